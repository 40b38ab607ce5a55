"""Sums, quantiles, the cost model and the verdict: what a replay says must follow from its outcomes."""

import json

import msgspec
import pytest

from kvserver.replay.cost import CostModel, prefill_s
from kvserver.replay.options import ReplayOptions
from kvserver.replay.outcome import Outcome
from kvserver.replay.report import render, render_json
from kvserver.replay.result import ReplayResult, byte_problems, quantiles, sum_up

OPTIONS = ReplayOptions()
HIT = Outcome(
    index=0,
    worker=0,
    prompt_tokens=1000,
    hbm_tokens=256,
    retrieved_tokens=640,
    foreign_tokens=128,
    computed_tokens=104,
    lookup_ns=70_000,
    retrieve_asked_bytes=5000,
    retrieve_began_ns=100,
    retrieve_ended_ns=2100,
    compared_bytes=5000,
    spot_bytes=64,
)
MISS = Outcome(
    index=1,
    worker=1,
    prompt_tokens=300,
    computed_tokens=300,
    lookup_ns=90_000,
    retrieve_asked_bytes=77,
    retrieve_began_ns=100,
    retrieve_ended_ns=101,
    retrieve_problem="timeout",
    store_chunks_asked=3,
    store_chunks_held=1,
    store_bytes=900,
    store_began_ns=50,
    store_ended_ns=350,
    store_why="full",
)


def _result(*outcomes: Outcome, problems: tuple[str, ...] = ()) -> ReplayResult:
    arm = sum_up("HBM + DRAM", outcomes, OPTIONS, hbm_evictions=7, server={"evictions": 3}, wall_s=1.5)
    return ReplayResult(
        name="demo",
        trace="t",
        seed=1,
        workers=2,
        users=3,
        token_bytes=1024,
        cost_model="m",
        arms=[arm],
        problems=[*problems, *byte_problems(arm)],
    )


def test_sums_are_those_of_the_outcomes() -> None:
    (arm,) = _result(HIT, MISS).arms
    assert (arm.requests, arm.prompt_tokens) == (2, 1300)
    assert (arm.hbm_tokens, arm.retrieved_tokens, arm.computed_tokens, arm.foreign_tokens) == (256, 640, 404, 128)
    assert (arm.retrieve.jobs, arm.retrieve.bytes, arm.retrieve.gb_per_s) == (1, 5000, 2.5)
    assert (arm.store.jobs, arm.store.bytes, arm.store.gb_per_s) == (1, 900, 3.0)
    assert arm.retrieves_failed == {"timeout": 1}
    assert arm.stores_cut_short == {"full": 1}
    assert arm.lookup_us.p50 == 70.0


def test_gb_per_s_is_over_the_time_in_which_some_job_was_under_way() -> None:
    times = [(100, 300), (200, 400), (250, 260), (900, 1000)]  # 400 ns in all
    jobs = [msgspec.structs.replace(HIT, retrieve_began_ns=began, retrieve_ended_ns=ended) for began, ended in times]
    (arm,) = _result(*jobs).arms
    assert arm.retrieve.gb_per_s == 4 * 5000 / 400
    assert arm.retrieve.ms.p99 == 0.0002


def test_outcome_whose_tokens_do_not_sum_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        _result(msgspec.structs.replace(HIT, computed_tokens=105))


def test_good_run_is_ok_and_says_so_on_its_last_line() -> None:
    result = _result(HIT, MISS)
    assert result.exit_code == 0
    last = render(result).splitlines()[-1]
    assert last.startswith("demo: ok, wrong bytes 0, 2 requests, token hit rate 68.9 % (HBM 19.7 % + server 49.2 %)")


@pytest.mark.parametrize(
    "outcome",
    [
        msgspec.structs.replace(HIT, wrong_bytes=1),
        msgspec.structs.replace(HIT, spot_wrong_bytes=1),
        msgspec.structs.replace(HIT, compared_bytes=0),
        msgspec.structs.replace(HIT, compared_bytes=4999),
        MISS,
    ],
)
def test_wrong_uncompared_or_absent_bytes_fail_the_run(outcome: Outcome) -> None:
    result = _result(outcome)
    assert result.exit_code == 1
    assert render(result).splitlines()[-1].startswith("demo: FAILED")
    assert json.loads(render_json(result))["ok"] is False


def test_a_problem_of_the_run_fails_it() -> None:
    result = _result(HIT, problems=("the server exited with -9",))
    assert result.exit_code == 1
    assert "problem: the server exited with -9" in render(result)


def test_json_holds_every_number_of_the_result() -> None:
    result = _result(HIT, MISS)
    document = json.loads(render_json(result))
    assert document.pop("ok") is True
    assert msgspec.convert(document, ReplayResult) == result


def test_table_tells_where_tokens_came_from() -> None:
    text = render(_result(HIT, MISS))
    for cell in ("256 (19.7 %)", "640 (49.2 %)", "404 (31.1 %)", "1,044 (80.3 %)", "1 (1 timeout)", "server evictions"):
        assert cell in text


def test_quantiles_are_nearest_ranks() -> None:
    some = quantiles([float(v) for v in range(40, 0, -1)])
    assert (some.mean, some.p50, some.p95, some.p99) == (20.5, 20.0, 38.0, 40.0)
    assert quantiles([3.0]).p50 == 3.0
    assert quantiles([]).p99 == 0.0


@pytest.mark.parametrize(("tokens", "seconds"), [(8192, 0.209), (32768, 1.18), (65536, 3.26)])
def test_cost_model_is_within_3_percent_of_the_known_prefills(tokens: int, seconds: float) -> None:
    assert prefill_s(new_tokens=tokens, prefix_tokens=0) == pytest.approx(seconds, rel=0.03)


def test_prefill_in_two_parts_costs_what_one_costs() -> None:
    whole = prefill_s(new_tokens=5000, prefix_tokens=100)
    parts = prefill_s(new_tokens=1200, prefix_tokens=100) + prefill_s(new_tokens=3800, prefix_tokens=1300)
    assert parts - prefill_s(new_tokens=0, prefix_tokens=0) == pytest.approx(whole)


def test_retrieved_tokens_cost_their_bytes_over_the_link_and_the_lookup() -> None:
    cost = CostModel(model_token_bytes=1000, link_bytes_per_s=1e6)
    hit = cost.ttft_s(prompt_tokens=800, hbm_tokens=300, retrieved_tokens=500, lookup_s=0.25)
    full = cost.ttft_s(prompt_tokens=800, hbm_tokens=800, retrieved_tokens=0, lookup_s=0.0)
    assert hit - full == pytest.approx(0.5 + 0.25)
