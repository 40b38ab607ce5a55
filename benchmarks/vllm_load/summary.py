"""Figures of one round of one arm."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.vllm_load.counters import LOADS_FAILED, Counters, hits
from benchmarks.vllm_load.crowd import Outcome

FILLER = "filler"
"""The kind of requests that only push others out: in no figure but the errors."""
QUANTILES = (50, 90, 99)
QUANTILES_OF_PACES = (50, 10, 1)
"""Where more is better, the worst are at the other end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A good answer has its first token in time, and those behind it fast enough on average."""

    ttft_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one workload at one arm."""

    arm: str
    number: int
    seed: int
    outcomes: Sequence[Outcome]
    counted: Counters
    """By the engine and the server meanwhile."""


class Figure(NamedTuple):
    value: float
    unit: str


def figures(of: Round, limits: Limits) -> dict[str, Figure]:
    """By name, in the order in which they are shown. What cannot be said is left out."""
    told: dict[str, Figure] = {}
    asked = [outcome for outcome in of.outcomes if outcome.ask.kind != FILLER]
    answered = [outcome for outcome in asked if not outcome.reply.problem]
    kinds = list(dict.fromkeys(outcome.ask.kind for outcome in sorted(asked, key=lambda outcome: outcome.began_s)))
    if len(kinds) > 1:
        for kind in kinds:
            same = [outcome for outcome in answered if outcome.ask.kind == kind]
            told |= _quantiles(f"ttft_{kind.replace(' ', '_')}", _ttfts_ms(same))
    told |= _quantiles("ttft", _ttfts_ms(answered))
    told |= _quantiles("gap", [1e3 * gap_s for outcome in answered for gap_s in outcome.reply.gaps_s])
    told |= _quantiles("tpot", [1e3 * gap_s for gap_s in _mean_gaps_s(answered)])
    told |= _paces("output_pace", [1 / gap_s for gap_s in _mean_gaps_s(answered) if gap_s])
    told |= _paces("input_pace", _input_paces(answered))
    told |= _rates(answered)
    told["requests"] = Figure(len(asked), "")
    told["errors"] = Figure(sum(bool(outcome.reply.problem) for outcome in of.outcomes), "")
    if LOADS_FAILED in of.counted:
        told["loads_failed"] = Figure(of.counted[LOADS_FAILED], "")
    told["other_length"] = Figure(len(of_other_length(of.outcomes)), "")
    if asked:
        told["good"] = Figure(100 * sum(_is_good(outcome, limits) for outcome in asked) / len(asked), "%")
    return told | _hits(of.outcomes, of.counted)


def of_other_length(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Answers with more or fewer tokens than were asked for: then arms did not do the same work."""
    return [each for each in outcomes if not each.reply.problem and each.reply.output_tokens != each.ask.output_tokens]


def quantile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _quantiles(name: str, values: Sequence[float]) -> dict[str, Figure]:
    """In milliseconds."""
    if not values:
        return {}
    return {f"{name}_p{percent}": Figure(quantile(values, percent), "ms") for percent in QUANTILES}


def _ttfts_ms(outcomes: Iterable[Outcome]) -> list[float]:
    return [1e3 * outcome.reply.ttft_s for outcome in outcomes if outcome.reply.ttft_s is not None]


def _paces(name: str, values: Sequence[float]) -> dict[str, Figure]:
    """So many tokens a second; all but so many percent had more."""
    if not values:
        return {}
    return {f"{name}_p{percent}": Figure(quantile(values, percent), "tok/s") for percent in QUANTILES_OF_PACES}


def _mean_gaps_s(outcomes: Iterable[Outcome]) -> list[float]:
    """Of each answer of several tokens: from its first token to its last, divided by the tokens behind the first."""
    return [statistics.fmean(outcome.reply.gaps_s) for outcome in outcomes if outcome.reply.gaps_s]


def _input_paces(outcomes: Iterable[Outcome]) -> list[float]:
    replies = [outcome.reply for outcome in outcomes]
    return [reply.prompt_tokens / reply.ttft_s for reply in replies if reply.prompt_tokens and reply.ttft_s]


def _rates(answered: Sequence[Outcome]) -> dict[str, Figure]:
    """Over the time from the first beginning to the last end."""
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


def _is_good(outcome: Outcome, limits: Limits) -> bool:
    reply = outcome.reply
    if reply.problem or reply.ttft_s is None or reply.ttft_s > limits.ttft_s:
        return False
    return not reply.gaps_s or statistics.fmean(reply.gaps_s) <= limits.gap_s


def _hits(outcomes: Sequence[Outcome], counted: Mapping[str, float]) -> dict[str, Figure]:
    """Of all requests, fillers included: that is what the counters count."""
    told = hits(counted)
    shares = {"hit_own": told.own, "hit_external": told.external, "brought": told.brought, "hit_server": told.server}
    known = [outcome.reply for outcome in outcomes if outcome.reply.cached_tokens is not None]
    if prompt_tokens := sum(reply.prompt_tokens for reply in known):
        shares["cached"] = sum(reply.cached_tokens or 0 for reply in known) / prompt_tokens
    return {name: Figure(100 * share, "%") for name, share in shares.items() if share is not None}
