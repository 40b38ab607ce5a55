"""The two memories that movers copy between, KV pools and the arena, with one value for each block."""

from kvserver.tiers.slots import SLOT_ALIGN

from .content import Block, Garbage
from .faults import SUM_STORE
from .shapes import Shape


class Wrong(AssertionError):
    """A promise was broken."""


class Pool:
    """One rank's paged KV. It outlives its process while a mover has it mapped."""

    def __init__(self, digest: bytes, shape: Shape, rank: int, blocks: int, garbage: Garbage) -> None:
        self.digest = digest
        self.shape = shape
        self.rank = rank
        self.blocks = [[garbage() for _ in range(blocks)] for _ in shape.groups]
        """Group -> block id -> content."""
        self.free = [list(range(blocks)) for _ in shape.groups]
        self.targets: dict[tuple[int, int], object] = {}
        """(group, block) -> the retrieve that may write there now."""
        self._garbage = garbage

    def take(self, group: int, count: int) -> list[int]:
        free = self.free[group]
        taken, free[:] = free[:count], free[count:]
        return taken

    def give_back(self, group: int, blocks: list[int]) -> None:
        """Frees blocks. The engine reuses them at once, so their content becomes garbage."""
        for block in blocks:
            self.blocks[group][block] = self._garbage()
            self.targets.pop((group, block), None)
        self.free[group].extend(blocks)

    def write(self, group: int, block: int, content: Block, job: object) -> None:
        """A mover's write, allowed only into blocks that a retrieve waits for."""
        if self.targets.get((group, block)) != job:
            raise Wrong(f"job {job} wrote into block {block} of group {group}, which it must not touch (any more)")
        self.blocks[group][block] = content


class Arena:
    """Slots by offset. Writing a slot destroys every slot that it overlaps."""

    def __init__(self, slab_bytes: int, slabs: int) -> None:
        self.resized = 0
        """Slots lost because a slot of another size was written over them, when a slab changed hands."""
        self.bytes = slab_bytes * slabs
        self.spoiled: dict[int, dict[int, tuple[str, Block | None]]] = {}
        """Slot -> place -> (kind of the fault, what should be there), for blocks that a fault has changed."""
        self.told: dict[int, int] = {}
        """Slot -> the sum that the mover has told which filled it last."""
        self.false_sums: set[int] = set()
        """Slots whose told sum is wrong by a fault."""
        self._slab_bytes = slab_bytes
        self._slabs: list[dict[int, tuple[int, list[Block | None]]]] = [{} for _ in range(slabs)]

    def write(self, offset: int, slot_bytes: int, blocks: int, place: int, content: Block) -> None:
        slots = self._slabs[offset // self._slab_bytes]
        slot = slots.get(offset)
        if slot is None or slot[0] != slot_bytes or len(slot[1]) != blocks:
            end = offset + slot_bytes
            if offset % SLOT_ALIGN or end > (offset // self._slab_bytes + 1) * self._slab_bytes:
                raise Wrong(f"slot {offset}+{slot_bytes} is not aligned or crosses a slab")
            for other in [at for at, (size, _) in slots.items() if at < end and offset < at + size]:
                self.resized += slots[other][0] != slot_bytes
                del slots[other]
                self.spoiled.pop(other, None)
            slot = slots[offset] = (slot_bytes, [None] * blocks)
        slot[1][place] = content
        self.spoiled.get(offset, {}).pop(place, None)

    def spoil(self, offset: int, place: int, content: Block | None, kind: str) -> None:
        """A fault changes a block."""
        blocks, spoiled = self.slot(offset), self.spoiled.setdefault(offset, {})
        _, right = spoiled.pop(place, ("", blocks[place]))
        blocks[place] = content
        if content != right:
            spoiled[place] = kind, right

    def tell(self, offset: int, payload_sum: int, *, is_false: bool = False) -> None:
        """A mover tells the sum of a slot that it has filled."""
        self.told[offset] = payload_sum
        (self.false_sums.add if is_false else self.false_sums.discard)(offset)

    def faults_at(self, offset: int, place: int) -> list[str]:
        """Kinds of the faults because of which this block makes the slot differ from its sum."""
        spoiled = self.spoiled.get(offset, {})
        kinds = [spoiled[place][0]] if place in spoiled else []
        return kinds + [SUM_STORE] * (offset in self.false_sums)

    def faults_of(self, offset: int) -> set[str]:
        return {kind for place in range(len(self.slot(offset))) for kind in self.faults_at(offset, place)}

    def meant(self, offset: int) -> list[Block | None]:
        """The content of a slot without the faults."""
        spoiled = self.spoiled.get(offset, {})
        return [spoiled[place][1] if place in spoiled else content for place, content in enumerate(self.slot(offset))]

    def offsets(self) -> list[int]:
        return [offset for slots in self._slabs for offset in slots]

    def read(self, offset: int, place: int) -> Block | None:
        slot = self._slabs[offset // self._slab_bytes].get(offset)
        return slot[1][place] if slot is not None and place < len(slot[1]) else None

    def slot(self, offset: int) -> list[Block | None]:
        slot = self._slabs[offset // self._slab_bytes].get(offset)
        return slot[1] if slot is not None else []
