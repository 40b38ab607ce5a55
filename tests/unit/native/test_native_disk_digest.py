"""The digest of a payload on its way through a device: other bytes than were stored are never written or read as right.

The ledger says what an engine stored, and a header what was written.
"""

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserver._native import DiskStore, Ledger, create_memfd, xxh3
from kvserver.tiers.records import DISK_RECORD, NO_PARENT, NO_SUM, RECORD
from tests.rigs.native_disk_rig import (
    BLOCK,
    CHECKSUM,
    DONE,
    ENTRY,
    SEGMENT_BYTES,
    SIZES,
    STALE,
    TABLE_BYTES,
    Extent,
    Rig,
    open_store,
    sum_of,
)
from tests.rigs.slow_digest import PRIME, ShardName, slow_digest

NAMESPACE, GROUP, SHARD = b"n" * 32, 3, 5
EXTENT_BYTES = SIZES[1]
HEADS = 2 * BLOCK
ODD_SIZES = (1, 3, 5, 63, 4095, 4096, 4097, 8199, EXTENT_BYTES - 1, EXTENT_BYTES)
DIGEST_AT, SEAL_AT = 168, 184
"""Offsets in a header (docs/disk-format.md)."""


class Shard(NamedTuple):
    """A payload under a key, and its extent."""

    payload: bytes
    key: bytes = b"k" * 32
    generation: int = 1
    position: int = 0

    @property
    def name(self) -> ShardName:
        return ShardName(NAMESPACE, self.key, GROUP, SHARD)

    @property
    def payload_at(self) -> int:
        return HEADS + self.position * EXTENT_BYTES

    @property
    def header_at(self) -> int:
        return HEADS + (1 + self.position) * ENTRY

    def ordered(self, slot: int) -> bytes:
        extent = Extent(0, 0, self.position, EXTENT_BYTES)
        return DISK_RECORD.pack(*self._fields_at(slot), NO_SUM, extent.name, 0, 0)

    def entry(self, slot: int, total: int) -> bytes:
        return RECORD.pack(*self._fields_at(slot), total)

    def _fields_at(self, slot: int) -> tuple[int | bytes, ...]:
        names = NAMESPACE, self.key, NO_PARENT
        shape = GROUP, SHARD, len(self.payload), 7, EXTENT_BYTES // BLOCK
        return slot, *names, *shape, self.generation


