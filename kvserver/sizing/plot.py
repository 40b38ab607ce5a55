"""Hit rate against the size of the arena as an SVG drawing; sizes are a factor of two apart on the axis."""

import math
from collections.abc import Sequence

from kvserver.replay.plot import legend, stroke, text
from kvserver.sizing.run import Sizing

WIDTH, HEIGHT = 840, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 62, 60
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
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            text(LEFT, 20, f"{sizing.trace}: {sizing.requests:,} requests, token hit rate in %"),
            *legend(list(lines)),
            *_grid(powers),
            *(_line(number, powers, values) for number, values in enumerate(lines.values())),
            text(WIDTH / 2, HEIGHT - 12, f"arena in GB, {sizing.token_bytes:,} bytes a token", anchor="middle"),
            "</svg>",
            "",
        ]
    )


def _grid(powers: Sequence[float]) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for percent in range(0, 101, PERCENT_STEP):
        parts.append(f'<path d="M{LEFT} {_y(percent):.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 6, _y(percent) + 4, str(percent), anchor="end"))
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
