"""Faults of the server or a rank: the engine computes on, no block is lost, no byte is wrong, nothing hangs.

Each engine here has its own server. Rig compares the context of every forward, and checks that all blocks came back.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import Rig, prompt
from tests.process.harness import Server, kill, stop, stopped, until

MakeRig = Callable[..., Rig]
BRISK = {"lookup_timeout_ms": 40, "store_timeout_ms": 400}


def serve() -> Server:
    return Server(arena_bytes=64 << 20, mover_grace_ms=300)


def test_no_server_at_the_start(make_rig: MakeRig) -> None:
    server = serve()
    rig = make_rig(server, tensor=2)
    rig.run(prompt(1, 300), prompt(2, 200), max_tokens=3)
    assert rig.loads() == []
    with server:
        rig.reconnect()
        rig.run(prompt(3, 300))
        rig.forget_hbm()
        rig.run(prompt(3, 300))
        assert len(rig.loads()) == 1
        assert rig.connector.get_statistics()["load_failures"] == 0
        rig.drain()


def test_the_server_dies_while_it_loads(make_rig: MakeRig) -> None:
    with serve() as server:
        rig = make_rig(server, tensor=2)
        rig.run(prompt(1, 300))
        rig.forget_hbm()
        stop(server.mover_pid())
        seq = rig.add(prompt(1, 300), max_tokens=4)
        rig.until("its load", rig.loads)
        server.kill()
        rig.drain()
        assert seq.is_finished
        assert rig.connector.get_statistics()["load_failures"] == 1


def test_the_server_dies_while_it_stores(make_rig: MakeRig) -> None:
    with serve() as server:
        rig = make_rig(server, tensor=2)
        stop(server.mover_pid())
        seq = rig.add(prompt(1, 300), max_tokens=4)
        rig.until("the end", lambda: seq.is_finished)
        rig.idle()
        assert rig.connector.should_defer_free(seq)
        server.kill()
        rig.drain()


def test_a_mover_dies_while_it_loads(make_rig: MakeRig) -> None:
    with serve() as server:
        rig = make_rig(server, tensor=2)
        rig.run(prompt(1, 300))
        rig.forget_hbm()
        mover = server.mover_pid()
        stop(mover)
        seq = rig.add(prompt(1, 300), max_tokens=4)
        rig.until("its load", rig.loads)
        kill(mover)
        rig.drain()
        assert seq.is_finished
        rig.reconnect()
        rig.forget_hbm()
        rig.run(prompt(1, 300))
        assert len(rig.loads()) == 2


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_copy_that_hangs(make_rig: MakeRig, what: str) -> None:
    """After its deadline the server kills the copying mover; only then are the blocks reused."""
    with serve() as server:
        rig = make_rig(server, **{f"{what}_timeout_ms": 400})
        if what == "load":
            rig.run(prompt(1, 300))
            rig.forget_hbm()
        stop(server.mover_pid())
        (seq,) = rig.run(prompt(1, 300), max_tokens=4)
        assert seq.is_finished
        assert rig.connector.get_statistics()["load_failures"] == (what == "load")
        assert what == "load" or rig.connector._half.statistics.stores_short > 0


def test_a_server_that_does_not_answer(make_rig: MakeRig) -> None:
    """One lookup is waited for; then nobody asks until the server gives a sign of life."""
    with serve() as server:
        make_rig(server).run(prompt(1, 300))
        rig = make_rig(server, **BRISK)
        with stopped(server.brain_pid()):
            seqs = rig.run(*(prompt(number, 200) for number in range(2, 8)), max_tokens=2)
            assert all(seq.is_finished for seq in seqs)
            assert rig.connector._half.statistics.lookups_unserved + rig.connector._half.statistics.lookups_late >= 1

        def loads() -> list[Any]:
            """The loads, once the engine asks again: after a late answer it waits for the next sign of life."""
            rig.reconnect()
            rig.run(prompt(1, 300))
            rig.forget_hbm()
            return rig.loads()

        until("a load", loads)


def test_a_server_that_starts_again(make_rig: MakeRig) -> None:
    """Old leases are void; lost chunks are computed and stored again."""
    with serve() as server:
        rig = make_rig(server, tensor=2)
        rig.run(prompt(1, 300))
        rig.forget_hbm()
        server.kill()
        server.start()
        rig.reconnect()
        rig.run(prompt(1, 300))
        rig.forget_hbm()
        rig.orders.clear()
        rig.run(prompt(1, 300))
        assert len(rig.loads()) == 1
        assert rig.connector.get_statistics()["load_failures"] <= 1


def test_the_brain_dies_and_comes_back(make_rig: MakeRig) -> None:
    with serve() as server:
        rig = make_rig(server, shape=Shape("mla"), tensor=2)
        rig.run(prompt(1, 300))
        rig.forget_hbm()
        kill(server.brain_pid())
        rig.run(prompt(2, 300), max_tokens=3)
        rig.reconnect()
        rig.run(prompt(1, 300))
        assert len(rig.loads()) == 1, "sealed chunks survive their brain"


def test_a_worker_that_is_away_fails_its_loads_and_lets_blocks_go(make_rig: MakeRig) -> None:
    """A rank whose process has no connection: its stores bring nothing, so no chunk is found with a part missing."""
    with serve() as server:
        rig = make_rig(server, tensor=2)
        rig.run(prompt(1, 300))
        rig.forget_hbm()
        rig.workers[1]._worker._half._client.close()
        (seq,) = rig.run(prompt(1, 300), max_tokens=3)
        assert rig.connector.get_statistics()["load_failures"] == 1
        rig.run(prompt(2, 300))
        rig.forget_hbm()
        rig.orders.clear()
        rig.run(prompt(2, 300))
        assert rig.loads() == [], "a chunk with a shard missing is not served"
        assert seq.is_finished


@pytest.mark.parametrize("call", ["match", "allocated", "computed", "retrieve_ended", "store_ended", "begin", "_event"])
def test_a_bug_of_ours_costs_the_cache_and_nothing_else(make_rig: MakeRig, call: str) -> None:
    """The bug is in the named call: begin and _event are a worker's, the others decide for the scheduler.
    Scenarios: fallback_page_event_constructor_failure_is_terminal; fallback_page_event_record_failure_is_terminal.
    """
    with serve() as server:
        rig = make_rig(server, tensor=2)
        rig.run(prompt(1, 300))
        rig.forget_hbm()
        seq = rig.add(prompt(1, 300), max_tokens=4)
        broken = rig.workers[1]._worker._half if call in ("begin", "_event") else rig.connector._half._offload
        happened = []

        def bug(*_: object, **__: object) -> None:
            happened.append(call)
            raise ZeroDivisionError

        setattr(broken, call, bug)
        rig.run(prompt(2, 300), max_tokens=4)
        assert happened
        assert seq.is_finished
        rig.run(prompt(3, 300), max_tokens=4)
        assert len(happened) == 1, "nothing more is tried"


def test_after_a_bug_what_is_in_flight_still_holds_its_blocks(make_rig: MakeRig) -> None:
    with serve() as server:
        rig = make_rig(server, max_num_batched_tokens=100)
        with rig.silence(0):
            seq = rig.add(prompt(1, 300), max_tokens=5)
            rig.until("a store", rig.stored_tokens)
            rig.connector._half._offload.computed = None
            rig.until("the end", lambda: seq.is_finished)
            assert rig.connector._guard.tripped
            assert rig.connector.should_defer_free(seq)
            assert rig.connector.has_pending_work()
        rig.drain()
        assert seq.block_table == []


def test_what_left_memory_comes_back_from_disk(make_rig: MakeRig, tmp_path: Path) -> None:
    """The arena holds four of six prompts, the disk all chunks except those it was too slow to take.
    Scenario: lmcache_local_disk_round_trip_without_cpu_hot_cache.
    """
    disk = {"disk_paths": str(tmp_path), "disk_bytes": 64 << 20, "disk_segment_bytes": 512 << 10}
    with Server(arena_bytes=4 << 20, slab_bytes=1 << 20, disk_write_policy="through", **disk) as server:
        until("the disk", lambda: server.status().disk_state == "ready")
        rig = make_rig(server, shape=Shape(layers=8), tensor=2, max_model_len=400)
        for number in range(6):
            rig.run(prompt(number, 300))
            until("its chunks to be on disk, or refused", lambda n=number: sum(on_disk_or_not(server)) >= 3 * (n + 1))
        rig.computed_tokens = 0
        for number in range(6):
            rig.forget_hbm()
            rig.run(prompt(number, 300))
        refused = on_disk_or_not(server)[1]
        assert 6 * 12 <= rig.computed_tokens <= 6 * 12 + refused * 288
        assert server.status().counters["disk_read_bytes"] > 0


def on_disk_or_not(server: Server) -> tuple[int, int]:
    """(chunks on disk, chunks that were not taken)."""
    status = server.status()
    return status.chunks_on_disk, sum(status.counters["disk_refused"].values())


def test_a_full_arena(make_rig: MakeRig) -> None:
    """Stores that find no room end, and leave no gap that a load could hit."""
    with Server(arena_bytes=4 << 20) as server:
        rig = make_rig(server, shape=Shape(layers=24, blocks=47), max_model_len=400)
        for number in range(4):
            rig.run(prompt(number, 300), max_tokens=2)
        rig.forget_hbm()
        for number in range(4):
            rig.run(prompt(number, 300), max_tokens=2)
        assert rig.connector.get_statistics()["load_failures"] == 0
