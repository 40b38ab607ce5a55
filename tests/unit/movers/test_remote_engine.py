"""Jobs of a remote store: verified, each ended once, loads first, and dead nodes left alone."""

import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from kvserver.movers import remote_engine
from kvserver.movers.remote_checks import digest_of, sums_of
from kvserver.movers.remote_engine import (
    Announce,
    Ended,
    Fetch,
    Job,
    Listen,
    Probe,
    Put,
    ReadNote,
    RemoteEngine,
)
from kvserver.remote.breaker import FAILURES_MAX
from kvserver.remote.chunk_value import ChunkName, Head, NamespaceName, Shard, encode
from kvserver.remote.directory import DirectoryStore
from kvserver.remote.objects.clouds import CloudObjects, Place
from kvserver.remote.objects.store import ObjectStore
from kvserver.remote.store import Announced, Cursor, Store, StoreError
from kvserver.remote.valkey import Settings, ValkeyStore
from tests.process.harness import until
from tests.rigs.remote_chunks import head_of, name_of
from tests.rigs.valkey_server import ValkeyServer

SIZES = (7, 4099, 1)
SLOTS = (0, 8192, 16384)
BACK = (32768, 40960, 49152)
ARENA_BYTES = 65536


class Watched(DirectoryStore):
    """A directory whose calls can be held up, and whose nodes can die."""

    def __init__(self, root: str) -> None:
        super().__init__(root, probe_s=20, bulk_s=20)
        self.begun: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.dead: set[str] = set()
        self.code = "remote-down"
        self.names = ["even", "odd"]

    def node_of(self, name: ChunkName) -> str:
        return self.names[name.key[0] % len(self.names)]

    def nodes(self) -> frozenset[str]:
        return frozenset(self.names)

    def heads(self, names: Sequence[ChunkName], shards: int) -> list:
        self.begun.append(f"heads {len(names)}")
        found = super().heads(names, shards)
        dead = [self.node_of(name) in self.dead for name in names]
        return [StoreError(self.code, "dead") if gone else head for gone, head in zip(dead, found, strict=True)]

    def read(self, name: ChunkName, head: Head, targets: Sequence[memoryview | None]) -> None:
        self._call("read", name)
        super().read(name, head, targets)

    def write(self, name: ChunkName, head: Head, sources: Sequence[memoryview]) -> bool:
        self._call("write", name)
        return super().write(name, head, sources)

    def announce(self, of: NamespaceName, epoch: int, batch: bytes) -> None:
        self.begun.append("announce")
        assert self.gate.wait(30)
        super().announce(of, epoch, batch)

    def _call(self, what: str, name: ChunkName) -> None:
        self.begun.append(what)
        assert self.gate.wait(30)
        if self.node_of(name) in self.dead:
            raise StoreError(self.code, "dead")


class WatchedNotes(Watched):
    """The same for calls of namespaces, whose node is told by their tenant."""

    def notes(self, names: Sequence[NamespaceName]) -> list[bytes | None]:
        self.begun.append(f"note {names[0].tenant}")
        assert self.gate.wait(30)
        if names[0].tenant in self.dead:
            raise StoreError(self.code, "dead")
        return super().notes(names)

    def announced(self, of: NamespaceName, epoch: int, after: Cursor | None) -> Announced:
        self.begun.append(f"listen {of.tenant}")
        assert self.gate.wait(30)
        if of.tenant in self.dead:
            raise StoreError(self.code, "dead")
        return super().announced(of, epoch, after)


