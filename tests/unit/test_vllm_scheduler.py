"""The scheduler half between vLLM's scheduler and the decisions, with a server and a pool that are played."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.inquiries import Answered
from kvclient.keys import LONG_TOKENS, PIECE_TOKENS, PIECES
from kvclient.offload_ends import Report
from kvclient.offload_values import Group, Options, RetrieveOrder, StoreOrder
from kvclient.values import Found, Lease, RetrieveResult, StoreResult
from kvclient.vllm_keys import Keyer
from kvclient.vllm_scheduler import Scheduled, Scheduler
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES

BLOCK, CHUNK = 4, 12
NAMESPACE = b"n" * 32


class Server:
    """What Client and its Inquiries are to the scheduler. Answers when it is listened to, or when it is waited for."""

    def __init__(self) -> None:
        self.connected = True
        self.held: set[bytes] = set()
        self.asked = 0
        self.waited = 0
        self.leased = 0
        self.released: list[int] = []
        self.closed = False
        self.refusal: RequestError | None = None
        self.is_slow = False
        """Answers only to who waits."""
        self.is_late = False
        """Nor to him."""
        self._questions: list[tuple[int, bytes, int]] = []

    def inquiries(self) -> "Server":
        return self

    def __len__(self) -> int:
        return len(self._questions)

    @property
    def ready(self) -> bool:
        return bool(self._questions) and not self.is_slow

    def ask(self, number: int, namespace: bytes, keys: bytes, *, chunks_wanted_min: int) -> None:
        assert namespace == NAMESPACE
        self.asked += 1
        self._questions.append((number, keys, chunks_wanted_min))

    def take(self) -> list[Answered]:
        if self.is_slow:
            return []
        asked, self._questions = self._questions, []
        return [Answered(number, self._found(keys, wanted), self.refusal) for number, keys, wanted in asked]

    def wait(self, due_s: float) -> None:
        self.waited += 1
        self.is_slow = self.is_late
        while self.is_late and time.monotonic() < due_s:
            pass

    def _found(self, keys: bytes, chunks_wanted_min: int) -> Found:
        if self.refusal is not None:
            return Found(0, None, self.refusal.code)
        if not self.connected:
            return Found(0, None, "not-connected")
        chunks = 0
        while keys[chunks * KEY_BYTES : (chunks + 1) * KEY_BYTES] in self.held:
            chunks += 1
        if chunks < max(1, chunks_wanted_min):
            return Found(chunks, None)
        self.leased += 1
        return Found(chunks, Lease(self.leased, chunks, 1, float("inf")))

    def release(self, lease: Lease) -> None:
        self.released.append(lease.number)

    def close(self) -> None:
        self.closed = True


class Pool:
    """vLLM's BlockPool, as far as pins go."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=block) for block in range(100)]
        self.pins: Counter[int] = Counter()
        self.cached: set[bytes] = set()

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Any] | None:
        assert groups == [0]
        return [self.blocks[0]] if block_hash in self.cached else None

    def touch(self, blocks: Sequence[Any]) -> None:
        self.pins.update(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        self.pins.subtract(block.block_id for block in ordered_blocks)
        assert min(self.pins.values()) >= 0


def request(name: str = "r", tokens: int = 41, *, first: int = 0, **more: object) -> Any:
    ids = list(range(first, first + tokens))
    fields: dict[str, object] = {
        "request_id": name,
        "all_token_ids": ids,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "prompt_token_ids": list(ids),
        "block_hashes": [block.to_bytes(32, "big") for block in range(tokens // BLOCK)],
        "lora_request": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**{**fields, **more})


class Bench:
    def __init__(self, *, ranks: int = 1, ahead_max: int = 32, step_wait_s: float = 0.0) -> None:
        self.server, self.pool = Server(), Pool()
        options = Options(
            chunk_tokens=CHUNK,
            groups=(Group(BLOCK),),
            ranks=ranks,
            engine_steps_back=True,
            null_block=0,
            ahead_max=ahead_max,
        )
        keyer = Keyer(chunk_tokens=CHUNK, hash_block_tokens=0, engine="e")
        server: Any = self.server
        self.over: list[tuple[int, int]] = []
        """(job, rank) of stores that have ended and were not reported."""
        self.half = Scheduler(
            server, options, keyer, store_output=True, step_wait_s=step_wait_s, stores_over=lambda: self.over
        )
        self.half.use_pool(self.pool)
        self.half.use_namespace({NAMESPACE})
        self.keyer = keyer
        self.table = list(range(10, 30))

    def hold(self, asked: Any, chunks: int) -> None:
        keys = self.keyer.keys(asked, extra=self.keyer.extra(asked), parent=b"", first_chunk=0)
        self.server.held = {keys[place * KEY_BYTES : (place + 1) * KEY_BYTES] for place in range(chunks)}

    def keys_of(self, asked: Any) -> set[bytes]:
        keys = self.keyer.keys(asked, extra=b"", parent=b"", first_chunk=0)
        return {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}

    def admit(self, asked: Any, hbm_tokens: int = 0) -> int:
        """match() and what vLLM's scheduler does with it."""
        tokens, between_steps = self.half.match(asked, hbm_tokens)
        assert tokens is not None
        assert between_steps == (tokens > 0)
        self.half.allocated(asked, [self.table], tokens)
        return tokens

    def step(self, **computed: int) -> tuple[tuple[RetrieveOrder, ...], tuple[StoreOrder, ...]]:
        return self.half.step(
            [Scheduled(name, 0, tokens) for name, tokens in computed.items()], lambda name: [self.table]
        )


def stored(order: StoreOrder, chunks: int, rank: int = 0) -> Report:
    return Report(order.job, rank, StoreResult(chunks, chunks, 1, "" if chunks else "full"), 0.0)


def test_a_computed_prompt_is_stored_and_its_blocks_are_pinned_until_it_is() -> None:
    bench, asked = Bench(), request()
    assert bench.admit(asked) == 0
    assert bench.step(r=20) != ((), ())
    _, (order,) = bench.step(r=41)
    assert bench.pool.pins == Counter(range(10, 19))
    bench.half.finished("r")
    assert bench.half.busy()
    bench.half.ended([stored(order, 2)])
    assert sum(bench.pool.pins.values()) == 3  # of the first step's
    assert bench.half.busy()


def test_all_blocks_of_a_request_that_has_finished_stay_while_one_of_its_stores_runs() -> None:
    bench, asked = Bench(), request()
    bench.admit(asked)
    _, (order,) = bench.step(r=20)
    bench.half.finished("r", [bench.table])
    assert all(bench.pool.pins[block] for block in bench.table)
    bench.half.ended([stored(order, 1)])
    assert +bench.pool.pins == Counter()


def test_blocks_of_a_store_that_has_ended_are_free_for_the_next_request_before_it_is_reported() -> None:
    bench, first, second = Bench(), request(), request("s")
    bench.admit(first)
    _, (order,) = bench.step(r=20)
    bench.half.finished("r", [bench.table])
    bench.half.match(second, 0)
    assert +bench.pool.pins != Counter()
    bench.over = [(order.job, 0)]
    bench.half.match(second, 0)
    assert +bench.pool.pins == Counter()
    bench.half.ended([stored(order, 1)])
    assert +bench.pool.pins == Counter()


def test_blocks_of_a_store_stay_until_ranks_elsewhere_have_reported() -> None:
    bench, first = Bench(ranks=2), request()
    bench.admit(first)
    _, (order,) = bench.step(r=20)
    bench.over = [(order.job, 0)]
    bench.half.match(request("s"), 0)
    assert +bench.pool.pins != Counter()
    bench.half.ended([Report(order.job, 1, StoreResult(order.chunks, order.chunks, 1, ""), 0.0)])
    assert +bench.pool.pins == Counter()


def test_a_prompt_that_is_held_is_retrieved_and_not_stored() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    assert bench.admit(asked, hbm_tokens=BLOCK) == 3 * CHUNK - BLOCK
    (order,), stores = bench.step()
    assert stores == ()
    assert [(item.first_block, list(item.block_ids)) for item in order.blocks] == [(1, bench.table[1:9])]
    bench.half.ended([Report(order.job, 0, RetrieveResult(True, 9, ""), 0.0)])
    assert bench.step(r=41) == ((), ())
    assert bench.pool.pins == Counter()


def test_a_failed_retrieve_is_not_tried_again() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    assert bench.admit(asked) == 36
    (order,), _ = bench.step()
    bench.half.ended([Report(order.job, 0, RetrieveResult(False, 0, "mover-lost"), 0.0)])
    asked_before = bench.server.asked
    assert bench.admit(asked) == 0
    assert bench.server.asked == asked_before


def test_a_job_ends_when_every_rank_has_reported() -> None:
    bench, asked = Bench(ranks=2), request()
    bench.admit(asked)
    _, (order,) = bench.step(r=41)
    bench.half.ended([stored(order, 3, rank=1)])
    assert sum(bench.pool.pins.values()) == 9
    bench.half.ended([stored(order, 1, rank=0)])
    assert sum(bench.pool.pins.values()) == 0


def test_an_aborted_request_gives_its_lease_back() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    assert bench.half.match(asked, 0) == (36, True)
    bench.half.finished("r")
    bench.step()
    assert bench.server.released == [1]


def test_what_the_engine_holds_itself_is_asked_for_and_not_stored_again() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    assert bench.admit(asked, hbm_tokens=40) == 0
    assert bench.step(r=41) == ((), ())
    assert bench.server.asked == 1


def test_a_request_that_must_be_computed_is_stored_and_takes_no_lease() -> None:
    bench, asked = Bench(), request(skip_reading_prefix_cache=True)
    bench.hold(asked, 2)
    assert bench.admit(asked) == 0
    _, (order,) = bench.step(r=41)
    assert order.first_chunk == 2


def test_output_is_stored_as_it_fills_chunks() -> None:
    bench, asked = Bench(), request(tokens=23)
    bench.admit(asked)
    _, (first,) = bench.step(r=23)
    asked.all_token_ids.append(23)
    asked.num_tokens = 24
    _, (second,) = bench.step(r=24)
    assert (first.first_chunk, second.first_chunk) == (0, 1)
    assert second.parent == first.keys
    assert first.keys + second.keys == bench.keyer.keys(asked, extra=b"", parent=b"", first_chunk=0)


def test_without_a_namespace_nothing_is_asked_or_stored() -> None:
    bench, asked = Bench(), request()
    bench.half._asking.namespace = b""
    assert bench.half.match(asked, 0) == (0, False)
    bench.half.allocated(asked, [bench.table], 0)
    assert bench.step(r=41) == ((), ())
    assert bench.server.asked == 0


def test_ranks_that_disagree_are_refused() -> None:
    with pytest.raises(RequestError, match="2 namespaces"):
        Bench().half.use_namespace({b"a" * 32, b"b" * 32})


def test_an_unkeyed_request_is_counted_and_left_alone() -> None:
    bench, asked = Bench(), request(prompt_embeds=object())
    assert bench.admit(asked) == 0
    assert bench.step(r=41) == ((), ())
    assert bench.server.asked == 0
    assert bench.half.take_counts()["requests_unkeyed"] == 1
    assert bench.half.take_counts() == {}


def test_after_a_reset_requests_have_other_names_and_computed_ones_none() -> None:
    bench, waiting, running = Bench(), request("w"), request("c", num_computed_tokens=12)
    bench.hold(waiting, 3)
    bench.half.new(waiting)
    bench.half.new(running)
    bench.half.reset()
    assert bench.half.match(waiting, 0) == (0, False)
    bench.half.allocated(waiting, [bench.table], 0)
    _, (order,) = bench.step(w=41, c=41)
    assert order.request == "w"
    assert not set(bench.server.held) & {order.keys[:KEY_BYTES]}


def test_a_refusal_is_a_miss_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.server.refusal = RequestError("keys-chain", "not one chain")
    for name in ("a", "b"):
        assert bench.admit(request(name)) == 0
    assert len(caplog.records) == 1


def test_a_lost_server_is_a_miss_and_its_leases_go_back_unused() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    assert bench.half.match(asked, 0) == (36, True)
    bench.server.connected = False
    assert bench.half.match(asked, 0) == (0, False)
    bench.step()
    assert bench.server.released == [1]


# ---------------------------------------------------------------- who waits for whom


def test_a_request_is_asked_for_when_it_comes_and_matched_when_the_answer_is_there() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.half.new(asked)
    assert bench.server.asked == 1
    assert bench.admit(asked) == 36
    assert (bench.server.asked, bench.server.waited) == (1, 0)


def test_a_step_that_has_other_work_waits_for_no_answer() -> None:
    bench, other, asked = Bench(), request("other"), request()
    bench.hold(asked, 3)
    bench.admit(other, hbm_tokens=40)
    bench.step(other=41)
    bench.server.is_slow = True
    for _ in range(3):
        assert bench.half.match(asked, 0) == (None, False)
        bench.step(other=41)
    assert bench.server.waited == 0
    bench.server.is_slow = False
    assert bench.admit(asked) == 36


def test_a_step_waits_a_little_where_that_was_asked_for_and_once_for_all_its_requests() -> None:
    bench, other = Bench(step_wait_s=0.001), request("other")
    bench.admit(other, hbm_tokens=40)
    bench.step(other=41)
    bench.server.is_slow = bench.server.is_late = True
    for name in "ab":
        assert bench.half.match(request(name), 0) == (None, False)
    assert bench.server.waited == 1
    bench.step(other=41)
    bench.server.is_late = False
    assert bench.half.match(request("a"), 0) == (0, False)
    assert bench.server.waited == 2


@pytest.mark.parametrize("end", ["finished", "preempted"])
def test_an_engine_without_other_work_waits_for_the_answer(end: str) -> None:
    bench, other, asked = Bench(), request("other"), request()
    bench.hold(asked, 3)
    bench.admit(other, hbm_tokens=40)
    bench.step(other=41)
    if end == "finished":
        bench.half.finished("other")
    else:
        bench.step()  # it is in none any more
    bench.server.is_slow = True
    assert bench.admit(asked) == 36
    assert bench.server.waited == 1


def test_an_engine_goes_on_stepping_until_the_lease_of_an_aborted_request_is_back() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.server.is_slow = True
    bench.half.new(asked)
    bench.half.finished("r")
    assert bench.half.busy()
    bench.step()
    assert bench.half.busy()
    bench.server.is_slow = False
    bench.step()
    assert not bench.half.busy()
    assert bench.server.released == [1]


@pytest.mark.parametrize(("blocks", "leases"), [(0, 1), (5, 1), (8, 1), (9, 0), (10, 0)])
def test_no_lease_is_taken_for_what_hbm_holds(blocks: int, leases: int) -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.pool.cached = set(asked.block_hashes[:blocks])
    bench.half.new(asked)
    tokens, _ = bench.half.match(asked, BLOCK * blocks)
    assert tokens == max(0, 36 - BLOCK * blocks)
    assert (bench.server.asked, bench.server.leased) == (1, leases)


def test_what_hbm_has_lost_since_is_asked_for_once_more() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.pool.cached = set(asked.block_hashes)
    bench.half.new(asked)
    assert bench.admit(asked) == 36
    assert (bench.server.asked, bench.server.leased) == (2, 1)


def test_few_requests_are_asked_for_ahead_of_time_and_the_next_when_one_is_admitted() -> None:
    bench = Bench(ahead_max=2)
    waiting = [request(name, first=100 * place) for place, name in enumerate("abcd")]
    for asked in waiting:
        bench.half.new(asked)
        bench.server.held |= bench.keys_of(asked)
    assert bench.server.asked == 2
    bench.step()
    assert bench.server.asked == 2
    assert bench.admit(waiting[0]) == 36
    bench.step()
    assert bench.server.asked == 3
    bench.half.finished("b")
    bench.step()
    assert bench.server.asked == 4


def test_a_long_prompt_has_its_keys_from_elsewhere_and_is_asked_for_at_the_next_step() -> None:
    bench, asked = Bench(), request(tokens=LONG_TOKENS + 5)
    bench.hold(asked, 7)
    bench.half.new(asked)
    assert bench.server.asked == 0
    assert bench.half._unnamed["r"].wait(10)
    bench.step()
    assert bench.server.asked == 1
    bench.table = list(range(1, 90))
    assert bench.admit(asked) == 7 * CHUNK


def test_a_step_that_has_other_work_waits_for_no_keys() -> None:
    bench, asked = busy(), request(tokens=3 * PIECE_TOKENS)
    bench.half.new(asked)
    assert bench.half.match(asked, 0) == (None, False)
    assert bench.server.asked == 0
    bench.half.finished("other")
    assert bench.half.match(asked, 0) == (0, False)


def test_a_long_prompt_gets_on_with_each_step_and_each_time_that_it_is_wanted() -> None:
    bench, asked = busy(), request(tokens=PIECES * PIECE_TOKENS)
    bench.hold(asked, 7)
    bench.half.new(asked)
    assert bench.half.match(asked, 0) == (None, False)
    bench.step(other=41)
    naming = bench.half._unnamed["r"]
    assert not naming.ready
    assert naming.go_on()  # the fourth and last piece
    assert naming.wait(10)
    bench.step(other=42)
    assert bench.server.asked == 1
    assert bench.half.match(asked, 0) == (7 * CHUNK, True)


def test_a_step_that_may_wait_a_little_does_so_for_keys_as_well() -> None:
    bench, asked = busy(step_wait_s=10.0), request(tokens=LONG_TOKENS)
    bench.hold(asked, 7)
    bench.half.new(asked)
    assert bench.half.match(asked, 0) == (7 * CHUNK, True)


def test_a_long_prompt_that_turns_out_to_have_no_names_is_left_alone() -> None:
    asked = request(tokens=3 * PIECE_TOKENS)
    asked.prompt_token_ids[-1] = 2**32
    for bench in (busy(), Bench()):
        bench.half.new(asked)
        while bench.half.match(asked, 0) == (None, False):
            bench.step(other=41)
        assert bench.half.match(asked, 0) == (0, False)
        assert bench.half.take_counts()["requests_unkeyed"] == 1
        assert bench.server.asked <= 1  # for the other
        bench.half.finished("r")


def busy(*, step_wait_s: float = 0.0) -> Bench:
    """An engine that computes another request, of which nothing is asked any more."""
    bench, other = Bench(step_wait_s=step_wait_s), request("other", tokens=CHUNK - 1)
    assert bench.admit(other) == 0
    bench.step(other=CHUNK - 1)
    return bench


@pytest.mark.parametrize("end", ["match", "finish", "reset"])
def test_a_long_prompt_may_be_wanted_before_it_is_named(end: str) -> None:
    bench, asked = Bench(), request(tokens=LONG_TOKENS)
    bench.hold(asked, 7)
    bench.half.new(asked)
    if end == "match":
        assert bench.half.match(asked, 0) == (7 * CHUNK, True)
    if end == "reset":
        bench.half.reset()
        assert bench.half.match(asked, 0) == (0, False)
    bench.half.finished("r")
    bench.step()
    assert not bench.half.busy()
    assert bench.half._unnamed == {}
