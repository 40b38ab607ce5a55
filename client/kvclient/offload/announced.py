"""Routers are told of the server: which chunks an engine could fetch from it, and when no more.

A router learns blocks by the engine's hashes, so only chunks that this engine has seen can be told. The server tells
keys (events); the engine tells what a key's chunk consists of (learn). A chunk is told in the best tier that holds it,
and only under a told parent: all that is told can be fetched.

Chunks that part within share the blocks before. So blocks are counted, and routers are told of each block once and of
its end once.

Decides only, and has no I/O. A call's work is bounded, and so are the tables. Work that is left is done by later calls.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from kvserver.wire.kv_events import Begun, ChunksRemoved, ChunksStored, KvEvent, Missed, NamespaceCleared, Tier

REMOVALS_MAX = 8192
"""Removals that are remembered. Answers to lookups that were asked before the oldest one say nothing."""
HELD_MAX = 1 << 20
"""Most keys that the picture of the server has besides those of chunks that are known."""
LITTER_PER_CALL = 4096
"""Entries of given-up tables that a call frees. A large table at once would hold up the engine."""

_BIT: dict[Tier, int] = {"dram": 1, "disk": 2}
_BEST: tuple[Tier | None, ...] = (None, "dram", "disk", "dram")
"""Bits of the tiers that hold a chunk -> the tier that is told."""


Block = Hashable
"""The engine's hash of a block."""


class Chunk:
    """A chunk that the engine has seen."""

    __slots__ = ("blocks", "children", "content", "key", "life", "parent", "tier")

    def __init__(self, key: bytes, parent: "Chunk | None", blocks: tuple[Block, ...], content: Any) -> None:
        """blocks: the engine's hashes of its blocks. content: whatever the engine wants back with it."""
        self.key = key
        self.parent = parent
        self.blocks = blocks
        self.content = content
        self.children: dict[bytes, Chunk] = {}
        self.tier: Tier | None = None
        """Tier in which it was told."""
        self.life = 0
        """Life of the routers' knowledge in which it was told."""


class Stored(NamedTuple):
    tier: Tier
    chunk: Chunk
    first: int
    """The first of its blocks that was not told before. The ones before are told for another chunk."""


class Removed(NamedTuple):
    tier: Tier
    blocks: list[Block]


Told = Stored | Removed


