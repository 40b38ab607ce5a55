"""The portable path in this process: real tensors, a real server, and copies that fail, hang or come too late.

Needs torch, which `make e2e` and `make e2e-ci` install. Bytes against kernels: tests/device/test_portable_device.py."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from kvclient import (
    Blocks,
    CacheSpec,
    Client,
    HostBuffer,
    RequestError,
    RetrieveResult,
    TensorBuffer,
    full_group,
    namespace_digest,
)
from kvclient.memory.layouts import describe
from kvclient.offload.job_ends import Report
from kvclient.offload.values import RetrieveOrder, StoreOrder
from kvclient.offload.worker import Worker
from tests.process.arena import flip
from tests.process.engine import PATIENT, Prompt, prompt
from tests.process.harness import WAIT_S, Server, kill, until

torch = pytest.importorskip("torch", reason="needs torch: make e2e-ci")

BLOCK_TOKENS, PER_CHUNK, BLOCKS = 5, 3, 23
CHUNK_TOKENS = PER_CHUNK * BLOCK_TOKENS
NAMESPACE = namespace_digest({"model": "portable"})

SHAPES: dict[str, tuple[tuple[int, ...], int, str]] = {
    "kv-first": ((2, BLOCKS, BLOCK_TOKENS, 3, 12), 1, "float16"),
    "block-first-fp8": ((BLOCKS, 2, BLOCK_TOKENS, 3, 7), 0, "float8_e4m3fn"),
    "mla": ((BLOCKS, BLOCK_TOKENS, 576), 0, "bfloat16"),
    "mla-token-major": ((BLOCKS * BLOCK_TOKENS, 1, 132), 0, "uint8"),
    "scales": ((BLOCKS, 3, BLOCK_TOKENS), 0, "float32"),
}


class Engine:
    """Two layers of tensors, and a client. The tensors contain every bit pattern, also those of NaNs."""

    def __init__(self, server: Server, shape: str, **options: Any) -> None:
        dimensions, self.block_dim, kind = SHAPES[shape]
        generator = torch.Generator().manual_seed(7)
        self.tensors = [
            torch.randint(0, 256, (*dimensions, getattr(torch, kind).itemsize), dtype=torch.uint8, generator=generator)
            .view(getattr(torch, kind))
            .squeeze(-1)
            for _ in range(2)
        ]
        described = describe(self.tensors, blocks=BLOCKS, block_dim=self.block_dim)
        self.spec = CacheSpec(
            name="kv",
            namespace=namespace_digest({"model": shape}),
            chunk_tokens=CHUNK_TOKENS,
            buffers=[TensorBuffer(tensor) for tensor in self.tensors],
            groups=[full_group(block_tokens=BLOCK_TOKENS, blocks=BLOCKS, regions=described.regions)],
            device="portable",
            **options,
        )
        self.client = Client(server.path, timeouts=PATIENT)
        self.cache = self.client.register_cache(self.spec)
        assert self.client.wait_connected(WAIT_S)
        assert self.cache.wait_registered(WAIT_S)
        assert self.cache.portable is not None
        self.pages = self.cache.portable._pages

    def bytes_of(self, ids: list[int]) -> list[Any]:
        """The blocks' content as integers, by plain indexing of the tensors."""
        found = []
        for tensor in self.tensors:
            ours = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.view(torch.int16)
            per_block = tensor.shape[self.block_dim] // BLOCKS
            rows = [block * per_block + row for block in ids for row in range(per_block)]
            found.append(ours[:, rows] if self.block_dim else ours[rows])
        return found

    def store(self, story: Prompt, ids: list[int], **options: Any) -> Any:
        return self.client.store(self.cache, 0, b"", story.keys, [Blocks(0, 0, ids)], **options)

    def retrieve(self, story: Prompt, ids: list[int], **options: Any) -> Any:
        found = self.client.lookup(self.spec.namespace, story.keys)
        assert found.lease is not None, found
        return self.client.retrieve(self.cache, found.lease, [Blocks(0, 0, ids)], **options)


