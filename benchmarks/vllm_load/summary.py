"""Figures of one round of one arm."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.vllm_load.counters import LOADS_FAILED, Counters, hits
from benchmarks.vllm_load.crowd import Outcome

FILLER = "filler"
"""Kind of requests that only evict others: excluded from all figures but the errors."""
QUANTILES = (50, 90, 99)
QUANTILES_OF_FIRST_TOKENS = (50, 90, 95, 99)
QUANTILES_OF_PACES = (50, 10, 1)
"""Quantiles of rates: the worst are at the low end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for a good answer: time to first token, and mean gap of the later tokens."""

    ttft_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """The outcomes of one workload at one arm."""

    arm: str
    number: int
    seed: int
    outcomes: Sequence[Outcome]
    counted: Counters
    """Counts of the engine and the server during the round."""


class Figure(NamedTuple):
    value: float
    unit: str


def figures(of: Round, limits: Limits) -> dict[str, Figure]:
    """Figures by name, in display order. Unknown ones are left out."""
    told: dict[str, Figure] = {}
    asked = [outcome for outcome in of.outcomes if outcome.ask.kind != FILLER]
    answered, ttfts_ms = pooled([of])
    kinds = list(dict.fromkeys(outcome.ask.kind for outcome in sorted(asked, key=lambda outcome: outcome.began_s)))
    if len(kinds) > 1:
        for kind in kinds:
            same = [outcome for outcome in answered if outcome.ask.kind == kind]
            told |= _quantiles(f"ttft_{kind.replace(' ', '_')}", _ttfts_ms(same))
    told |= _quantiles("ttft", ttfts_ms, QUANTILES_OF_FIRST_TOKENS)
    if ttfts_ms:
        told["ttft_max"] = Figure(max(ttfts_ms), "ms")
    told |= _quantiles("gap", [1e3 * gap_s for outcome in answered for gap_s in outcome.reply.gaps_s])
    told |= _quantiles("tpot", [1e3 * gap_s for gap_s in _mean_gaps_s(answered)])
    told |= _paces("output_pace", [1 / gap_s for gap_s in _mean_gaps_s(answered) if gap_s])
    told |= _paces("input_pace", _input_paces(answered))
    told |= rates(of)
    told["requests"] = Figure(len(asked), "")
    told["errors"] = Figure(sum(bool(outcome.reply.problem) for outcome in of.outcomes), "")
    if LOADS_FAILED in of.counted:
        told["loads_failed"] = Figure(of.counted[LOADS_FAILED], "")
    told["other_length"] = Figure(len(of_other_length(of.outcomes)), "")
    if asked:
        told["good"] = Figure(100 * sum(_is_good(outcome, limits) for outcome in asked) / len(asked), "%")
    return told | _hits(of.outcomes, of.counted)


def of_other_length(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Answers with more or fewer tokens than were asked for: then the arms did not do the same work."""
    return [each for each in outcomes if not each.reply.problem and each.reply.output_tokens != each.ask.output_tokens]


def quantile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _quantiles(name: str, values: Sequence[float], percents: Sequence[int] = QUANTILES) -> dict[str, Figure]:
    """Quantiles in milliseconds."""
    if not values:
        return {}
    return {f"{name}_p{percent}": Figure(quantile(values, percent), "ms") for percent in percents}


def _ttfts_ms(outcomes: Iterable[Outcome]) -> list[float]:
    return [1e3 * outcome.reply.ttft_s for outcome in outcomes if outcome.reply.ttft_s is not None]


def _paces(name: str, values: Sequence[float]) -> dict[str, Figure]:
    """Quantiles in tokens per second: p10 is the rate that nine of ten exceed."""
    if not values:
        return {}
    return {f"{name}_p{percent}": Figure(quantile(values, percent), "tok/s") for percent in QUANTILES_OF_PACES}


def _mean_gaps_s(outcomes: Iterable[Outcome]) -> list[float]:
    """Mean gap of each answer with several tokens: first to last token, divided by the tokens after the first."""
    return [statistics.fmean(outcome.reply.gaps_s) for outcome in outcomes if outcome.reply.gaps_s]


def _input_paces(outcomes: Iterable[Outcome]) -> list[float]:
    replies = [outcome.reply for outcome in outcomes]
    return [reply.prompt_tokens / reply.ttft_s for reply in replies if reply.prompt_tokens and reply.ttft_s]


def rates(of: Round) -> dict[str, Figure]:
    """Rates over the time from the first start to the last end."""
    answered, _ = pooled([of])
    if not answered:
        return {}
    began_s = min(outcome.began_s for outcome in answered)
    seconds = max(outcome.began_s + outcome.reply.total_s for outcome in answered) - began_s
    if seconds <= 0:
        return {}
    return {
        "request_rate": Figure(len(answered) / seconds, "1/s"),
        "input_rate": Figure(sum(outcome.reply.prompt_tokens for outcome in answered) / seconds, "tok/s"),
        "output_rate": Figure(sum(outcome.reply.output_tokens for outcome in answered) / seconds, "tok/s"),
    }


def pooled(rounds: Sequence[Round]) -> tuple[list[Outcome], list[float]]:
    """The requests of all rounds that were answered, without fillers, and their times to the first token in ms."""
    answered = [
        outcome
        for each in rounds
        for outcome in each.outcomes
        if outcome.ask.kind != FILLER and not outcome.reply.problem
    ]
    return answered, _ttfts_ms(answered)


def _is_good(outcome: Outcome, limits: Limits) -> bool:
    reply = outcome.reply
    if reply.problem or reply.ttft_s is None or reply.ttft_s > limits.ttft_s:
        return False
    return not reply.gaps_s or statistics.fmean(reply.gaps_s) <= limits.gap_s


def _hits(outcomes: Sequence[Outcome], counted: Mapping[str, float]) -> dict[str, Figure]:
    """Hit rates over all requests, including fillers, because the counters count all."""
    told = hits(counted)
    shares = {"hit_own": told.own, "hit_external": told.external, "brought": told.brought, "hit_server": told.server}
    shares["cached"] = cached_share(outcomes)
    return {name: Figure(100 * share, "%") for name, share in shares.items() if share is not None}


def cached_share(outcomes: Iterable[Outcome]) -> float | None:
    """Share of the prompts' tokens that were not computed, as the answers say. None if none says so."""
    known = [outcome.reply for outcome in outcomes if outcome.reply.cached_tokens is not None]
    prompt_tokens = sum(reply.prompt_tokens for reply in known)
    return sum(reply.cached_tokens or 0 for reply in known) / prompt_tokens if prompt_tokens else None
