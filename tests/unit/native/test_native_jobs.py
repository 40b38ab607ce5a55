"""Jobs from submission to their one completion: words, refusals, unmapping, shrinking pools, leaks."""

import contextlib
import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvserver.transfer.native import ABANDONED, DONE, FAILED, LIVE, SUBMITTED, CopyEngine, create_memfd
from tests.rigs.native_rig import (
    BIG,
    BIG_PAGE,
    BIG_POOL,
    KINDS,
    SESSION,
    WORDS,
    Kind,
    Memory,
    Rig,
    all_big,
    busy_then_queued,
    rig,
    until,
)
from tests.rigs.oracle_plan import CopyGroup, Group, Run

CACHE = 3
PAGE, BLOCKS, REGIONS, PER_CHUNK = 1000, 31, 3, 4
GROUP = Group(PER_CHUNK, BLOCKS, (Run(0, 0, REGIONS, BLOCKS * PAGE, PAGE, PAGE),))
POOL = REGIONS * BLOCKS * PAGE
ARENA = 1 << 20


def some(*block_ids: int, slot: int = 0) -> list[CopyGroup]:
    """A copy of up to one chunk."""
    return [CopyGroup(0, 0, block_ids, (slot,))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("code", "copies"),
    [
        ("block-range", some(4, BLOCKS)),
        ("block-range", some(-1)),
        ("block-duplicate", some(4, 5, 4)),
        ("slots", some(4, slot=ARENA)),
        ("slots", [CopyGroup(0, 0, (4,), ())]),
    ],
)
def test_a_wrong_job_fails_before_its_first_byte(kind: Kind, code: str, copies: list[CopyGroup]) -> None:
    pool = Memory(POOL)
    with rig(ARENA) as session:
        session.map(CACHE, [GROUP], [pool])
        session.arena.fill(1)
        pool.fill(2)
        before = session.arena.view[:], pool.view[:]
        job, generation = session.submit(kind, CACHE, copies, word=9)
        (completion,) = session.wait()
        assert completion[:5] == (job, "invalid", 0, 0, code)
        assert completion[5]
        assert session.board.state(9) == (generation, FAILED)
        assert (session.arena.view[:], pool.view[:]) == before
    pool.close()


def test_a_job_whose_word_was_abandoned_moves_nothing() -> None:
    pool = Memory(POOL)
    with rig(ARENA) as session:
        session.map(CACHE, [GROUP], [pool])
        pool.fill(2)
        before = session.arena.view[:]
        generation = session.board.begin(4)
        assert session.board.abandon_retrieve(4, generation) == ABANDONED
        session.engine.submit(7, "store", CACHE, 4, generation, [copy.packed() for copy in some(1, 2)])
        assert session.wait()[0][:3] == (7, "abandoned", 0)
        assert session.board.state(4) == (generation, ABANDONED)
        assert session.arena.view[:] == before
    pool.close()


def test_a_job_of_an_earlier_generation_moves_nothing() -> None:
    pool = Memory(POOL)
    with rig(ARENA) as session:
        session.map(CACHE, [GROUP], [pool])
        pool.fill(2)
        before = session.arena.view[:]
        old = session.board.begin(4)
        session.board.abandon_store(4, old)
        new = session.board.begin(4)
        session.engine.submit(7, "store", CACHE, 4, old, [copy.packed() for copy in some(1, 2)])
        assert session.wait()[0][1] == "abandoned"
        assert session.board.state(4) == (new, LIVE)
        assert session.arena.view[:] == before
    pool.close()


def test_words_of_done_jobs_say_so_before_the_completion_is_seen() -> None:
    pool = Memory(POOL)
    with rig(ARENA) as session:
        session.map(CACHE, [GROUP], [pool])
        for word in (0, WORDS - 1):
            _, generation = session.submit("store", CACHE, some(1, 2), word=word)
            assert session.wait()[0][1] == "done"
            assert session.board.state(word) == (generation, DONE)
    pool.close()


def test_a_store_that_is_abandoned_under_way_stops_between_two_pieces_and_never_says_done() -> None:
    """Abandoned just after it began. The copy may have ended by then; word and completion agree."""
    pool = Memory(BIG_POOL)
    with rig(BIG_POOL, 1) as session:
        session.map(CACHE, [BIG], [pool])
        for _ in range(1000):
            job, generation = session.submit("store", CACHE, all_big())
            while session.board.state(0) == (generation, LIVE):
                pass
            state = session.board.abandon_store(0, generation)
            ((ended, status, moved, *_),) = session.wait()
            assert ended == job
            assert (state, status) in {(ABANDONED, "abandoned"), (DONE, "done")}
            assert session.board.state(0) == (generation, state)
            if moved < BIG_POOL:
                assert state == ABANDONED
                break
        else:
            raise AssertionError("every abandoned store was copied to its end")
    pool.close()


