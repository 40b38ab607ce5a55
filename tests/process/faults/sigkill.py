"""Scenarios in which a process is killed with SIGKILL. Each takes a Scene and the number of the round."""

from collections.abc import Callable

from kvclient import Blocks
from tests.process.engine import SMALL, Engine, Prompt, prompt
from tests.process.faults.scene import FLIGHT_CHUNKS, FREED_S, Flight, Scene, assert_no_process
from tests.process.harness import kill, pids_below, resume, stop, until
from tests.process.worker import Worker

# ---------------------------------------------------------------- a worker


def worker_before_register(scene: Scene, round_: int) -> None:
    with Worker(scene.server.path, shape="large") as worker:
        assert worker.call("connected")
        until("the worker's session", lambda: scene.server.status().sessions == 3)
        worker.kill()
        _wait_session_ended(scene)


def worker_mid_register(scene: Scene, round_: int) -> None:
    """Kills a worker while the mover has not read its map order or, every other round, before another mover runs."""
    mover_pid = scene.server.mover_pid()
    with Worker(scene.server.path, shape="large") as worker:
        assert worker.call("connected")
        pool = worker.call("pool_name")
        if round_ % 2:
            kill(mover_pid)
            until("another mover", lambda: scene.server.mover_pid_now() not in (0, mover_pid))
            worker.call("register")
        else:
            stop(mover_pid)
            worker.call("register")
            until(
                "the order to map", lambda: "mapping" in {cache.state for cache in scene.server.status().shown_caches}
            )
        worker.kill()
        _wait_session_ended(scene)
        resume(mover_pid)
        scene.wait_freed(pool)


def worker_mid_store(scene: Scene, round_: int) -> None:
    """Kills a worker whose store is unread or being copied.

    The mover goes on, or stays stopped until the brain kills it."""
    seeds: list[int] = []
    with Worker(scene.server.path, shape="large") as worker:
        pool = worker.call("ready")

        def begin() -> None:
            seeds.append(scene.fresh_seed())
            worker.call("begin_store", seeds[-1], FLIGHT_CHUNKS)

        _kill_in_flight(scene, worker, begin, round_)
        scene.wait_freed(pool)
    scene.recover()
    assert scene.survivor.lookup(prompt(seeds[-1], FLIGHT_CHUNKS)).chunks == 0, "a store that died must not be served"


def worker_mid_retrieve(scene: Scene, round_: int) -> None:
    seed = scene.fresh_seed()
    story = prompt(seed, FLIGHT_CHUNKS)
    assert scene.survivor.store(story).chunks == FLIGHT_CHUNKS
    with Worker(scene.server.path, shape="large") as worker:
        pool = worker.call("ready")
        _kill_in_flight(scene, worker, lambda: worker.call("begin_retrieve", seed, FLIGHT_CHUNKS), round_)
        scene.wait_freed(pool)
    scene.recover()
    assert scene.survivor.retrieve(story) == FLIGHT_CHUNKS


def _kill_in_flight(scene: Scene, worker: Worker, begin: Callable[[], None], round_: int) -> None:
    """Kills the worker with a job unread or half copied.

    Then the mover goes on, or stays stopped until the brain kills it."""
    if round_ % 2:
        mover_pid, _ = scene.hold_unread(begin)
    else:
        mover_pid, _ = scene.hold_copying(begin, lambda _: bool(worker.call("is_done")), lambda _: None)
    worker.kill()
    if round_ % 4 < 2:
        _wait_session_ended(scene)
        resume(mover_pid)
        scene.seen["mover went on"] += 1
    else:
        scene.seen["mover stayed stopped"] += 1


def _wait_session_ended(scene: Scene) -> None:
    until("the dead worker's session to end", lambda: scene.server.status().sessions == 2, FREED_S)


# ---------------------------------------------------------------- a mover, the brain, the whole server


def mover(scene: Scene, round_: int) -> None:
    """Kills the mover; the survivor registers again by itself."""
    story = _kill_around_a_job(scene, round_, lambda: kill_mover(scene))
    scene.recover()
    if story is not None:
        assert scene.survivor.retrieve(story) in (0, story.chunks)


def brain(scene: Scene, round_: int) -> None:
    """Kills the brain. The chunks that were sealed at its death are served again; Scene.end() compares them."""
    story = _kill_around_a_job(scene, round_, lambda: kill_brain(scene))
    scene.recover()
    if story is not None:
        assert scene.survivor.retrieve(story) in (0, story.chunks)


def brain_while_storing(scene: Scene, round_: int) -> None:
    """Kills the brain during a rapid series of stores. Every acknowledged chunk must hit again."""
    namespace = bytes(31) + b"\x07"
    with Engine(scene.server.path, SMALL, namespace=namespace, name="small", timeouts=scene.survivor.timeouts) as small:
        small.ready()
        stories = [prompt(1000 + number, 1 + number % 5) for number in range(11 + 7 * (round_ % 5))]
        acknowledged = {story: small.store(story).chunks for story in stories}
        flying = {}
        for number in range(4):
            story = prompt(2000 + number, 3)
            where = [Blocks(0, 0, list(range(9 * number, 9 * number + 9)))]  # no block belongs to two jobs at once
            small.pool.compute(story, where)
            flying[story] = small.begin_store(story, where)
        kill_brain(scene)
        acknowledged |= {story: future.result(20).chunks for story, future in flying.items()}
        scene.wait_quiet(engines=2)
        small.ready()
        for story, chunks in acknowledged.items():
            assert small.retrieve(story) >= chunks
            scene.seen["chunks acknowledged"] += chunks
        scene.wait_quiet(engines=2)
        small.client.clear(namespace)


def server(scene: Scene, round_: int) -> None:
    """Kills the supervisor, and so all its children. A new server at the same path is used at once."""
    survivor = scene.survivor
    below = pids_below(scene.server.pid)
    _kill_around_a_job(scene, round_, scene.server.kill)
    assert_no_process(below)
    until("the client to notice", lambda: not survivor.client.connected)
    found = survivor.lookup(scene.stored[0])
    assert (found.chunks, found.lease) == (0, None)
    assert found.why
    scene.server.start()
    scene.recover()
    for story in scene.stored:
        assert survivor.retrieve(story) == 0, "another life of the server holds nothing"
        assert survivor.store(story).chunks == story.chunks


def kill_mover(scene: Scene) -> None:
    mover_pid = scene.server.mover_pid()
    kill(mover_pid)
    until("the brain to know it", lambda: mover_pid not in [known.pid for known in scene.server.status().movers])


def kill_brain(scene: Scene) -> None:
    brain_pid = scene.server.brain_pid()
    kill(brain_pid)
    until("another brain", lambda: scene.server.brain_pid() != brain_pid)


def _kill_around_a_job(scene: Scene, round_: int, strike: Callable[[], None]) -> Prompt | None:
    """Calls `strike` while the survivor is idle, or during its store or retrieve; returns that job's prompt.

    The job's future ends by itself. Its blocks are then used for other content, and nobody may write to them any more;
    Scene.end() checks this."""
    what = ("idle", "store", "retrieve")[round_ % 3]
    scene.seen[what] += 1
    if what == "idle":
        strike()
        return None
    begin: Callable[[], Flight] = scene.begin_store
    if what == "retrieve":
        story = scene.fresh_prompt()
        assert scene.survivor.store(story).chunks == story.chunks
        begin = lambda: scene.begin_retrieve(story)  # noqa: E731
    _, flight = scene.hold(begin, copying=True)
    strike()
    flight.future.result(20)
    scene.survivor.pool.spoil(flight.where)
    return flight.story
