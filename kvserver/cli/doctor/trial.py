"""A trial transfer for doctor: opens, stores and retrieves memory of another process, as a mover does.

`python -m kvserver.cli.doctor.trial KIND LIBRARY ORDINAL CACHE` is the other process, in the role of an engine. It
writes the handle of its memory and waits until its standard input ends.
"""

import os
import select
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import Literal, NamedTuple, Protocol

from kvserver._native import Board, DeviceEngine, StagedCopier, create_memfd, ipc_mode
from kvserver.errors import DeviceError
from kvserver.transfer.device import open_device, rtc_library

MIB = 1 << 20
ARENA_BYTES = 64 * MIB
SEGMENT_BYTES = 4 * MIB
"""Segment size of the other process's staging memory; it lends sixteen segments."""
GATHER_SEGMENT_BYTES = 16 * MIB
"""Segment size of the mover's own staging: the smallest that it works with."""
PAGE_BYTES, BLOCKS_PER_CHUNK = 32 << 10, 16
CHUNK_BYTES = PAGE_BYTES * BLOCKS_PER_CHUNK
ROUNDS = 4
"""Measured rounds; the first one also allocates and touches memory, the best one counts."""
WAIT_S = 20.0
SESSION, CACHE, WORD = 1, 1, 0

Completion = tuple[int, str, int, int, str, str, str, bytes, list[int]]
Verb = Literal["store", "retrieve"]


class Settings(Protocol):
    """The part of the configuration that is used here."""

    @property
    def device_library(self) -> str: ...
    @property
    def arena_reach(self) -> Literal["auto", "register", "bounce"]: ...
    @property
    def copy_threads(self) -> int: ...


class Outcome(NamedTuple):
    facts: dict[str, str]
    """Facts of the mover's engine."""
    mode: str
    """The mode in which pages of PAGE_BYTES were copied."""
    store_gbps: float
    retrieve_gbps: float


class _Arena(NamedTuple):
    """Settings of a mover with an arena that is only for this trial."""

    device_library: str
    arena_reach: Literal["auto", "register", "bounce"]
    copy_threads: int
    cache_dir: str
    arena_bytes: int = ARENA_BYTES
    slab_bytes: int = ARENA_BYTES


