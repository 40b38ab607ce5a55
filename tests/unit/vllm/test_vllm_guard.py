"""An exception anywhere in the connector leaves the engine running.

Each promised retrieve ends once, nothing stays pinned, and no request continues on blocks that do not hold their bytes.

A small engine drives both halves through their guards, with the real decisions; server, client and pool are fakes. One
call into one collaborator is made to raise: its first, its second, and so on, until a run gets through untouched."""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.offload.decide import Offload
from kvclient.offload.guard import GuardedWorker
from kvclient.offload.values import Group, Options, RetrieveOrder, StoreOrder
from kvclient.offload.worker import Worker
from kvclient.values import CacheSpec, RetrieveResult, StoreResult
from kvclient.vllm.guard import GuardedScheduler
from kvclient.vllm.keys import Keyer
from kvclient.vllm.scheduler import Scheduled, Scheduler
from tests.rigs.vllm_rig import BLOCK, CHUNK, NAMESPACE, Pool, Server, request

LOG = logging.getLogger("kvserver.test")
RANKS = 2
TABLE = list(range(10, 30))
SPEC = CacheSpec(name="kv", namespace=NAMESPACE, chunk_tokens=CHUNK, buffers=[], groups=[])


class Boom(Exception):
    """An unexpected exception."""


class Fuse:
    """Counts calls and makes one of them raise, before it does anything or when it is done."""

    def __init__(self, at: int, when: str) -> None:
        self.at = at
        self.when = when
        self.calls = 0

    def around(self, target: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(target, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.at and self.when == "before":
                raise Boom(name)
            value = inner(*arguments, **named)
            if self.calls == self.at:
                raise Boom(name)
            return value

        setattr(target, name, call)


class Client:
    """One rank's client. A retrieve writes its blocks, and both kinds of job end a step after they were begun."""

    def __init__(self) -> None:
        self.problem = None
        self.cache = SimpleNamespace(problem=None, wait_registered=lambda _: True)
        self.running: list[tuple[Future[Any], Any, set[int]]] = []
        self.written: set[int] = set()

    def wait_connected(self, timeout_s: float) -> bool:
        return True

    def register_cache(self, spec: CacheSpec, *, namespace: Future[bytes]) -> Any:
        return self.cache

    def retrieve(
        self, cache: object, lease: object, blocks: Any, *, after: object, timeout_s: float | None, beside: object
    ) -> Future[Any]:
        return self._begin(RetrieveResult(True, 1, ""), {block for item in blocks for block in item.block_ids})

    def store(
        self, cache: object, first: int, parent: bytes, keys: bytes, blocks: Any, *, after: object, beside: object
    ) -> Future[Any]:
        chunks = len(keys) // 32
        return self._begin(StoreResult(chunks, chunks, 1, ""), set())

    def _begin(self, result: Any, blocks: set[int]) -> Future[Any]:
        future: Future[Any] = Future()
        self.running.append((future, result, blocks))
        return future

    def end_all(self) -> None:
        running, self.running = self.running, []
        for future, result, blocks in running:
            self.written |= blocks
            future.set_result(result)

    def close(self) -> None: ...


class Engine:
    """Calls the halves in vLLM's order, for one request that the server holds and two that it does not.

    Each asks until it is admitted, waits for its retrieve when one was promised, computes and finishes. A third is
    aborted before that."""

    def __init__(self) -> None:
        self.server, self.pool = Server(), Pool()
        self.server.is_slow = True  # until the scheduler waits for it
        options = Options(
            chunk_tokens=CHUNK,
            groups=(Group(BLOCK),),
            ranks=RANKS,
            engine_steps_back=True,
            null_block=0,
            await_others=True,
            await_wait_s=5.0,
        )
        self.keyer = Keyer(chunk_tokens=CHUNK, hash_block_tokens=0)
        self.inner = Scheduler(self.server, options, self.keyer, store_output=True)  # type: ignore[arg-type]
        self.scheduler = GuardedScheduler(self.inner, options.groups, release="0.99.1")
        self.scheduler.use_pool(self.pool)
        self.scheduler.use_namespace({NAMESPACE})
        self.clients = [Client() for _ in range(RANKS)]
        self.inner_workers = [
            Worker(client, rank=rank, event=object, log=LOG)  # type: ignore[arg-type]
            for rank, client in enumerate(self.clients)
        ]
        self.workers = [GuardedWorker(worker, LOG) for worker in self.inner_workers]
        for worker in self.workers:
            namespace: Future[bytes] = Future()
            namespace.set_result(NAMESPACE)
            worker.register(SPEC, namespace, {})
        self.waiting: dict[str, set[int]] = {}
        """Requests that wait for a retrieve, and the ranks that have not reported."""
        self.hold(request("held"))

    def hold(self, asked: Any) -> None:
        keys = self.keyer.keys(asked, extra=b"", parent=b"", first_chunk=0)
        self.server.held = {keys[at : at + 32] for at in range(0, len(keys), 32)}

    # ---------------------------------------------------------------- vLLM

    def run(self) -> None:
        requests = [request("held")]
        requests += [request(f"new {first}", first=first) for first in (100, 200)]
        for asked in requests:
            self.scheduler.new(asked)
        self.match(request("aborted"))
        self.scheduler.finished("aborted", ())
        self.step({})
        for asked in requests:
            tokens = self.match(asked)
            self.scheduler.allocated(asked, [TABLE], tokens)
            if tokens:
                assert self.scheduler.disk_tokens(asked.request_id) == 0
                self.waiting[asked.request_id] = set(range(RANKS))
        self.step({"new 100": CHUNK})
        self.scheduler.preempted(["new 100"])
        self.step({asked.request_id: 41 for asked in requests if asked.request_id not in self.waiting})
        for _ in range(4):
            self.step({})
        assert self.waiting == {}, "a request waits for ever"
        self.step({"held": 41})
        for asked in requests:
            self.scheduler.finished(asked.request_id, ())
        self.scheduler.reset()
        steps = 0
        while self.scheduler.busy():
            steps += 1
            assert steps < 5, "never at rest"
            self.step({})
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def match(self, asked: Any) -> int:
        for _ in range(3):
            tokens, between_steps = self.scheduler.match(asked, BLOCK)
            if tokens is not None:
                assert between_steps == (tokens > 0)
                return tokens
        raise AssertionError("match() has no end")

    def step(self, computed: dict[str, int]) -> None:
        told: tuple[tuple[RetrieveOrder, ...], tuple[StoreOrder, ...]] = self.scheduler.step(
            lambda: ([Scheduled(name, 0, tokens) for name, tokens in computed.items()], lambda name: [TABLE])
        )
        for rank, (worker, client) in enumerate(zip(self.workers, self.clients, strict=True)):
            worker.begin(*told)
            worker.computed()
            ended = worker.take_ended()
            for name in ended.retrieved:
                self.waiting[name].remove(rank)  # KeyError: reported twice, or never asked for
                good = set(TABLE[1:9]) <= client.written
                assert name in ended.failed or good, "told to go on with bytes that are not there"
                assert name not in ended.failed or set(TABLE[1:9]) <= ended.failed_blocks
            self.waiting = {name: ranks for name, ranks in self.waiting.items() if ranks}
            self.scheduler.ended(ended.reports, namespaces=(), is_inert=worker.is_inert)
            client.end_all()
        self.scheduler.collect()


PLACES: dict[str, Callable[[Engine], tuple[Any, str]]] = {
    **{
        f"scheduler.{name}": lambda engine, name=name: (engine.inner, name)  # type: ignore[misc]
        for name in (
            "new",
            "match",
            "allocated",
            "disk_tokens",
            "step",
            "collect",
            "ended",
            "preempted",
            "finished",
            "busy",
            "reset",
            "close",
        )
    },
    **{
        f"worker.{name}": lambda engine, name=name: (engine.inner_workers[1], name)  # type: ignore[misc]
        for name in ("begin", "computed", "take_ended", "close", "_say_problems", "_retrieve", "_store")
    },
    **{
        f"decisions.{name}": lambda engine, name=name: (engine.inner._offload, name)  # type: ignore[misc]
        for name in vars(Offload)
        if not name.startswith("_")
    },
    "client.retrieve": lambda engine: (engine.clients[0], "retrieve"),
    "client.store": lambda engine: (engine.clients[1], "store"),
    **{
        f"server.{name}": lambda engine, name=name: (engine.server, name)  # type: ignore[misc]
        for name in ("ask", "take", "wait", "release", "pledge", "unpledge")
    },
    "keys": lambda engine: (engine.keyer, "begin"),
    "pool.touch": lambda engine: (engine.pool, "touch"),
}


def test_without_a_bug_the_prompt_is_retrieved_and_the_other_stored() -> None:
    engine = Engine()
    engine.run()
    assert all(set(TABLE[1:9]) <= client.written for client in engine.clients)
    counts = engine.scheduler.take_counts()
    assert (counts["retrieves"], counts["stores"], counts.get("bugs", 0)) == (1, 3, 0)
    assert not engine.scheduler._promised, "a request that is no more leaves nothing behind"


HANDS_OVER = ("scheduler.step", "worker.take_ended", "client.retrieve", "client.store", "pool.touch")
"""After these calls the result belongs to the other side, so none of our code can fail afterwards."""
NEVER_CALLED = {
    f"decisions.{name}"
    for name in (
        "awaits_more",
        "begin_unkeyed",
        "extend",
        "handoff",
        "held_tokens",
        "holds",
        "leases_lost",
        "preempted",
        "set_unavailable",
        "stored_whole",
    )
}
"""Verbs of the decisions that this engine does not use, or only at its start or after trouble."""


@pytest.mark.parametrize(
    ("when", "place"),
    [("before", place) for place in PLACES] + [("after", place) for place in PLACES if place not in HANDS_OVER],
)
def test_the_engine_goes_on_whichever_call_raises(when: str, place: str, caplog: pytest.LogCaptureFixture) -> None:
    raised = 0
    for at in range(1, 50):
        engine, fuse = Engine(), Fuse(at, when)
        fuse.around(*PLACES[place](engine))
        caplog.clear()
        engine.run()
        assert +engine.pool.pins == Counter(), "blocks stay pinned"
        if fuse.calls < at:
            break
        raised += 1
        traces = [record for record in caplog.records if record.exc_info]
        assert len(traces) == 1
        bugs = [half.take_counts().get("bugs", 0) for half in (engine.scheduler, *engine.workers)]
        assert sum(bugs) == 1
        assert not any("bugs" in half.take_counts() for half in (engine.scheduler, *engine.workers))
    else:
        raise AssertionError("never got through untouched")
    assert raised or place in NEVER_CALLED


def test_what_is_meant_to_end_the_process_gets_through() -> None:
    engine = Engine()
    engine.inner.new = interrupted_by(KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.scheduler.new(request())


def interrupted_by(problem: BaseException) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise problem

    return call


def test_a_bug_in_what_the_engine_tells_is_caught_as_well() -> None:
    engine, asked = Engine(), request("held")
    assert engine.match(asked) > 0

    def broken() -> Any:
        raise Boom

    engine.scheduler.allocated(asked, [TABLE], 32)
    (order,), stores = engine.scheduler.step(broken)
    assert (order.request, order.refused, stores) == ("held", "connector-bug", ())
    assert [(item.first_block, list(item.block_ids)) for item in order.blocks] == [(1, TABLE[1:9])]
    assert engine.scheduler.step(broken) == ((), ())


def test_a_field_that_the_engines_release_lacks_is_named_in_the_line_that_ends_the_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    engine.scheduler.step(lambda: SimpleNamespace().scheduled_new_reqs)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no cache from now on" in line
    assert "vLLM 0.99.1" in line
    assert "'scheduled_new_reqs'" in line


def test_what_was_promised_and_not_ordered_fails_behind_the_engines_own_prefix() -> None:
    engine, asked = Engine(), request("held")
    assert engine.match(asked) > 0
    engine.inner.allocated = interrupted_by(Boom())  # type: ignore[method-assign]
    engine.scheduler.allocated(asked, [TABLE], 30)
    (order,), _ = engine.scheduler.step(lambda: ([], lambda name: [TABLE]))
    assert (order.hbm_tokens, order.end_tokens, order.refused) == (BLOCK, BLOCK + 30, "connector-bug")
    assert [(item.first_block, list(item.block_ids)) for item in order.blocks] == [(1, TABLE[1:9])]


def test_ranks_that_disagree_are_still_refused_at_the_start() -> None:
    with pytest.raises(Exception, match="2 namespaces"):
        Engine().scheduler.use_namespace({b"a" * 32, b"b" * 32})


def test_ranks_that_come_to_disagree_end_the_cache_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.scheduler.ended([], namespaces={(0, NAMESPACE)}, is_inert=False)
    assert engine.scheduler.match(request("held"), 0)[0]
    engine.scheduler.ended([], namespaces={(1, b"b" * 32)}, is_inert=False)
    assert engine.scheduler.match(request("held"), 0) == (0, False)
    assert "2 namespaces" in caplog.text


def test_a_rank_without_a_cache_ends_it_for_all(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.scheduler.ended([], namespaces=(), is_inert=True)
    engine.scheduler.ended([], namespaces=(), is_inert=True)
    assert engine.scheduler.match(request("held"), 0) == (0, False)
    assert len(caplog.records) == 1
