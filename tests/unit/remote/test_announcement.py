"""What a server remembers of announcements."""

import random
import subprocess
import sys
from hashlib import blake2b

from kvserver.remote.announcement import (
    GONE,
    KIND_BITS,
    MARK_BYTES,
    STORED,
    UNKNOWN,
    WRITTEN,
    KnownChunks,
    foretold,
    mark_of,
    pack,
    unpack,
)
from kvserver.transfer.native import Marker

NAMESPACE, EPOCH = b"n" * 32, 77


def mark(number: int) -> int:
    return mark_of(NAMESPACE, EPOCH, number.to_bytes(32, "little"))


def test_a_mark_is_what_the_format_says() -> None:
    """docs/remote-format.md: the others of a fleet may run another release."""
    key = bytes(range(32))
    told = blake2b(NAMESPACE + EPOCH.to_bytes(8, "little") + key, digest_size=8).digest()
    assert mark_of(NAMESPACE, EPOCH, key) == int.from_bytes(told, "little") & ~3
    marker = Marker(NAMESPACE, EPOCH)
    assert marker.of(bytes(32)) != marker.of(key) == mark_of(NAMESPACE, EPOCH, key), "one marker makes many marks"


def test_what_was_told_last_of_a_chunk_counts() -> None:
    known = KnownChunks(16)
    assert known.kind(mark(1)) == UNKNOWN
    for kind in (STORED, WRITTEN, GONE, WRITTEN):  # in this order, as they happen
        known.note(mark(1), kind)
        assert known.kind(mark(1)) == kind
    assert known.kind(mark(2)) == UNKNOWN


def test_words_about_what_is_computed_change_nothing_that_is_known() -> None:
    """So servers that do not know them take them for nothing."""
    known = KnownChunks(16)
    for number, kind in enumerate((UNKNOWN, STORED, WRITTEN, GONE)):
        known.note(mark(number), kind)
        for comes in (True, False):
            told = foretold(mark(number), comes=comes)
            known.note(told & ~KIND_BITS, told & KIND_BITS)
            known.note((told | 4) & ~KIND_BITS, told & KIND_BITS)
            assert known.kind(mark(number)) == kind
    assert not known.forgotten


def test_a_full_table_forgets_chunks_and_never_takes_one_for_another() -> None:
    known, told = KnownChunks(64), {}
    chance = random.Random(3)
    for number in range(1000):
        told[number] = chance.choice((STORED, WRITTEN, GONE))
        known.note(mark(number), told[number])
        assert known.kind(mark(number)) == told[number]
    kept = [number for number in told if known.kind(mark(number)) != UNKNOWN]
    assert 0 < len(kept) <= 2 * 64
    assert all(known.kind(mark(number)) == told[number] for number in kept)
    assert known.forgotten > 0


def test_chunks_that_are_only_stored_take_the_place_of_none_that_is_in_the_store() -> None:
    known = KnownChunks(64)
    for number in range(16):
        known.note(mark(number), WRITTEN)
    for number in range(1000, 3000):
        known.note(mark(number), STORED)
    assert [known.kind(mark(number)) for number in range(16)] == [WRITTEN] * 16
    assert known.forgotten == 0


def test_that_a_chunk_was_stored_says_nothing_new_of_one_whose_place_in_the_store_is_known() -> None:
    known = KnownChunks(64)
    for kind in (WRITTEN, GONE):
        known.note(mark(1), kind)
        known.note(mark(1), STORED)
        assert known.kind(mark(1)) == kind


def test_a_table_that_is_half_full_has_nearly_all_of_them() -> None:
    known = KnownChunks(1 << 12)
    for number in range(1 << 11):
        known.note(mark(number), WRITTEN)
    kept = sum(known.kind(mark(number)) == WRITTEN for number in range(1 << 11))
    assert kept > 0.93 * (1 << 11)


def test_what_is_known_of_a_store_takes_16_mib_from_the_start_on() -> None:
    code = """
from kvserver.remote.announcement import WRITTEN, KnownChunks, mark_of
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before = resident()
known = KnownChunks()
begun = resident()
for number in range(777):
    known.note(mark_of(b"n" * 32, 1, number.to_bytes(32, "little")), WRITTEN)
print(begun - before, resident() - begun)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    taken, more = map(int, told.split())
    assert 16 << 20 <= taken < 18 << 20
    assert more < 1 << 18


def test_marks_differ_by_namespace_epoch_and_key() -> None:
    names = [(NAMESPACE, 1, b"k" * 32), (NAMESPACE, 2, b"k" * 32), (NAMESPACE, 1, b"l" * 32), (b"m" * 32, 1, b"k" * 32)]
    marks = [mark_of(*name) for name in names]
    assert len(set(marks)) == len(names)
    assert all(one & 3 == 0 for one in marks)


def test_a_batch_that_was_cut_loses_its_last_mark_alone() -> None:
    batch = pack([mark(1) | STORED, mark(2) | WRITTEN])
    assert len(batch) == 2 * MARK_BYTES
    assert list(unpack(batch)) == [mark(1) | STORED, mark(2) | WRITTEN]
    assert list(unpack(batch[:-3])) == [mark(1) | STORED]
    assert list(unpack(b"")) == []
