"""Workers that look dead and are not, clients in forked children, and servers that are not there."""

import os
import signal
from pathlib import Path

from kvserver._native import create_memfd
from kvserver.wire import messages as wire
from tests.process.engine import SMALL, Engine, Group, Shape, prompt
from tests.process.faults.scenarios import run_gil
from tests.process.harness import (
    OBSERVER_SESSIONS,
    RawSession,
    Server,
    descriptors_of,
    kill,
    maps,
    pids_below,
    stopped,
    until,
)
from tests.process.worker import Worker

GIL_S = 5.0


def test_a_worker_that_holds_the_gil_keeps_its_registration() -> None:
    assert run_gil(GIL_S)["seconds held"] == int(GIL_S)


def test_a_stopped_worker_keeps_its_registration() -> None:
    with Server(attach_ttl_ms=300, mover_grace_ms=300) as server, Worker(server.path) as worker:
        worker.call("ready")
        worker.call("store", 1, 3)
        os.kill(worker.pid, signal.SIGSTOP)
        began_s = server.status().uptime_s
        until("every time to live to pass", lambda: server.status().uptime_s > began_s + 1)
        assert server.status().caches == 1
        os.kill(worker.pid, signal.SIGCONT)
        assert worker.call("retrieve", 1, 3) == 3
        assert worker.call("registrations") == 1


def test_a_forked_child_is_refused_and_its_parent_goes_on(server: Server) -> None:
    with Worker(server.path) as worker:
        worker.call("ready")
        assert worker.call("store", 1, 3)["chunks"] == 3
        refusals = worker.call("refusals_in_child")
        assert refusals == dict.fromkeys(
            ("lookup", "store", "retrieve", "release", "register", "clear", "status"), "forked"
        )
        assert worker.call("retrieve", 1, 3) == 3
        assert worker.call("registrations") == 1
        assert server.status().sessions == OBSERVER_SESSIONS + 1


def test_a_client_that_is_there_before_its_server_finds_it() -> None:
    server = Server()
    story = prompt(1, chunks=2)
    with Engine(server.path) as engine:
        engine.register()
        found = engine.lookup(story)
        assert (found.chunks, found.lease, found.why) == (0, None, "not-connected")
        assert engine.begin_store(story, engine.place(story)).result(20).why == "not-connected"
        with server:
            engine.ready()
            assert engine.store(story).chunks == 2
            assert engine.retrieve(story) == 2


def test_a_server_that_stops_and_starts_again_and_again_is_found_each_time() -> None:
    with Server() as server, Engine(server.path) as engine:
        for life in range(3):
            story = prompt(life, chunks=2)
            engine.ready()
            assert engine.store(story).chunks == 2
            assert engine.retrieve(story) == 2
            below = pids_below(server.pid)
            assert server.stop() == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in below), "a stopped server leaves no process"
            until("the client to notice", lambda: not engine.client.connected)
            assert engine.lookup(story).chunks == 0
            server.start()


def test_sigterm_ends_a_server_whose_brain_and_mover_are_stopped() -> None:
    with Server() as server, Engine(server.path) as engine:
        engine.ready()
        below = pids_below(server.pid)
        for pid in below:
            os.kill(pid, signal.SIGSTOP)
        server.stop()
        assert not any(Path(f"/proc/{pid}").exists() for pid in below)


def test_a_new_server_takes_over_the_path_of_one_that_was_killed() -> None:
    with Server() as server, Engine(server.path) as engine:
        engine.ready()
        below = pids_below(server.pid)
        kill(server.pid)
        until("its children to follow", lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
        assert server.path.exists(), "the dead server's socket is still there"
        server.start()
        assert engine.ready().store(prompt(1, chunks=2)).chunks == 2


def test_a_brain_that_dies_of_a_bug_is_replaced(server: Server) -> None:
    """SIGABRT stands for a failed assertion. The recovery is the same as after SIGKILL."""
    story = prompt(1, chunks=4)
    with Engine(server.path) as engine:
        engine.ready().store(story)
        brain = server.brain_pid()
        os.kill(brain, signal.SIGABRT)
        until("another brain", lambda: server.brain_pid() != brain)
        until("the cache to be registered again", lambda: server.status().caches == 1)
        assert engine.ready().retrieve(story) == 4
        assert server.status().arena.used_bytes == 4 * SMALL.slot_bytes()


def test_a_stopped_supervisor_hurts_nobody(server: Server) -> None:
    with Engine(server.path) as engine:
        engine.ready()
        with stopped(server.pid):
            for seed in range(5):
                story = prompt(seed, chunks=3)
                assert engine.store(story).chunks == 3
                assert engine.retrieve(story) == 3


def test_a_chunk_of_which_a_rank_died_before_it_stored_is_discarded_in_time() -> None:
    """A busy machine may let the time pass between two steps; then the test repeats them."""
    story = prompt(1, chunks=4)
    shapes = [Shape(groups=(Group(4, 23, 3, 517, shards=2, shard=rank),)) for rank in range(2)]
    with (
        Server(reserve_ttl_ms=400) as server,
        Engine(server.path, shapes[0], name="tp", epoch=7, ranks=2, rank=0) as first,
    ):
        with Engine(server.path, shapes[1], name="tp", epoch=7, ranks=2, rank=1) as second:
            first.ready(), second.ready()

            def has_room() -> bool:
                until("nothing to be held", lambda: server.status().arena.used_bytes == 0)
                stored = first.store(story).chunks
                return stored == 4 and server.status().arena.used_bytes == 4 * shapes[0].slot_bytes()

            until("room for every rank, at once", has_room)
        until("the chunks to be discarded", lambda: server.status().chunks == 0)
        assert server.status().arena.used_bytes == 0
        assert first.lookup(story).chunks == 0
        with Engine(server.path, shapes[1], name="tp", epoch=7, ranks=2, rank=1) as second:
            second.ready()
            until(
                "the chunks of both ranks to be found",
                lambda: first.store(story).chunks == second.store(story).chunks == 4 == first.lookup(story).chunks,
            )


def test_descriptors_that_were_offered_and_never_registered_go_with_their_session(server: Server) -> None:
    name = f"tests-offered-{os.getpid()}"
    memory = create_memfd(name, 4096)
    session = RawSession(server.path)
    assert session.local is not None
    for number in range(3):
        assert isinstance(session.local.ask(wire.Offer(number + 2), [memory]), wire.Offered)
    os.close(memory)
    assert sum(name in held for held in descriptors_of(server.brain_pid())) == 3
    session.close()
    until("the descriptors to be closed", lambda: not maps(server.brain_pid(), name))
