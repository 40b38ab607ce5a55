"""Sizes, times and tables as people read them on a terminal."""

from collections.abc import Iterator, Sequence


def size(count: float) -> str:
    """Rounded to three digits or so: 1.50GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count = count / 1024
    return f"{count:.3g}TiB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """An empty line, the head and the rows in columns; nothing when there are no rows."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    yield ""
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
