"""Pledges of vLLM's scheduler half: when it makes them, and when it takes them back. What proxies say of requests."""

import json
import time
from typing import Any

import pytest

from kvclient.offload.job_ends import Report
from kvclient.offload.lookups import AWAIT_AGAIN_S
from kvclient.offload.values import Group, RetrieveOrder
from kvclient.values import RetrieveResult, StoreResult
from kvclient.vllm.guard import GuardedScheduler
from kvclient.vllm.transfer_params import TransferParams
from tests.rigs.vllm_rig import BLOCK, CHUNK, Bench, request, stored

TOKENS = 3 * CHUNK + 5


def bench() -> Bench:
    return Bench(await_others=True, await_wait_s=5.0)


def test_a_prompt_is_pledged_with_its_first_step_and_once() -> None:
    at = bench()
    asked = request(tokens=TOKENS)
    assert at.admit(asked) == 0
    assert at.server.may_wait
    assert at.server.pledges == {}, "it is not scheduled yet"
    at.step(r=CHUNK)
    (keys,) = at.server.pledges.values()
    assert {keys[place : place + 32] for place in range(0, len(keys), 32)} == at.keys_of(asked)
    at.step(r=2 * CHUNK)
    assert len(at.server.pledges) == 1


def test_without_the_option_nothing_is_pledged_and_no_lookup_may_wait() -> None:
    at = Bench()
    at.admit(request(tokens=TOKENS))
    at.step(r=CHUNK)
    assert at.server.pledges == {}
    assert not at.server.may_wait


def test_an_aborted_request_takes_its_pledge_back_without_another_step() -> None:
    at = bench()
    at.admit(request(tokens=TOKENS))
    at.step(r=CHUNK)
    at.half.finished("r")
    assert at.server.pledges == {}


def test_a_preempted_request_takes_its_pledge_back_with_that_step() -> None:
    at = bench()
    at.admit(request(tokens=TOKENS))
    at.step(r=CHUNK)
    at.half.preempted(["r", "unknown"])
    at.step()
    assert at.server.pledges == {}


def test_a_finished_request_keeps_its_word_while_its_last_store_is_under_way() -> None:
    at = bench()
    at.admit(request(tokens=TOKENS))
    _, (first,) = at.step(r=2 * CHUNK)
    at.half.ended([stored(first, 2)])
    _, (last,) = at.step(r=TOKENS)
    at.half.finished("r")
    assert len(at.server.pledges) == 1
    at.half.ended([stored(last, 1)])
    assert len(at.server.pledges) == 1, "the server ends it with the last chunk"


def test_a_reset_takes_all_pledges_back() -> None:
    at = bench()
    at.admit(request(tokens=TOKENS))
    at.step(r=CHUNK)
    at.half.reset()
    at.step()
    assert at.server.pledges == {}


# ---------------------------------------------------------------- what proxies for prefill/decode disaggregation say


def beside_a_proxy(**options: Any) -> Bench:
    """An engine that waits for nobody and pledges nothing, unless a proxy says so."""
    params = TransferParams("engine-7")
    return Bench(await_wait_s=5.0, await_producer_s=5.0, transfer_params=params, **options)


def to_compute(**more: object) -> Any:
    """As vLLM's, llm-d's and Dynamo's proxies send it to the engine that computes the prompt."""
    nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    sent = {"do_remote_decode": True, "do_remote_prefill": False, **nothing, **more}
    return request(tokens=TOKENS, kv_transfer_params=sent)


