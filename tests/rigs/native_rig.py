"""An engine with an arena, a board and pools, driven as a mover and a client would drive them."""

import mmap
import os
import random
import select
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from kvserver.transfer.native import LIVE, Board, Completion, CopyEngine, completions, create_memfd
from tests.rigs.oracle_plan import CopyGroup, Group, Run, plan
from tests.rigs.pauses import pause_s

Kind = Literal["store", "retrieve"]
KINDS: tuple[Kind, ...] = ("store", "retrieve")
SESSION = 5
WORDS = 37
WAIT_MS = 30_000

BIG_PAGE = 2 << 20
BIG = Group(1, 24, (Run(0, 0, 1, 0, BIG_PAGE, BIG_PAGE),))
BIG_POOL = 24 * BIG_PAGE


def until(is_so: Callable[[], bool]) -> None:
    """Polls for an action of another thread that gives no signal."""
    began_s = time.monotonic()
    while not is_so():
        waited_s = time.monotonic() - began_s
        assert waited_s < WAIT_MS / 1000
        time.sleep(pause_s(waited_s))


class Memory:
    """A memfd and its bytes. Closing it twice is allowed, and so is to forget it."""

    def __init__(self, size: int, *, sealed: bool = False) -> None:
        self.size = size
        self.fd = create_memfd("test", size, sealed=sealed)
        self.view = mmap.mmap(self.fd, size)
        self._close = weakref.finalize(self, os.close, self.fd)

    def fill(self, seed: int) -> None:
        """Bytes in which no page resembles another."""
        self.view[:] = random.Random(seed).randbytes(self.size)

    def close(self) -> None:
        self.view.close()
        self._close()


class Rig:
    """One session on one engine."""

    def __init__(self, arena_bytes: int, threads: int) -> None:
        self.arena = Memory(arena_bytes, sealed=True)
        self.board_memory = Memory(WORDS * 8, sealed=True)
        self.engine = CopyEngine(self.arena.fd, arena_bytes, threads)
        self.engine.map_board(SESSION, self.board_memory.fd, WORDS)
        self.board = Board(self.board_memory.fd, WORDS)
        self.jobs = 0

    def map(self, cache: int, groups: list[Group], buffers: list[Memory]) -> None:
        sizes = [buffer.size for buffer in buffers]
        self.engine.map_cache(
            cache, SESSION, [buffer.fd for buffer in buffers], sizes, [group.packed() for group in groups]
        )

    def submit(self, kind: Kind, cache: int, copies: list[CopyGroup], word: int = 0) -> tuple[int, int]:
        """Makes the word live and submits a job; returns (job, generation)."""
        generation = self.board.begin(word)
        self.jobs += 1
        self.engine.submit(self.jobs, kind, cache, word, generation, [copy.packed() for copy in copies])
        return self.jobs, generation

    def wait(self, count: int = 1) -> list[Completion]:
        """Waits for exactly `count` completions."""
        found: list[Completion] = []
        poll = select.poll()
        poll.register(self.engine.eventfd, select.POLLIN)
        while len(found) < count:
            assert poll.poll(WAIT_MS), f"{len(found)} of {count} completions came: {found}"
            os.eventfd_read(self.engine.eventfd)
            found += completions(self.engine, min(3, count - len(found)))
        assert len(found) == count
        return found

    def run(self, kind: Kind, cache: int, copies: list[CopyGroup]) -> Completion:
        self.submit(kind, cache, copies)
        return self.wait()[0]

    def close(self) -> None:
        self.engine.close()
        self.board.close()
        self.board_memory.close()
        self.arena.close()


@contextmanager
def rig(arena_bytes: int = 1 << 20, threads: int = 2) -> Iterator[Rig]:
    made = Rig(arena_bytes, threads)
    try:
        yield made
    finally:
        made.close()


def all_big() -> list[CopyGroup]:
    """Copies of every block of a pool laid out as BIG, which keep a worker busy for some milliseconds."""
    return [CopyGroup(0, 0, tuple(range(24)), tuple(range(0, BIG_POOL, BIG_PAGE)))]


def busy_then_queued(session: Rig, cache: int, queued: list[Kind]) -> tuple[int, list[int]]:
    """Starts a large store that occupies the only worker, then jobs that queue after it, all on their own words."""
    first, generation = session.submit("store", cache, all_big(), word=0)
    while session.board.state(0) == (generation, LIVE):
        pass
    others = [
        session.submit(kind, cache, [CopyGroup(0, 0, (index,), (index * BIG_PAGE,))], word=1 + index)[0]
        for index, kind in enumerate(queued)
    ]
    return first, others


def carried_out(
    groups: list[Group], copies: list[CopyGroup], kind: Kind, arena: bytes, pools: list[bytes]
) -> tuple[bytes, list[bytes]]:
    """Arena and pools after the job, computed by the oracle."""
    new_arena, new_pools = bytearray(arena), [bytearray(pool) for pool in pools]
    for buffer, at, slot, count in plan(groups, copies, kind):
        if kind == "store":
            new_arena[slot : slot + count] = pools[buffer][at : at + count]
        else:
            new_pools[buffer][at : at + count] = arena[slot : slot + count]
    return bytes(new_arena), [bytes(pool) for pool in new_pools]
