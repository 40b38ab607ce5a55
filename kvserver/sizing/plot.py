"""Hit rate against the size of the arena as an SVG drawing; sizes are a factor of two apart on the axis."""

import math
from collections.abc import Sequence
from html import escape

from kvserver.sizing.run import Sizing

WIDTH, HEIGHT = 840, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 62, 60
COLOURS = ("#888888", "#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b")
DASHES = ("2 3", "7 3", "", "9 3 2 3", "4 2", "1 2")
"""They tell lines apart in grey, too."""
PERCENT_STEP = 20


def draw(sizing: Sizing) -> str:
    """Draws the sizing, which must have at least one size."""
    sizes = sorted(sizing.sizes, key=lambda size: size.arena_bytes)
    powers = [math.log2(size.arena_bytes / 1e9) for size in sizes]
    total = max(1, sizing.prompt_tokens)
    lines = {
        "from HBM": [100 * size.hbm_tokens / total for size in sizes],
        "from HBM and DRAM": [100 * (size.hbm_tokens + size.server_tokens) / total for size in sizes],
        "nothing is ever forgotten": [100 * sizing.infinite_tokens / total] * len(sizes),
    }
    return svg(
        HEIGHT,
        [
            text(LEFT, 20, f"{sizing.trace}: {sizing.requests:,} requests, token hit rate in %"),
            *legend(list(lines)),
            *_grid(powers),
            *(_line(number, powers, values) for number, values in enumerate(lines.values())),
            text(WIDTH / 2, HEIGHT - 12, f"arena in GB, {sizing.token_bytes:,} bytes a token", anchor="middle"),
        ],
    )


def svg(height: int, parts: Sequence[str]) -> str:
    """A drawing of this height on white."""
    size = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    paper = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', paper, *parts, "</svg>", ""])


def grid_line(y: float, name: str) -> list[str]:
    line = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>'
    return [line, text(LEFT - 6, y + 4, name, anchor="end")]


def legend(names: Sequence[str]) -> list[str]:
    parts, x = [], float(LEFT)
    for number, name in enumerate(names):
        parts.append(f'<path d="M{x:.0f} 34h28" fill="none" {stroke(number)}/>')
        parts.append(text(x + 34, 38, name))
        x += 64 + 7.5 * len(name)
    return parts


def stroke(number: int) -> str:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    return f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222">{escape(words)}</text>'


def _grid(powers: Sequence[float]) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for percent in range(0, 101, PERCENT_STEP):
        parts += grid_line(_y(percent), str(percent))
    for power in powers:
        at = _x(power, powers)
        parts.append(f'<path d="M{at:.1f} {bottom}v5" stroke="#888888"/>')
        parts.append(text(at, bottom + 18, f"{2**power:.3g}", anchor="middle"))
    return parts


def _line(number: int, powers: Sequence[float], values: Sequence[float]) -> str:
    points = " ".join(f"{_x(power, powers):.1f},{_y(value):.1f}" for power, value in zip(powers, values, strict=True))
    return f'<polyline points="{points}" fill="none" {stroke(number)}/>'


def _x(power: float, powers: Sequence[float]) -> float:
    """Horizontal position; a single size is in the middle."""
    span = powers[-1] - powers[0]
    share = (power - powers[0]) / span if span else 0.5
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def _y(percent: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * percent / 100
