"""The result of a replay: sums over outcomes, one ArmResult per server configuration, and what was wrong."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvserver.replay.cost import CostModel
from kvserver.replay.options import ReplayOptions
from kvserver.replay.outcome import Outcome


class Quantiles(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p95: float
    p99: float


class Job(NamedTuple):
    began_ns: int
    ended_ns: int
    bytes: int


class Traffic(msgspec.Struct, frozen=True):
    """Jobs of one kind that moved bytes, from the call to its reply."""

    jobs: int
    bytes: int
    gb_per_s: float
    """Bytes over the time in which at least one of them, of any worker, was under way."""
    ms: "Quantiles"
    """How long one takes."""


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    requests: int
    prompt_tokens: int
    hbm_tokens: int
    retrieved_tokens: int
    computed_tokens: int
    """hbm + retrieved + computed = prompt, exactly."""
    foreign_tokens: int
    """Of retrieved_tokens: at least so many were stored by another worker."""
    retrieve: Traffic
    store: Traffic
    lookup_us: Quantiles
    ttft_s: Quantiles
    """Estimated (cost.py), with the server."""
    ttft_hbm_only_s: Quantiles
    """Estimated for the same requests and the same HBM contents, without a server."""
    lookups_unserved: dict[str, int]
    """Counts by reason. Each is a miss."""
    retrieves_failed: dict[str, int]
    stores_cut_short: dict[str, int]
    compared_bytes: int
    wrong_bytes: int
    """Of retrieved and of spot-checked bytes."""
    spot_bytes: int
    hbm_evictions: int
    server: dict[str, int | float | str]
    """What the server counted, by the names of its status document."""
    wall_s: float


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    trace: str
    seed: int
    workers: int
    users: int
    token_bytes: int
    """Real bytes that stand for one token in this run."""
    cost_model: str
    arms: list[ArmResult]
    problems: list[str]
    """Why the replay does not count as passed; empty when it does."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1


def sum_up(
    name: str,
    outcomes: Sequence[Outcome],
    options: ReplayOptions,
    *,
    hbm_evictions: int,
    server: dict[str, int | float | str],
    wall_s: float,
) -> ArmResult:
    cost = CostModel(options.model_token_bytes, options.link_bytes_per_s)
    retrieves = [o for o in outcomes if o.retrieve_asked_bytes and not o.retrieve_problem]
    stores = [o for o in outcomes if o.store_chunks_asked]
    for o in outcomes:
        assert o.hbm_tokens + o.retrieved_tokens + o.computed_tokens == o.prompt_tokens
    return ArmResult(
        name=name,
        requests=len(outcomes),
        prompt_tokens=sum(o.prompt_tokens for o in outcomes),
        hbm_tokens=sum(o.hbm_tokens for o in outcomes),
        retrieved_tokens=sum(o.retrieved_tokens for o in outcomes),
        computed_tokens=sum(o.computed_tokens for o in outcomes),
        foreign_tokens=sum(o.foreign_tokens for o in outcomes),
        retrieve=_traffic([Job(o.retrieve_began_ns, o.retrieve_ended_ns, o.retrieve_asked_bytes) for o in retrieves]),
        store=_traffic([Job(o.store_began_ns, o.store_ended_ns, o.store_bytes) for o in stores if o.store_bytes]),
        lookup_us=quantiles([o.lookup_ns / 1e3 for o in outcomes if o.lookup_ns]),
        ttft_s=quantiles(
            [
                cost.ttft_s(
                    prompt_tokens=o.prompt_tokens,
                    hbm_tokens=o.hbm_tokens,
                    retrieved_tokens=o.retrieved_tokens,
                    lookup_s=o.lookup_ns / 1e9,
                )
                for o in outcomes
            ]
        ),
        ttft_hbm_only_s=quantiles(
            [
                cost.ttft_s(prompt_tokens=o.prompt_tokens, hbm_tokens=o.hbm_tokens, retrieved_tokens=0, lookup_s=0.0)
                for o in outcomes
            ]
        ),
        lookups_unserved=dict(Counter(o.lookup_problem for o in outcomes if o.lookup_problem)),
        retrieves_failed=dict(Counter(o.retrieve_problem for o in outcomes if o.retrieve_problem)),
        stores_cut_short=dict(Counter(o.store_why for o in stores if o.store_chunks_held < o.store_chunks_asked)),
        compared_bytes=sum(o.compared_bytes for o in outcomes),
        wrong_bytes=sum(o.wrong_bytes + o.spot_wrong_bytes for o in outcomes),
        spot_bytes=sum(o.spot_bytes for o in outcomes),
        hbm_evictions=hbm_evictions,
        server=server,
        wall_s=wall_s,
    )


def byte_problems(arm: ArmResult) -> list[str]:
    """A run that moved nothing or compared nothing has shown nothing, so it has not passed."""
    problems = []
    if arm.wrong_bytes:
        problems.append(f"{arm.name}: {arm.wrong_bytes} wrong bytes")
    if arm.retrieved_tokens == 0:
        problems.append(f"{arm.name}: nothing was retrieved")
    if arm.compared_bytes != arm.retrieve.bytes or arm.compared_bytes == 0:
        problems.append(f"{arm.name}: {arm.compared_bytes} bytes compared of {arm.retrieve.bytes} retrieved")
    return problems


def quantiles(values: Sequence[float]) -> Quantiles:
    """Nearest rank. All 0 when there are no values."""
    if not values:
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    ranked = sorted(values)
    p50, p95, p99 = (ranked[-(-len(ranked) * percent // 100) - 1] for percent in (50, 95, 99))
    return Quantiles(sum(ranked) / len(ranked), p50, p95, p99)


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