def test_a_job_that_is_cancelled_between_two_pieces_ends_and_so_does_its_word() -> None:
    """The only worker has turned to a retrieve: nobody copies the store when it is cancelled."""
    pool = Memory(BIG_POOL)
    seen: set[str] = set()
    with rig(BIG_POOL, 1) as session:
        session.map(CACHE, [BIG], [pool])
        while "abandoned" not in seen:
            store, stored = session.submit("store", CACHE, all_big(), word=0)
            while session.board.state(0) == (stored, LIVE):
                pass
            retrieve, retrieved = session.submit("retrieve", CACHE, all_big(), word=1)
            while session.board.state(1) == (retrieved, LIVE):
                pass
            session.engine.cancel(store)
            ends = {job: status for job, status, *_ in session.wait(2)}
            assert ends[retrieve] == "done"
            ended = {"abandoned": FAILED, "done": DONE}[ends[store]]  # it may have been copied before
            assert [session.board.state(word) for word in (0, 1)] == [(stored, ended), (retrieved, DONE)]
            seen.add(ends[store])
    pool.close()


def test_a_running_retrieve_cannot_be_abandoned() -> None:
    pool = Memory(BIG_POOL)
    seen: set[int] = set()
    with rig(BIG_POOL, 1) as session:
        session.map(CACHE, [BIG], [pool])
        while SUBMITTED not in seen:
            _, generation = session.submit("retrieve", CACHE, all_big())
            while session.board.state(0) == (generation, LIVE):
                pass
            seen.add(session.board.abandon_retrieve(0, generation))
            assert session.wait()[0][1] == "done"
            assert session.board.state(0) == (generation, DONE)
    assert seen <= {SUBMITTED, DONE}
    pool.close()


def test_unmapping_waits_for_the_jobs_of_its_cache_and_only_for_those() -> None:
    pool, other = Memory(BIG_POOL), Memory(POOL)
    pool.fill(9)
    with rig(BIG_POOL, 1) as session:
        for word in range(20, WORDS):
            session.map(CACHE, [BIG], [pool])
            session.map(CACHE + 1, [GROUP], [other])
            first, others = busy_then_queued(session, CACHE, ["store", "store"])
            session.engine.unmap_cache(CACHE + 1)
            session.engine.unmap_cache(CACHE)
            with pytest.raises(ValueError, match="not mapped"):
                session.submit("store", CACHE, all_big(), word=word)
            with pytest.raises(ValueError, match="not mapped"):
                session.engine.unmap_cache(CACHE)
            problem = dropped_board(session)
            ends = [(end[0], end[1]) for end in session.wait(5)]
            assert ends[-1] == (CACHE, "unmapped")
            assert set(ends) == {
                (first, "done"),
                *((job, "done") for job in others),
                (CACHE, "unmapped"),
                (CACHE + 1, "unmapped"),
            }
            assert session.arena.view[BIG_PAGE:] == pool.view[BIG_PAGE:]
            if problem:
                assert "still has mapped caches" in problem
                break
            session.engine.map_board(SESSION, session.board_memory.fd, WORDS)  # all had ended before
        else:
            pytest.fail("the board could always be dropped")
        session.engine.drop_board(SESSION)
    for memory in (pool, other):
        memory.close()


def dropped_board(session: Rig) -> str:
    """Drops the board; returns the refusal's reason, empty when it was dropped."""
    try:
        session.engine.drop_board(SESSION)
    except ValueError as problem:
        return str(problem)
    return ""


def test_a_cache_is_unmapped_after_its_last_job_when_all_memory_is_there() -> None:
    """All memory is faulted in, so the thread that unmaps waits only for the order."""
    pool = Memory(BIG_POOL)
    pool.fill(3)
    with rig(BIG_POOL, 1) as session:
        session.arena.fill(4)
        session.map(CACHE, [BIG], [pool])
        time.sleep(0.3)  # for that long it polls whether memory is there, and the order would reach it anyway
        job, _ = session.submit("store", CACHE, all_big())
        session.engine.unmap_cache(CACHE)
        assert [(number, status) for number, status, *_ in session.wait(2)] == [(job, "done"), (CACHE, "unmapped")]
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_that_was_truncated_fails_the_job_and_nothing_else(kind: Kind) -> None:
    pool, other = Memory(BIG_POOL), Memory(POOL)
    with rig(BIG_POOL, 2) as session:
        session.map(CACHE, [BIG], [pool])
        session.map(CACHE + 1, [GROUP], [other])
        os.ftruncate(pool.fd, 5 * BIG_PAGE)
        job, generation = session.submit(kind, CACHE, all_big(), word=2)
        (end,) = session.wait()
        assert (end[0], end[1], end[4]) == (job, "failed", "pool-shrunk")
        assert end[2] <= 5 * BIG_PAGE, "bytes that were copied: not more than there were"
        assert "buffer 0" in end[5]
        assert session.board.state(2) == (generation, FAILED)
        assert session.run(kind, CACHE, [CopyGroup(0, 0, (0, 4), (0, BIG_PAGE))])[1] == "done"
        assert session.run(kind, CACHE + 1, some(1, 2))[1] == "done"
        session.engine.unmap_cache(CACHE)
        assert session.wait()[0][:2] == (CACHE, "unmapped")
    other.close()
    pool.close()


