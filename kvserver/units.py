"""Bytes and times as people write and read them (4096, 16GiB, 1.5GiB, 3 h 4 min), and tables as text."""

import re
from collections.abc import Iterator, Sequence

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def show_bytes(count: int) -> str:
    """The exact number of bytes, in the largest unit that leaves a whole number."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


def parse_bytes(text: str) -> int | None:
    """Bytes from text such as 4096 or 16GiB; None when it is neither."""
    match = re.fullmatch(r"([0-9]{1,15}) ?(KiB|MiB|GiB|TiB)?", text)
    if match is None:
        return None
    return int(match[1]) * {None: 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}[match[2]]


def size(count: float) -> str:
    """The number of bytes rounded to three digits: 1.5GiB."""
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


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "- %"


def rate(bytes_per_s: float) -> str:
    """A rate in decimal units, as links and devices are sold: 1.2 GB/s."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if bytes_per_s < 1000:
            return f"{bytes_per_s:.3g} {unit}"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.3g} GB/s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table: an empty line, the head and the rows in columns; nothing without rows."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    yield ""
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
