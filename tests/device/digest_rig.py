"""Device jobs with digests in every mode, and errors planted between a store and its retrieve.

    with Halves(machine) as halves, Scene(halves, "direct with a ring", "register", seed) as scene:
        stored = scene.store()
        sums = scene.sums_of(stored)
        scene.retrieve(stored, sums)

One process has the engine's memory and its native client, the others a DeviceEngine each. This process has the arena:
it sums what was stored, and plants errors. `python -m tests.device.digest_rig FD OPTIONS` is one of those processes.
"""

import mmap
import os
import random
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvserver import _native
from kvserver.transfer.native import FAILED, NO_DIGEST, SLOT_ALIGN, Completion, digest_sum
from tests.device.mover_rig import ARENA_BYTES, NEVER, SEGMENT_BYTES, SESSION, SLAB_BYTES, Half, Rig, main
from tests.gpu.plain_driver import PlainDriver
from tests.process.harness import WAIT_S, until
from tests.rigs.oracle_plan import SKIP, CopyGroup, Group, Run

PRIME = 2**61 - 1
POOL_BYTES = 6 << 20
SHARD_BYTES_MAX = 2 << 20
PAGES = (1, 3, 66, 132, 576, 1000, 2048, 4100, 5000, 9001, 70_001)
REACHES = ("register", "bounce")
MODES = {
    "staged": (False, True, "staged"),
    "server-gather": (False, False, "server-gather"),
    "direct with a ring": (True, True, "staged"),
    "direct": (True, False, "direct"),
    "direct in place of server-gather": (True, False, "server-gather"),
}
"""(whether copies of any length go direct, whether the cache has a ring, the mode that jobs are submitted with)"""

Ring = tuple[int, int]
"""Process and number of a descriptor."""


class DigestHalf(Half):
    MODULE = __name__


class Halves:
    """The process with memory, and one mover for each way to the arena, with and without packing."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.client = DigestHalf(machine, role="client")
        self.pool = self.client.call("pool")
        self._movers: dict[tuple[bool, str], Mover] = {}

    def mover(self, direct: bool, reach: str) -> "Mover":
        if (direct, reach) not in self._movers:
            self._movers[direct, reach] = Mover(self.machine, direct, reach)
        return self._movers[direct, reach]

    def __enter__(self) -> "Halves":
        return self

    def __exit__(self, *_: object) -> None:
        for mover in self._movers.values():
            mover.close()
        self.client.close()


class Mover:
    """A process with a DeviceEngine, and its arena here."""

    def __init__(self, machine: Any, direct: bool, reach: str) -> None:
        never = 1 if direct else NEVER
        self.half = DigestHalf(machine, role="engine", arena_reach=reach, direct_from=never)
        self.half.call("arena_ready", ARENA_BYTES // SLAB_BYTES)
        fd = os.open(f"/proc/{self.half.pid}/fd/{self.half.call('arena')}", os.O_RDWR)
        self.arena = mmap.mmap(fd, ARENA_BYTES)
        os.close(fd)
        self.caches = 0

    def close(self) -> None:
        self.half.close()
        self.arena.close()


class Client:
    """The engine's process: a pool, and the native client with its ring, or one that a test plays."""

    def __init__(self, vendor: Any, library: str) -> None:
        self._vendor, self._library = vendor, library
        self._driver = PlainDriver(vendor, library)
        self._base = self._driver.alloc(POOL_BYTES)
        self._folder = tempfile.TemporaryDirectory()
        self._copier = _native.StagedCopier(vendor, library, 0, SEGMENT_BYTES, SHARD_BYTES_MAX, "", self._folder.name)
        self._played: _native.RingOwner | None = None

    def pool(self) -> tuple[str, int, int]:
        """Handle and size of the allocation, and where the pool begins in it."""
        *_, base, size, handle = _native.export_memory(self._vendor, self._library, self._base, POOL_BYTES)
        return handle.hex(), size, self._base - base

    def staging(self) -> tuple[str, int]:
        return self._copier.handle.hex(), self._copier.segment_bytes

    def begin_ring(self, groups: Any) -> int:
        return self._copier.begin_ring(groups, [self._base], [POOL_BYTES])

    def end_ring(self) -> None:
        self._copier.end_ring()
        until("the copier to be quiet", lambda: self._copier.quiet)
        self._played = None

    def write(self, at: int, content: bytes) -> None:
        self._driver.write(self._base + at, content)

    def read(self, size: int) -> bytes:
        return self._driver.read(self._base, size)

    def begin_capture(self) -> None:
        self._driver.begin_capture()

    def end_capture(self) -> int:
        return self._driver.end_capture()

    # ---------------------------------------------------------------- a client that a test plays

    def play(self) -> int:
        self._played = _native.RingOwner(self._copier.segment_bytes)
        return self._played.fd

    def take(self, lane: int) -> Any:
        assert self._played is not None
        ring, found = self._played, []
        until("a segment to be asked for", lambda: found.append(ring.take(lane)) or found[-1], WAIT_S)
        return found[-1]

    def done(self, lane: int, segment: int, sequence: int, sums: bytes) -> None:
        assert self._played is not None
        self._played.done(lane, segment, sequence, sums)


