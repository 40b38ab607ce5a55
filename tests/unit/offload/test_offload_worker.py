"""The worker half: orders in, one report of each job out, whatever the client does with it."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.offload.values import RetrieveOrder, StoreOrder
from kvclient.offload.worker import Worker
from kvclient.values import Blocks, CacheSpec, Lease, RetrieveResult, StoreResult
from kvserver.errors import RequestError

LOG = logging.getLogger("kvserver.test")
LEASE = Lease(1, 3, 1, float("inf"))
NAMESPACE = b"n" * 32
SPEC = CacheSpec(name="kv", namespace=b"", chunk_tokens=12, buffers=[], groups=[])


class Client:
    """A client that hands out futures for the test to complete."""

    def __init__(self, *, is_there: bool = True) -> None:
        self.is_there = is_there
        self.problem: RequestError | None = None
        self.refusal: RequestError | None = None
        self.cache = SimpleNamespace(problem=None, wait_registered=self.wait_registered, registered=True)
        self.second = SimpleNamespace(problem=None, wait_registered=self.wait_registered, registered=True)
        """The cache of another shard."""
        self.connected = is_there
        self.waits: list[str] = []
        self.timeouts: list[float | None] = []
        """Time-outs of the retrieves. None: as for any other."""
        self.calls: list[tuple[str, object]] = []
        self.caches: list[list[object]] = []
        """The caches of each job."""
        self.specs: list[str] = []
        self.left: list[object] = []
        self.futures: list[Future[Any]] = []

    def wait_connected(self, timeout_s: float) -> bool:
        self.waits.append("connected")
        if self.problem is not None:
            raise self.problem
        return self.is_there

    def wait_registered(self, timeout_s: float) -> bool:
        self.waits.append("registered")
        return True

    def register_cache(self, spec: CacheSpec, *, namespace: Future[bytes]) -> Any:
        self.specs.append(spec.name)
        return self.cache if len(self.specs) == 1 else self.second

    def unregister(self, cache: object) -> Future[bool]:
        self.left.append(cache)
        done: Future[bool] = Future()
        done.set_result(True)
        return done

    def retrieve(
        self,
        cache: object,
        lease: Lease,
        blocks: Sequence[Blocks],
        *,
        after: object,
        timeout_s: float | None,
        beside: Sequence[object],
    ) -> Future[Any]:
        self.timeouts.append(timeout_s)
        return self._begin("retrieve", after, [cache, *beside])

    def store(
        self,
        cache: object,
        first_chunk: int,
        parent: bytes,
        *rest: object,
        after: object,
        beside: Sequence[object],
    ) -> Future[Any]:
        return self._begin("store", after, [cache, *beside])

    def _begin(self, kind: str, after: object, caches: list[object]) -> Future[Any]:
        if self.refusal is not None:
            raise self.refusal
        self.caches.append(caches)
        self.calls.append((kind, after))
        self.futures.append(Future())
        return self.futures[-1]


def named() -> Future[bytes]:
    """A namespace that is known already."""
    found: Future[bytes] = Future()
    found.set_result(NAMESPACE)
    return found


class Bench:
    def __init__(self, *, registered: bool = True) -> None:
        self.client = Client()
        self.events = 0
        self.worker = Worker(self.client, rank=2, event=self.event, log=LOG)  # type: ignore[arg-type]
        if registered:
            self.worker.register(SPEC, named())

    def event(self) -> object:
        self.events += 1
        return f"event {self.events}"


def retrieve(job: int = 1, refused: str = "") -> RetrieveOrder:
    return RetrieveOrder(job, f"r{job}", LEASE, (Blocks(0, 1, [7, 8]),), 4, 12, refused)


def store(job: int = 9) -> StoreOrder:
    return StoreOrder(job, f"r{job}", 0, b"", b"k" * 32, (Blocks(0, 0, [1, 2, 3]),))


def test_stores_begin_when_they_are_computed_and_retrieves_at_once() -> None:
    bench = Bench()
    bench.worker.begin([retrieve()], [store()])
    assert bench.client.calls == [("retrieve", "event 1")]
    bench.worker.computed()
    bench.worker.computed()
    assert bench.client.calls[1:] == [("store", "event 2")]


def test_stores_wait_for_a_draft_model_that_runs_when_ends_have_been_taken() -> None:
    bench = Bench()
    bench.worker.begin([], [store()])
    bench.worker.take_ended()
    assert bench.client.calls == []
    bench.worker.computed()
    assert bench.client.calls == [("store", "event 1")]


def test_stores_of_a_step_whose_end_nobody_told_begin_with_the_next() -> None:
    bench = Bench()
    bench.worker.begin([], [store(8)])
    bench.worker.begin([retrieve()], [store(9)])
    assert bench.client.calls == [("store", "event 1"), ("retrieve", "event 2")]
    bench.worker.computed()
    assert bench.client.calls[2:] == [("store", "event 3")]


def test_each_job_is_reported_once() -> None:
    bench = Bench()
    bench.worker.begin([retrieve(1), retrieve(2)], [store(3)])
    bench.worker.computed()
    assert bench.worker.take_ended().reports == []
    for future, result in zip(
        bench.client.futures,
        (RetrieveResult(True, 8, ""), RetrieveResult(False, 0, "timeout"), StoreResult(1, 1, 8, "")),
        strict=True,
    ):
        future.set_result(result)
    assert bench.worker.ends.stores_over() == [(3, 2)]
    ended = bench.worker.take_ended()
    assert bench.worker.ends.stores_over() == []
    assert [(report.job, report.rank) for report in ended.reports] == [(1, 2), (2, 2), (3, 2)]
    assert (ended.retrieved, ended.failed, ended.failed_blocks) == ({"r1", "r2"}, {"r2"}, {7, 8})
    assert bench.worker.take_ended().reports == []


@pytest.mark.parametrize("why", ["not registered", "refused order", "refused call", "bug"])
def test_what_cannot_be_begun_is_reported_as_failed(why: str) -> None:
    bench = Bench(registered=why != "not registered")
    if why == "refused call":
        bench.client.refusal = RequestError("too-large", "why not")
    bench.worker.begin([retrieve(1, refused="null-block" if why == "refused order" else "")], [store(3)])
    bench.worker.computed()
    for future in bench.client.futures:
        future.set_exception(ValueError("a bug"))
    assert [kind for kind, _ in bench.client.calls if why == "refused order"] == ["store"] * (why == "refused order")
    ended = bench.worker.take_ended()
    assert {report.job: report.result.why != "" for report in ended.reports} == {1: True, 3: True}
    assert ended.failed == ended.retrieved == {"r1"}
    assert ended.failed_blocks == {7, 8}


def test_what_was_refused_and_then_given_up_is_reported_once() -> None:
    bench = Bench()
    bench.worker.begin([retrieve(1, refused="null-block")], [store(3)])
    bench.worker.ends.end_unbegun("given-up")
    reports = {report.job: report.result.why for report in bench.worker.take_ended().reports}
    assert reports == {1: "null-block", 3: "given-up"}
    assert bench.worker.take_ended().reports == []


def test_what_runs_is_not_given_up_with_the_rest() -> None:
    """Its blocks are still being written."""
    bench = Bench()
    bench.worker.begin([retrieve(1)], [store(3)])
    bench.worker.ends.note([retrieve(1), store(3)])  # once more, as after a bug
    bench.worker.ends.end_unbegun("given-up")
    assert [report.job for report in bench.worker.take_ended().reports] == [3]
    bench.client.futures[0].set_result(RetrieveResult(True, 8, ""))
    assert [report.job for report in bench.worker.take_ended().reports] == [1]


@pytest.mark.parametrize(("is_there", "waits"), [(True, ["connected", "registered"]), (False, ["connected"])])
def test_an_engine_waits_for_a_server_only_if_there_is_one(is_there: bool, waits: list[str]) -> None:
    client = Client(is_there=is_there)
    Worker(client, rank=0, event=object, log=LOG).register(SPEC, named())  # type: ignore[arg-type]
    assert client.waits == waits


def test_an_engine_starts_when_the_server_refuses_it(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.problem = RequestError("protocol", "another number")
    Worker(client, rank=0, event=object, log=LOG).register(SPEC, named())  # type: ignore[arg-type]
    assert "another number" in caplog.text


def test_a_namespace_that_comes_later_is_not_waited_for() -> None:
    client, namespace = Client(), Future[bytes]()
    worker = Worker(client, rank=0, event=object, log=LOG)  # type: ignore[arg-type]
    worker.register(SPEC, namespace)
    assert client.waits == ["connected"]
    assert (worker.namespace, worker.take_namespace()) == (b"", b"")
    namespace.set_result(NAMESPACE)
    assert worker.namespace == NAMESPACE
    assert [worker.take_namespace() for _ in range(3)] == [NAMESPACE, b"", b""]
    worker.register(SPEC, named())
    assert worker.take_namespace() == NAMESPACE, "again, for the memory is another"


def test_the_namespace_is_told_when_a_server_that_is_there_has_the_cache() -> None:
    bench = Bench()
    bench.client.cache.registered = False
    assert bench.worker.take_namespace() == b"", "what is looked up now could not be retrieved"
    bench.client.connected = False
    assert bench.worker.take_namespace() == NAMESPACE


def test_a_refusal_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.client.cache.problem = RequestError("geometry", "another chunk size")
    bench.client.problem = RequestError("protocol", "another number")
    for _ in range(3):
        bench.worker.begin([], [])
    assert [record.getMessage() for record in caplog.records] == [
        "no cache rank=2 protocol: another number",
        "no cache rank=2 geometry: another chunk size",
    ]


@pytest.mark.parametrize(("right_chunks", "failed"), [(0, {7, 8, 9, 3, 4}), (1, {8, 9, 3, 4}), (2, {3, 4}), (9, set())])
def test_blocks_of_the_chunks_before_a_wrong_one_have_not_failed(right_chunks: int, failed: set[int]) -> None:
    """Chunks of two blocks; the retrieve begins with the second block of the prefix."""
    bench = Bench()
    bench.worker.ends.begin_cache([2])
    bench.worker.begin([retrieve()._replace(blocks=(Blocks(0, 1, [7, 8, 9, 3, 4]),))], [])
    bench.client.futures[0].set_result(RetrieveResult(False, 0, "digest", right_chunks))
    assert bench.worker.take_ended().failed_blocks == failed


def test_a_retrieve_that_waits_for_another_engine_has_a_time_of_its_own() -> None:
    bench = Bench()
    bench.worker.begin([retrieve(1), retrieve(2)._replace(wait_s=7.5)], [])
    assert bench.client.timeouts == [None, 7.5]


def test_every_job_is_for_all_shards_of_the_rank_and_none_before_all_are_registered() -> None:
    bench = Bench(registered=False)
    client = bench.client
    client.second.registered = False
    bench.worker.register(SPEC, named(), [replace(SPEC, name="another")])
    assert client.specs == ["kv", "another"]
    assert client.waits == ["connected", "registered", "registered"]
    assert bench.worker.take_namespace() == b"", "lookups would find what cannot be retrieved"
    client.second.registered = True
    assert bench.worker.take_namespace() == NAMESPACE
    bench.worker.begin([retrieve()], [store()])
    bench.worker.computed()
    assert client.caches == [[client.cache, client.second]] * 2
    bench.worker.unregister()
    assert client.left == [client.cache, client.second]
    bench.worker.begin([retrieve(2)], [])
    assert len(client.caches) == 2, "no cache is left"


def test_a_refusal_of_any_shard_is_told(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(registered=False)
    bench.worker.register(SPEC, named(), [replace(SPEC, name="another")])
    bench.client.second.problem = RequestError("geometry", "shard 1 has other pages")
    bench.worker.begin([], [])
    assert "no cache rank=2 geometry: shard 1 has other pages" in caplog.text
