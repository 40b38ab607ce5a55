"""A run as a table for people, as rows for programs, and as files: one line per request, and two charts."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.rows import Rows
from benchmarks.vllm_load.rounds import Agreement, differing_from
from benchmarks.vllm_load.summary import (
    FILLER,
    Figure,
    Limits,
    Round,
    cached_share,
    figures,
    pooled,
    quantile,
    rates,
)
from kvserver.sizing import chart

Runs = Mapping[str, Mapping[str, Sequence[Figure]]]
"""Figure name -> arm -> one figure per round, in order."""
Points = list[tuple[float, float]]

MEANING = {
    "ttft": "from sending a request to its first token, ms",
    "gap": "between two tokens of an answer, ms (ITL of vLLM's bench)",
    "tpot": "of each answer, the mean of its gaps, ms",
    "output_pace": "of each answer, tokens a second behind its first (1 / tpot); p10: nine of ten were faster",
    "input_pace": "of each request, tokens of its prompt / seconds to its first token",
    "*_rate": "from the first request's beginning to the last one's end",
    "loads_failed": "what kvserver was to bring back and did not; it was computed",
    "other_length": "answers with more or fewer tokens than were asked for",
    "good": "answers within the limits for first token and mean gap",
    "hit_own": "of all prompts' tokens, in the engine's own prefix cache",
    "hit_external": "of what the engine did not have, promised by its connector",
    "brought": "of all prompts' tokens, brought back by kvserver",
    "hit_server": "of the chunks that the server was asked for, held",
    "cached": "of all prompts' tokens, not computed, as each answer says",
}
ARM_COLUMNS = (
    "all rounds",
    "requests done",
    "first token p50, ms",
    "p95",
    "max",
    "input tokens/s",
    "% not computed",
    "differ from the first",
)


def collect(rounds: Sequence[Round], limits: Limits) -> dict[str, dict[str, list[Figure]]]:
    found: dict[str, dict[str, list[Figure]]] = {}
    for each in sorted(rounds, key=lambda each: each.number):
        for name, figure in figures(each, limits).items():
            found.setdefault(name, {}).setdefault(each.arm, []).append(figure)
    return found


def table(runs: Runs, arms: Sequence[str], agreement: Agreement) -> str:
    """Median of the rounds (smallest - largest), and its share of the first arm's value in the same round."""
    rows = [["", *arms, *(f"{arm} / {arms[0]}" for arm in arms[1:])]]
    for name, by_arm in runs.items():
        cells = [_cell(by_arm.get(arm, [])) for arm in arms]
        rows.append([name, *cells, *(_share(by_arm.get(arm, []), by_arm.get(arms[0], [])) for arm in arms[1:])])
    notes = [f"{name}: {meaning}" for name, meaning in MEANING.items()]
    return "\n".join([_aligned(rows), "", *notes, verdict(agreement)])


def arms(rounds: Sequence[Round], names: Sequence[str]) -> str:
    """A row for each arm, over the requests of all its rounds: those done, times to the first token, pace and hits."""
    rows = [list(ARM_COLUMNS), *(_arm_row(rounds, name, names[0]) for name in names)]
    return _aligned(rows)