def test_a_producer_is_pledged_and_answers_what_an_unchanged_proxy_passes_on() -> None:
    at = beside_a_proxy()
    asked = to_compute()
    at.admit(asked)
    assert not at.server.may_wait
    at.step(r=TOKENS)
    (keys,) = at.server.pledges.values()
    assert {keys[place : place + 32] for place in range(0, len(keys), 32)} == at.keys_of(asked)
    told = at.half.finished("r", [[3, 5], [2]])
    assert len(at.server.pledges) == 1, "its stores are under way"
    assert told is not None
    assert told == json.loads(json.dumps(told))
    assert (told["do_remote_prefill"], told["do_remote_decode"]) == (True, False)
    assert (told["remote_engine_id"], told["remote_request_id"]) == ("engine-7", "r")
    assert told["remote_block_ids"] == [[3, 5], [2]]
    assert told["remote_num_tokens"] == 3 * CHUNK
    assert told["remote_host"]
    assert told["remote_port"] == 0

    other = beside_a_proxy()
    passed_on = request(tokens=TOKENS, kv_transfer_params=told | {"remote_prefill_cached_tokens": 12})
    assert other.half.match(passed_on, 0) == (None, False)
    assert other.server.may_wait
    assert other.half.match(passed_on, 0) == (None, False), "its producer has not come yet"
    other.hold(passed_on, chunks=3)
    for _ in range(100):
        tokens, _ = other.half.match(passed_on, 0)
        if tokens is not None:
            break
        time.sleep(0.005)
    assert tokens == 3 * CHUNK
    other.half.allocated(passed_on, [other.table], tokens)
    assert other.half.finished("r", [[1]]) is None, "it is the last one to get it"
    assert other.server.pledges == {}


@pytest.mark.parametrize(("tokens", "is_awaited"), [(3 * CHUNK, False), (4 * CHUNK, True), (None, True)])
def test_a_longer_prompt_expects_what_its_producer_has_stored(tokens: int | None, is_awaited: bool) -> None:
    at = beside_a_proxy()
    told = {"do_remote_prefill": True, "remote_num_tokens": tokens}
    longer = request(tokens=TOKENS + CHUNK, kv_transfer_params=told)
    at.hold(longer, chunks=3)
    found, _ = at.half.match(longer, 0)
    assert found == (None if is_awaited else 3 * CHUNK)


@pytest.mark.parametrize("tokens", ["many", True, -1, 3.5])
def test_a_number_of_tokens_that_is_none_counts_as_absent(tokens: object, caplog: pytest.LogCaptureFixture) -> None:
    at = beside_a_proxy()
    for name in ("r", "s"):
        told = {"do_remote_prefill": True, "remote_num_tokens": tokens}
        assert at.half.match(request(name, tokens=TOKENS, kv_transfer_params=told), 0) == (None, False)
        assert at.server.may_wait
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (
        f"remote_num_tokens must be a number of tokens or null; of these types came: ['{type(tokens).__name__}" in said
    )


def test_many_that_wait_cost_an_idle_engine_one_pause_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    at = beside_a_proxy()
    pauses: list[float] = []
    sleep = time.sleep
    waiting = [
        request(str(each), tokens=TOKENS, first=100 * each, kv_transfer_params={"do_remote_prefill": True})
        for each in range(7)
    ]
    with monkeypatch.context() as patched:
        patched.setattr("kvclient.vllm.scheduler.time.sleep", pauses.append)
        for asks in (7, 14):
            assert [at.half.match(each, 0) for each in waiting] == [(None, False)] * 7
            assert (at.server.asked, len(pauses)) == (asks, asks / 7)
            at.step()
            sleep(AWAIT_AGAIN_S)
    assert at.server.waited == 0, "nobody waits for answers of those that wait anyway"


def test_a_producer_that_could_not_be_named_answers_that_nobody_need_wait_for_it() -> None:
    at = beside_a_proxy()
    asked = to_compute()
    asked.prompt_embeds = object()
    asked.prompt_token_ids = None
    at.half.new(asked)
    told = at.half.finished("r")
    assert at.server.asked == 0
    assert told is not None
    assert told["do_remote_prefill"] is False


@pytest.mark.parametrize(("chunks", "held", "is_whole"), [(3, 3, True), (3, 2, False), (2, 2, False)])
def test_a_producer_says_whether_its_whole_prompt_can_be_had(chunks: int, held: int, is_whole: bool) -> None:
    at = beside_a_proxy()
    at.admit(to_compute())
    _, (order,) = at.step(r=chunks * CHUNK)
    at.half.ended([Report(order.job, 0, StoreResult(held, held, 1, "" if held == chunks else "full"), 0.0)])
    told = at.half.finished("r")
    assert told is not None
    assert told["do_remote_prefill"] is is_whole
    other = beside_a_proxy()
    tokens, _ = other.half.match(request(tokens=TOKENS, kv_transfer_params=told), 0)
    assert tokens == (None if is_whole else 0)


