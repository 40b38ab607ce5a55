"""Sums the outcomes of an arm's requests: totals, rates, estimated times, and all of it over time."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.replay.cost import CostModel
from benchmarks.replay.options import ReplayOptions
from benchmarks.replay.queueing import Answered, Work, answer_all
from benchmarks.replay.result import ArmResult, Latency, Quantiles, Restart, Sources, Traffic, Window
from benchmarks.replay.seen import Seen
from kvserver.sizing.outcome import Outcome
from kvserver.sizing.workload import Prompt

WINDOWS = 30
"""Points of the time series."""


class Job(NamedTuple):
    began_ns: int
    ended_ns: int
    bytes: int


class Estimate(NamedTuple):
    alone_s: list[float]
    answered: dict[int, Answered]


def sum_up(
    name: str,
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    options: ReplayOptions,
    *,
    hbm_evictions: int,
    seen: Seen,
    restart: Restart | None,
    wall_s: float,
) -> ArmResult:
    """The arm's result. outcomes: in the order in which they ended."""
    for o in outcomes:
        assert o.hbm_tokens + o.retrieved_tokens + o.computed_tokens == o.prompt_tokens
        assert o.disk_tokens <= o.retrieved_tokens
    retrieves = [o for o in outcomes if o.retrieve_asked_bytes and not o.retrieve_problem]
    stores = [o for o in outcomes if o.store_chunks_asked]
    token_bytes = options.block_bytes // options.block_tokens
    from_disk = _traffic([_retrieve_job(o, o.disk_tokens * token_bytes) for o in retrieves if o.disk_tokens])
    cost = cost_model(options, from_disk)
    served = Estimate([cost.ttft_s(o) for o in outcomes], _answered(prompts, outcomes, cost))
    hbm_only = Estimate([cost.hbm_only_s(o) for o in outcomes], _answered_by_hbm_only(prompts, outcomes, cost))
    return ArmResult(
        name=name,
        requests=len(outcomes),
        prompt_tokens=sum(o.prompt_tokens for o in outcomes),
        hbm_tokens=sum(o.hbm_tokens for o in outcomes),
        retrieved_tokens=sum(o.retrieved_tokens for o in outcomes),
        computed_tokens=sum(o.computed_tokens for o in outcomes),
        foreign_tokens=sum(o.foreign_tokens for o in outcomes),
        disk_tokens=sum(o.disk_tokens for o in outcomes),
        retrieve=_traffic([_retrieve_job(o, o.retrieve_asked_bytes) for o in retrieves]),
        store=_traffic([Job(o.store_began_ns, o.store_ended_ns, o.store_bytes) for o in stores if o.store_bytes]),
        from_disk=from_disk,
        lookup_us=quantiles([o.lookup_ns / 1e3 for o in outcomes if o.lookup_ns]),
        ttft=_latency(served),
        ttft_hbm_only=_latency(hbm_only),
        disk_bytes_per_s=cost.disk_bytes_per_s,
        lookups_unserved=dict(Counter(o.lookup_problem for o in outcomes if o.lookup_problem)),
        retrieves_failed=dict(Counter(o.retrieve_problem for o in outcomes if o.retrieve_problem)),
        stores_cut_short=dict(Counter(o.store_why for o in stores if o.store_chunks_held < o.store_chunks_asked)),
        compared_bytes=sum(o.compared_bytes for o in outcomes),
        wrong_bytes=sum(o.wrong_bytes + o.spot_wrong_bytes for o in outcomes),
        spot_bytes=sum(o.spot_bytes for o in outcomes),
        hbm_evictions=hbm_evictions,
        server=seen.server,
        disk=seen.disk,
        restart=restart,
        series=_series(prompts, outcomes, served.answered, hbm_only.answered),
        wall_s=wall_s,
    )


def sources_of(outcomes: Sequence[Outcome]) -> Sources:
    return Sources(
        prompt_tokens=sum(o.prompt_tokens for o in outcomes),
        hbm_tokens=sum(o.hbm_tokens for o in outcomes),
        dram_tokens=sum(o.retrieved_tokens - o.disk_tokens for o in outcomes),
        disk_tokens=sum(o.disk_tokens for o in outcomes),
    )


