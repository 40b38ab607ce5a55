"""Reads what nodes of a Valkey or Redis answer: which of them has which keys, and the fields of INFO. Pure."""

from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from kvserver.remote.secrets import safe_text
from kvserver.remote.valkey_answers import OutOfStepError

SLOTS = 16_384


def slot_of(key: bytes) -> int:
    """The hash slot of a key: of what is between its first braces, if there is something, else of the whole key."""
    _, opened, rest = key.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return crc_hqx(tag if opened and closed and tag else key, 0) % SLOTS


class NodeMap:
    """Ranges of slots and their masters. Knows nothing at first, and then says "" for every key."""

    def __init__(self, ranges: Sequence[tuple[int, str]] = ()) -> None:
        """ranges: first slot -> node, in order."""
        self._starts = [start for start, _ in ranges]
        self._nodes = [node for _, node in ranges]
        self.names = frozenset(["", *self._nodes] if not ranges or ranges[0][0] else self._nodes)
        """All that node_of() may answer."""

    def node_of(self, key: bytes) -> str:
        place = bisect_right(self._starts, slot_of(key)) - 1
        return self._nodes[place] if place >= 0 else ""


def node_map(told: Any) -> NodeMap:
    """The map of an answer to CLUSTER SLOTS: a list of [first slot, last slot, [host, port, …], replicas …].

    Raises OutOfStepError for an answer of another shape."""
    ranges = []
    if isinstance(told, list) and len(told) > SLOTS:
        raise OutOfStepError(f"expected slots and their master, got {len(told)} ranges of {SLOTS} slots")
    for row in told if isinstance(told, list) else [told]:
        match row:
            case [int(start), int(), [host, int(port), *_], *_]:
                ranges.append((start, f"{_text(host)}:{port}"))
            case _:
                raise OutOfStepError(f"expected slots and their master, got {type(row).__name__}")
    return NodeMap(sorted(ranges))


def _text(host: Any) -> str:
    return safe_text(host.decode(errors="replace") if isinstance(host, bytes) else host)


def info_of(told: bytes) -> dict[str, str]:
    """The fields of an INFO reply."""
    lines = (line.partition(":") for line in told.decode(errors="replace").splitlines())
    return {name: value for name, separator, value in lines if separator}


def version_of(info: dict[str, str]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'of an unknown version')}"