class Announced:
    """The announcements of one engine."""

    def __init__(self, *, chunks_max: int, held_max: int = HELD_MAX) -> None:
        """chunks_max: most chunks that are known. The ones seen longest ago go first."""
        self._chunks_max = chunks_max
        self._held_max = held_max
        self._namespace = b""
        self._held: dict[bytes, int] = {}
        """The server's picture: key -> bits of the tiers that hold the chunk."""
        self._known: OrderedDict[bytes, Chunk] = OrderedDict()
        """In the order in which they were seen last."""
        self._blocks: dict[Tier, dict[Block, int]] = {"dram": {}, "disk": {}}
        """Block -> number of told chunks that have it."""
        self._life = 1
        self._told: OrderedDict[Chunk, None] = OrderedDict()
        self._changed: OrderedDict[Chunk, None] = OrderedDict()
        """Chunks to look at."""
        self._doubted: deque[OrderedDict[Chunk, None]] = deque()
        """Chunks to look at afterwards: all that were told when the picture was given up."""
        self._ready: list[Told] = []
        self._clock = 0
        """Counts what the server has taken back."""
        self._removals: OrderedDict[bytes, int] = OrderedDict()
        """Key -> when it was taken back last."""
        self._void = 0
        """Answers to lookups that were asked before say nothing."""
        self._litter: list[dict[Any, Any]] = []

    @property
    def pending(self) -> bool:
        """Whether take() has something to do."""
        return bool(self._ready or self._changed or self._doubted)

    def knows(self, key: bytes) -> bool:
        return key in self._known

    def is_told(self, key: bytes) -> bool:
        chunk = self._known.get(key)
        return chunk is not None and self._tier_of(chunk) is not None

    # ---------------------------------------------------------------- what the server says

    def follow(self, namespace: bytes) -> None:
        """Tell of this namespace, and of what the server says from now on."""
        self._namespace = namespace
        self._give_up_picture()

    def server_said(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case ChunksStored(self._namespace, tier, _, keys):
                    self._stored(keys, _BIT[tier])
                case ChunksRemoved(self._namespace, tier, keys):
                    self._removed(keys, _BIT[tier])
                case NamespaceCleared(self._namespace) | Begun() | Missed():
                    self._give_up_picture()

    @property
    def now(self) -> int:
        """Goes with a lookup that is asked now."""
        return self._clock

    def found(self, keys: Iterable[bytes], asked: int) -> None:
        """A lookup that was asked at `asked` has found these chunks in DRAM.

        The server may have told so long ago. If it has taken one back since, the answer may be older than that.
        """
        if asked < self._void:
            return
        for key in keys:
            if self._removals.get(key, 0) > asked:
                break
            if key not in self._held:
                self._stored([key], _BIT["dram"])

    def _stored(self, keys: Sequence[bytes], bit: int) -> None:
        for key in keys:
            chunk = self._known.get(key)
            if chunk is not None:
                self._changed[chunk] = None
            elif len(self._held) >= self._held_max and key not in self._held:
                continue
            self._held[key] = self._held.get(key, 0) | bit

    def _removed(self, keys: Sequence[bytes], bit: int) -> None:
        for key in keys:
            self._note_removal(key)
            left = self._held.pop(key, 0) & ~bit
            if left:
                self._held[key] = left
            if (chunk := self._known.get(key)) is not None:
                self._changed[chunk] = None

    def _note_removal(self, key: bytes) -> None:
        self._clock += 1
        self._removals[key] = self._clock
        self._removals.move_to_end(key)
        if len(self._removals) > REMOVALS_MAX:
            _, self._void = self._removals.popitem(last=False)

    def _give_up_picture(self) -> None:
        self._clock += 1
        self._void = self._clock
        self._removals.clear()
        self._litter.append(self._held)
        self._held = {}
        self._doubt()

    # ---------------------------------------------------------------- what the engine says

    def learn(self, key: bytes, parent: bytes, blocks: Sequence[Block], content: Any) -> bool:
        """The engine has seen this chunk. parent: the key before; empty at the head of a prompt.

        Returns False if the parent is not known, so that the chunk cannot be told.
        """
        if key in self._known:
            return True
        above = self._known.get(parent)
        if parent and above is None:
            return False
        chunk = self._known[key] = Chunk(key, above, tuple(blocks), content)
        if above is not None:
            above.children[key] = chunk
        if key in self._held:
            self._changed[chunk] = None
        while len(self._known) > self._chunks_max:
            self._forget_oldest()
        return True

    def seen(self, keys: Iterable[bytes]) -> None:
        """A prompt with these chunks was seen again. Its head stays known longer than its tail."""
        for key in reversed(list(keys)):
            if key in self._known:
                self._known.move_to_end(key)

    def forget(self) -> None:
        """No chunk can be fetched by its key any more."""
        self._litter.append(self._known)
        self._known = OrderedDict()
        self._doubt()

    def cleared(self) -> None:
        """Routers have been told that this engine has nothing any more, which was meant for its own cache."""
        self._life += 1
        self._litter += self._blocks.values()
        self._blocks = {"dram": {}, "disk": {}}
        self._ready.clear()
        self._doubt()

    def _doubt(self) -> None:
        if self._told:
            self._doubted.append(self._told)
            self._told = OrderedDict()

    def _forget_oldest(self) -> None:
        chunk = next(iter(self._known.values()))
        while chunk.children:  # its tail first
            chunk = next(iter(chunk.children.values()))
        del self._known[chunk.key]
        if chunk.parent is not None:
            del chunk.parent.children[chunk.key]
        self._changed.pop(chunk, None)
        self._tell(chunk, None)

    # ---------------------------------------------------------------- what routers are told

    def take(self, chunks_max: int) -> list[Told]:
        """Returns the changes to tell now, after a look at no more than chunks_max chunks."""
        for _ in range(chunks_max):
            chunk = self._next()
            if chunk is None:
                break
            self._tell(chunk, self._wanted(chunk))
        self._tidy()
        ready, self._ready = self._ready, []
        return ready

    def _next(self) -> Chunk | None:
        if self._changed:
            return self._changed.popitem(last=False)[0]
        while self._doubted:
            if self._doubted[0]:
                return self._doubted[0].popitem(last=False)[0]
            self._doubted.popleft()
        return None

    def _wanted(self, chunk: Chunk) -> Tier | None:
        if self._known.get(chunk.key) is not chunk:
            return None
        if chunk.parent is not None and self._tier_of(chunk.parent) is None:
            return None
        return _BEST[self._held.get(chunk.key, 0)]

    def _tier_of(self, chunk: Chunk) -> Tier | None:
        return chunk.tier if chunk.life == self._life else None

    def _tell(self, chunk: Chunk, tier: Tier | None) -> None:
        before = self._tier_of(chunk)
        chunk.tier, chunk.life = tier, self._life
        if tier is None:
            self._told.pop(chunk, None)
        else:
            self._told[chunk] = None
        if tier == before:
            return
        if tier is not None:
            self._count_in(tier, chunk)
        if before is not None:
            self._count_out(before, chunk)
        if (tier is None) != (before is None):
            self._changed.update(dict.fromkeys(chunk.children.values()))

    def _count_in(self, tier: Tier, chunk: Chunk) -> None:
        counts, first = self._blocks[tier], 0
        for place, block in enumerate(chunk.blocks):
            counts[block] = known = counts.get(block, 0) + 1
            if known > 1 and first == place:
                first = place + 1
        if first < len(chunk.blocks):
            self._ready.append(Stored(tier, chunk, first))

    def _count_out(self, tier: Tier, chunk: Chunk) -> None:
        counts, gone = self._blocks[tier], []
        for block in chunk.blocks:
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
                gone.append(block)
        if gone:
            self._ready.append(Removed(tier, gone))

    def _tidy(self) -> None:
        for _ in range(LITTER_PER_CALL):
            if not self._litter:
                break
            if not self._litter[-1]:
                self._litter.pop()
                continue
            _, entry = self._litter[-1].popitem()
            if isinstance(entry, Chunk):
                entry.children.clear()  # otherwise it is garbage in a circle