FROM = [22, 0, 7, 3, 21, 9, 1, 14, 2, 11, 5, 19]
INTO = [4, 20, 6, 8, 10, 12, 13, 15, 16, 17, 18, 1]
STORY = prompt(3, 4, CHUNK_TOKENS)


@pytest.fixture
def engine(server: Server) -> Iterator[Engine]:
    made = Engine(server, "kv-first", staging_bytes=1)
    yield made
    made.client.close()
    assert made.client.counters.bugs == 0


class Gate:
    """A copy that waits in its thread until the test opens it."""

    def __init__(self, copy: Callable[..., None]) -> None:
        self._copy = copy
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.open.wait(WAIT_S)
        self._copy(*arguments)


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_come_back_into_other_blocks_and_no_other_changes(server: Server, shape: str) -> None:
    engine = Engine(server, shape, staging_bytes=1)
    stored, others = engine.bytes_of(FROM), [block for block in range(BLOCKS) if block not in INTO]
    rest = [part.clone() for part in engine.bytes_of(others)]
    assert engine.store(STORY, FROM).result(WAIT_S).chunks == 4
    result = engine.retrieve(STORY, INTO).result(WAIT_S)
    assert (result.ok, result.bytes) == (True, 12 * sum(t.numel() * t.element_size() // BLOCKS for t in engine.tensors))
    assert equal(engine.bytes_of(INTO), stored)
    assert equal(engine.bytes_of(others), rest)
    engine.client.close()


def test_of_a_part_with_a_wrong_chunk_no_chunk_counts_as_right(server: Server) -> None:
    """Nothing of it leaves the buffer on the host, so the blocks hold what they held."""
    engine = Engine(server, "kv-first")
    assert engine.store(STORY, FROM).result(WAIT_S).chunks == 4
    before = [part.clone() for part in engine.bytes_of(INTO)]
    flip(server, engine.bytes_of(FROM[2 * PER_CHUNK :][:1])[0][0].contiguous().numpy().tobytes())
    assert engine.retrieve(STORY, INTO).result(WAIT_S) == RetrieveResult(False, 0, "digest", 0)
    assert equal(engine.bytes_of(INTO), before)
    assert engine.client.lookup(engine.spec.namespace, STORY.keys).chunks == 2, "those before it are held"
    engine.client.close()


def test_a_buffer_for_two_chunks_is_enough_for_any_prompt_and_it_cannot_grow(engine: Engine) -> None:
    block_bytes = sum(t.numel() * t.element_size() for t in engine.tensors) // BLOCKS
    assert 2 * PER_CHUNK * block_bytes <= engine.pages.bytes < 3 * PER_CHUNK * block_bytes
    with pytest.raises(PermissionError):
        os.ftruncate(engine.cache.descriptors[0], 1 << 20)
    jobs = [engine.store(prompt(seed, 4, CHUNK_TOKENS), FROM) for seed in range(6)]
    assert [job.result(WAIT_S).chunks for job in jobs] == [4] * 6
    loads = [engine.retrieve(prompt(seed, 4, CHUNK_TOKENS), INTO) for seed in range(6)]
    assert all(job.result(WAIT_S).ok for job in loads)
    assert equal(engine.bytes_of(INTO[:6]), engine.bytes_of(FROM[:6]))


def test_a_range_in_the_middle_of_chunks_is_filled(engine: Engine) -> None:
    stored = engine.bytes_of(FROM[2:7])
    engine.store(STORY, FROM).result(WAIT_S)
    found = engine.client.lookup(engine.spec.namespace, STORY.keys)
    assert found.lease is not None
    part = engine.client.retrieve(engine.cache, found.lease, [Blocks(0, 2, INTO[:5])])
    assert part.result(WAIT_S).ok
    assert equal(engine.bytes_of(INTO[:5]), stored)


def test_what_was_stored_is_found_after_the_server_was_killed(engine: Engine, server: Server) -> None:
    stored = engine.bytes_of(FROM)
    engine.store(STORY, FROM).result(WAIT_S)
    kill(server.brain_pid())
    until(
        "the cache to be registered again",
        lambda: engine.client.counters.registrations == 2 and engine.cache.registered,
    )
    assert engine.retrieve(STORY, INTO).result(WAIT_S).ok
    assert equal(engine.bytes_of(INTO), stored)


# ---------------------------------------------------------------- the mode it reports


def test_it_is_asked_for_by_name_warned_of_once_and_shown(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="kvclient.memory.portable"):
        engine = Engine(server, "mla")
        engine.store(STORY, FROM).result(WAIT_S)
        engine.retrieve(STORY, INTO).result(WAIT_S)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("portable path name=kv device=cpu bytes=")
    assert "slow" in said
    status = server.status()
    assert (status.caches, status.caches_engine_driven) == (1, 1)
    assert [cache.mode for cache in status.shown_caches] == ["engine-driven"]
    moved = status.counters["mode_bytes"]
    assert isinstance(moved, dict)
    assert (moved["direct"], moved["engine-driven"]) == (0, 2 * 12 * 2 * BLOCK_TOKENS * 576 * 2)
    engine.client.close()


@pytest.mark.parametrize("device", ["host", "cuda", "rocm"])
def test_tensors_are_not_taken_for_another_device(device: str) -> None:
    client = Client("/nowhere/kv.sock")
    tensor = torch.zeros(BLOCKS, 8)
    groups = [full_group(block_tokens=5, blocks=BLOCKS, regions=describe([tensor], blocks=BLOCKS).regions)]
    spec = CacheSpec(
        name="kv", namespace=NAMESPACE, chunk_tokens=15, buffers=[TensorBuffer(tensor)], groups=groups, device=device
    )
    with pytest.raises(RequestError) as refusal:
        client.register_cache(spec)
    assert refusal.value.code == "device"
    client.close()


@pytest.mark.parametrize(
    ("buffers", "mode", "code", "says"),
    [
        ([HostBuffer(0, 99)], "", "device", "must be a TensorBuffer"),
        ([TensorBuffer(torch.zeros(BLOCKS, 2, dtype=torch.uint8))], "", "layout", "buffer 0, which has 46 bytes"),
        ([TensorBuffer(torch.zeros(BLOCKS, 8))], "staged", "mode", "must be engine-driven, or not said"),
        (
            [TensorBuffer(torch.zeros(BLOCKS, 8)), TensorBuffer(torch.zeros(BLOCKS, 8, device="meta"))],
            "",
            "device",
            "['cpu', 'meta']",
        ),
    ],
)
def test_what_is_no_portable_cache_is_refused(buffers: Any, mode: Any, code: str, says: str) -> None:
    client = Client("/nowhere/kv.sock")
    regions = describe([torch.zeros(BLOCKS, 8)], blocks=BLOCKS).regions
    groups = [full_group(block_tokens=5, blocks=BLOCKS, regions=regions)]
    spec = CacheSpec(
        name="kv", namespace=NAMESPACE, chunk_tokens=15, buffers=buffers, groups=groups, device="portable", mode=mode
    )
    with pytest.raises(RequestError) as refusal:
        client.register_cache(spec)
    assert (refusal.value.code, says in refusal.value.message) == (code, True), refusal.value
    client.close()


@pytest.mark.parametrize(
    ("ids", "code"), [([0, 1, BLOCKS], "block-range"), ([0, 1, -1], "block-range"), ([0, 1, 0], "block-duplicate")]
)
def test_blocks_that_there_are_not_are_refused_as_the_server_does(engine: Engine, ids: list[int], code: str) -> None:
    with pytest.raises(RequestError) as refusal:
        engine.store(STORY.head(1), ids).result(WAIT_S)
    assert refusal.value.code == code
    engine.store(STORY.head(1), FROM[:3]).result(WAIT_S)
    with pytest.raises(RequestError) as refusal:
        engine.retrieve(STORY.head(1), ids).result(WAIT_S)
    assert refusal.value.code == code


# ---------------------------------------------------------------- ends


def test_a_gather_that_hangs_ends_its_store_in_time_and_holds_no_other_place(engine: Engine) -> None:
    gate = engine.pages.gather = Gate(engine.pages.gather)  # type: ignore[assignment]
    hung = engine.store(STORY.head(1), FROM[:3], timeout_s=0.05)
    assert gate.reached.wait(WAIT_S)
    result = hung.result(WAIT_S)
    assert (result.chunks, result.why) == (0, "timeout")
    assert engine.client.lookup(engine.spec.namespace, STORY.keys).chunks == 0
    behind = engine.store(STORY.head(1), FROM[:3])
    gate.open.set()
    assert behind.result(WAIT_S).chunks == 1
    until("all places to be free", lambda: engine.cache.quiet)


def test_a_scatter_that_hangs_keeps_its_blocks_whatever_the_deadline(engine: Engine) -> None:
    stored = engine.bytes_of(FROM[:3])
    engine.store(STORY.head(1), FROM[:3]).result(WAIT_S)
    gate = engine.pages.scatter = Gate(engine.pages.scatter)  # type: ignore[assignment]

    def begun() -> Any:
        """A retrieve whose scatter hangs; None if a busy machine did not reach it within the deadline."""
        lease = engine.client.lookup(engine.spec.namespace, STORY.head(1).keys).lease
        if lease is None:
            return None
        load = engine.client.retrieve(engine.cache, lease, [Blocks(0, 0, INTO[:3])], timeout_s=0.05)
        until("the scatter, or an end before it", lambda: gate.reached.is_set() or load.done())
        return load if gate.reached.is_set() else None

    load = until("a scatter to hang", begun)
    late = engine.store(prompt(8, 1, CHUNK_TOKENS), FROM[:3], timeout_s=0.06).result(WAIT_S)
    assert late.why == "timeout", "the scatter's deadline is over by now"
    assert not load.done()
    gate.open.set()
    assert load.result(WAIT_S).ok
    assert equal(engine.bytes_of(INTO[:3]), stored)


def test_unregistering_waits_until_nothing_writes_the_tensors(engine: Engine) -> None:
    engine.store(STORY.head(1), FROM[:3]).result(WAIT_S)
    gate = engine.pages.scatter = Gate(engine.pages.scatter)  # type: ignore[assignment]
    load = engine.retrieve(STORY.head(1), INTO[:3])
    assert gate.reached.wait(WAIT_S)
    farewell = engine.client.unregister(engine.cache)
    until("the server to have no cache of it", lambda: engine.client.status()["caches"] == 0)
    assert not farewell.done()
    gate.open.set()
    assert farewell.result(WAIT_S)
    assert load.result(WAIT_S).ok


@pytest.mark.parametrize("problem", [RuntimeError("the device is lost"), MemoryError(), KeyError("a bug of it")])
def test_a_copy_that_fails_is_a_miss_and_the_next_one_works(engine: Engine, problem: Exception) -> None:
    def fail(moves: object) -> None:
        raise problem

    gather, scatter = engine.pages.gather, engine.pages.scatter
    engine.pages.gather = fail  # type: ignore[assignment]
    result = engine.store(STORY, FROM).result(WAIT_S)
    assert (result.chunks, result.why) == (0, "client-copy")
    engine.pages.gather = gather  # type: ignore[method-assign]
    stored = engine.bytes_of(FROM)
    assert engine.store(STORY, FROM).result(WAIT_S).chunks == 4
    engine.pages.scatter = fail  # type: ignore[assignment]
    load = engine.retrieve(STORY, INTO).result(WAIT_S)
    assert (load.ok, load.why) == (False, "client-copy")
    engine.pages.scatter = scatter  # type: ignore[method-assign]
    assert engine.retrieve(STORY, INTO).result(WAIT_S).ok
    assert equal(engine.bytes_of(INTO), stored)
    assert engine.cache.quiet


class Event:
    """An event of an engine's stream that is reached when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.asked = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.is_done


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_jobs_touch_no_block_before_the_engines_event(engine: Engine, verb: str) -> None:
    engine.store(STORY.head(1), FROM[:3]).result(WAIT_S)
    copy = "gather" if verb == "store" else "scatter"
    gate = Gate(getattr(engine.pages, copy))
    gate.open.set()
    setattr(engine.pages, copy, gate)
    story = prompt(9, 1, CHUNK_TOKENS) if verb == "store" else STORY.head(1)
    event = Event()
    job = getattr(engine, verb)(story, FROM[:3], after=event)
    assert event.asked.wait(WAIT_S)
    engine.client.status()
    assert not gate.reached.is_set()
    assert not job.done()
    event.is_done = True
    assert not job.result(WAIT_S).why
    assert gate.reached.is_set()


def test_an_event_that_never_comes_is_a_miss_in_time(engine: Engine) -> None:
    result = engine.store(STORY, FROM, after=Event(), timeout_s=0.05).result(WAIT_S)
    assert (result.chunks, result.why) == (0, "timeout")
    with pytest.raises(RequestError) as refusal:
        engine.store(STORY, FROM, after=object())
    assert refusal.value.code == "after"


# ---------------------------------------------------------------- the worker of a connector


class Stream:
    """An engine's stream that runs what was queued when the test says so, and not before."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], object]] = []
        self.done = 0

    def event(self) -> "Point":
        return Point(self, len(self.queued))

    def run(self) -> None:
        for work in self.queued[self.done :]:
            work()
            self.done += 1


class Point:
    def __init__(self, stream: Stream, at: int) -> None:
        self._stream, self._at = stream, at
        self.asked = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self._stream.done >= self._at


@pytest.fixture
def worker(engine: Engine) -> Iterator[tuple[Worker, Stream, list[Point]]]:
    """A worker on the engine's tensors. Its events are noted in the list."""
    stream, points = Stream(), []

    def event() -> Point:
        points.append(stream.event())
        return points[-1]

    known: Future[bytes] = Future()
    known.set_result(engine.spec.namespace)
    made = Worker(engine.client, rank=0, event=event, log=logging.getLogger("worker"))
    made.register(replace(engine.spec, name="worker"), known)
    yield made, stream, points
    stream.run()
    made.unregister()


def test_a_store_holds_what_the_forward_before_it_wrote(
    engine: Engine, worker: tuple[Worker, Stream, list[Point]]
) -> None:
    made, stream, points = worker
    made.begin([], [StoreOrder(1, "a", 0, b"", STORY.keys, (Blocks(0, 0, FROM),))])
    stream.queued.append(lambda: [write(tensor, FROM, 2.5) for tensor in engine.tensors])
    made.computed()
    assert points[-1].asked.wait(WAIT_S)
    engine.client.status()
    assert made.take_ended().reports == []
    stream.run()
    (report,) = ended(made)
    assert report.result.chunks == 4
    for tensor in engine.tensors:
        write(tensor, INTO, -1.0)
    assert engine.retrieve(STORY, INTO).result(WAIT_S).ok
    assert all((tensor[:, INTO] == 2.5).all() for tensor in engine.tensors)


def test_a_load_writes_after_what_ran_before_it_and_is_complete_when_it_is_reported(
    engine: Engine, worker: tuple[Worker, Stream, list[Point]]
) -> None:
    made, stream, points = worker
    stored = engine.bytes_of(FROM)
    assert engine.store(STORY, FROM).result(WAIT_S).chunks == 4
    found = engine.client.lookup(engine.spec.namespace, STORY.keys)
    assert found.lease is not None
    seen: list[list[Any]] = []
    before = engine.bytes_of(INTO)
    stream.queued.append(lambda: seen.append(engine.bytes_of(INTO)))  # a forward that still reads the blocks
    made.begin([RetrieveOrder(2, "b", found.lease, (Blocks(0, 0, INTO),), 0, 4 * CHUNK_TOKENS)], [])
    assert points[-1].asked.wait(WAIT_S)
    engine.client.status()
    assert made.take_ended().retrieved == set()
    stream.run()
    (report,) = ended(made)
    assert report.result.ok
    assert equal(engine.bytes_of(INTO), stored)
    assert equal(seen[0], before)


def write(tensor: Any, ids: list[int], value: float) -> None:
    tensor[:, ids] = value


def ended(worker: Worker) -> list[Report]:
    reports: list[Report] = []

    def has_some() -> bool:
        reports.extend(worker.take_ended().reports)
        return bool(reports)

    until("the job to end", has_some)
    return reports