class Scene:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.arena = memoryview(bytearray(ARENA_BYTES))
        self.engine = RemoteEngine(self.store, self.arena, connections=2, seed=1, jobs_max=40)
        self.poll = select.poll()  # select() does not take the numbers that a process of many tests comes to
        self.poll.register(self.engine.eventfd, select.POLLIN)
        self.ends: dict[int, Ended] = {}
        self._jobs = 0

    def begin(self, make: Callable[[int], Job]) -> int:
        self._jobs += 1
        assert self.engine.submit(make(self._jobs))
        return self._jobs

    def run(self, make: Callable[[int], Job]) -> Ended:
        return self.end_of(self.begin(make))

    def end_of(self, job: int) -> Ended:
        until("the end of the job", lambda: self.collect() or job in self.ends)
        return self.ends[job]

    def collect(self) -> None:
        if self.poll.poll(50):
            for ended in self.engine.ended():
                assert ended.job not in self.ends, "each job ends once"
                self.ends[ended.job] = ended

    def fill(self, seed: int, *, write: int = 1) -> tuple[ChunkName, Head]:
        """A chunk in the slots, and its head."""
        name = name_of(seed)
        for number, (slot, size) in enumerate(zip(SLOTS, SIZES, strict=True)):
            self.arena[slot : slot + size] = bytes((seed + number + at) % 251 for at in range(size))
        return name, self.head_of_slots(name, write=write)

    def head_of_slots(self, name: ChunkName, *, write: int = 1) -> Head:
        """A head of what is in the slots now."""
        shards = []
        for number, (slot, size) in enumerate(zip(SLOTS, SIZES, strict=True)):
            shard = Shard(0, number, size, 0)
            shards.append(shard._replace(digest=digest_of(name, shard, self.arena[slot : slot + size]) or 0))
        return head_of(name, write=write)._replace(shards=tuple(shards))

    def put(self, seed: int) -> tuple[ChunkName, Head]:
        name, head = self.fill(seed)
        assert self.run(lambda job: Put(job, name, head, SLOTS)).fault == ""
        return name, head

    def came_back(self) -> bool:
        return all(
            self.arena[slot : slot + size] == self.arena[back : back + size]
            for slot, back, size in zip(SLOTS, BACK, SIZES, strict=True)
        )


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    store = Watched(str(tmp_path))
    scene = Scene(store)
    yield scene
    store.gate.set()
    scene.engine.close()


def seeds_of(node: str, count: int, scene: Scene) -> list[int]:
    return [seed for seed in range(1000) if scene.store.node_of(name_of(seed)) == node][:count]


def test_a_chunk_goes_out_and_comes_back_into_other_slots(scene: Scene) -> None:
    name, head = scene.put(3)
    found = scene.run(lambda job: Probe(job, (name_of(4), name), 3))
    assert found.heads == (None, head)
    assert found.faults == ()
    assert scene.run(lambda job: Fetch(job, name, head, BACK)).fault == ""
    assert scene.came_back()


def test_slots_that_are_not_wanted_are_not_written(scene: Scene) -> None:
    name, head = scene.put(3)
    before = bytes(scene.arena[BACK[0] :])
    assert scene.run(lambda job: Fetch(job, name, head, (None, None, BACK[2]))).fault == ""
    after = bytes(scene.arena[BACK[0] :])
    assert [at for at in range(len(after)) if after[at] != before[at]] == [BACK[2] - BACK[0]]


def test_bytes_that_changed_in_the_arena_are_not_written(scene: Scene) -> None:
    name, head = scene.fill(3)
    scene.arena[SLOTS[1] + 4000] ^= 1
    assert scene.run(lambda job: Put(job, name, head, SLOTS)).fault == "digest"
    assert scene.run(lambda job: Probe(job, (name,), 3)).heads == (None,)


def test_bytes_that_changed_in_the_store_are_not_given_and_the_chunk_is_dropped(scene: Scene, tmp_path: Path) -> None:
    name, head = scene.put(3)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    damaged = bytearray(path.read_bytes())
    damaged[len(encode(head)) + 70] ^= 16
    path.write_bytes(damaged)
    assert scene.run(lambda job: Fetch(job, name, head, BACK)).fault == "digest"
    assert scene.run(lambda job: Probe(job, (name,), 3)).heads == (None,)
    scene.put(3)


def test_sums_of_the_store_itself_are_compared_and_told() -> None:
    memory = MemoryStore()
    driver = CloudObjects(Place("s3", "memory"), stand_in=memory)
    scene = Scene(ObjectStore(driver, node="memory"))
    name, head = scene.put(3)
    (path,) = (one["path"] for page in obstore.list(memory) for one in page)
    right = scene.run(lambda job: Fetch(job, name, head, BACK))
    assert right.fault == ""
    assert list(right.sums) == sums_of(scene.engine._memory(head, BACK))
    assert scene.came_back()
    damaged = bytearray(memory.get(path).bytes())
    damaged[len(encode(head)) + 70] ^= 16
    memory.put(path, bytes(damaged))
    assert scene.run(lambda job: Fetch(job, name, head, BACK)).fault == "digest"
    assert scene.run(lambda job: Probe(job, (name,), 3)).heads == (None,)
    scene.engine.close()


def test_a_chunk_that_is_gone_or_was_there_first_is_said_to_be_so(scene: Scene) -> None:
    name, head = scene.put(3)
    again = head._replace(write=2)
    assert scene.run(lambda job: Put(job, name, again, SLOTS)).fault == "existed"
    assert scene.run(lambda job: Fetch(job, name, again, BACK)).fault == "gone"
    scene.store.drop(name, head)
    assert scene.run(lambda job: Fetch(job, name, head, BACK)).fault == "gone"


