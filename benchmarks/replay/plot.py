"""A replay over time as an SVG drawing: the token hit rate and the estimated time to first token of each arm."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.replay.result import ReplayResult
from kvserver.sizing.plot import LEFT, RIGHT, TOP, WIDTH, grid_line, legend, stroke, svg, text

PANEL_HEIGHT, GAP, BOTTOM = 210, 48, 52
GRID_LINES = 5
ROUND_STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)


class Line(NamedTuple):
    name: str
    values: list[float]


class Panel(NamedTuple):
    title: str
    lines: list[Line]
    top: float


def draw(result: ReplayResult) -> str:
    """Draws all arms; at least one is needed. They share the horizontal axis, because they send the same requests."""
    first = result.arms[0]
    hours = [window.at_s / 3600 for window in first.series]
    hit_rates = [Line("HBM only", [_percent(w.sources.hbm_tokens, w.sources.prompt_tokens) for w in first.series])]
    hit_rates += [
        Line(arm.name, [_percent(w.sources.hit_tokens, w.sources.prompt_tokens) for w in arm.series])
        for arm in result.arms
    ]
    times = [Line("HBM only", [w.ttft_hbm_only_p95_s for w in first.series])]
    times += [Line(arm.name, [w.ttft_p95_s for w in arm.series]) for arm in result.arms]
    panels = [
        Panel("token hit rate, %", hit_rates, 100.0),
        Panel("estimated time to first token with waiting, p95 of a window, s", times, _round_up(_largest(times))),
    ]
    height = TOP + len(panels) * PANEL_HEIGHT + (len(panels) - 1) * GAP + BOTTOM
    parts = [
        text(LEFT, 20, f"{result.trace}: {first.requests} requests, {result.users} users, {result.workers} workers"),
        *legend([line.name for line in hit_rates]),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, hours, TOP + number * (PANEL_HEIGHT + GAP))
    parts.append(text(WIDTH / 2, height - 12, "hours on the clock of the recorded traffic", anchor="middle"))
    return svg(height, parts)


def _panel(panel: Panel, hours: Sequence[float], y: float) -> list[str]:
    bottom, last = y + PANEL_HEIGHT, max(hours, default=0.0) or 1.0
    parts = [text(LEFT, y - 6, panel.title)]
    for step in range(GRID_LINES + 1):
        value = panel.top * step / GRID_LINES
        at = bottom - PANEL_HEIGHT * step / GRID_LINES
        parts += grid_line(at, f"{value:g}")
        parts.append(text(_x(last * step / GRID_LINES, last), bottom + 16, f"{last * step / GRID_LINES:.1f}", "middle"))
    for number, line in enumerate(panel.lines):
        points = " ".join(
            f"{_x(hour, last):.1f},{bottom - PANEL_HEIGHT * min(value, panel.top) / panel.top:.1f}"
            for hour, value in zip(hours, line.values, strict=False)
        )
        parts.append(f'<polyline points="{points}" fill="none" {stroke(number)}/>')
    return parts


def _x(value: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / last


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def _largest(lines: Sequence[Line]) -> float:
    return max((value for line in lines for value in line.values), default=0.0)


def _round_up(value: float) -> float:
    """The value rounded up to a ROUND_STEPS number times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in ROUND_STEPS if step * power >= value)
