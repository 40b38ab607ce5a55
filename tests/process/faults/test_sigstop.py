"""Processes that stop (SIGSTOP) and go on: jobs are given up in time and blocks are never handed back too early.

`make faults` runs more rounds."""

import pytest

from tests.process.faults.scenarios import run
from tests.process.faults.scene import open_scene
from tests.process.harness import resume


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("stop-lookups", 1),
        ("stop-brain-store", 2),
        ("stop-brain-retrieve", 2),
        ("stop-mover-store", 4),
        ("stop-mover-retrieve", 4),
        ("mover-killed-by-the-brain", 2),
    ],
)
def test_a_process_may_stop_at_any_instant(name: str, rounds: int) -> None:
    assert run(name, rounds)["rounds"] == rounds


def test_what_is_cleared_in_the_middle_of_a_store_is_not_stored_and_its_slots_come_back() -> None:
    with open_scene(mover_grace_ms=20_000) as scene:
        scene.begin()
        mover, flight = scene.hold(scene.begin_store, copying=True)
        assert scene.survivor.client.clear(scene.survivor.namespace) >= flight.story.chunks
        assert scene.server.status().arena.used_bytes, "slots under a copy are not free"
        resume(mover)
        result = flight.future.result(20)
        assert (result.chunks, result.why) == (0, "discarded")
        assert scene.wait_quiet().arena.used_bytes == 0
        assert scene.survivor.retrieve(flight.story) == 0


def test_what_is_cleared_in_the_middle_of_a_retrieve_still_arrives_and_its_slots_come_back() -> None:
    with open_scene(mover_grace_ms=20_000) as scene:
        scene.begin()
        story = scene.fresh_prompt()
        assert scene.survivor.store(story).chunks == story.chunks
        mover, flight = scene.hold(lambda: scene.begin_retrieve(story), copying=True)
        scene.survivor.client.clear(scene.survivor.namespace)
        assert scene.survivor.lookup(story).chunks == 0
        assert scene.server.status().arena.used_bytes, "slots under a copy are not free"
        resume(mover)
        assert flight.future.result(20).ok
        scene.survivor.pool.expect(story, flight.where)
        assert scene.survivor.pool.wrong() == 0
        assert scene.wait_quiet().arena.used_bytes == 0
