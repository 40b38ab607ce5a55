"""Order and early ends of jobs: some overtake, are cancelled, or are there when the engine closes."""

import pytest

from kvserver.transfer.native import DONE, FAILED, LIVE
from tests.rigs.native_rig import BIG, BIG_PAGE, BIG_POOL, KINDS, Kind, Memory, all_big, busy_then_queued, rig
from tests.rigs.oracle_plan import CopyGroup, Group, Run

CACHE = 3


def test_retrieves_overtake_stores() -> None:
    pool = Memory(BIG_POOL)
    overtaken = (2, 0, 1)  # even a store that had begun
    orders: set[tuple[int, ...]] = set()
    with rig(BIG_POOL, 1) as session:
        session.map(CACHE, [BIG], [pool])
        while overtaken not in orders:
            first, (store, retrieve) = busy_then_queued(session, CACHE, ["store", "retrieve"])
            orders.add(tuple([first, store, retrieve].index(end[0]) for end in session.wait(3)))
    assert orders <= {overtaken, (0, 2, 1), (0, 1, 2)}  # the others: the store had ended before
    pool.close()


def test_cancel_ends_what_has_not_begun_and_only_that_job() -> None:
    pool = Memory(BIG_POOL)
    cancelled = 0
    with rig(BIG_POOL, 1) as session:
        session.map(CACHE, [BIG], [pool])
        while not cancelled:
            first, (waiting,) = busy_then_queued(session, CACHE, ["store"])
            generation, _ = session.board.state(1)
            session.engine.cancel(waiting)
            session.engine.cancel(987654)
            ends = {end[0]: end for end in session.wait(2)}
            assert ends[first][1] == "done"
            if ends[waiting][1] == "abandoned":
                moved = ends[waiting][2]
                assert moved < BIG_PAGE
                cancelled += moved == 0  # otherwise it had begun, and was stopped between two pieces
                assert session.board.state(1) == (generation, FAILED)
            else:  # it had reached its last piece
                assert session.board.state(1) == (generation, DONE)
    pool.close()


@pytest.mark.parametrize("kind", ["store", "retrieve"])
@pytest.mark.parametrize("threads", [1, 3])
def test_cancel_stops_a_running_job_between_two_pieces(kind: Kind, threads: int) -> None:
    pool = Memory(BIG_POOL)
    stopped = 0
    with rig(BIG_POOL, threads) as session:
        session.map(CACHE, [BIG], [pool])
        while not stopped:
            job, generation = session.submit(kind, CACHE, all_big(), word=0)
            while session.board.state(0) == (generation, LIVE):
                pass
            session.engine.cancel(job)
            session.engine.cancel(job)
            ((ended, status, moved, *_),) = session.wait(1)
            assert ended == job
            if status == "abandoned":
                stopped += 1
                assert moved < BIG_POOL
                assert session.board.state(0) == (generation, FAILED)
            else:  # its last pieces were under way
                assert status == "done"
                assert session.board.state(0) == (generation, DONE)
        session.submit(kind, CACHE, all_big(), word=1)
        ((_, status, *_),) = session.wait(1)
        assert status == "done"
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
def test_cancel_does_not_wait_for_a_mebibyte_of_tiny_pages(kind: Kind) -> None:
    """Copying a page has a fixed cost, so a piece has at most 4096 pages."""
    blocks, regions, pages_max = 512, 4096, 4096
    tiny = Group(1, blocks, (Run(0, 0, regions, 2 * blocks, 2, 1),))
    everything = [CopyGroup(0, 0, tuple(range(blocks)), tuple(range(0, blocks * regions, regions)))]
    pool = Memory(regions * 2 * blocks)
    with rig(blocks * regions, 1) as session:
        source, target = (pool, session.arena) if kind == "store" else (session.arena, pool)
        source.view[:] = b"\1" * source.size
        session.map(CACHE, [tiny], [pool])
        for _ in range(100):
            target.view[0] = 0
            job, _ = session.submit(kind, CACHE, everything)
            while target.view[0] == 0:
                pass
            session.engine.cancel(job)
            ((_, status, moved, *_),) = session.wait()
            assert (status, moved) == ("done", blocks * regions) or (status == "abandoned" and moved % pages_max == 0)
            if moved % (256 << 10):  # pieces of larger pages have no fewer bytes
                return
    pytest.fail("every job ended where a piece of larger pages would have")


def test_close_ends_every_job_once() -> None:
    pool = Memory(BIG_POOL)
    with rig(BIG_POOL, 1) as session:
        session.map(CACHE, [BIG], [pool])
        first, others = busy_then_queued(session, CACHE, ["store", "retrieve", "store"])
        session.engine.unmap_cache(CACHE)
        session.engine.close()
        ends = {(end[0], end[1] == "unmapped"): end[1] for end in session.wait(5)}
        assert ends[first, False] == "done"
        assert {ends[job, False] for job in others} <= {"done", "abandoned"}
        assert ends[CACHE, True] == "unmapped"
        for word in range(4):
            assert session.board.state(word)[1] in {DONE, FAILED}
        with pytest.raises(ValueError, match="closed"):
            session.submit("store", CACHE, all_big(), word=9)
        session.engine.close()
    pool.close()