class DigestRig(Rig):
    """The mover's process."""

    def arena(self) -> int:
        return self._arena

    def map_groups(self, cache: int, groups: Any, pool: Any, staging: Any, ring: Ring | None) -> None:
        brought = None
        if ring is not None:
            fd = os.open(f"/proc/{ring[0]}/fd/{ring[1]}", os.O_RDWR)
            brought = bytes.fromhex(staging[0]), staging[1], fd
        mode = _native.ipc_mode(self._vendor)
        self._engine.map_cache(cache, SESSION, [(bytes.fromhex(pool[0]), pool[1])], brought, mode, groups)
        if brought is not None:
            os.close(brought[2])

    def begin(self, job: int, kind: Any, cache: int, copies: Any, how: tuple[str, bool]) -> None:
        """how: the mode, and whether with digests."""
        self._generations[job] = self._board.begin(job)
        self._engine.submit(job, kind, cache, job, self._generations[job], copies, *how)

    def end(self, job: int) -> tuple[Any, int]:
        """The completion of the only job, and the state of its word."""
        (completion,) = self.completions(1)
        return completion, self.state(job)


# ---------------------------------------------------------------- one cache


class End(NamedTuple):
    """The end of a job."""

    status: str
    code: str
    sums: list[int]
    wrong: list[int]
    word: int
    mode: str


class Planted(NamedTuple):
    """An error: what it is, and the shards that it makes wrong."""

    what: str
    shards: list[int]


class Scene:
    """A cache of random shape in a part of the pool, mapped by one mover. Use as a context manager."""

    JOB = 7

    def __init__(self, halves: Halves, mode: str, reach: str, seed: int, *, played: bool = False) -> None:
        self.rng = random.Random(seed)
        self.halves = halves
        self.expected_mode = mode.partition(" ")[0]
        direct, self.ringed, self.mode = MODES[mode]
        self.mover = halves.mover(direct, reach)
        self.arena = self.mover.arena
        self.groups, self.bytes = _random_groups(self.rng)
        self._inset = halves.pool[2]
        self._played = played

    def __enter__(self) -> "Scene":
        packed = [_moved(group, self._inset).packed() for group in self.groups]
        client, ring, staging = self.halves.client, None, None
        if self.ringed:
            staging = client.call("staging")
            ring = client.pid, client.call("play") if self._played else client.call("begin_ring", packed)
        self.mover.caches += 1
        self.mover.half.call("map_groups", self.mover.caches, packed, self.halves.pool[:2], staging, ring)
        (completion,) = self.mover.half.call("completions", 1)
        assert completion[1] == "mapped", completion
        self.shadow = bytearray()
        self.compute()
        return self

    def __exit__(self, *_: object) -> None:
        self.mover.half.call("unmap", self.mover.caches)
        self.mover.half.call("completions", 1)
        self.halves.client.call("end_ring")

    def compute(self) -> None:
        """New bytes in the whole pool."""
        self.shadow = bytearray(self.rng.randbytes(self.bytes))
        self.halves.client.call("write", 0, bytes(self.shadow))

    # ---------------------------------------------------------------- jobs

    def run(self, kind: str, copies: list[CopyGroup], *, digests: bool = True) -> End:
        self.begin(kind, copies, digests=digests)
        return self.end()

    def begin(self, kind: str, copies: list[CopyGroup], *, digests: bool = True) -> None:
        packed = [copy.packed() for copy in copies]
        self.mover.half.call("begin", self.JOB, kind, self.mover.caches, packed, (self.mode, digests))

    def end(self) -> End:
        raw, word = self.mover.half.call("end", self.JOB)
        completion = Completion._make(raw)
        sums = list(array("Q", completion.sums))
        return End(completion.status, completion.code, sums, completion.wrong, word, completion.mode)

    def whole(self, *, skips: bool = False) -> list[CopyGroup]:
        """Copies of whole chunks with ids in any order."""
        copies, slots = [], _Slots()
        for index, group in enumerate(self.groups):
            chunks = group.blocks // group.blocks_per_chunk
            ids = self.rng.sample(range(group.blocks), chunks * group.blocks_per_chunk)
            taken = [slots.take(group.shard_bytes) for _ in range(chunks)]
            taken = [SKIP if skips and self.rng.random() < 0.3 else slot for slot in taken]
            copies.append(CopyGroup(index, 0, tuple(ids), tuple(taken)))
        return copies

    def store(self, copies: list[CopyGroup] | None = None) -> list[CopyGroup]:
        """Stores; what a retrieve of the same needs, with its sums. They are those of the bytes in the arena."""
        copies = self.whole() if copies is None else copies
        end = self.run("store", copies)
        assert (end.status, end.code, end.wrong, end.mode) == ("done", "", [], self.expected_mode), end
        assert end.sums == self.sums_of(copies), "the sums of what was stored"
        return with_sums(copies, end.sums)

    def shards(self, copies: list[CopyGroup]) -> list[tuple[int, int]]:
        """(slot, bytes) of each shard."""
        return [(slot, self.groups[copy.group].shard_bytes) for copy in copies for slot in copy.slots if slot != SKIP]

    def sums_of(self, copies: list[CopyGroup]) -> list[int]:
        """As a processor makes them from the arena."""
        return [digest_sum(self.arena[slot : slot + size], 0, size, 0)[0] for slot, size in self.shards(copies)]

    def part(self, stored: list[CopyGroup]) -> list[CopyGroup]:
        """Retrieves of some consecutive blocks of what was stored, into other blocks."""
        parts = []
        for copy in stored:
            per_chunk, blocks = self.groups[copy.group].blocks_per_chunk, len(copy.block_ids)
            first = self.rng.randrange(blocks)
            count = self.rng.randint(1, blocks - first)
            chunks = slice(first // per_chunk, (first + count - 1) // per_chunk + 1)
            ids = self.rng.sample(range(self.groups[copy.group].blocks), count)
            parts.append(CopyGroup(copy.group, first, tuple(ids), copy.slots[chunks], copy.sums[chunks]))
        return parts

    def retrieve(self, copies: list[CopyGroup]) -> None:
        """Retrieves right bytes, which must pass, and compares every byte of the pool."""
        end = self.run("retrieve", copies)
        assert (end.status, end.code, end.wrong, end.mode) == ("done", "", [], self.expected_mode), end
        for copy in copies:
            for buffer_at, arena_at, size in _page_copies(self.groups[copy.group], copy):
                self.shadow[buffer_at : buffer_at + size] = self.arena[arena_at : arena_at + size]
        assert self.halves.client.call("read", self.bytes) == bytes(self.shadow), "wrong bytes"

    def fails(self, copies: list[CopyGroup], planted: Planted) -> None:
        """Retrieves wrong bytes, which must be noticed: no word ends as done, and exactly those shards are named."""
        end = self.run("retrieve", copies)
        assert (end.status, end.code, end.word) == ("failed", "digest", FAILED), (planted, end)
        assert end.wrong == planted.shards, (planted, end)

    # ---------------------------------------------------------------- errors

    @contextmanager
    def planted(self, stored: list[CopyGroup], before: bytes) -> Iterator[tuple[Planted, list[CopyGroup]]]:
        """One error in what was stored, until the block's end. before: the arena of an older store."""
        shards = self.shards(stored)
        used = max(slot + size for slot, size in shards)
        kept = self.arena[:used]
        nth = self.rng.randrange(len(shards))
        copies, expected = stored, [nth]
        what = self.rng.choice(ERRORS)
        if what == "wrong sum":
            sums = [value for copy in stored for value in copy.sums]
            sums[nth] = (sums[nth] + self.rng.choice((1, PRIME - 1, self.rng.randrange(1, PRIME)))) % PRIME
            copies = with_sums(stored, sums)
        else:
            self._plant(what, shards, nth, before)
            now = self.arena[:used]
            expected = [at for at, (slot, size) in enumerate(shards) if now[slot:][:size] != kept[slot:][:size]]
            if not expected:  # those bytes were there already
                self.arena[shards[nth][0]] ^= 1
                expected = [nth]
        try:
            yield Planted(what, expected), copies
        finally:
            self.arena[:used] = kept

    def _plant(self, what: str, shards: list[tuple[int, int]], nth: int, before: bytes) -> None:
        """Changes bytes of a shard in the arena."""
        arena, rng, (slot, size) = self.arena, self.rng, shards[nth]
        at = rng.randrange(size)
        match what:
            case "flipped bit":
                arena[slot + at] ^= 1 << rng.randrange(8)
            case "swapped pages":
                page = max(1, min(size // 2, rng.choice((1, 16, 66, 132, 2048, 4096))))
                places = rng.sample(range(size // page), 2) if size // page > 1 else (0, 0)
                one, other = (slice(slot + place * page, slot + (place + 1) * page) for place in places)
                arena[one], arena[other] = arena[other], arena[one]
            case "zeros":
                length = rng.randint(1, size - at)
                arena[slot + at : slot + at + length] = bytes(length)
            case "cut":
                arena[slot + at : slot + size] = before[slot + at : slot + size]
            case "older generation":
                arena[slot : slot + size] = before[slot : slot + size]
            case "another key":
                other_slot, other_size = rng.choice(shards)
                length = min(size, other_size)
                arena[slot : slot + length] = arena[other_slot : other_slot + length]


ERRORS = ("flipped bit", "swapped pages", "zeros", "cut", "older generation", "another key", "wrong sum")


def with_sums(copies: list[CopyGroup], sums: list[int]) -> list[CopyGroup]:
    """The copies with the sums of their shards."""
    left = iter(sums)
    return [
        CopyGroup(
            copy.group,
            copy.first_block,
            copy.block_ids,
            copy.slots,
            tuple(NO_DIGEST if slot == SKIP else next(left) for slot in copy.slots),
        )
        for copy in copies
    ]


class _Slots:
    """Places in the arena that cross no slab."""

    def __init__(self) -> None:
        self._at = 0

    def take(self, size: int) -> int:
        size = -(-size // SLOT_ALIGN) * SLOT_ALIGN
        if self._at // SLAB_BYTES != (self._at + size - 1) // SLAB_BYTES:
            self._at = -(-self._at // SLAB_BYTES) * SLAB_BYTES
        slot, self._at = self._at, self._at + size
        assert self._at <= ARENA_BYTES
        return slot


def _random_groups(rng: random.Random) -> tuple[list[Group], int]:
    at, groups = rng.choice((0, 7, 16)), []
    for _ in range(rng.randint(1, 3)):
        blocks, runs = rng.randint(5, 19), []
        for _ in range(rng.randint(1, 2)):
            page, regions, gap = rng.choice(PAGES), rng.randint(1, 3), rng.choice((0, 0, 5, 64))
            page, regions = (page, 1) if page * regions > 70_001 else (page, regions)
            stride = page + gap
            inside = rng.random() < 0.5
            strides = (stride, regions * stride) if inside else (blocks * stride, stride)
            runs.append(Run(0, at, regions, *strides, page))
            at += blocks * regions * stride
        groups.append(Group(rng.randint(1, 5), blocks, tuple(runs)))
    assert at <= POOL_BYTES
    return groups, at


def _moved(group: Group, inset: int) -> Group:
    runs = tuple(
        Run(run.buffer, run.offset + inset, run.regions, run.region_stride, run.block_stride, run.page_bytes)
        for run in group.runs
    )
    return Group(group.blocks_per_chunk, group.blocks, runs)


def _page_copies(group: Group, copy: CopyGroup) -> Iterator[tuple[int, int, int]]:
    """(offset in the pool, offset in the arena, bytes) of each page of a copy."""
    first_chunk = copy.first_block // group.blocks_per_chunk
    for index, block in enumerate(copy.block_ids):
        chunk, in_chunk = divmod(copy.first_block + index, group.blocks_per_chunk)
        slot = copy.slots[chunk - first_chunk]
        if slot == SKIP:
            continue
        at = slot
        for run in group.runs:
            for region in range(run.regions):
                pool = run.offset + region * run.region_stride + block * run.block_stride
                yield pool, at + in_chunk * run.page_bytes, run.page_bytes
                at += group.blocks_per_chunk * run.page_bytes


def many_faults(scene: Scene, faults: int, met: Callable[[str], None]) -> None:
    """Stores, plants errors one after the other, and retrieves whole and part chunks. Every error must be noticed."""
    scene.store()
    before = scene.arena[:]
    scene.compute()
    stored = scene.store()
    for number in range(faults):
        with scene.planted(stored, before) as (planted, copies):
            if number % 2:
                scene.fails(copies, planted)
            else:
                scene.fails(*_in_part(scene, copies, planted))
        met(planted.what)
    scene.compute()
    scene.retrieve(stored)
    scene.retrieve(scene.part(stored))


def _in_part(scene: Scene, copies: list[CopyGroup], planted: Planted) -> tuple[list[CopyGroup], Planted]:
    """Some blocks of each chunk that is wrong, and none of all others."""
    parts, wrong, at = [], [], 0
    for copy in copies:
        per_chunk = scene.groups[copy.group].blocks_per_chunk
        for chunk, slot in enumerate(copy.slots):
            if at in planted.shards:
                first = scene.rng.randrange(per_chunk)
                count = scene.rng.randint(1, per_chunk - first)
                ids = copy.block_ids[chunk * per_chunk + first :][:count]
                parts.append(CopyGroup(copy.group, chunk * per_chunk + first, ids, (slot,), (copy.sums[chunk],)))
                wrong.append(len(wrong))
            at += 1
    return parts, Planted(planted.what, wrong)


def stretches_of(packed: bytes) -> list[tuple[int, int]]:
    """(begin, end) of each stretch of a segment's list."""
    found, at = [], 0
    while at < len(packed):
        _, _, blocks, _, begin, end = struct.unpack_from("<IIIIQQ", packed, at)
        found.append((begin, end))
        at += 32 + (blocks * 4 + 7) // 8 * 8
    return found


if __name__ == "__main__":
    main({"client": Client, "engine": DigestRig})