def _arm_row(rounds: Sequence[Round], name: str, first: str) -> list[str]:
    own = [each for each in rounds if each.arm == name]
    answered, ttfts_ms = pooled(own)
    times = [quantile(ttfts_ms, 50), quantile(ttfts_ms, 95), max(ttfts_ms)] if ttfts_ms else []
    paces = [figure.value for each in own if (figure := rates(each).get("input_rate"))]
    cached = cached_share(outcome for each in own for outcome in each.outcomes)
    firsts = {each.number: each.outcomes for each in rounds if each.arm == first}
    differing = sum(differing_from(firsts[each.number], each.outcomes) for each in own if each.number in firsts)
    return [
        name,
        str(len(answered)),
        *([_number(ms) for ms in times] or ["-"] * 3),
        _number(statistics.median(paces)) if paces else "-",
        f"{100 * cached:.1f}" if cached is not None else "-",
        str(differing) if name != first else "",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of one width; a line under the first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def verdict(agreement: Agreement) -> str:
    return (
        f"answers compared with others to the same prompt: {agreement.compared}; prompts answered differently: "
        f"{agreement.differing}, of these also when asked alone: {agreement.differing_alone}"
    )


def rows(runs: Runs, workload: str, arms: Sequence[str], agreement: Agreement, printed: Rows) -> None:
    """Prints rows. The first arm is the ceiling of the others: the same machine without a server."""
    for name, by_arm in runs.items():
        for arm, found in by_arm.items():
            values = [figure.value for figure in found]
            others = [figure.value for figure in by_arm.get(arms[0], [])]
            paired = arm != arms[0] and len(others) == len(values) and all(others)
            printed.add(f"{workload}/{arm}/{name}", values, found[0].unit, ceilings=others if paired else ())
    printed.add(f"{workload}/answers_compared", [agreement.compared], "")
    printed.add(f"{workload}/prompts_differing", [agreement.differing], "")
    printed.add(f"{workload}/prompts_differing_alone", [agreement.differing_alone], "")


def files(folder: Path, workload: str, rounds: Sequence[Round]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{workload}.jsonl").open("w") as out:
        for each in rounds:
            for outcome in each.outcomes:
                reply = outcome.reply
                line = {
                    "arm": each.arm,
                    "round": each.number,
                    "seed": each.seed,
                    "request": outcome.ask.name,
                    "kind": outcome.ask.kind,
                    "began_s": outcome.began_s,
                    "users": outcome.users,
                    "ttft_s": reply.ttft_s,
                    "total_s": reply.total_s,
                    "gaps_s": reply.gaps_s,
                    "prompt_tokens": reply.prompt_tokens,
                    "cached_tokens": reply.cached_tokens,
                    "output_tokens": reply.output_tokens,
                    "said": reply.said,
                    "problem": reply.problem,
                }
                out.write(json.dumps(line) + "\n")
    over_time, shares = _points(rounds)
    title = f"{workload}: time to the first token"
    (folder / f"{workload}-over-time.svg").write_text(_chart(title, over_time, x="s", y="s", dots=True))
    (folder / f"{workload}-shares.svg").write_text(_chart(title, shares, x="s", y="% of requests"))


def _chart(title: str, series: Mapping[str, Points], *, x: str, y: str, dots: bool = False) -> str:
    points = [point for each in series.values() for point in each]
    x_last, y_last = (max((point[axis] for point in points), default=0) or 1.0 for axis in (0, 1))
    lines = [chart.Line(*each) for each in series.items()]
    return chart.draw(title, [chart.Panel(y, lines, chart.ticks(x_last), chart.ticks(y_last))], x, dots=dots)


def steps_of_share(values: Sequence[float]) -> Points:
    """Points (value, percent of all values that do not exceed it)."""
    ordered = sorted(values)
    return [(value, 100 * (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


def _points(rounds: Sequence[Round]) -> tuple[dict[str, Points], dict[str, Points]]:
    """Time to first token over time, and its cumulative distribution, for each arm."""
    over_time: dict[str, Points] = {}
    for each in rounds:
        points = over_time.setdefault(each.arm, [])
        for outcome in each.outcomes:
            if outcome.reply.ttft_s is not None and outcome.ask.kind != FILLER:
                points.append((outcome.began_s, outcome.reply.ttft_s))
    shares = {arm: steps_of_share([seconds for _, seconds in points]) for arm, points in over_time.items()}
    return over_time, shares


def _cell(found: Sequence[Figure]) -> str:
    if not found:
        return "-"
    values = [figure.value for figure in found]
    unit = f" {found[0].unit}" if found[0].unit else ""
    return f"{_number(statistics.median(values))}{unit} ({_number(min(values))} - {_number(max(values))})"


def _share(found: Sequence[Figure], others: Sequence[Figure]) -> str:
    if len(found) != len(others) or not found or not all(figure.value for figure in others):
        return ""
    return (
        f"{100 * statistics.median(mine.value / other.value for mine, other in zip(found, others, strict=True)):.1f} %"
    )


def _number(value: float) -> str:
    return (
        f"{value:.0f}"
        if value == int(value) or abs(value) >= 1000
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )
