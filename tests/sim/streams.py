"""Other servers that compute prompts and foretell them: they write them chunk by chunk, late, in part or never.

And the promise to whoever awaits such a prompt: others are believed that a chunk comes only while they tell so.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from kvserver.remote.announcement import COMES, FORETOLD_BITS, KIND_BITS, WRITTEN, foretold, mark_of, unpack

from .content import key_of
from .memory import Wrong

if TYPE_CHECKING:
    from .remote import Store
    from .world import World

Path = tuple[int, ...]
ACTS: dict[str, float] = {
    "foretell": 4,
    "stream": 10,
    "foretell-again": 5,
    "take-back": 0.5,
    "fall-silent": 0.5,
    "lie": 1,
    "store-goes-down": 0.5,
}
"""Acts of other servers that compute prompts, with their weights."""
STREAMS_MAX = 4
OWN_BRANCH, OWN_BRANCHES = 10, 40
"""Prompts that only other servers compute begin with one of these branches."""
MS = 1_000_000


class Stream:
    """A prompt that another server computes."""

    def __init__(self, digest: bytes, epoch: int, path: Path, written: int) -> None:
        self.digest, self.epoch, self.path, self.written = digest, epoch, path, written
        """written: leading chunks that it does not compute."""

    @property
    def marks(self) -> list[int]:
        """What announcements call the chunks that are to come."""
        depths = range(self.written + 1, len(self.path) + 1)
        return [mark_of(self.digest, self.epoch, key_of(self.path[:depth])) for depth in depths]


class Streams:
    """The prompts that the other servers of one store compute, and the words that anybody gave."""

    def __init__(self, world: "World", store: "Store") -> None:
        self._world, self._store = world, store
        self._rng: Random = store.rng
        self._share = self._rng.choice((0.05, 0.15))
        self._streams: list[Stream] = []
        self._comes_ns: dict[int, int] = {}
        """Mark -> when another server told last that it comes."""
        self._written: set[int] = set()
        """Marks of chunks that anybody has said to be in the store."""

    def act(self) -> None:
        """One act, in some steps."""
        if self._rng.random() >= self._share:
            return
        if self._rng.random() < 0.3:
            self._store.is_down = False
        act = self._rng.choices(list(ACTS), list(ACTS.values()))[0]
        self._world.counts[f"stream {act}"] += 1
        if act == "foretell":
            self._begin()
        elif act == "lie":
            self._lie()
        elif act == "store-goes-down":
            self._store.is_down = True
        elif self._streams:
            stream = self._rng.choice(self._streams)
            engines = [engine for engine in self._world.engines if engine.digest == stream.digest]
            if engines and self._rng.random() < 0.5:
                self._rng.choice(engines).plan_await(stream.path)
            match act:
                case "stream":
                    self._go_on(stream)
                case "foretell-again":
                    self._tell(stream, comes=True)
                case "take-back":
                    self._tell(stream, comes=False)
                    self._streams.remove(stream)
                case "fall-silent":
                    self._streams.remove(stream)

    def _begin(self) -> None:
        world, rng = self._world, self._rng
        digest = rng.choice(list(world.shapes))
        epoch = self._store.epochs.get(digest)
        if epoch is None:
            return
        chunks = 1 + int(rng.random() * world.swarm.depth)
        path = tuple(int(rng.random() * world.swarm.fanout) for _ in range(chunks))
        if rng.random() < 0.7:
            path = (OWN_BRANCH + int(rng.random() * OWN_BRANCHES), *path[1:])
        stream = Stream(digest, epoch, path, int(rng.random() * 2))
        self._streams = [*self._streams[1 - STREAMS_MAX :], stream]
        self._tell(stream, comes=True)
        world.pledged.append((digest, path))
        del world.pledged[:-6]

    def _lie(self) -> None:
        """A word that nobody keeps, about any chunk."""
        digest = self._rng.choice(list(self._world.shapes))
        epoch = self._store.epochs.get(digest)
        if epoch is not None:
            path = tuple(
                int(self._rng.random() * self._world.swarm.fanout) for _ in range(1 + int(self._rng.random() * 3))
            )
            mark = mark_of(digest, epoch, key_of(path))
            self._store.tell(digest, epoch, foretold(mark, comes=self._rng.random() < 0.7))

    def _go_on(self, stream: Stream) -> None:
        """The next chunks are written, in the epoch that counts now."""
        for _ in range(1 + int(self._rng.random() * 2)):
            if stream.written < len(stream.path):
                stream.written += 1
                self._store.write(stream.digest, stream.path[: stream.written])
        if stream.written == len(stream.path):
            self._streams.remove(stream)

    def _tell(self, stream: Stream, *, comes: bool) -> None:
        for mark in stream.marks:
            self._store.tell(stream.digest, stream.epoch, foretold(mark, comes=comes))

    # ---------------------------------------------------------------- who may be believed

    def told(self, mark: int) -> None:
        """Another server tells this, whether it is true or not."""
        if mark & KIND_BITS == WRITTEN:
            self._written.add(mark & ~FORETOLD_BITS)
        elif not mark & KIND_BITS and mark & COMES:
            self._comes_ns[mark & ~FORETOLD_BITS] = self._world.now_ns

    def told_by_us(self, marks: bytes) -> None:
        """The server tells this. It does not count on its own word."""
        self._written.update(mark & ~FORETOLD_BITS for mark in unpack(marks) if mark & KIND_BITS == WRITTEN)

    def check_awaited(self, digest: bytes, keys: list[bytes], ttl_ms: int) -> None:
        """These chunks were promised because others write them."""
        epoch, world = self._store.epochs.get(digest), self._world
        epochs = {*self._store.was_epoch.get(digest, ()), *([epoch] if epoch is not None else [])}
        for key in keys:
            marks = [mark_of(digest, epoch, key) & ~FORETOLD_BITS for epoch in epochs]
            is_there = any((digest, epoch, key) in self._store.values for epoch in epochs)
            if is_there or not self._written.isdisjoint(marks):
                continue
            since_ns = max((self._comes_ns.get(mark, 0) for mark in marks), default=0)
            if not since_ns or world.now_ns - since_ns > ttl_ms * MS:
                raise Wrong(f"a chunk is promised that nobody else foretold within {ttl_ms} ms")
        world.counts["chunks awaited from a store"] += len(keys)


class OurWord:
    """What the service tells others that it computes: only what its engines have pledged, and it says how that ends."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._pledged: dict[bytes, set[bytes]] = {}
        """Namespace -> keys of all prompts that engines have pledged chunks of."""
        self._open: dict[tuple[str, bytes, int, int], bool] = {}
        """(store, namespace, epoch, mark) -> the service told that it comes, and nothing since."""

    def pledged(self, digest: bytes, keys: list[bytes]) -> None:
        self._pledged.setdefault(digest, set()).update(keys)

    def told(self, store: str, digest: bytes, epoch: int, marks: bytes, earlier: set[int]) -> None:
        """earlier: epochs that the namespace had before. What waited to be told may be of one of them."""
        keys = self._pledged.get(digest, ())
        mine = {mark_of(digest, epoch, key) & ~FORETOLD_BITS for key in keys}
        older = {mark_of(digest, epoch, key) & ~FORETOLD_BITS for key in keys for epoch in earlier}
        for told in unpack(marks):
            mark = told & ~FORETOLD_BITS
            if told & KIND_BITS:
                name = store, digest, epoch, mark
                if told & KIND_BITS == WRITTEN and self._open.get(name):
                    self._open[name] = False
                    self._counts["chunks foretold and written"] += 1
                continue
            if mark not in mine | older:
                raise Wrong("a chunk is foretold that no engine has pledged")
            self._counts["chunks foretold" if told & COMES else "chunks taken back"] += 1
            if mark in mine:
                self._open[store, digest, epoch, mark] = bool(told & COMES)

    def namespaces_are(self, known: Sequence[bytes]) -> None:
        """Others are told nothing of a namespace that has left. They wait for no longer than their patience."""
        self._open = {name: is_open for name, is_open in self._open.items() if name[1] in known}

    def check_end(self, stores: "dict[str, Store]") -> None:
        """Nobody computes anything: whatever was foretold was written by the service itself, or taken back. Chunks that
        others say to have written may not be there."""
        for (store, digest, epoch, _), is_open in self._open.items():
            if is_open and stores[store].epochs.get(digest) == epoch:
                raise Wrong("a chunk was foretold, not written since and not taken back")
