"""Charts as SVG, written by hand: two kinds of lines do not justify a plotting library."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
TICKS = 5
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#c17c0b", "#4a4a4a")


def steps_of_share(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points (value, percent of all values that do not exceed it)."""
    ordered = sorted(values)
    return [(value, 100 * (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


def write(path: Path, *, title: str, x: str, y: str, series: Mapping[str, Points], lines: bool = True) -> None:
    """Writes one chart; without lines its points are dots. Series without points appear only in the legend."""
    path.write_text(render(title=title, x=x, y=y, series=series, lines=lines))


def render(*, title: str, x: str, y: str, series: Mapping[str, Points], lines: bool) -> str:
    points = [point for each in series.values() for point in each]
    x_max = max((point[0] for point in points), default=0) or 1.0
    y_max = max((point[1] for point in points), default=0) or 1.0

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = LEFT + point[0] / x_max * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - point[1] / y_max * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        _text(WIDTH / 2, 18, title, "middle"),
        _text(WIDTH / 2, HEIGHT - 10, x, "middle"),
        f'<g transform="rotate(-90 14 {HEIGHT / 2})">{_text(14, HEIGHT / 2, y, "middle")}</g>',
    ]
    for tick in range(TICKS + 1):
        across, down = place((x_max * tick / TICKS, y_max * tick / TICKS))
        parts.append(f'<path d="M{LEFT} {down}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, down + 4, f"{y_max * tick / TICKS:.3g}", "end"))
        parts.append(_text(across, HEIGHT - BOTTOM + 18, f"{x_max * tick / TICKS:.3g}", "middle"))
    for number, (name, each) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(point) for point in each]
        if lines:
            path = " ".join(f"{across},{down}" for across, down in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        else:
            parts += [f'<circle cx="{across}" cy="{down}" r="2.2" fill="{colour}"/>' for across, down in placed]
        parts.append(f'<rect x="{LEFT + 8}" y="{TOP + 16 * number - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(LEFT + 24, TOP + 16 * number, name, "start"))
    return "\n".join([*parts, "</svg>\n"])


def _text(across: float, down: float, text: str, anchor: str) -> str:
    return f'<text x="{across:g}" y="{down:g}" text-anchor="{anchor}">{escape(text)}</text>'
