"""Reference implementation of plan_pieces in its plainest form: page by page, then adjacent copies joined."""

import struct
from dataclasses import dataclass

Copy = tuple[int, int, int, int]
"""(buffer, buffer_offset, arena_offset, bytes)."""

SKIP = -1


@dataclass(frozen=True)
class Run:
    buffer: int
    offset: int
    regions: int
    region_stride: int
    block_stride: int
    page_bytes: int

    def packed(self) -> tuple[int, int, int, int, int, int]:
        return (self.buffer, self.offset, self.regions, self.region_stride, self.block_stride, self.page_bytes)


@dataclass(frozen=True)
class Group:
    blocks_per_chunk: int
    blocks: int
    runs: tuple[Run, ...]

    def packed(self) -> tuple[int, int, list[tuple[int, int, int, int, int, int]]]:
        return (self.blocks_per_chunk, self.blocks, [run.packed() for run in self.runs])

    @property
    def shard_bytes(self) -> int:
        return self.blocks_per_chunk * sum(run.regions * run.page_bytes for run in self.runs)


@dataclass(frozen=True)
class CopyGroup:
    group: int
    first_block: int
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    sums: tuple[int, ...] = ()

    def packed(self) -> tuple[int, int, bytes, bytes, bytes]:
        ids = struct.pack(f"<{len(self.block_ids)}i", *self.block_ids)
        slots = struct.pack(f"<{len(self.slots)}q", *self.slots)
        return (self.group, self.first_block, ids, slots, struct.pack(f"<{len(self.sums)}Q", *self.sums))


def chunks_touched(first_block: int, blocks: int, blocks_per_chunk: int) -> int:
    return len({block // blocks_per_chunk for block in range(first_block, first_block + blocks)})


def pages(groups: list[Group], copy: CopyGroup, kind: str, order: str = "neighbours") -> list[Copy]:
    """Every page of one copy group, in the order of execution."""
    group = groups[copy.group]
    if order == "shards":
        return [page for shard in _shards(group, copy) for page in sorted(pages(groups, shard, kind), key=_target)]
    first_chunk = copy.first_block // group.blocks_per_chunk
    places = []
    for index, block_id in enumerate(copy.block_ids):
        chunk, in_chunk = divmod(copy.first_block + index, group.blocks_per_chunk)
        slot = copy.slots[chunk - first_chunk]
        if slot != SKIP:
            places.append((block_id, slot, in_chunk))
    if kind == "store":
        places.sort()
    found = []
    run_offset = 0
    for run in group.runs:
        region_bytes = group.blocks_per_chunk * run.page_bytes
        steps = [(region, place) for region in range(run.regions) for place in places]
        if run.region_stride < run.block_stride:
            steps = [(region, place) for place in places for region in range(run.regions)]
        for region, (block_id, slot, in_chunk) in steps:
            source = run.offset + region * run.region_stride + block_id * run.block_stride
            target = slot + run_offset + region * region_bytes + in_chunk * run.page_bytes
            found.append((run.buffer, source, target, run.page_bytes))
        run_offset += run.regions * region_bytes
    return found


def _target(copy: Copy) -> int:
    return copy[2]


def _shards(group: Group, copy: CopyGroup) -> list[CopyGroup]:
    """The copy, cut into its chunks."""
    first_chunk = copy.first_block // group.blocks_per_chunk
    cut = []
    for chunk, slot in enumerate(copy.slots, first_chunk):
        begin = max(chunk * group.blocks_per_chunk, copy.first_block)
        end = (chunk + 1) * group.blocks_per_chunk
        ids = copy.block_ids[begin - copy.first_block : end - copy.first_block]
        cut.append(CopyGroup(copy.group, begin, ids, (slot,)))
    return cut


def merged(copies: list[Copy]) -> list[Copy]:
    """Joins copies that are adjacent on both sides."""
    result: list[Copy] = []
    for buffer, source, target, count in copies:
        if result:
            last_buffer, last_source, last_target, last_count = result[-1]
            if (last_buffer, last_source + last_count, last_target + last_count) == (buffer, source, target):
                result[-1] = (buffer, last_source, last_target, last_count + count)
                continue
        result.append((buffer, source, target, count))
    return result


def plan(groups: list[Group], copy_groups: list[CopyGroup], kind: str, order: str = "neighbours") -> list[Copy]:
    return merged([page for copy in copy_groups for page in pages(groups, copy, kind, order)])
