"""The format of a chunk in a remote store."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvserver.remote.chunk_value import (
    FRAGMENTS_MAX,
    HEAD_BYTES_MAX,
    SHARDS_MAX,
    Head,
    Shard,
    WrongValue,
    decode,
    decode_of,
    encode,
    fragments_of,
    head_bytes,
    text_of,
)
from tests.rigs.remote_chunks import head_of, name_of

DIGESTS = some.binary(min_size=32, max_size=32)
NUMBERS = some.integers(0, (1 << 64) - 1)
SHARDS = some.builds(
    Shard, some.integers(0, 0xFFFF), some.integers(0, 0xFFFF), some.integers(1, (1 << 32) - 1), NUMBERS
)
HEADS = some.builds(
    Head,
    namespace=DIGESTS,
    key=DIGESTS,
    parent=DIGESTS,
    epoch=NUMBERS,
    write=NUMBERS,
    written_s=NUMBERS,
    shards=some.lists(SHARDS, min_size=1, max_size=9).map(tuple),
    fragment_bytes=some.sampled_from([0, 1 << 20, 8 << 20]),
)


@given(HEADS, some.binary(max_size=70))
def test_a_head_is_read_as_it_was_written_whatever_follows_it(head: Head, payload: bytes) -> None:
    packed = encode(head)
    assert len(packed) == head_bytes(len(head.shards))
    assert decode(packed + payload) == head


def test_every_changed_bit_and_every_cut_of_a_head_is_noticed() -> None:
    packed = encode(head_of(name_of(1)))
    for place in range(8 * len(packed)):
        changed = bytearray(packed)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(WrongValue):
            decode(bytes(changed))
    for length in range(len(packed)):
        with pytest.raises(WrongValue):
            decode(packed[:length])


@given(some.binary(max_size=400))
def test_bytes_of_somebody_else_are_no_head(value: bytes) -> None:
    with pytest.raises(WrongValue):
        decode(value)


def test_the_head_of_another_chunk_epoch_or_namespace_is_refused() -> None:
    name = name_of(1)
    packed = encode(head_of(name))
    assert decode_of(name, packed) == head_of(name)
    others = (
        name_of(2),
        name._replace(epoch=name.epoch ^ 1),
        name._replace(of=name.of._replace(namespace=bytes(32))),
    )
    for other in others:
        with pytest.raises(WrongValue, match="other"):
            decode_of(other, packed)


def test_a_head_has_1_to_246_shards_and_4_kib_hold_them() -> None:
    assert len(encode(head_of(name_of(1), sizes=[3] * SHARDS_MAX))) == HEAD_BYTES_MAX <= 4096 + 16
    for count in (0, SHARDS_MAX + 1):
        with pytest.raises(ValueError, match=f"has {count} shards"):
            encode(head_of(name_of(1), sizes=[3] * count))


@given(some.lists(some.integers(1, 1000), min_size=1, max_size=7), some.integers(1, 300))
def test_fragments_cover_every_byte_of_every_shard_once(sizes: list[int], fragment_bytes: int) -> None:
    head = head_of(name_of(1), sizes=sizes)._replace(fragment_bytes=fragment_bytes)
    fragments = list(fragments_of(head))
    assert [fragment.number for fragment in fragments] == list(range(len(fragments)))
    covered = [
        (fragment.shard, at)
        for fragment in fragments
        for at in range(fragment.offset, fragment.offset + fragment.bytes)
    ]
    assert covered == [(shard, at) for shard, size in enumerate(sizes) for at in range(size)]
    assert all(1 <= fragment.bytes <= fragment_bytes for fragment in fragments)


def test_a_head_with_more_fragments_than_a_probe_can_name_is_no_head() -> None:
    """Its bytes are right, so whoever reads it would name 4 billion keys."""
    head = head_of(name_of(1))
    shard = head.shards[0]._replace(payload_bytes=(1 << 32) - 1)
    with pytest.raises(WrongValue, match="has 4294967295 fragments"):
        decode(encode(head._replace(shards=(shard,), fragment_bytes=1)))
    most = head._replace(shards=(shard._replace(payload_bytes=FRAGMENTS_MAX * 3),), fragment_bytes=3)
    assert decode(encode(most)) == most
    with pytest.raises(WrongValue, match="fragments"):
        decode(encode(most._replace(shards=(shard._replace(payload_bytes=FRAGMENTS_MAX * 3 + 1),))))


def test_a_chunk_in_one_value_has_no_fragments() -> None:
    assert not list(fragments_of(head_of(name_of(1))))
    large = head_of(name_of(1), sizes=[(8 << 20) - 1, 2])
    assert [fragment.bytes for fragment in fragments_of(large)] == [(8 << 20) - 1, 2]


@given(DIGESTS, DIGESTS)
def test_names_of_digests_differ_and_need_no_quoting(one: bytes, other: bytes) -> None:
    assert (text_of(one) == text_of(other)) == (one == other)
    assert len(text_of(one)) == 52
    assert set(text_of(one)) <= set("abcdefghijklmnopqrstuvwxyz234567")
