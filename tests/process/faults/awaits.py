"""Scenarios in which one engine awaits what another one computes, and one of them, or the server, dies or stops.

A worker computes a prompt chunk by chunk, and has pledged it. The survivor awaits it, unless the scenario harms whoever
awaits. The fault falls before the first chunk that is awaited, in the middle or before the last one. A store is under
way then, or none. Each scenario takes a Scene and the number of the round, which decides all that varies.

A pledge is patient here, and so is whoever awaits it: both longer than WAIT_S. An end that nobody tells shows as a
wait that is too long, not as an end by the clock."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from kvclient import Lease
from kvserver.service.requests.awaits import DISTRUSTED_PATIENCES
from tests.process.engine import Engine, Prompt, Waiting, prompt
from tests.process.faults.scene import FLIGHT_CHUNKS, Scene
from tests.process.faults.sigkill import kill_brain, kill_mover
from tests.process.faults.sigstop import LATE_S
from tests.process.harness import OBSERVER_SESSIONS, WAIT_S, is_gone, resume, stop, stopped, until
from tests.process.worker import Worker

AWAIT_S = 3 * WAIT_S
"""Deadline of whoever awaits, where the scenario gives no shorter one."""
HURRY_S = 1.0
"""Deadline that passes before the producer goes on."""
PATIENCE_MS = int(AWAIT_S * 1000)
SHORT_PATIENCE_MS = 3000
SLOW_PATIENCE_MS = 2000
STUCK_GRACE_MS = 700
"""How long the brain waits for a mover that does not go on."""
SLOW_S = 2.6
"""How long the stores of a slow prompt take in all: longer than the patience. Each of them takes less."""
LENGTHS = (4, 5, 7)
"""Chunks of a prompt that is awaited: less than a quarter of the arena."""
HELD = (0, 1, 2)
"""Chunks that are held before anything is pledged."""
ATTEMPTS_MAX = 20


class Prefill:
    """A prompt that a worker computes, up to the chunk at which the fault falls. The survivor awaits it, or nobody."""

    def __init__(
        self,
        scene: Scene,
        round_: int,
        producer: Worker,
        *,
        lengths: Sequence[int] = LENGTHS,
        helds: Sequence[int] = HELD,
    ) -> None:
        vary = random.Random(round_)
        self.scene, self.producer = scene, producer
        self.seed = scene.fresh_seed()
        self.story = prompt(self.seed, vary.choice(lengths))
        self.held = vary.choice(helds)
        ahead = self.story.chunks - self.held
        self.came = self.held + (ahead // 2, 0, ahead - 1)[round_ % 3]
        """Chunks that are there when the fault falls."""
        self.under_way = ("unmoved", "none", "any")[(round_ + round_ // 3) % 3]
        """The state of the next chunk's store then: held by a stopped mover, not begun, or whatever it is."""
        self.way = (2 * round_ + round_ // 3) % 3
        """What else varies, in scenarios in which something does."""
        self.pieces = vary.choice((1, 2))
        """Chunks of a store."""
        self.ends: Counter[str] = Counter()

    def pledged(self, by: Worker | None = None) -> "Prefill":
        """The worker stores what is held, and pledges the rest, unless another process of its engine does."""
        self.stores(0, self.held)
        self.ends = pledges_ended(self.scene)
        assert (by or self.producer).call("pledge", self.seed, self.story.chunks) == self.story.chunks - self.held
        return self

    def awaited(self) -> Waiting:
        """The survivor awaits it, and the worker goes on until the fault."""
        waiting = Waiting(self.scene.survivor, self.story, AWAIT_S)
        assert (waiting.found.chunks, waiting.found.producer) == (self.held, "producer")
        assert waiting.found.awaited == self.story.chunks - self.held
        self.goes_on()
        return waiting

    def goes_on(self) -> None:
        """The worker goes on until the fault."""
        self.stores(self.held, self.came)

    def stores(self, first: int, end: int, producer: Worker | None = None) -> None:
        """Computes and stores chunks [first, end), in pieces."""
        for at in range(first, end, self.pieces):
            until_chunk = min(at + self.pieces, end)
            assert (producer or self.producer).call("store_piece", self.seed, at, until_chunk) == until_chunk - at

    @contextmanager
    def amid_a_store(self) -> Iterator[None]:
        """The fault falls while the next chunk is being stored, in two of three rounds."""
        self.scene.seen[f"store under way: {self.under_way}"] += 1
        if self.under_way == "unmoved":
            with stopped(self.scene.server.mover_pid()):
                self.producer.call("begin_store", self.seed, self.came + 1, self.came)
                until("the store to be in flight", lambda: self.scene.server.status().stores)
                yield
            return
        if self.under_way == "any":
            self.producer.call("begin_store", self.seed, self.came + 1, self.came)
        yield

    def finishes_the_store(self) -> None:
        """The worker's store that was under way when the fault fell has ended, and is whole."""
        if self.under_way != "none":
            assert self.producer.call("outcome")["chunks"] == 1

    @property
    def may_have_come(self) -> range:
        """How many chunks may be there after the fault."""
        return range(self.came, self.came + 1 + (self.under_way != "none"))

    def told(self, waiting: Waiting, how: str) -> None:
        """Who awaits it was told of the end, and has what came. The pledge ended so, unless all of it came."""
        result = waiting.end()
        assert result.ok or result.why == "not-coming", result
        assert waiting.right in self.may_have_come, (waiting.right, self.may_have_come)
        self.scene.seen["came whole" if result.ok else "told that no more comes"] += 1
        self.ended("stored" if result.ok else how)

    def ended(self, *hows: str) -> None:
        """Pledges have ended in these ways since the first one was made, and none is left."""
        assert pledges_ended(self.scene) - self.ends == Counter(hows)
        assert self.scene.server.status().pledges == 0

    def is_read(self, at_least: int, at_most: int) -> None:
        """A lookup that waits for nobody finds so many chunks, and each of their bytes is right."""
        chunks = self.scene.survivor.retrieve(self.story)
        assert at_least <= chunks <= at_most, f"{chunks} chunks, expected {at_least} to {at_most}"
        self.scene.seen["chunks compared"] += chunks

    def found(self) -> int:
        """How many of its chunks a lookup finds that waits for nobody."""
        found = self.scene.survivor.lookup(self.story)
        if found.lease is not None:
            self.scene.survivor.client.release(found.lease)
        return found.chunks

    def comes_after_all(self, waiting: Waiting, producer: Worker, *, distrusted: bool = False) -> None:
        """Pledged and awaited again, the rest comes.

        distrusted: a store of it has failed, so the server may take no pledge of this worker now. Then all of it is
        read when it is there."""
        held = self.found()
        if waiting.right == self.story.chunks:
            assert held == waiting.right, "it came whole"
            return
        pledged = producer.call("pledge", self.seed, self.story.chunks)
        assert pledged == self.story.chunks - held or (distrusted and not pledged), pledged
        self.scene.seen["chunks pledged again"] += pledged
        waiting.right = min(waiting.right, held)
        if pledged:
            waiting.begin(AWAIT_S)
            assert waiting.found.awaited == pledged
        self.stores(held, self.story.chunks, producer)
        if not pledged:
            waiting.begin(AWAIT_S)
        assert waiting.end().ok
        assert self.scene.server.status().pledges == 0


# ---------------------------------------------------------------- the producer


def producer_killed(scene: Scene, round_: int) -> None:
    with _producer(scene) as producer:
        pool = producer.call("ready")
        prefill = Prefill(scene, round_, producer).pledged()
        waiting = prefill.awaited()
        with prefill.amid_a_store():
            producer.kill()
            until("its pledge to end", lambda: not scene.server.status().pledges)
        prefill.told(waiting, "died")
        scene.wait_freed(pool)
    prefill.is_read(waiting.right, prefill.may_have_come[-1])


def scheduler_killed(scene: Scene, round_: int) -> None:
    """An engine of two processes: the one that pledged dies, the one that stores goes on."""
    epoch = scene.fresh_seed()
    with _producer(scene, epoch=epoch) as producer, _producer(scene, epoch=epoch, rank=-1) as scheduler:
        producer.call("ready")
        assert scheduler.call("connected")
        prefill = Prefill(scene, round_, producer).pledged(by=scheduler)
        waiting = prefill.awaited()
        with prefill.amid_a_store():
            scheduler.kill()
            until("its pledge to end", lambda: not scene.server.status().pledges)
        prefill.told(waiting, "died")
        prefill.finishes_the_store()
        prefill.stores(prefill.may_have_come[-1], prefill.story.chunks)
    prefill.is_read(prefill.story.chunks, prefill.story.chunks)


def producer_restarted(scene: Scene, round_: int) -> None:
    """Another process of the same engine begins the prompt again, in another epoch."""
    with _producer(scene) as producer:
        producer.call("ready")
        prefill = Prefill(scene, round_, producer).pledged()
        waiting = prefill.awaited()
        with prefill.amid_a_store():
            producer.kill()
        prefill.told(waiting, "died")
    scene.wait_quiet()
    with _producer(scene) as producer:
        producer.call("ready")
        prefill.comes_after_all(waiting, producer)


def producer_stopped(scene: Scene, round_: int) -> None:
    """The patience ends the wait. A producer that goes on afterwards stores what nobody awaits any more."""
    with _producer(scene) as producer:
        producer.call("ready")
        prefill, waiting = _in_time(scene, round_, producer)
        try:
            with prefill.amid_a_store():
                stop(producer.pid)
            prefill.told(waiting, "late")
        finally:
            resume(producer.pid)
        prefill.finishes_the_store()
        there = prefill.may_have_come[-1]
        prefill.stores(there, prefill.story.chunks)
    prefill.is_read(prefill.story.chunks, prefill.story.chunks)


def producer_aborts(scene: Scene, round_: int) -> None:
    with _producer(scene) as producer:
        producer.call("ready")
        prefill, waiting = _taken_back(scene, round_, producer)
        prefill.told(waiting, "withdrawn")
        prefill.finishes_the_store()
        prefill.is_read(prefill.may_have_come[-1], prefill.may_have_come[-1])


def producer_preempted(scene: Scene, round_: int) -> None:
    """It takes its word back, and gives it again when it goes on."""
    with _producer(scene) as producer:
        producer.call("ready")
        prefill, waiting = _taken_back(scene, round_, producer)
        prefill.told(waiting, "withdrawn")
        prefill.finishes_the_store()
        prefill.comes_after_all(waiting, producer)


def producer_out_of_room(scene: Scene, round_: int) -> None:
    """Every other round there is room for one chunk of two. Its bytes may come after those who wait were told."""
    with _producer(scene) as producer:
        producer.call("ready")
        prefill = Prefill(scene, round_, producer).pledged()
        waiting = prefill.awaited()
        with scene.engine("hoarder") as hoarder:
            leases = _hoard(scene, hoarder.ready())
            end, room = prefill.came + 1, 0
            if round_ % 2 and end < prefill.story.chunks:
                end, room = end + 1, 1
                hoarder.client.release(leases.pop())
            assert producer.call("store_piece", prefill.seed, prefill.came, end) == room
            result = waiting.end()
            assert result.why == "not-coming", result
            assert prefill.came <= waiting.right <= prefill.came + room
            prefill.ended("not-stored")
            assert prefill.found() == prefill.came + room
        scene.wait_quiet(engines=2)
        scene.touch()
        prefill.comes_after_all(waiting, producer, distrusted=True)


def pledge_without_store(scene: Scene, round_: int) -> None:
    """The producer stores nothing more. It is not believed a second time, but the one that awaited it is."""
    with _producer(scene) as producer:
        producer.call("ready")
        began_s = time.monotonic()
        prefill, waiting = _in_time(scene, round_, producer)
        chunks, survivor = prefill.story.chunks, scene.survivor
        result = waiting.end()
        assert (result.why, waiting.right) == ("not-coming", prefill.came), result
        prefill.ended("late")
        again = producer.call("pledge", prefill.seed, chunks)
        if time.monotonic() < began_s + DISTRUSTED_PATIENCES * SHORT_PATIENCE_MS / 1000:
            assert not again, "who broke its word is believed again too soon"
            scene.seen["not believed"] += 1
        elif again:
            producer.call("unpledge")
        assert survivor.client.pledge(survivor.namespace, prefill.story.keys).chunks == chunks - prefill.came
        assert producer.call("begin_await", prefill.seed, chunks, AWAIT_S) == chunks - prefill.came
        assert survivor.store_piece(prefill.story, prefill.came) == chunks - prefill.came
        assert producer.call("end_await")["ok"]


def store_slow(scene: Scene, round_: int) -> None:
    """A stopped mover holds each store for a while: all of them longer than the patience, none of them as long."""
    with _producer(scene) as producer:
        producer.call("ready")
        mover_pid = scene.server.mover_pid()
        since_s, slowest_s = time.monotonic(), 0.0
        prefill = Prefill(scene, round_, producer).pledged()
        waiting = Waiting(scene.survivor, prefill.story, AWAIT_S)
        for chunk in range(prefill.held, prefill.story.chunks):
            with stopped(mover_pid):
                producer.call("begin_store", prefill.seed, chunk + 1, chunk)
                time.sleep(SLOW_S / (prefill.story.chunks - prefill.held))  # this slowness is what the round is about
                now_s = time.monotonic()
            assert producer.call("outcome")["chunks"] == 1
            slowest_s, since_s = max(slowest_s, time.monotonic() - since_s), now_s
        result = waiting.end()
        if slowest_s < SLOW_PATIENCE_MS / 1000:
            assert result.ok, result
            prefill.ended("stored")
        else:
            scene.seen["slower than the patience"] += 1
        prefill.is_read(prefill.story.chunks, prefill.story.chunks)


def stored_by_another(scene: Scene, round_: int) -> None:
    """Every other round the producer stores the same chunks at the same time."""
    with _producer(scene) as producer, _another(scene) as another:
        producer.call("ready"), another.call("ready")
        prefill = Prefill(scene, round_, producer).pledged()
        waiting = prefill.awaited()
        for chunk in range(prefill.came, prefill.story.chunks):
            storing = [another, producer] if round_ % 2 else [another]
            _store_at_once(prefill, storing, chunk)
        assert waiting.end().ok
        prefill.ended("stored")
    prefill.is_read(prefill.story.chunks, prefill.story.chunks)


def two_producers(scene: Scene, round_: int) -> None:
    """Two pledge one prompt at once: one of them is believed, and both compute it. Then one of them dies, or none."""
    with _producer(scene) as one, _another(scene) as two:
        one.call("ready"), two.call("ready")
        prefill = Prefill(scene, round_, one)
        prefill.stores(0, prefill.held)
        prefill.ends = pledges_ended(scene)
        for worker in (one, two):
            worker.begin("pledge", prefill.seed, prefill.story.chunks)
        took = [worker.end() for worker in (one, two)]
        assert sorted(took) == [0, prefill.story.chunks - prefill.held], "a chunk has one pledge"
        believed, other = (one, two) if took[0] else (two, one)
        waiting = Waiting(scene.survivor, prefill.story, AWAIT_S)
        for chunk in range(prefill.held, prefill.came):
            _store_at_once(prefill, [one, two], chunk)
        victim = (believed, other, None)[prefill.way]
        if victim is None:
            for chunk in range(prefill.came, prefill.story.chunks):
                _store_at_once(prefill, [one, two], chunk)
            assert waiting.end().ok
            prefill.ended("stored")
            return
        prefill.under_way = "any"
        for worker in (one, two):
            worker.call("begin_store", prefill.seed, prefill.came + 1, prefill.came)
        victim.kill()
        scene.seen["the one believed died" if victim is believed else "the other one died"] += 1
        left = other if victim is believed else believed
        left.call("outcome")
        _wait_victim_ended(scene)
        if scene.server.status().pledges:  # the one believed lives, and the chunk under way has come from either
            prefill.stores(prefill.came, prefill.story.chunks, left)
            assert waiting.end().ok
            prefill.ended("stored")
        else:  # the chunk under way was the victim's to store, or was the last one
            prefill.told(waiting, "died" if victim is believed else "not-stored")
            prefill.comes_after_all(waiting, left, distrusted=victim is other)


# ---------------------------------------------------------------- the one that awaits


def consumer_killed(scene: Scene, round_: int) -> None:
    """It dies with a lease, and while its retrieve waits and first parts are copied. The producer notices nothing."""
    with _producer(scene) as producer, Worker(scene.server.path, shape="large", name="consumer") as consumer:
        producer.call("ready")
        pool = consumer.call("ready")
        prefill = Prefill(scene, round_, producer).pledged()
        ahead = prefill.story.chunks - prefill.held
        assert consumer.call("take_lease", prefill.seed, prefill.story.chunks) == ahead
        assert consumer.call("begin_await", prefill.seed, prefill.story.chunks, AWAIT_S) == ahead
        prefill.goes_on()
        with prefill.amid_a_store():
            consumer.kill()
        scene.wait_freed(pool)
        _wait_nobody_waits(scene)
        prefill.finishes_the_store()
        prefill.stores(prefill.may_have_come[-1], prefill.story.chunks)
        prefill.ended("stored")
    prefill.is_read(prefill.story.chunks, prefill.story.chunks)


def consumer_aborts(scene: Scene, round_: int) -> None:
    """It gives its leases back, lets its cache go, or says goodbye. The producer goes on."""
    with _producer(scene) as producer, scene.engine("consumer") as consumer:
        producer.call("ready"), consumer.ready()
        prefill = Prefill(scene, round_, producer).pledged()
        unused = consumer.client.lookup(consumer.namespace, prefill.story.keys, may_wait=True).lease
        assert unused is not None
        waiting = Waiting(consumer, prefill.story, AWAIT_S)
        prefill.goes_on()
        with prefill.amid_a_store():
            _abort(scene, waiting, unused, ("leases", "cache", "client")[prefill.way])
        prefill.finishes_the_store()
        prefill.stores(prefill.may_have_come[-1], prefill.story.chunks)
        result = waiting.end()
        scene.seen[f"aborted retrieve: {result.why or 'whole'}"] += 1
        _wait_nobody_waits(scene)
        prefill.ended("stored")
    prefill.is_read(prefill.story.chunks, prefill.story.chunks)


def consumer_out_of_time(scene: Scene, round_: int) -> None:
    """Its own deadline ends the wait. It asks again while the producer, which was only slow, goes on.

    The mover may have been stopped while it copied what is there. It still could write, so the retrieve ends after
    the store under way."""
    with _producer(scene) as producer:
        producer.call("ready")
        prefill = Prefill(scene, round_, producer).pledged()
        prefill.goes_on()
        overdue = _copies_overdue(scene)
        waiting = Waiting(scene.survivor, prefill.story, HURRY_S)
        with prefill.amid_a_store():
            until(
                "the retrieve to end or to be overdue",
                lambda: waiting.future.done() or _copies_overdue(scene) > overdue,
                HURRY_S + LATE_S,
            )
        result = waiting.end()
        scene.seen[f"out of time: {result.why or 'whole'}"] += 1
        if result.why != "timeout":  # a stopped mover does not bring in time what was there already
            assert result.ok or result.why == "not-coming", result
            assert waiting.right in prefill.may_have_come
        prefill.finishes_the_store()
        if not result.ok:
            _asks_again(scene, prefill, waiting, prefill.may_have_come[-1])
        prefill.ended("stored")


def consumer_out_of_time_amid_its_copy(scene: Scene, round_: int) -> None:
    """A stopped mover could still write what is there. So the retrieve is overdue, and ends when the mover goes on."""
    with _producer(scene) as producer:
        producer.call("ready")
        prefill = _mostly_there(scene, round_, producer)
        overdue = _copies_overdue(scene)
        mover_pid, waiting = _stopped_amid_the_copy(scene, prefill)
        until("the retrieve to be overdue", lambda: _copies_overdue(scene) > overdue, HURRY_S + LATE_S)
        assert not waiting.future.done(), "blocks that may still be written were handed back"
        resume(mover_pid)
        result = waiting.end()
        assert result.why in ("timeout", "not-coming"), result
        scene.seen[f"out of time: {result.why}"] += 1
        _asks_again(scene, prefill, waiting, prefill.came)
        prefill.ended("stored")


def consumer_out_of_time_mover_stuck(scene: Scene, round_: int) -> None:
    """The stopped mover does not go on. The brain kills it, and only then the retrieve ends: within its bound."""
    with _producer(scene) as producer:
        producer.call("ready")
        prefill = _mostly_there(scene, round_, producer)
        mover_pid, waiting = _stopped_amid_the_copy(scene, prefill)
        gone_at_the_end: Future[bool] = Future()
        waiting.future.add_done_callback(lambda _: gone_at_the_end.set_result(is_gone(mover_pid)))
        bound_s = HURRY_S + STUCK_GRACE_MS / 1000
        assert gone_at_the_end.result(bound_s + LATE_S), "the retrieve ended while the mover could still write"
        result = waiting.end()
        assert not result.ok
        assert not waiting.right, result
        scene.seen[f"out of time: {result.why}"] += 1
        _wait_both_registered(scene, producer)
        prefill.comes_after_all(waiting, producer)


# ---------------------------------------------------------------- the server


def brain(scene: Scene, round_: int) -> None:
    """Kills the brain. What was stored is there again; leases and pledges are not."""
    _survives(scene, round_, lambda: kill_brain(scene))


def mover(scene: Scene, round_: int) -> None:
    """Kills the mover that the two engines share."""
    _survives(scene, round_, lambda: kill_mover(scene))


def supervisor(scene: Scene, round_: int) -> None:
    """Kills the supervisor, and so all. The next server holds nothing."""
    with _producer(scene) as producer:
        producer.call("ready")
        prefill = Prefill(scene, round_, producer).pledged()
        waiting = prefill.awaited()
        with prefill.amid_a_store():
            scene.server.kill()
        result = waiting.end()
        scene.seen[f"the wait ended: {result.why or 'whole'}"] += 1
        scene.server.start()
        _wait_both_registered(scene, producer)
        assert prefill.found() == 0
        waiting.right = 0  # so that all of it is awaited again
        prefill.comes_after_all(waiting, producer)
        for story in scene.stored:
            assert scene.survivor.store(story).chunks == story.chunks


# ---------------------------------------------------------------- helpers


def pledges_ended(scene: Scene) -> Counter[str]:
    """How many pledges have ended, by how."""
    ended = scene.server.status().counters["pledges_ended"]
    assert isinstance(ended, dict)
    return Counter(ended)


def _copies_overdue(scene: Scene) -> int:
    """How many copies to the survivor were still under way at the deadline of their retrieve."""
    return scene.survivor.client.counters.retrieves_overdue


def _mostly_there(scene: Scene, round_: int, producer: Worker) -> Prefill:
    """A pledged prompt of which so much is there that a copy of it takes several milliseconds."""
    few = [FLIGHT_CHUNKS - ahead for ahead in (1, 2, 4)]
    prefill = Prefill(scene, round_, producer, lengths=[FLIGHT_CHUNKS], helds=few).pledged()
    prefill.goes_on()
    return prefill


def _stopped_amid_the_copy(scene: Scene, prefill: Prefill) -> tuple[int, Waiting]:
    """The survivor hurries, and the mover is stopped while it copies what is there. Returns the mover's pid as well."""

    def missed(waiting: Waiting) -> None:
        assert waiting.end().why == "not-coming"

    return scene.hold_copying(
        lambda: Waiting(scene.survivor, prefill.story, HURRY_S), lambda waiting: waiting.future.done(), missed
    )


def _asks_again(scene: Scene, prefill: Prefill, waiting: Waiting, there: int) -> None:
    """Who was out of time awaits the rest, which the producer stores: chunks from `there` on."""
    scene.survivor.ready()  # else a gate that the overdue job shut would keep the lookup from being sent
    waiting.begin(AWAIT_S)
    prefill.stores(there, prefill.story.chunks)
    assert waiting.end().ok


def _producer(scene: Scene, epoch: int | None = None, rank: int = 0) -> Worker:
    return Worker(scene.server.path, shape="large", name="producer", epoch=epoch, rank=rank)


def _another(scene: Scene) -> Worker:
    return Worker(scene.server.path, shape="large", name="another producer")


def _in_time(scene: Scene, round_: int, producer: Worker) -> tuple[Prefill, Waiting]:
    """Begins until the patience lasts up to the fault; on a busy machine it may not."""
    for _ in range(ATTEMPTS_MAX):
        prefill = Prefill(scene, round_, producer).pledged()
        waiting = prefill.awaited()
        if scene.server.status().pledges:
            return prefill, waiting
        waiting.end()
        scene.seen["slower than the patience"] += 1
    raise TimeoutError(f"the patience was over before the fault in {ATTEMPTS_MAX} attempts")


def _taken_back(scene: Scene, round_: int, producer: Worker) -> tuple[Prefill, Waiting]:
    prefill = Prefill(scene, round_, producer).pledged()
    waiting = prefill.awaited()
    with prefill.amid_a_store():
        producer.call("unpledge")
    return prefill, waiting


def _hoard(scene: Scene, hoarder: Engine) -> list[Lease]:
    """Fills the arena with chunks that are leased. The last lease is on a single chunk."""
    until("the arena to be ready", lambda: (arena := scene.server.status().arena).ready_bytes == arena.total_bytes)
    leases: list[Lease] = []
    stories: list[Prompt] = list(scene.stored)
    while stories:
        found = hoarder.lookup(stories.pop())
        assert found.lease is not None
        leases.append(found.lease)
        another = scene.fresh_prompt(1)
        if not stories and hoarder.store(another).chunks:
            stories.append(another)
    return leases


def _store_at_once(prefill: Prefill, workers: Sequence[Worker], chunk: int) -> None:
    """All of them compute and store one chunk. Any of their stores may be the one that brings it."""
    for worker in workers:
        worker.call("begin_store", prefill.seed, chunk + 1, chunk)
    assert max(worker.call("outcome")["chunks"] for worker in workers) == 1


def _abort(scene: Scene, waiting: Waiting, unused: Lease, way: str) -> None:
    client = waiting.engine.client
    scene.seen[f"aborted by {way}"] += 1
    if way == "client":
        client.close()
        return
    client.release(unused)
    if way == "leases":
        client.release(waiting.lease)
    else:
        assert waiting.engine.cache is not None
        client.unregister(waiting.engine.cache)


def _survives(scene: Scene, round_: int, strike: Callable[[], None]) -> None:
    """A process of the server dies. Nobody is told of more than was right, and all goes on once it is replaced."""
    with _producer(scene) as producer:
        producer.call("ready")
        prefill = Prefill(scene, round_, producer).pledged()
        waiting = prefill.awaited()
        with prefill.amid_a_store():
            strike()
        result = waiting.end()
        scene.seen[f"the wait ended: {result.why or 'whole'}"] += 1
        _wait_both_registered(scene, producer)
        assert prefill.found() in prefill.may_have_come
        prefill.comes_after_all(waiting, producer)


def _wait_both_registered(scene: Scene, producer: Worker) -> None:
    scene.wait_quiet(engines=2)
    scene.survivor.ready()
    producer.call("ready")


def _wait_nobody_waits(scene: Scene) -> None:
    def nobody() -> bool:
        status = scene.server.status()
        return not status.leases + status.retrieves

    until("leases and waiting retrieves to end", nobody)


def _wait_victim_ended(scene: Scene) -> None:
    def ended() -> bool:
        status = scene.server.status()
        return status.sessions == OBSERVER_SESSIONS + 2 and not status.stores

    until("the victim's session and its store to end", ended)