def test_writes_never_keep_loads_from_being_served(scene: Scene) -> None:
    name, head = scene.put(3)
    others = [(name_of(seed), scene.head_of_slots(name_of(seed))) for seed in range(10, 19)]
    scene.store.gate.clear()
    scene.store.begun.clear()
    writes = [scene.begin(lambda job, chunk=chunk: Put(job, *chunk, SLOTS)) for chunk in others]
    until("writes to begin", lambda: scene.store.begun.count("write") == 6)
    load = scene.begin(lambda job: Fetch(job, name, head, BACK))
    until("the load to begin", lambda: "read" in scene.store.begun)
    scene.store.gate.set()
    assert {scene.end_of(job).fault for job in (load, *writes)} == {""}


def test_announcements_that_hang_keep_neither_notes_nor_probes_from_being_served(scene: Scene) -> None:
    name = name_of(3)
    scene.store.gate.clear()
    told = scene.begin(lambda job: Announce(job, name.of, name.epoch, b"8 bytes."))
    heard = scene.begin(lambda job: Listen(job, name.of, name.epoch))
    until("the announcement has begun", lambda: "announce" in scene.store.begun)
    assert scene.run(lambda job: ReadNote(job, name.of)).fault == ""
    assert scene.run(lambda job: Probe(job, (name,), 3)).heads == (None,)
    assert not {told, heard} & scene.ends.keys()
    scene.store.gate.set()
    assert scene.end_of(told).fault == ""
    assert (scene.end_of(heard).marks, scene.end_of(heard).is_all) == (b"8 bytes.", True)


@pytest.mark.parametrize("kind", ["note", "listen"])
@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_namespaces_on_a_dead_node_keep_others_from_their_notes_for_one_call_and_not_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, every_s: float
) -> None:
    """Each of their calls takes its whole deadline. Their turn comes all the same, once in LATE_EVERY_S."""
    monkeypatch.setattr(remote_engine, "LATE_EVERY_S", every_s)
    scene = Scene(WatchedNotes(str(tmp_path)))

    def job_of(tenant: str) -> Callable[[int], Job]:
        name = NamespaceName(tenant, bytes(32))
        return lambda job: ReadNote(job, name) if kind == "note" else Listen(job, name, 5)

    scene.store.dead |= {"a", "b", "c"}
    for tenant in "abc":
        assert scene.run(job_of(tenant)).fault == "remote-down"
    scene.store.gate.clear()
    scene.store.begun.clear()
    jobs = [scene.begin(job_of("a"))]
    until("it to begin", lambda: scene.store.begun)
    jobs += [scene.begin(job_of(tenant)) for tenant in "bcxay"]
    scene.store.gate.set()
    for job in jobs:
        scene.end_of(job)
    order = "abcxay" if every_s == 0.0 else "axybca"
    assert scene.store.begun == [f"{kind} {tenant}" for tenant in order]
    scene.store.dead.clear()
    for tenant in "abc":
        assert scene.run(job_of(tenant)).fault == ""
    scene.store.gate.clear()
    scene.store.begun.clear()
    jobs = [scene.begin(job_of(tenant)) for tenant in "axby"]
    scene.store.gate.set()
    assert [scene.end_of(job).fault for job in jobs] == [""] * 4
    assert scene.store.begun == [f"{kind} {tenant}" for tenant in "axby"], "who has answered again waits for nobody"
    scene.engine.close()


def test_calls_that_have_waited_for_long_behind_a_dead_store_end_without_a_call(tmp_path: Path) -> None:
    """One by one they would take so long that the brain ends the mover."""

    class Slow(DirectoryStore):
        calls = 0

        def notes(self, names: Sequence[NamespaceName]) -> list[bytes | None]:
            self.calls += 1
            time.sleep(0.15)
            raise StoreError("remote-slow", "no answer")

    store = Slow(str(tmp_path))
    engine = RemoteEngine(store, memoryview(bytearray(64)), jobs_max=200, waited_s_max=0.3)
    for job in range(100):
        assert engine.submit(ReadNote(job, name_of(1).of))
    ends: list[Ended] = []
    until("all to end", lambda: ends.extend(engine.ended()) or len(ends) == 100)
    assert {ended.fault for ended in ends} == {"remote-slow"}
    assert 1 <= store.calls < 20
    engine.close()