class Device:
    """A device, an engine and the ledger of its arena."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._store = open_store(directory)
        self.found = b"" if self._store.created else self._store.recover()
        arena_bytes = Rig.SLOTS * Rig.SLOT_BYTES
        self._ledger_fd = create_memfd("ledger", Ledger.file_bytes(arena_bytes))
        self.ledger = Ledger(self._ledger_fd, arena_bytes)
        self._rig = Rig(self._store, ledger_fd=self._ledger_fd)

    def lay(self, shard: Shard, slot: int, *, total: int | None = None) -> None:
        """Lays a payload into a slot, with its entry. total: its sum there, if not that of the payload."""
        self.ledger.clear(struct.pack("<q", slot))
        self.ledger.seal(shard.entry(slot, sum_of(shard.payload) if total is None else total))
        self._rig.arena.view[slot : slot + len(shard.payload)] = shard.payload

    def spoil(self, slot: int, payload: bytes) -> None:
        self._rig.arena.view[slot : slot + len(payload)] = payload

    def write(self, shard: Shard, slot: int = 0) -> int:
        self._rig.engine.submit(1, "write", shard.ordered(slot))
        ((_, _, outcome, _),) = self._rig.wait(1)
        assert self._rig.sums[1, 0] == NO_SUM
        return outcome

    def read(self, shard: Shard, slot: int = EXTENT_BYTES) -> int:
        """The outcome. What is read as right must be right."""
        self._rig.arena.view[slot : slot + EXTENT_BYTES] = bytes(EXTENT_BYTES)
        self._rig.engine.submit(2, "read", shard.ordered(slot))
        ((_, _, outcome, _),) = self._rig.wait(1)
        if outcome == DONE:
            assert self._rig.arena.view[slot : slot + len(shard.payload)] == shard.payload
        assert self._rig.sums[2, 0] == (sum_of(shard.payload) if outcome == DONE else NO_SUM)
        return outcome

    def stored(self, *shards: Shard) -> None:
        for shard in shards:
            self.lay(shard, 0)
            assert self.write(shard) == DONE

    def close(self) -> None:
        self._rig.close()
        self._store.close()
        self.ledger.close()
        os.close(self._ledger_fd)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path)
    yield made
    made.close()


def read_after_a_restart(directory: Path, shard: Shard) -> int:
    """The outcome of a read; STALE also if the restart did not find the record."""
    device = Device(directory)
    found = any(fields[2] == shard.key and fields[9] == shard.generation for fields in unpacked(device.found))
    outcome = device.read(shard)
    device.close()
    assert found or outcome == STALE
    return outcome


def unpacked(records: bytes) -> Iterator[tuple[Any, ...]]:
    return DISK_RECORD.iter_unpack(records)


def header(directory: Path, shard: Shard) -> bytes:
    return (directory / DiskStore.HEADERS).read_bytes()[shard.header_at :][:ENTRY]


def lay_header(directory: Path, shard: Shard, content: bytes) -> None:
    with (directory / DiskStore.HEADERS).open("r+b") as file:
        file.seek(shard.header_at)
        file.write(content)


def lay_payload(directory: Path, shard: Shard, payload: bytes) -> None:
    with (directory / DiskStore.FILE).open("r+b") as file:
        file.seek(shard.payload_at)
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def payload(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


# ---------------------------------------------------------------- what may happen to bytes


def flipped(whole: bytes) -> bytes:
    return whole[:-1] + bytes([whole[-1] ^ 0x10])


def flipped_first(whole: bytes) -> bytes:
    return bytes([whole[0] ^ 1]) + whole[1:]


def swapped(whole: bytes) -> bytes:
    return whole[BLOCK : 2 * BLOCK] + whole[:BLOCK] + whole[2 * BLOCK :]


def zeroed(whole: bytes) -> bytes:
    begin, end = len(whole) // 3, len(whole) // 3 + max(1, len(whole) // 5)
    return whole[:begin] + bytes(end - begin) + whole[end:]


def cut(whole: bytes) -> bytes:
    """The rest is what was there before."""
    return whole[: len(whole) // 2] + payload(len(whole) - len(whole) // 2, seed=99)


def older(whole: bytes) -> bytes:
    return payload(len(whole), seed=99)


SPOILED = [
    pytest.param(spoil, size, id=f"{spoil.__name__}-{size}")
    for spoil in (flipped, flipped_first, swapped, zeroed, cut, older)
    for size in ODD_SIZES
    if size > BLOCK or spoil is not swapped
]
Spoil = Callable[[bytes], bytes]


@pytest.mark.parametrize(("spoil", "size"), SPOILED)
def test_a_slot_that_changed_since_it_was_stored_gets_no_header(device: Device, spoil: Spoil, size: int) -> None:
    shard = Shard(payload(size), generation=2)
    device.stored(shard._replace(generation=1))
    device.lay(shard, 0)
    device.spoil(0, spoil(shard.payload))
    assert device.write(shard) == CHECKSUM
    assert device.read(shard) == STALE
    assert header(device.directory, shard) == bytes(ENTRY), "the older record is gone, and there is no new one"
    device.lay(shard, 0)
    assert device.write(shard) == DONE
    assert device.read(shard) == DONE


@pytest.mark.parametrize(("spoil", "size"), SPOILED)
def test_a_payload_that_changed_on_the_device_is_not_read_as_right(tmp_path: Path, spoil: Spoil, size: int) -> None:
    device = Device(tmp_path)
    shard = Shard(payload(size), generation=2)
    device.stored(shard)
    lay_payload(tmp_path, shard, spoil(shard.payload))
    assert device.read(shard) == CHECKSUM, "by the engine that wrote it"
    device.close()
    assert read_after_a_restart(tmp_path, shard) == CHECKSUM
    lay_payload(tmp_path, shard, shard.payload)
    assert read_after_a_restart(tmp_path, shard) == DONE


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("size", ODD_SIZES)
def test_the_bytes_of_another_record_are_not_read_as_right(tmp_path: Path, size: int) -> None:
    """Whole payloads, each of them once right: of an older generation of the key, and of another key."""
    device = Device(tmp_path)
    one, older_one = Shard(payload(size), generation=9), Shard(payload(size, 2), generation=4, position=1)
    other = Shard(payload(size, 3), key=b"o" * 32, generation=5, position=2)
    device.stored(older_one, other, one)
    device.close()
    for theirs in (older_one, other):
        lay_payload(tmp_path, one, theirs.payload)
        assert read_after_a_restart(tmp_path, one) == CHECKSUM
        assert read_after_a_restart(tmp_path, theirs) == DONE


def test_a_header_of_another_record_vouches_for_nothing(tmp_path: Path) -> None:
    """As it is, it names another place. With this place and a new seal it is found, and its payload is not."""
    device = Device(tmp_path)
    one, other = Shard(payload(4097)), Shard(payload(4097, 2), key=b"o" * 32, generation=2, position=1)
    device.stored(one, other)
    device.close()
    theirs = header(tmp_path, other)
    lay_header(tmp_path, one, theirs)
    assert read_after_a_restart(tmp_path, one) == STALE
    assert read_after_a_restart(tmp_path, other) == DONE
    moved = other._replace(position=one.position)
    lay_header(tmp_path, one, resealed(theirs[:40] + struct.pack("<Q", one.position) + theirs[48:]))
    assert read_after_a_restart(tmp_path, moved) == CHECKSUM


def resealed(content: bytes) -> bytes:
    return content[:SEAL_AT] + struct.pack("<Q", xxh3(content[:SEAL_AT])) + content[SEAL_AT + 8 :]


def with_digest(content: bytes, digest: int) -> bytes:
    return resealed(content[:DIGEST_AT] + struct.pack("<Q", digest) + content[DIGEST_AT + 8 :])


def test_equal_bytes_under_two_keys_have_two_digests(tmp_path: Path) -> None:
    device = Device(tmp_path)
    one, other = Shard(payload(4097)), Shard(payload(4097), key=b"o" * 32, position=1)
    device.stored(one, other)
    device.close()
    (theirs,) = struct.unpack_from("<Q", header(tmp_path, other), DIGEST_AT)
    lay_header(tmp_path, one, with_digest(header(tmp_path, one), theirs))
    assert read_after_a_restart(tmp_path, one) == CHECKSUM


@pytest.mark.parametrize("digest", [PRIME, PRIME + 1, NO_SUM])
def test_a_header_with_a_number_that_is_no_digest_is_damaged(tmp_path: Path, digest: int) -> None:
    device = Device(tmp_path)
    device.stored(shard := Shard(payload(5)))
    device.close()
    lay_header(tmp_path, shard, with_digest(header(tmp_path, shard), digest))
    store = open_store(tmp_path)
    assert (store.recover(), store.damaged) == (b"", 1)
    store.close()


def test_a_slot_that_holds_another_payload_than_the_order_says_gets_no_header(device: Device) -> None:
    """Another key's, one of another length, or none at all."""
    shard = Shard(payload(4097))
    device.lay(shard._replace(key=b"o" * 32), 0)
    assert device.write(shard) == CHECKSUM
    device.lay(shard, 0)
    assert device.write(shard._replace(payload=shard.payload[:-1])) == CHECKSUM
    device.spoil(EXTENT_BYTES, shard.payload)
    assert device.write(shard, slot=EXTENT_BYTES) == CHECKSUM
    assert device.write(shard) == DONE


