"""Scenarios with a worker that is alive and looks dead, or the other way round."""

import os
import time

from tests.process.faults.scene import FREED_S, Scene
from tests.process.harness import kill, until
from tests.process.worker import Worker


def forked_child_lives_on(scene: Scene, round_: int) -> None:
    """The child inherited all sockets, so (every other round) none of them closes when the worker dies."""
    with Worker(scene.server.path, shape="large") as worker:
        pool = worker.call("ready")
        worker.call("store", scene.fresh_seed(), 2)
        child = worker.call("fork_child_that_stays", round_ % 2 == 1)
        try:
            worker.kill()
            began_s = time.monotonic()
            scene.wait_freed(pool)
            until("the session to end", lambda: scene.server.status().sessions == 2, FREED_S)
            scene.seen["freed after ms, in all"] += int((time.monotonic() - began_s) * 1000)
            os.kill(child, 0)  # it did survive
        finally:
            kill(child)


def gil_holder_stays_registered(scene: Scene, seconds: float) -> None:
    """A worker whose Python threads cannot run, as during compilation and graph capture, is alive."""
    seed = scene.fresh_seed()
    with Worker(scene.server.path, shape="large") as worker:
        worker.call("ready")
        worker.call("store", seed, 3)
        worker.begin("hold_the_gil", seconds)
        while not worker.has_answered():
            status = scene.server.status()
            assert (status.sessions, status.caches) == (3, 2), "a worker that holds the GIL lost its registration"
            time.sleep(min(0.1, seconds / 20))  # how often we look, not how long we wait
        assert worker.end() >= seconds
        assert worker.call("retrieve", seed, 3) == 3
        assert worker.call("registrations") == 1
    scene.seen["seconds held"] += int(seconds)