def cost_model(options: ReplayOptions, from_disk: Traffic | None = None) -> CostModel:
    """The cost model. The disk's rate is the option, or else the one measured in this run."""
    measured = from_disk.gb_per_s * 1e9 if from_disk is not None else 0.0
    return CostModel(
        model_token_bytes=options.model_token_bytes,
        link_bytes_per_s=options.link_bytes_per_s,
        disk_bytes_per_s=options.model_disk_bytes_per_s or measured,
        prefill_times=options.prefill_times,
    )


def quantiles(values: Sequence[float]) -> Quantiles:
    """Quantiles by nearest rank; all 0 if there are no values."""
    if not values:
        return Quantiles(0.0, 0.0, 0.0, 0.0, 0.0)
    ranked = sorted(values)
    p50, p95, p99 = (ranked[-(-len(ranked) * percent // 100) - 1] for percent in (50, 95, 99))
    return Quantiles(sum(ranked) / len(ranked), p50, p95, p99, ranked[-1])


# ---------------------------------------------------------------- traffic


def _retrieve_job(outcome: Outcome, moved_bytes: int) -> Job:
    return Job(outcome.retrieve_began_ns, outcome.retrieve_ended_ns, moved_bytes)


def _traffic(jobs: Sequence[Job]) -> Traffic:
    moved_bytes = sum(job.bytes for job in jobs)
    busy_ns = _covered_ns(jobs)
    return Traffic(
        jobs=len(jobs),
        bytes=moved_bytes,
        gb_per_s=moved_bytes / busy_ns if busy_ns else 0.0,  # bytes per nanosecond are GB per second
        ms=quantiles([(job.ended_ns - job.began_ns) / 1e6 for job in jobs]),
    )


def _covered_ns(jobs: Sequence[Job]) -> int:
    """The length of the union of the jobs' times."""
    covered = until = 0
    for job in sorted(jobs):
        covered += max(0, job.ended_ns - max(until, job.began_ns))
        until = max(until, job.ended_ns)
    return covered


# ---------------------------------------------------------------- estimated times


def _answered(prompts: Sequence[Prompt], outcomes: Sequence[Outcome], cost: CostModel) -> dict[int, Answered]:
    return answer_all(prompts, {o.index: Work(cost.disk_s(o), cost.engine_s(o)) for o in outcomes})


def _answered_by_hbm_only(
    prompts: Sequence[Prompt], outcomes: Sequence[Outcome], cost: CostModel
) -> dict[int, Answered]:
    return answer_all(prompts, {o.index: Work(0.0, cost.hbm_only_s(o)) for o in outcomes})


def _latency(estimate: Estimate) -> Latency:
    answered = estimate.answered.values()
    last_s = max((one.first_token_s for one in answered), default=0.0)
    return Latency(
        alone=quantiles(estimate.alone_s),
        queued=quantiles([one.ttft_s for one in answered]),
        requests_per_hour=len(answered) / last_s * 3600 if last_s else 0.0,
    )


def _series(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    served: dict[int, Answered],
    hbm_only: dict[int, Answered],
) -> list[Window]:
    """Windows of equally many requests, in the order of the workload."""
    at_s = {prompt.index: prompt.at_s for prompt in prompts}
    ordered = sorted(outcomes, key=lambda o: o.index)
    windows = []
    for number in range(WINDOWS):
        some = ordered[len(ordered) * number // WINDOWS : len(ordered) * (number + 1) // WINDOWS]
        if some:
            windows.append(
                Window(
                    at_s=at_s[some[len(some) // 2].index],
                    sources=sources_of(some),
                    ttft_p95_s=quantiles([served[o.index].ttft_s for o in some]).p95,
                    ttft_hbm_only_p95_s=quantiles([hbm_only[o.index].ttft_s for o in some]).p95,
                )
            )
    return windows
