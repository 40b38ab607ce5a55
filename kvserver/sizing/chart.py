"""Charts as SVG, written by hand: lines and dots do not justify a plotting library."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH = 840
LEFT, RIGHT, TOP, GAP, BOTTOM = 64, 24, 62, 48, 52
COLOURS = ("#888888", "#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b")
DASHES = ("2 3", "7 3", "", "9 3 2 3", "4 2", "1 2")
"""They tell lines apart in grey, too."""
TICKS = 5
ROUND_STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)

Ticks = Sequence[tuple[float, str]]
"""Places on an axis with what is written there. The axis goes from the first one to the last."""


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One drawing area. All panels of a chart have the same lines."""

    title: str
    lines: Sequence[Line]
    x: Ticks
    y: Ticks
    height: int = 258


def draw(title: str, panels: Sequence[Panel], x_title: str, *, dots: bool = False) -> str:
    """A chart with its panels below each other. dots: points are not connected."""
    height = TOP + sum(panel.height + GAP for panel in panels) - GAP + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 20, title),
        *_legend([line.name for line in panels[0].lines]),
    ]
    top = TOP
    for panel in panels:
        parts += _panel(panel, top, dots=dots)
        top += panel.height + GAP
    return "\n".join([*parts, _text(WIDTH / 2, height - 12, x_title, "middle"), "</svg>", ""])


def ticks(last: float) -> list[tuple[float, str]]:
    """Ticks at equal distances from 0 on."""
    return [(last * step / TICKS, f"{last * step / TICKS:.3g}") for step in range(TICKS + 1)]


def round_up(value: float) -> float:
    """The value rounded up to a ROUND_STEPS number times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in ROUND_STEPS if step * power >= value)


def _panel(panel: Panel, top: float, *, dots: bool) -> list[str]:
    bottom = top + panel.height

    def across(x: float) -> float:
        (first, _), (last, _) = panel.x[0], panel.x[-1]
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - first) / (last - first) if last > first else 0.5)

    def down(y: float) -> float:
        return bottom - panel.height * min(y / panel.y[-1][0], 1)

    parts = [_text(LEFT, top - 6, panel.title)]
    for y, name in panel.y:
        parts.append(f'<path d="M{LEFT} {down(y):.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, down(y) + 4, name, "end"))
    for x, name in panel.x:
        parts.append(f'<path d="M{across(x):.1f} {bottom}v5" stroke="#888888"/>')
        parts.append(_text(across(x), bottom + 18, name, "middle"))
    for number, line in enumerate(panel.lines):
        points = [f"{across(x):.1f},{down(y):.1f}" for x, y in line.points]
        if dots:
            places = (point.split(",") for point in points)
            colour = COLOURS[number % len(COLOURS)]
            parts += [f'<circle cx="{x}" cy="{y}" r="2.2" fill="{colour}"/>' for x, y in places]
        else:
            parts.append(f'<polyline points="{" ".join(points)}" fill="none" {_stroke(number)}/>')
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], float(LEFT)
    for number, name in enumerate(names):
        parts.append(f'<path d="M{x:.0f} 34h28" fill="none" {_stroke(number)}/>')
        parts.append(_text(x + 34, 38, name))
        x += 64 + 7.5 * len(name)
    return parts


def _stroke(number: int) -> str:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    return f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222">{escape(words)}</text>'
