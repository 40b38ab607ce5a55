"""Sums, quantiles, the cost model and the verdict: a replay's figures must follow from its outcomes."""

import json

import msgspec
import pytest

from benchmarks.replay.cost import CostModel
from benchmarks.replay.options import ReplayOptions
from benchmarks.replay.report import render, render_json
from benchmarks.replay.result import DiskUse, ReplayResult, byte_problems
from benchmarks.replay.seen import Seen, joined
from benchmarks.replay.summing import sum_up
from kvserver.sizing.outcome import Outcome
from kvserver.sizing.workload import Prompt

OPTIONS = ReplayOptions(block_tokens=64, regions=1, page_bytes=64)  # a token is a byte
PROMPTS = [
    Prompt(index=index, at_s=10.0 * index, conversation=0, worker=index % 2, tokens=1000, blocks=[], after=())
    for index in range(4)
]
DISK = DiskUse(
    total_bytes=8000,
    used_bytes=2000,
    written_bytes=450,
    read_bytes=640,
    process_written_bytes=900,
    evictions=5,
    recovered=0,
    refused={"late": 11, "budget": 0},
    faults={"io": 0},
)
MEASURED = CostModel(model_token_bytes=1, link_bytes_per_s=1.0)
"""The model for which the constants were measured."""
HIT = Outcome(
    index=0,
    worker=0,
    prompt_tokens=1000,
    hbm_tokens=256,
    retrieved_tokens=640,
    foreign_tokens=128,
    disk_tokens=320,
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


def _result(*outcomes: Outcome, problems: tuple[str, ...] = (), disk: DiskUse | None = DISK) -> ReplayResult:
    seen = Seen({"evictions": 3}, disk)
    arm = sum_up("+ DRAM", PROMPTS, outcomes, OPTIONS, hbm_evictions=7, seen=seen, restart=None, wall_s=1.5)
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
    assert (arm.disk_tokens, arm.dram_tokens) == (320, 320)
    assert (arm.retrieve.jobs, arm.retrieve.bytes, arm.retrieve.gb_per_s) == (1, 5000, 2.5)
    assert (arm.from_disk.jobs, arm.from_disk.bytes, arm.from_disk.gb_per_s) == (1, 320, 0.16)
    assert arm.disk_bytes_per_s == 0.16e9
    assert (arm.store.jobs, arm.store.bytes, arm.store.gb_per_s) == (1, 900, 3.0)
    assert arm.retrieves_failed == {"timeout": 1}
    assert arm.stores_cut_short == {"full": 1}
    assert arm.lookup_us.p50 == 70.0


def test_gb_per_s_is_over_the_time_in_which_some_job_was_under_way() -> None:
    times = [(100, 300), (200, 400), (250, 260), (900, 1000)]  # 400 ns in all
    jobs = [
        msgspec.structs.replace(HIT, index=index, retrieve_began_ns=began, retrieve_ended_ns=ended)
        for index, (began, ended) in enumerate(times)
    ]
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
    assert last.startswith(
        "demo: ok, wrong bytes 0, 2 requests, token hit rate 68.9 % (HBM 19.7 % + DRAM 24.6 % + disk 24.6 %)"
    )


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


def test_two_lives_of_a_server_are_added_and_what_it_holds_is_the_last_ones() -> None:
    names = ("evictions", "evicted bytes", "chunks stored", "stores short", "leases expired", "mover restarts")
    life = Seen(dict.fromkeys(names, 3) | {"chunks held": 7}, DISK)
    both = joined(life, Seen({**life.server, "chunks held": 2}, msgspec.structs.replace(DISK, used_bytes=100)))
    assert both.server == dict.fromkeys(names, 6) | {"chunks held": 2}
    assert both.disk is not None
    assert (both.disk.written_bytes, both.disk.used_bytes, both.disk.refused["late"]) == (900, 100, 22)
    assert (both.disk.evictions, both.disk.read_bytes, both.disk.process_written_bytes) == (10, 1280, 1800)
    assert joined(Seen(), life) is life


@pytest.mark.parametrize(("tokens", "seconds"), [(8192, 0.209), (32768, 1.18), (65536, 3.26)])
def test_cost_model_is_within_3_percent_of_the_known_prefills(tokens: int, seconds: float) -> None:
    assert MEASURED.prefill_s(tokens, 0) == pytest.approx(seconds, rel=0.03)


def test_prefill_in_two_parts_costs_what_one_costs() -> None:
    whole = MEASURED.prefill_s(5100, 100)
    parts = MEASURED.prefill_s(1300, 100) + MEASURED.prefill_s(5100, 1300)
    assert parts - MEASURED.prefill_s(5100, 5100) == pytest.approx(whole)


def test_a_slower_model_takes_longer_for_what_it_computes_and_not_for_a_full_hit() -> None:
    slower = CostModel(model_token_bytes=1, link_bytes_per_s=1.0, prefill_times=3.0)
    base = slower.prefill_s(900, 900)
    assert base == MEASURED.prefill_s(900, 900)
    assert slower.prefill_s(900, 100) - base == pytest.approx(3 * (MEASURED.prefill_s(900, 100) - base))


def test_retrieved_tokens_cost_their_bytes_over_the_link_those_on_disk_before_that_and_the_lookup() -> None:
    cost = CostModel(model_token_bytes=1000, link_bytes_per_s=1e6, disk_bytes_per_s=1e5)
    request = Outcome(index=0, worker=0, prompt_tokens=800, hbm_tokens=300, retrieved_tokens=500, lookup_ns=250_000_000)
    full = cost.prefill_s(800, 800)
    assert cost.ttft_s(request) - full == pytest.approx(0.5 + 0.25)
    from_disk = msgspec.structs.replace(request, disk_tokens=40)
    assert cost.ttft_s(from_disk) - full == pytest.approx(0.5 + 0.25 + 0.4)
    assert cost.hbm_only_s(from_disk) == cost.prefill_s(800, 300)