def test_the_guard_hands_the_answer_on_and_has_none_after_a_bug() -> None:
    at = beside_a_proxy()
    guarded = GuardedScheduler(at.half, [Group(BLOCK)])
    for name in ("r", "s"):
        guarded.new(request(name, tokens=TOKENS, kv_transfer_params={"do_remote_decode": True}))
    told = guarded.finished("r", [[3]])
    assert told is not None
    assert told["remote_block_ids"] == [[3]]
    guarded.ended([], namespaces=(), is_inert=True)
    assert guarded.finished("s", [[3]]) is None


def test_an_engine_that_stores_nothing_and_one_beside_another_connector_answer_nothing() -> None:
    for at in (beside_a_proxy(stores=False), Bench(await_wait_s=5.0, await_producer_s=5.0)):
        at.admit(to_compute())
        at.step(r=TOKENS)
        assert at.server.pledges == {}
        assert at.half.finished("r") is None


def nested(depth: int) -> list[object]:
    """Lists within lists, of which repr() would raise RecursionError."""
    lists: list[object] = []
    for _ in range(depth):
        lists = [lists]
    return lists


@pytest.mark.parametrize(
    ("sent", "warned"),
    [
        (None, ""),
        ({}, ""),
        ({"do_remote_decode": None, "do_remote_prefill": False, "prompt_token_ids": [1]}, ""),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "exclude each other"),
        ({"do_remote_decode": 1}, "must be true, false or null"),
        ({"do_remote_prefill": "true"}, "must be true, false or null"),
        ({"do_remote_prefill": True, "do_remote_decode": []}, "types came: ['list', 'bool']"),
        ({"do_remote_prefill": nested(100_000)}, "types came: ['NoneType', 'list']"),
        (["do_remote_prefill"], "must be a mapping"),
        ("x" * 5000, "must be a mapping"),
    ],
)
def test_params_that_say_nothing_or_nonsense_count_as_absent_with_one_warning(
    sent: object, warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    at = beside_a_proxy()
    for name in ("r", "s"):
        asked = request(name, tokens=TOKENS, kv_transfer_params=sent)
        at.admit(asked)
        assert not at.server.may_wait
        at.step(**{name: CHUNK})
        assert at.half.finished(name) is None
    assert at.server.pledges == {}
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [warned in line for line in said] == [True] * bool(warned)
    assert all(len(line) < 400 for line in said)


@pytest.mark.parametrize("more", [{"transfer_id": "t"}, {"remote_port": "nonsense"}, {7: 8}])
def test_keys_that_nobody_reads_change_nothing(more: dict[Any, object]) -> None:
    at = beside_a_proxy()
    asked = to_compute()
    asked.kv_transfer_params |= more
    at.admit(asked)
    at.step(r=CHUNK)
    assert len(at.server.pledges) == 1


# ---------------------------------------------------------------- blocks that are filled while another engine computes


def filling(asked: Any) -> tuple[Bench, RetrieveOrder]:
    """An engine whose request has its blocks, while another one computes all but the first chunk."""
    at = Bench(await_others=True, await_wait_s=5.0, await_tokens_max=10 * TOKENS)
    at.hold(asked, chunks=1)
    at.server.awaited = 2
    assert at.admit(asked) == 3 * CHUNK
    (order,), stores = at.step()
    assert stores == ()
    return at, order


def test_a_request_gets_its_blocks_while_another_engine_computes() -> None:
    at, order = filling(request(tokens=TOKENS))
    assert (order.end_tokens, order.lease.chunks, order.lease.awaited) == (3 * CHUNK, 1, 2)
    assert 4.0 < order.wait_s <= 5.0
    at.half.ended([Report(order.job, 0, RetrieveResult(False, 0, "not-coming", 2), 1.0)])
    assert at.server.released == [order.lease.number]
    _, (rest,) = at.step(r=TOKENS)
    assert (rest.first_chunk, rest.chunks) == (2, 1), "the server has what came"


def test_an_aborted_request_gives_its_lease_back_though_its_retrieve_goes_on() -> None:
    at, order = filling(request(tokens=TOKENS))
    at.half.finished("r")
    assert at.half.busy()
    at.step()
    assert at.server.released == [order.lease.number]
