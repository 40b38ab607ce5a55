"""The digest of docs/digest.md in Python's whole numbers, byte by byte, without a line of the data plane's."""

import hashlib
from functools import cache
from typing import NamedTuple

PRIME = 2**61 - 1
ROW_BYTES = 4096


class ShardName(NamedTuple):
    """What a payload is stored under."""

    namespace: bytes
    key: bytes
    group: int
    shard: int


@cache
def entry(table: str, index: int) -> int:
    """A[index] or B[index]."""
    counter = (index // 4).to_bytes(4, "little")
    hashed = hashlib.sha256(b"kvserver digest 1 " + table.encode() + counter).digest()
    return int.from_bytes(hashed[index % 4 * 8 :][:8], "little") % 2**60


def weight(place: int) -> int:
    """By what the byte at that place of a payload is multiplied."""
    return 2 ** (8 * (place % 4)) * entry("B", place // 4 % 1024) * entry("A", place // ROW_BYTES)


def slow_sum(stretch: bytes, offset: int = 0) -> int:
    """S of a stretch whose first byte is byte `offset` of its payload."""
    return sum(byte * weight(offset + at) for at, byte in enumerate(stretch)) % PRIME


def slow_name(name: ShardName, payload_bytes: int) -> int:
    """H."""
    numbers = name.group.to_bytes(2, "little") + name.shard.to_bytes(2, "little") + payload_bytes.to_bytes(8, "little")
    hashed = hashlib.sha256(b"kvserver digest 1" + name.namespace + name.key + numbers).digest()
    return int.from_bytes(hashed, "little") % PRIME


def slow_digest(payload: bytes, name: ShardName) -> int:
    return (slow_sum(payload) + slow_name(name, len(payload))) % PRIME