def test_more_jobs_than_the_bound_are_not_taken_and_all_that_were_taken_end(scene: Scene) -> None:
    name, head = scene.put(3)
    scene.store.gate.clear()
    taken = [job for job in range(100, 200) if scene.engine.submit(Fetch(job, name, head, BACK))]
    assert len(taken) == 40
    for job in taken[10:20]:
        scene.engine.cancel(job)
    scene.store.gate.set()
    assert {scene.end_of(job).fault for job in taken} == {"", "cancelled"}
    assert scene.engine.submit(Fetch(300, name, head, BACK))


def test_while_loads_wait_one_write_is_under_way_at_a_time(scene: Scene) -> None:
    """More would slow loads. None at all could wait until the brain ends the mover."""
    name, head = scene.put(3)
    scene.store.gate.clear()
    scene.store.begun.clear()
    loads = [scene.begin(lambda job: Fetch(job, name, head, BACK)) for _ in range(20)]
    until("loads to begin", lambda: scene.store.begun.count("read") == 3)
    others = [(name_of(seed), scene.head_of_slots(name_of(seed))) for seed in range(10, 13)]
    writes = [scene.begin(lambda job, chunk=chunk: Put(job, *chunk, SLOTS)) for chunk in others]
    until("a write to begin", lambda: "write" in scene.store.begun)
    time.sleep(0.1)
    assert scene.store.begun.count("write") == 1
    scene.store.gate.set()
    assert {scene.end_of(job).fault for job in (*loads, *writes)} == {""}


def test_a_closed_engine_ends_what_waits_and_takes_nothing(tmp_path: Path) -> None:
    store = Watched(str(tmp_path))
    scene = Scene(store)
    name, head = scene.put(3)
    scene.store.gate.clear()
    jobs = [scene.begin(lambda job: Fetch(job, name, head, BACK)) for _ in range(9)]
    until("three to begin", lambda: scene.store.begun.count("read") == 3)
    threading.Timer(0.1, scene.store.gate.set).start()
    scene.collect()
    rest = {ended.job: ended.fault for ended in scene.engine.close()}
    assert not scene.engine.submit(Fetch(300, name, head, BACK))
    ends = {job: scene.ends[job].fault for job in jobs if job in scene.ends} | rest
    assert sorted(ends) == jobs
    assert sorted(ends.values()) == [""] * 3 + ["cancelled"] * 6


def test_a_dead_node_is_left_alone_others_are_served_and_it_serves_again_by_itself(scene: Scene) -> None:
    (even,), odd = seeds_of("even", 1, scene), seeds_of("odd", FAILURES_MAX + 1, scene)
    chunks = {seed: scene.put(seed) for seed in (even, *odd)}
    scene.store.dead.add("odd")
    for seed in odd[:FAILURES_MAX]:
        name, head = chunks[seed]
        assert scene.run(lambda job, name=name, head=head: Fetch(job, name, head, BACK)).fault == "remote-down"
    scene.store.begun.clear()
    name, head = chunks[odd[-1]]
    assert scene.run(lambda job: Fetch(job, name, head, BACK)).fault == "left-alone"
    assert scene.run(lambda job: Probe(job, (name,), 3)).faults == ("left-alone",)
    assert "read" not in scene.store.begun
    assert scene.engine.left_alone() == ["odd"]
    both = scene.run(lambda job: Probe(job, (name, chunks[even][0]), 3))
    assert both.heads == (None, chunks[even][1])
    assert both.faults == ("left-alone", "")
    scene.store.dead.clear()
    until("it to be asked again", lambda: scene.run(lambda job: Fetch(job, name, head, BACK)).fault == "")
    assert scene.engine.left_alone() == []


def recovering(scene: Scene) -> tuple[ChunkName, Head]:
    """A chunk of a node that was left alone, answers again, and is asked by few at a time."""
    name, head = scene.put(seeds_of("odd", 1, scene)[0])
    scene.store.dead.add("odd")
    for _ in range(FAILURES_MAX):
        assert scene.run(lambda job: Fetch(job, name, head, BACK)).fault == "remote-down"
    assert scene.engine.left_alone() == ["odd"]
    scene.store.dead.clear()
    until("its tries to succeed", lambda: not scene.engine.left_alone())
    return name, head