def attempt(kind: Literal["cuda", "rocm"], ordinal: int, device_id: str, settings: Settings) -> Outcome:
    """Tries one device. Raises DeviceError with the text that the mover or a registration would give."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvserver-doctor-"))
        arena, board = (create_memfd("kvserver-doctor", size) for size in (ARENA_BYTES, os.sysconf("SC_PAGE_SIZE")))
        stack.callback(os.close, arena)
        stack.callback(os.close, board)
        own = _Arena(settings.device_library, settings.arena_reach, settings.copy_threads, folder)
        handle, size = stack.enter_context(_Lender(kind, settings.device_library, ordinal, folder))
        engine = open_device(kind, device_id, arena, own, gather_segment_bytes=GATHER_SEGMENT_BYTES)
        stack.callback(engine.close)
        mover = _Mover(kind, engine, board)
        outcome = mover.transfer(handle, size)
        mover.find_a_flipped_bit(arena)
        return outcome


class _Mover:
    """Gives orders to the engine, one at a time, in place of a mover."""

    def __init__(self, kind: Literal["cuda", "rocm"], engine: DeviceEngine, board: int) -> None:
        self._kind = kind
        self._engine = engine
        self._board = Board(board, WORD + 1)
        self._poll = select.poll()
        self._poll.register(engine.eventfd, select.POLLIN)
        self._jobs = 0
        self._ids: list[int] = []
        engine.map_board(SESSION, board, WORD + 1)
        engine.arena_ready(1)

    def transfer(self, handle: bytes, size: int) -> Outcome:
        blocks = size // PAGE_BYTES
        run = (0, 0, 1, 0, PAGE_BYTES, PAGE_BYTES)
        groups = [(BLOCKS_PER_CHUNK, blocks, [run])]
        self._engine.map_cache(CACHE, SESSION, [(handle, size)], None, ipc_mode(self._kind), groups)
        self._completion("mapped")
        # Every other block, because adjacent blocks would be merged into one long copy.
        ids = [*range(0, blocks, 2)][: blocks // 2 // BLOCKS_PER_CHUNK * BLOCKS_PER_CHUNK]
        self._ids = ids
        rounds = [(self._run("store", ids), self._run("retrieve", ids)) for _ in range(ROUNDS)]
        stores, retrieves = ([pair[way] for pair in rounds] for way in (0, 1))
        rates = [len(ids) * PAGE_BYTES / min(done[3] for done in way) for way in (stores, retrieves)]
        return Outcome(dict(self._engine.facts), stores[0][6], *rates)

    def find_a_flipped_bit(self, arena: int) -> None:
        """Loads what is stored, with a bit of it flipped and without, and reads the blocks again. Raises DeviceError if
        the flipped bit goes unnoticed, or if the blocks then hold other bytes than before."""
        sums = self._run("store", self._ids, digests=True)[7]
        at = CHUNK_BYTES + PAGE_BYTES // 2
        (byte,) = os.pread(arena, 1, at)
        os.pwrite(arena, bytes([byte ^ 4]), at)
        noticed = self._run("retrieve", self._ids, sums, wanted="failed", digests=True)
        if (noticed[4], noticed[8]) != ("digest", [1]):
            raise DeviceError("digest", f"a flipped bit of chunk 1 was told as {noticed[4] or 'nothing'} {noticed[8]}")
        os.pwrite(arena, bytes([byte]), at)
        self._run("retrieve", self._ids, sums, digests=True)
        if self._run("store", self._ids, digests=True)[7] != sums:
            raise DeviceError("digest", "blocks that were loaded hold other bytes than were stored")

    def _run(
        self, verb: Verb, ids: list[int], sums: bytes = b"", *, wanted: str = "done", digests: bool = False
    ) -> Completion:
        self._jobs += 1
        slots = range(0, len(ids) // BLOCKS_PER_CHUNK * CHUNK_BYTES, CHUNK_BYTES)
        packed = [b"".join(each.to_bytes(size, "little") for each in row) for size, row in ((4, ids), (8, slots))]
        generation = self._board.begin(WORD)
        groups = [(0, 0, packed[0], packed[1], sums)]
        self._engine.submit(self._jobs, verb, CACHE, WORD, generation, groups, "server-gather", digests=digests)
        return self._completion(wanted)

    def _completion(self, wanted: str) -> Completion:
        if not self._poll.poll(WAIT_S * 1000):
            raise DeviceError("device", f"a transfer for trial was not {wanted} within {WAIT_S:g} s")
        os.eventfd_read(self._engine.eventfd)
        (completion,) = self._engine.completions(1)
        if completion[1] != wanted:
            raise DeviceError(completion[4] or "device", f"a transfer for trial: {completion[1]}, {completion[5]}")
        return completion


class _Lender:
    """The other process, as a context manager that yields the handle and size of its memory."""

    def __init__(self, kind: str, library: str, ordinal: int, folder: str) -> None:
        command = [sys.executable, "-m", "kvserver.cli.doctor.trial", kind, library, str(ordinal), folder]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __enter__(self) -> tuple[bytes, int]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], WAIT_S)
        line = self._process.stdout.readline() if ready else ""
        handle, _, size = line.strip().partition(" ")
        if not size:
            self._process.kill()
            _, problem = self._process.communicate()
            said = problem.strip().splitlines()[-1:] or [f"nothing within {WAIT_S:g} s"]
            raise DeviceError("device", f"a second process could not lend memory: {said[0]}")
        return bytes.fromhex(handle), int(size)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    kind, library, ordinal, folder = sys.argv[1:]
    vendor: Literal["cuda", "rocm"] = "rocm" if kind == "rocm" else "cuda"
    memory = StagedCopier(vendor, library, int(ordinal), SEGMENT_BYTES, 0, rtc_library(vendor, library), folder)
    sys.stdout.write(f"{memory.handle.hex()} {16 * memory.segment_bytes}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