def test_a_pool_that_shrinks_under_running_copies_never_kills_the_process() -> None:
    rng = random.Random(5)
    statuses: set[str] = set()
    for _ in range(6):
        pool = Memory(BIG_POOL)
        pool.view.close()
        with rig(BIG_POOL, 2) as session:
            session.map(CACHE, [BIG], [pool])
            for word, kind in enumerate(KINDS):  # each in its own half of pool and arena
                half = range(12 * word, 12 * word + 12)
                slots = tuple(block * BIG_PAGE for block in half)
                session.submit(kind, CACHE, [CopyGroup(0, 0, tuple(half), slots)], word=word)
            os.ftruncate(pool.fd, rng.randrange(BIG_POOL))
            statuses |= {end[1] for end in session.wait(2)}
        pool.close()
    assert statuses <= {"done", "failed"}
    assert "failed" in statuses


def test_a_bus_error_outside_of_copies_still_ends_the_process() -> None:
    code = """
import mmap, os
from kvserver.transfer.native import CopyEngine, create_memfd
engine = CopyEngine(create_memfd("arena", 4096), 4096, 1)
lost = os.memfd_create("lost")
os.ftruncate(lost, 8192)
view = mmap.mmap(lost, 8192)
os.ftruncate(lost, 0)
print("before", flush=True)
view[5000]
print("after", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-7, "before\n")


def test_many_small_jobs_complete_exactly_once_with_their_own_bytes() -> None:
    """Each word has a slot and five blocks of its own.

    Each of them stores, then retrieves into other blocks of its own, again and again, all words at once."""
    total, per_word = 2000, 5
    blocks = per_word * WORDS
    group = Group(2, blocks, (Run(0, 0, 2, blocks * PAGE, PAGE, PAGE),))
    pool = Memory(2 * blocks * PAGE)
    rng = random.Random(1)
    with rig(WORDS * 4096, 3) as session:
        session.map(CACHE, [group], [pool])
        pool.fill(4)
        stored: dict[int, list[bytes]] = {}
        running: dict[int, tuple[int, Kind, int]] = {}

        def pages(block: int) -> list[bytes]:
            return [pool.view[r * blocks * PAGE + block * PAGE :][:PAGE] for r in range(2)]

        def start(word: int, kind: Kind) -> None:
            block = per_word * word + rng.randrange(per_word)
            copies = [CopyGroup(0, 1, (block,), (word * 4096,))]
            running[session.submit(kind, CACHE, copies, word=word)[0]] = (word, kind, block)

        for word in range(WORDS):
            start(word, "store")
        ended = 0
        while running:
            job, status, count, *_ = session.wait()[0]
            word, kind, block = running.pop(job)
            assert (status, count) == ("done", 2 * PAGE)
            if kind == "store":
                stored[word] = pages(block)
            else:
                assert pages(block) == stored[word]
            ended += 1
            if ended + len(running) < total:
                start(word, "retrieve" if kind == "store" else "store")
        assert ended == total == session.jobs
        assert session.engine.completions(10) == []
    pool.close()


def test_completions_left_behind_make_the_eventfd_readable_again() -> None:
    pool = Memory(POOL)
    with rig(ARENA, 1) as session:
        session.map(CACHE, [GROUP], [pool])
        jobs = {session.submit("store", CACHE, some(word), word=word)[0] for word in range(7)}
        assert {end[0] for end in session.wait(7)} == jobs  # wait() takes 3 at a time
    pool.close()


def test_numbers_that_nobody_knows_are_refused_without_a_completion() -> None:
    pool = Memory(POOL)
    with rig(ARENA) as session:
        session.map(CACHE, [GROUP], [pool])
        with pytest.raises(ValueError, match="cache 99 is not mapped"):
            session.submit("store", 99, some(1), word=1)
        with pytest.raises(ValueError, match=f"word={WORDS}"):
            session.engine.submit(50, "store", CACHE, WORDS, 1, [])
        with pytest.raises(ValueError, match="kind=move"):
            session.engine.submit(50, "move", CACHE, 1, 1, [])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="block_ids: 5 bytes"):
            session.engine.submit(50, "store", CACHE, 1, 1, [(0, 0, bytes(5), b"", b"")])
        with pytest.raises(ValueError, match="cache 3 is mapped already"):
            session.map(CACHE, [GROUP], [pool])
        with pytest.raises(ValueError, match="session 5 has a board already"):
            session.engine.map_board(SESSION, session.board_memory.fd, WORDS)
        with pytest.raises(ValueError, match="session 6 has no board"):
            session.engine.map_cache(4, 6, [pool.fd], [POOL], [GROUP.packed()])
        with pytest.raises(ValueError, match="session 6 has no board"):
            session.engine.drop_board(6)
        assert session.engine.completions(10) == []
        assert session.run("store", CACHE, some(1))[1] == "done"
    pool.close()


def test_descriptors_that_could_hurt_are_refused() -> None:
    pool = Memory(POOL)
    with rig(ARENA) as session:

        def refused(fd: int, size: int, code: str) -> None:
            with pytest.raises(ValueError, match=rf"^{code}: "):
                session.engine.map_cache(CACHE, SESSION, [fd], [size], [GROUP.packed()])

        refused(pool.fd, POOL + 1, "descriptor-size")
        refused(pool.fd, POOL - 1, "layout")
        read_end, write_end = os.pipe()
        refused(read_end, POOL, "descriptor-seal")
        with open(__file__, "rb") as plain:
            refused(plain.fileno(), POOL, "descriptor-seal")
        read_only = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDONLY)
        refused(read_only, POOL, "descriptor-seal")
        sealed = create_memfd("sealed", POOL, sealed=False)
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        refused(sealed, POOL, "descriptor-seal")
        with pytest.raises(ValueError, match=r"^layout: 2 descriptors"):
            session.engine.map_cache(CACHE, SESSION, [pool.fd, pool.fd], [POOL], [GROUP.packed()])
        with pytest.raises(ValueError, match=r"^descriptor-seal: "):
            session.engine.map_board(9, pool.fd, 4)
        with pytest.raises(ValueError, match="needs 304 bytes"):
            session.engine.map_board(9, session.board_memory.fd, WORDS + 1)
        for fd in (read_end, write_end, read_only, sealed):
            os.close(fd)
    pool.close()


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_thread_counts_are_bounded(threads: int) -> None:
    fd = create_memfd("arena", 4096)
    with pytest.raises(ValueError, match=f"threads={threads}"):
        CopyEngine(fd, 4096, threads)
    with pytest.raises(ValueError, match="arena_bytes=8192"):
        CopyEngine(fd, 8192, 1)
    os.close(fd)


def mappings_of(name: str) -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def engine_threads() -> dict[str, int]:
    """Blocked signals of each engine thread. A joined thread may still be listed for a moment."""
    blocked = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            blocked[status["Name"]] = int(status["SigBlk"], 16)
    return {name: signals for name, signals in blocked.items() if name.startswith("kv-")}


def test_nothing_stays_open_or_mapped() -> None:
    def once() -> None:
        pool = Memory(POOL)
        with rig(ARENA, 3) as session:
            session.map(CACHE, [GROUP], [pool])
            with contextlib.suppress(ValueError):
                session.engine.map_cache(CACHE + 1, SESSION, [pool.fd, pool.fd], [POOL, POOL + 1], [GROUP.packed()])
            session.submit("store", CACHE, some(1, 2))
            session.engine.unmap_cache(CACHE)
            session.wait(2)
            assert mappings_of("memfd:test") == 3 + 3  # ours, the engine's arena and board, and Board's
        pool.close()

    gc.collect()
    until(lambda: not engine_threads())
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    gc.collect()
    assert mappings_of("memfd:test") == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    until(lambda: not engine_threads())


def test_threads_have_names_and_leave_signals_to_the_main_thread() -> None:
    until(lambda: not engine_threads())
    pool = Memory(POOL)
    with rig(ARENA, 1) as session:
        session.map(CACHE, [GROUP], [pool])
        session.run("store", CACHE, some(1))
        session.engine.unmap_cache(CACHE)
        session.wait()  # now both threads have begun
        ours = engine_threads()
    pool.close()
    assert sorted(ours) == ["kv-copy-0", "kv-house"]
    for blocked in ours.values():
        assert all(blocked >> number - 1 & 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD))
        assert not blocked >> signal.SIGBUS - 1 & 1
