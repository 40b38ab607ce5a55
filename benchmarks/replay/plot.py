"""A replay over time as an SVG drawing: the token hit rate and the estimated time to first token of each arm."""

from collections.abc import Callable

from benchmarks.replay.result import ReplayResult, Window
from kvserver.sizing import chart

PANEL_HEIGHT = 210


def draw(result: ReplayResult) -> str:
    """Draws all arms; at least one is needed. They share the horizontal axis, because they send the same requests."""
    first = result.arms[0]
    hours = chart.ticks(max((window.at_s for window in first.series), default=0.0) / 3600 or 1.0)

    def line(name: str, windows: list[Window], value: Callable[[Window], float]) -> chart.Line:
        # They share the times of the first arm: an arm that ended early has other windows of the same requests.
        return chart.Line(name, [(at.at_s / 3600, value(w)) for at, w in zip(first.series, windows, strict=False)])

    hit_rates = [
        line("HBM only", first.series, lambda w: _percent(w.sources.hbm_tokens, w.sources.prompt_tokens)),
        *(
            line(arm.name, arm.series, lambda w: _percent(w.sources.hit_tokens, w.sources.prompt_tokens))
            for arm in result.arms
        ),
    ]
    times = [
        line("HBM only", first.series, lambda w: w.ttft_hbm_only_p95_s),
        *(line(arm.name, arm.series, lambda w: w.ttft_p95_s) for arm in result.arms),
    ]
    longest_s = chart.round_up(max((y for each in times for _, y in each.points), default=0.0))
    panels = [
        chart.Panel("token hit rate, %", hit_rates, hours, chart.ticks(100.0), PANEL_HEIGHT),
        chart.Panel(
            "estimated time to first token with waiting, p95 of a window, s",
            times,
            hours,
            chart.ticks(longest_s),
            PANEL_HEIGHT,
        ),
    ]
    title = f"{result.trace}: {first.requests} requests, {result.users} users, {result.workers} workers"
    return chart.draw(title, panels, "hours on the clock of the recorded traffic")


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
