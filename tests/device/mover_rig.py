"""A DeviceEngine in its own process; the test plays the client's side of its rings.

    with Halves(machine) as halves:
        cache = halves.map(333, staged=True)
        job = halves.submit("store", cache, 2)
        halves.rig.call("take", cache, STORE)         # as a client's thread would: ASKED → TAKEN
        halves.rig.call("done", cache, STORE)
        halves.wait(job)

The memory belongs to another process, because no process can open its own handles. `python -m tests.device.mover_rig
FD OPTIONS` is either of the two.
"""

import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from kvserver import _native
from tests.device.simulated import Driver, Machine, environment_of
from tests.process.harness import WAIT_S
from tests.process.worker import Worker

STORE, RETRIEVE = 0, 1
SESSION, WORDS = 5, 4096
SEGMENT_BYTES = 1 << 20
STAGING_BYTES = 16 * SEGMENT_BYTES
SLAB_BYTES = 4 << 20
ARENA_BYTES = 4 * SLAB_BYTES
PER_CHUNK, BLOCKS, REGIONS = 3, 30, 2
NEVER = 2**64 - 1

Exported = tuple[str, int]
"""IPC handle and bytes of an allocation."""


class Half(Worker):
    """The parent's side of a process of this module."""

    MODULE = __name__

    def __init__(self, machine: Machine, **options: object) -> None:
        self._pipe, theirs = Pipe()
        told = json.dumps({"vendor": machine.vendor, "library": str(machine.library), **options})
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.MODULE, str(theirs.fileno()), told],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd=Path(__file__).resolve().parents[2],
            env=environment_of(machine),
        )
        theirs.close()


class Halves:
    """A process with memory, and one with an engine that uses it."""

    def __init__(
        self,
        machine: Machine,
        *,
        arena_reach: str = "auto",
        direct_from: int = NEVER,
        bare_direct_from: int = 0,
        slabs: int = 4,
    ) -> None:
        self.memory = Half(machine, role="memory")
        self.rig = Half(
            machine,
            role="engine",
            arena_reach=arena_reach,
            direct_from=direct_from,
            bare_direct_from=bare_direct_from,
        )
        self.rig.call("arena_ready", slabs)
        self._jobs = 0
        self._caches = 0

    def __enter__(self) -> "Halves":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.rig.close()
        self.memory.close()

    def begin_map(self, page_bytes: int, *, staged: bool) -> int:
        """Begins to map a cache of BLOCKS blocks in its own allocation; returns its number."""
        pool = self.memory.call("take", REGIONS * BLOCKS * page_bytes)
        return self.begin_map_of(pool, page_bytes, self.memory.call("take", STAGING_BYTES) if staged else None)

    def begin_map_of(self, pool: Exported, page_bytes: int, staging: Exported | None = None) -> int:
        self._caches += 1
        self.rig.call("map", self._caches, page_bytes, pool, staging)
        return self._caches

    def map(self, page_bytes: int, *, staged: bool) -> int:
        cache = self.begin_map(page_bytes, staged=staged)
        assert self.wait(cache)[1] == "mapped"
        return cache

    def unmap(self, cache: int) -> None:
        self.rig.call("unmap", cache)
        assert self.wait(cache)[1] == "unmapped"

    def submit(self, kind: str, cache: int, chunks: int, mode: str = "staged") -> int:
        """Submits a job. Its number is also its word's."""
        self._jobs += 1
        self.rig.call("submit", self._jobs, kind, cache, chunks, mode)
        return self._jobs

    def submit_on_the_word_of(self, other: int, kind: str, cache: int, chunks: int) -> int:
        """Submits a job on the word and the generation of another one."""
        self.rig.call("share_word", self._jobs + 1, other)
        return self.submit(kind, cache, chunks)

    def wait(self, subject: int) -> tuple[Any, ...]:
        """The only completion of a job or cache."""
        (completion,) = self.rig.call("completions", 1)
        assert completion[0] == subject, completion
        return tuple(completion)


class Memory:
    """Allocations of a process, identified by their handles."""

    def __init__(self, vendor: Any, library: str) -> None:
        self._vendor = vendor
        self._library = library
        self._driver = Driver(vendor, library)

    def take(self, size: int) -> Exported:
        exported = _native.export_memory(self._vendor, self._library, self._driver.alloc(size), size)
        return exported[4].hex(), exported[3]


class Rig:
    """The engine, its arena, the board, and the rings of its caches."""

    def __init__(
        self, vendor: Any, library: str, arena_reach: Any, direct_from: int, bare_direct_from: int = 0
    ) -> None:
        """bare_direct_from: for caches without staging; 0: the same."""
        self._vendor = vendor
        self._arena = _native.create_memfd("arena", ARENA_BYTES)
        board = _native.create_memfd("board", WORDS * 8)
        self._board = _native.Board(board, WORDS)
        self._rings: dict[int, _native.RingOwner] = {}
        self._taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._generations: dict[int, int] = {}
        self._words: dict[int, int] = {}
        """Words of jobs that do not have the one of their own number."""
        self._job = 0
        self._engine = _native.DeviceEngine(
            kind=vendor,
            library=library,
            device_id=_native.device_facts(vendor, library, 0)[0],
            arena_reach=arena_reach,
            rtc_library="",
            cache_dir="",
            arena_fd=self._arena,
            arena_bytes=ARENA_BYTES,
            slab_bytes=SLAB_BYTES,
            threads=2,
            gather_segment_bytes=SEGMENT_BYTES,
            measured=(1.0, direct_from, bare_direct_from or direct_from) * 2,
        )
        self._engine.map_board(SESSION, board, WORDS)

    # ---------------------------------------------------------------- the brain's side

    def arena_ready(self, slabs: int) -> None:
        self._engine.arena_ready(slabs)

    def map(self, cache: int, page_bytes: int, pool: Exported, staging: Exported | None) -> None:
        run = (0, 0, REGIONS, BLOCKS * page_bytes, page_bytes, page_bytes)
        brought = None
        if staging is not None:
            self._rings[cache] = _native.RingOwner(SEGMENT_BYTES)
            brought = bytes.fromhex(staging[0]), SEGMENT_BYTES, self._rings[cache].fd
        buffers = [(bytes.fromhex(pool[0]), pool[1])]
        mode = _native.ipc_mode(self._vendor)
        self._engine.map_cache(cache, SESSION, buffers, brought, mode, [(PER_CHUNK, BLOCKS, [run])])

    def unmap(self, cache: int) -> None:
        self._engine.unmap_cache(cache)

    def submit(self, job: int, kind: Any, cache: int, chunks: int, mode: str) -> None:
        """Submits a job with blocks in order and slots SLAB_BYTES / 4 apart."""
        word = self._words.get(job, job)
        if word == job:
            self._generations[word] = self._board.begin(word)
        ids = b"".join(block.to_bytes(4, "little") for block in range(chunks * PER_CHUNK))
        slots = b"".join((chunk * SLAB_BYTES // 4).to_bytes(8, "little") for chunk in range(chunks))
        self._engine.submit(job, kind, cache, word, self._generations[word], [(0, 0, ids, slots, b"")], mode)

    def share_word(self, job: int, other: int) -> None:
        """The job will be submitted on the word and the generation of the other one."""
        self._words[job] = other

    def cancel(self, job: int) -> None:
        self._engine.cancel(job)

    def completions(self, count: int) -> list[Any]:
        """Exactly `count` completions; fails if there are more at that moment."""
        found: list[Any] = []
        poll = select.poll()
        poll.register(self._engine.eventfd, select.POLLIN)
        while len(found) < count:
            assert poll.poll(WAIT_S * 1000), f"{len(found)} of {count} completions came: {found}"
            os.eventfd_read(self._engine.eventfd)
            found += self._engine.completions(count + 1)
        assert len(found) == count, found
        return found

    def hold_the_gil(self, gate: str) -> None:
        """Blocks all Python threads of this process until a FIFO gets a byte. Creates a `.held` file first."""
        with open(gate, "rb", buffering=0) as opened:
            Path(gate).with_suffix(".held").touch()
            ctypes.PyDLL(None).read(opened.fileno(), ctypes.create_string_buffer(1), ctypes.c_size_t(1))

    def imports(self) -> int:
        return self._engine.imports

    def close(self) -> list[Any]:
        """Closes the engine; returns its last completions."""
        self._engine.close()
        return self._engine.completions(100)

    # ---------------------------------------------------------------- the client's side

    def state(self, job: int) -> int:
        generation, state = self._board.state(job)
        assert generation == self._generations[job]
        return state

    def abandon_store(self, job: int) -> int:
        return self._board.abandon_store(job, self._generations[job])

    def take(self, cache: int, lane: int) -> int:
        """Takes the next segment that is asked for; returns its job."""
        assert self.asked(cache, lane, WAIT_S), "nothing was asked"
        return self._job

    def asked(self, cache: int, lane: int, within_s: float) -> bool:
        """Waits for a request for a segment and takes it. Returns False on timeout."""
        deadline_s = time.monotonic() + within_s
        while (asked := self._rings[cache].take(lane)) is None:
            if time.monotonic() >= deadline_s:
                return False
            self._rings[cache].sleep(10)
        segment, sequence, self._job, *_ = asked
        self._taken.setdefault((cache, lane), []).append((segment, sequence))
        return True

    def done(self, cache: int, lane: int) -> None:
        segment, sequence = self._taken[cache, lane].pop(0)
        self._rings[cache].done(lane, segment, sequence)

    def fault(self, cache: int, lane: int) -> None:
        segment, sequence = self._taken[cache, lane].pop(0)
        self._rings[cache].fault(lane, segment, sequence, 2)


def main(roles: Mapping[str, Callable[..., object]]) -> None:
    """One half, until its pipe closes."""
    pipe = Connection(int(sys.argv[1]))
    options = json.loads(sys.argv[2])
    half = roles[options.pop("role")](**options)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((getattr(half, name)(*arguments), None))
        except Exception as problem:  # the test must see any failure
            pipe.send((None, f"{type(problem).__name__}: {problem}"))


if __name__ == "__main__":
    main({"memory": Memory, "engine": Rig})
