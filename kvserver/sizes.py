"""Bytes as people write them: 4096, 16GiB."""

import re

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def show_bytes(count: int) -> str:
    """Exact, in the largest unit that leaves a whole number."""
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