def test_jobs_that_come_at_once_while_a_node_recovers_wait_for_each_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "RAMP_WAIT_S", 30.0)
    name, head = recovering(scene)
    scene.store.gate.clear()
    jobs = [scene.begin(lambda job: Fetch(job, name, head, BACK)) for _ in range(13)]
    jobs.append(scene.begin(lambda job: Probe(job, (name,), 3)))
    until("the first to begin", lambda: scene.store.begun[-1] == "read" or None)
    scene.store.gate.set()
    ends = [scene.end_of(job) for job in jobs]
    assert [ended.fault for ended in ends] == [""] * len(jobs)
    assert ends[-1].heads == (head,)


def test_a_job_does_not_wait_for_long_for_a_recovering_node_that_hangs(scene: Scene) -> None:
    name, head = recovering(scene)
    scene.store.gate.clear()
    hangs = scene.begin(lambda job: Fetch(job, name, head, BACK))
    until("it to begin", lambda: scene.store.begun[-1] == "read" or None)
    assert scene.run(lambda job: Fetch(job, name, head, BACK)).fault == "left-alone"
    assert scene.run(lambda job: Probe(job, (name,), 3)).faults == ("left-alone",)
    scene.store.gate.set()
    assert scene.end_of(hangs).fault == ""


def test_a_probe_with_many_names_of_a_dead_node_is_one_failure(scene: Scene) -> None:
    names = tuple(name_of(seed) for seed in seeds_of("odd", 3 * FAILURES_MAX, scene))
    scene.store.dead.add("odd")
    assert set(scene.run(lambda job: Probe(job, names, 3)).faults) == {"remote-down"}
    assert scene.engine.left_alone() == []


def test_nodes_that_a_cluster_has_no_more_are_forgotten_and_others_are_left_alone_as_before(scene: Scene) -> None:
    names = tuple(name_of(seed) for seed in range(2 * FAILURES_MAX))
    scene.store.dead |= {"even", "odd"}
    for _ in range(FAILURES_MAX):
        scene.run(lambda job: Probe(job, names, 3))
    assert scene.engine.left_alone() == ["even", "odd"]
    for round_ in range(3):
        scene.store.names[0] = f"new {round_}"
        scene.run(lambda job: Probe(job, names, 3))
        until("others to be forgotten", lambda: set(scene.engine._nodes) == set(scene.store.names))
        assert scene.engine.left_alone() == ["odd"]


def test_a_cluster_with_more_nodes_than_the_bound_is_served_and_the_last_used_ones_are_known(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "NODES_MAX", 4)
    scene.store.names[:] = [f"{number}" for number in range(10)]
    (first,), dead = seeds_of("3", 1, scene), seeds_of("7", FAILURES_MAX, scene)
    scene.store.dead.add("7")
    for seed in dead:
        scene.run(lambda job, seed=seed: Probe(job, (name_of(seed),), 3))
    for seed in range(50):
        name = name_of(first if seed % 2 else seed)
        assert scene.run(lambda job, name=name: Probe(job, (name, name_of(dead[0])), 3)).faults[-1] == "left-alone"
        assert len(scene.engine._nodes) <= 4
    assert scene.engine.left_alone() == ["7"]


def test_a_full_store_is_not_left_alone(scene: Scene) -> None:
    scene.store.dead |= {"odd", "even"}
    scene.store.code = "remote-full"
    for seed in range(20, 20 + 3 * FAILURES_MAX):
        name, head = scene.fill(seed)
        assert scene.run(lambda job, name=name, head=head: Put(job, name, head, SLOTS)).fault == "remote-full"
    assert scene.engine.left_alone() == []


def test_every_job_ends_while_a_valkey_is_frozen_and_it_serves_again_without_a_restart() -> None:
    hasty = Settings((("127.0.0.1", 0),), probe_s=0.2, bulk_s=0.4, note_s=0.3, connect_s=0.5)
    with ValkeyServer() as server:
        store = ValkeyStore(hasty._replace(addresses=(("127.0.0.1", server.port),)))
        scene = Scene(store)
        chunks = [scene.put(seed) for seed in range(1, 9)]
        server.stop()
        faults = set()
        for name, head in 3 * chunks:
            faults |= {scene.run(lambda job, name=name, head=head: Fetch(job, name, head, BACK)).fault}
            faults |= set(scene.run(lambda job, name=name: Probe(job, (name,), 3)).faults)
        assert faults <= {"remote-slow", "remote-down", "left-alone"}
        assert "left-alone" in faults
        server.go_on()
        name, head = chunks[-1]
        until("it to serve again", lambda: scene.run(lambda job: Fetch(job, name, head, BACK)).fault == "")
        assert scene.came_back()
        scene.engine.close()
        store.close()
