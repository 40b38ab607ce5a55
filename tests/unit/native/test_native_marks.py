"""Marks of chunks: BLAKE2b as in hashlib, and a table that forgets and never mistakes."""

import random
from hashlib import blake2b

import pytest

from kvserver.transfer.native import Marker, MarkTable

GONE = 3
KEY = bytes(range(100, 132))


@pytest.mark.parametrize("bytes_", range(121))
def test_a_mark_is_the_digest_of_hashlib_for_every_length(bytes_: int) -> None:
    chance = random.Random(bytes_)
    whole = chance.randbytes(bytes_)
    namespace, key = whole[: bytes_ // 3], whole[bytes_ // 3 :]
    for epoch in (0, 1, chance.getrandbits(64), 2**64 - 1):
        told = blake2b(namespace + epoch.to_bytes(8, "little") + key, digest_size=8).digest()
        marker = Marker(namespace, epoch)
        assert marker.of(key) == marker.of(key) == int.from_bytes(told, "little") & ~3


def test_what_does_not_fit_into_a_mark_is_refused_and_the_message_says_what_would() -> None:
    with pytest.raises(ValueError, match="namespace: 121 bytes; expected at most 120"):
        Marker(bytes(121), 7)
    with pytest.raises(ValueError, match="key: 89 bytes; expected at most 88"):
        Marker(bytes(32), 7).of(bytes(89))
    for epoch in (-1, 2**64):
        with pytest.raises(TypeError):
            Marker(bytes(32), epoch)
    for most in (0, 3, 12):
        with pytest.raises(ValueError, match=f"most={most} must be a power of two and at least 4"):
            MarkTable(most)


def test_a_table_tells_the_last_kind_of_a_chunk() -> None:
    table, marker = MarkTable(64), Marker(b"a namespace", 5)
    assert table.kind_of(marker, KEY) == 0
    for kind in (1, 2, GONE, 2):
        assert table.put(marker.of(KEY) | kind) == 0
        assert table.kind(marker.of(KEY)) == table.kind_of(marker, KEY) == kind
        assert table.kind_of(marker, KEY[1:]) == table.kind_of(Marker(b"a namespace", 6), KEY) == 0


def test_a_full_table_forgets_what_is_gone_first_and_says_what_it_forgets() -> None:
    table, held = MarkTable(8), dict[int, int]()
    chance = random.Random(1)
    for _ in range(5_000):
        mark = chance.randrange(1, 25) << 2 | chance.randrange(4) << 62
        kind = chance.randrange(1, 4)
        forgotten = table.put(mark | kind)
        bucket = [other for other in held if other >> 2 & 1 == mark >> 2 & 1]
        if mark in held or len(bucket) < 4:
            assert forgotten == 0
        else:
            lost = forgotten & ~3
            assert held.pop(lost) == forgotten & 3
            assert forgotten & 3 == GONE or GONE not in (held[other] for other in bucket if other != lost)
        held[mark] = kind
        assert all(table.kind(other) == there for other, there in held.items())
        assert table.kind(1 << 40) == 0
    assert len(held) == 8