# ---------------------------------------------------------------- sums that are known, and others


@pytest.mark.parametrize("size", ODD_SIZES)
def test_a_slot_that_nobody_summed_gets_its_digest_on_the_device(tmp_path: Path, size: int) -> None:
    device = Device(tmp_path)
    shard = Shard(payload(size))
    device.lay(shard, 0, total=NO_SUM)
    assert device.write(shard) == DONE
    assert device.read(shard) == DONE
    device.close()
    (digest,) = struct.unpack_from("<Q", header(tmp_path, shard), DIGEST_AT)
    assert digest == slow_digest(shard.payload, shard.name)
    lay_payload(tmp_path, shard, flipped(shard.payload))
    assert read_after_a_restart(tmp_path, shard) == CHECKSUM


def test_an_entry_that_was_withdrawn_meanwhile_still_counts(device: Device) -> None:
    shard = Shard(payload(4097))
    device.lay(shard, 0)
    device.ledger.clear(struct.pack("<q", 0))
    device.spoil(0, flipped(shard.payload))
    assert device.write(shard) == CHECKSUM
    device.spoil(0, shard.payload)
    assert device.write(shard) == DONE


def test_a_wrong_sum_of_right_bytes_is_no_excuse(device: Device) -> None:
    shard = Shard(payload(4097))
    device.lay(shard, 0, total=(sum_of(shard.payload) + 1) % PRIME)
    assert device.write(shard) == CHECKSUM


def test_what_is_recovered_has_no_sum(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.stored(Shard(payload(77)))
    device.close()
    store = open_store(tmp_path)
    assert [fields[10] for fields in unpacked(store.recover())] == [NO_SUM]
    store.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, EXTENT_BYTES), seed=st.integers(0, 1 << 30), summed=st.booleans())
def test_any_payload_comes_back_and_no_changed_byte_of_it_does(
    tmp_path: Path, size: int, seed: int, summed: bool
) -> None:
    for half in (DiskStore.FILE, DiskStore.HEADERS):
        (tmp_path / half).unlink(missing_ok=True)
    chooser = random.Random(seed)
    shard = Shard(payload(size, seed), key=chooser.randbytes(32), position=chooser.randrange(4))
    device = Device(tmp_path)
    device.lay(shard, 0, total=None if summed else NO_SUM)
    assert device.write(shard) == DONE
    device.close()
    (digest,) = struct.unpack_from("<Q", header(tmp_path, shard), DIGEST_AT)
    assert digest == slow_digest(shard.payload, shard.name)
    assert read_after_a_restart(tmp_path, shard) == DONE
    wrong = bytearray(shard.payload)
    wrong[chooser.randrange(size)] ^= 1 << chooser.randrange(8)
    lay_payload(tmp_path, shard, bytes(wrong))
    assert read_after_a_restart(tmp_path, shard) == CHECKSUM


def test_the_ledger_must_be_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    other = create_memfd("ledger", Ledger.file_bytes(SEGMENT_BYTES + TABLE_BYTES))
    with pytest.raises(ValueError, match="ledger"):
        Rig(store, ledger_fd=other)
    os.close(other)
    store.close()
