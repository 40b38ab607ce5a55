"""Scenarios that stop the brain or a mover with SIGSTOP while jobs are given up and their blocks reused.

Then the process goes on, and every byte of pool and cache is compared (Scene.end()). Each scenario takes a Scene and
the number of the round."""

import time
from concurrent.futures import Future

from tests.process.engine import Prompt
from tests.process.faults.scene import Flight, Scene
from tests.process.harness import is_gone, resume, stopped, until

GIVE_UP_S = 0.12
"""Deadline of jobs that should be given up."""
UNANSWERED_S = 0.5
"""Deadline of jobs that finish in time while the brain cannot report it."""
LOOKUP_S = 0.1
LATE_S = 10.0
"""Slack beyond a deadline, for a busy machine."""


def lookups_miss(scene: Scene, round_: int) -> None:
    """A lookup in a stopped brain misses by its deadline, the next ones miss at once; a stopped mover delays no lookup.

    The resumed brain grants the lease, finds the connection closed and ends the lease at once. Scene.end() checks that
    none is left."""
    survivor, story = scene.survivor, scene.stored[0]
    with stopped(scene.server.mover_pid()):
        found = survivor.lookup(story)
        assert found.chunks == story.chunks, "a lookup needs no mover"
        assert found.lease is not None
        survivor.client.release(found.lease)
    with stopped(scene.server.brain_pid()):
        began_s = time.monotonic()
        found = survivor.client.lookup(survivor.namespace, story.keys, timeout_s=LOOKUP_S)
        assert (found.chunks, found.lease, found.why) == (0, None, "timeout")
        assert time.monotonic() - began_s < LOOKUP_S + LATE_S
        trips = survivor.client.counters.trips
        for _ in range(1000):
            assert survivor.client.lookup(survivor.namespace, story.keys).why
        assert survivor.client.counters.trips == trips, "a server that is known to hang is not asked"
    scene.recover()
    assert survivor.retrieve(story) == story.chunks


def brain_and_store(scene: Scene, round_: int) -> None:
    """The store is given up while its request is unread or, every other round, when only the reply is missing."""
    brain_pid = scene.server.brain_pid()
    if round_ % 2:
        mover_pid, flight = scene.hold(lambda: scene.begin_store(UNANSWERED_S), copying=True)
        with stopped(brain_pid):
            resume(mover_pid)
            scene.seen[f"store {_give_up_store(scene, flight)}"] += 1
    else:
        with stopped(brain_pid):
            flight = scene.begin_store(GIVE_UP_S)
            assert _give_up_store(scene, flight) == "timeout"
        scene.recover()
        assert scene.survivor.lookup(flight.story).chunks == 0, "a store that was given up is not served"
    scene.recover()
    _retrieve_if_held(scene, flight)


def brain_and_retrieve(scene: Scene, round_: int) -> None:
    """The retrieve is given up while its request is unread or, every other round, when only the reply is missing."""
    story = _store(scene)
    brain_pid = scene.server.brain_pid()
    if round_ % 2:
        mover_pid, flight = scene.hold(lambda: scene.begin_retrieve(story, UNANSWERED_S), copying=True)
        with stopped(brain_pid):
            resume(mover_pid)
            _end_retrieve(scene, flight)
    else:
        found = scene.survivor.lookup(story)
        assert found.lease is not None
        where = scene.survivor.place(story)
        with stopped(brain_pid):
            future = scene.survivor.begin_retrieve(found.lease, where, GIVE_UP_S)
            assert future.result(20).why == "timeout"
            scene.survivor.pool.spoil(where)
    scene.recover()
    assert scene.survivor.pool.wrong() == 0
    assert scene.survivor.retrieve(story) == story.chunks


def mover_and_store(scene: Scene, round_: int) -> None:
    """The store is given up unread, or in the middle of the copy.

    Its blocks are reused at once, then the mover goes on."""
    mover_pid, flight = scene.hold(lambda: scene.begin_store(GIVE_UP_S), copying=round_ % 2 == 0)
    assert _give_up_store(scene, flight) == "timeout"
    resume(mover_pid)
    scene.recover()
    assert scene.survivor.lookup(flight.story).chunks == 0, "a store that was given up is not served"


def mover_and_retrieve(scene: Scene, round_: int) -> None:
    """A retrieve that is given up unread ends at once.

    In the middle of the copy it ends when the mover has finished."""
    story = _store(scene)
    survivor = scene.survivor
    copying = round_ % 2 == 0
    overdue = survivor.client.counters.retrieves_overdue
    mover_pid, flight = scene.hold(lambda: scene.begin_retrieve(story, GIVE_UP_S), copying=copying)
    if copying:
        until("the retrieve to be overdue", lambda: survivor.client.counters.retrieves_overdue > overdue)
        assert not flight.future.done(), "blocks that may still be written were handed back"
        resume(mover_pid)
        _end_retrieve(scene, flight)
    else:
        assert flight.future.result(20).why == "timeout"
        survivor.pool.spoil(flight.where)
        resume(mover_pid)
    scene.recover()
    assert survivor.retrieve(story) == story.chunks


def mover_killed_by_the_brain(scene: Scene, round_: int) -> None:
    """The brain kills a mover that does not go on; the future of its retrieve completes only when the mover is gone."""
    story = _store(scene)
    survivor = scene.survivor
    before = survivor.client.counters.registrations
    mover_pid, flight = scene.hold(lambda: scene.begin_retrieve(story, GIVE_UP_S), copying=True)
    gone_at_the_end: Future[bool] = Future()
    flight.future.add_done_callback(lambda _: gone_at_the_end.set_result(is_gone(mover_pid)))
    assert gone_at_the_end.result(20), "the future completed while the mover could still write"
    assert not flight.future.result(20).ok
    survivor.pool.spoil(flight.where)
    scene.recover()
    assert survivor.client.counters.registrations > before
    assert survivor.retrieve(story) == story.chunks


# ---------------------------------------------------------------- helpers


def _store(scene: Scene) -> Prompt:
    story = scene.fresh_prompt()
    assert scene.survivor.store(story).chunks == story.chunks
    return story


def _give_up_store(scene: Scene, flight: Flight) -> str:
    """Waits until the client gives the store up, then reuses its blocks at once."""
    result = flight.future.result(20)
    scene.survivor.pool.spoil(flight.where)
    assert result.chunks == 0
    return str(result.why)


def _end_retrieve(scene: Scene, flight: Flight) -> None:
    """Waits for the future; compares the blocks if it succeeded, and reuses them in any case."""
    if flight.future.result(20).ok:
        scene.survivor.pool.expect(flight.story, flight.where)
        assert scene.survivor.pool.wrong() == 0
        scene.seen["retrieved after all"] += 1
    scene.survivor.pool.spoil(flight.where)


def _retrieve_if_held(scene: Scene, flight: Flight) -> None:
    chunks = scene.survivor.retrieve(flight.story)
    assert chunks in (0, flight.story.chunks)
    scene.seen["stored after all"] += chunks > 0
