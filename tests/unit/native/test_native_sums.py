"""Sums of the arena: a byte changed while no server runs costs its slot, and no other."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserver.transfer.native import SLOT_ALIGN, Ledger, create_memfd
from tests.process.harness import until
from tests.rigs.ledger_format import ENTRIES, RECORD

PLACES, MARKS = 67, 5
"""Places in the arena, and marks in the ledger's part after it."""
ARENA_BYTES = PLACES * SLOT_ALIGN
SPAN_BYTES = (PLACES + MARKS) * SLOT_ALIGN


class Slot(NamedTuple):
    place: int
    units: int
    payload_bytes: int

    @property
    def record(self) -> bytes:
        rng = random.Random(self.place)
        names = (rng.randbytes(32), rng.randbytes(32), rng.randbytes(32))
        return RECORD.pack(self.place * SLOT_ALIGN, *names, 0, 1, self.payload_bytes, 0, self.units, self.place)

    def holds(self, offset: int) -> bool:
        begin = self.place * SLOT_ALIGN
        return begin <= offset < begin + self.payload_bytes


SLOTS = [
    Slot(0, 1, SLOT_ALIGN),
    Slot(2, 3, 2 * SLOT_ALIGN + 1),
    Slot(5, 2, 5000),
    Slot(11, 1, 0),
    Slot(30, 30, 29 * SLOT_ALIGN + 77),
    Slot(PLACES - 1, 1, 999),
]
MARK = Slot(PLACES + 3, 1, 0)
RECORDS = b"".join(slot.record for slot in SLOTS)
"""A scan's result without the mark, which comes last."""


class Memory:
    """An arena with its ledger, as a stopped server leaves them."""

    def __init__(self) -> None:
        self.arena = create_memfd("arena", ARENA_BYTES)
        self.fd = create_memfd("ledger", Ledger.file_bytes(SPAN_BYTES))
        os.pwrite(self.arena, random.Random(1).randbytes(ARENA_BYTES), 0)
        self.ledger = Ledger(self.fd, SPAN_BYTES)
        self.ledger.seal(RECORDS + MARK.record)

    def flip(self, offset: int) -> None:
        (byte,) = os.pread(self.arena, 1, offset)
        os.pwrite(self.arena, bytes([byte ^ 0x10]), offset)

    def put(self, threads: int = 3) -> tuple[int, int, int]:
        return self.ledger.put_sums(self.arena, ARENA_BYTES, threads)

    def compare(self, threads: int = 3) -> tuple[int, int, int]:
        return self.ledger.compare_sums(self.arena, ARENA_BYTES, threads)

    def close(self) -> None:
        self.ledger.close()
        os.close(self.fd)
        os.close(self.arena)


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.close()


PAYLOAD_BYTES = sum(slot.payload_bytes for slot in SLOTS)


@pytest.mark.parametrize("threads", [1, 2, 64])
def test_unchanged_slots_are_sealed_again(memory: Memory, threads: int) -> None:
    assert memory.put(threads) == (len(SLOTS), PAYLOAD_BYTES, 0)
    assert memory.compare(threads) == (len(SLOTS), PAYLOAD_BYTES, 0)
    assert memory.ledger.scan() == RECORDS + MARK.record
    assert memory.ledger.damaged == 0


def test_no_reader_takes_a_slot_for_sealed_that_was_summed_and_not_compared(memory: Memory) -> None:
    memory.put()
    assert memory.ledger.scan() == MARK.record, "a mark has no bytes that could change"
    assert memory.ledger.damaged == len(SLOTS)
    assert memory.compare() == (0, 0, 0), "and they are gone"


@settings(max_examples=60)
@given(st.sets(st.integers(0, ARENA_BYTES - 1), max_size=5))
def test_exactly_the_slots_whose_payload_changed_are_lost(offsets: set[int]) -> None:
    memory = Memory()
    memory.put()
    for offset in offsets:
        memory.flip(offset)
    whole = [slot for slot in SLOTS if not any(slot.holds(offset) for offset in offsets)]
    lost = len(SLOTS) - len(whole)
    assert memory.compare() == (len(whole), sum(slot.payload_bytes for slot in whole), lost)
    assert memory.ledger.scan() == b"".join(slot.record for slot in whole) + MARK.record
    assert memory.ledger.damaged == lost
    memory.close()


@given(st.sampled_from(SLOTS), st.integers(0, 126), st.integers(1, 255))
def test_an_entry_that_changed_is_lost(slot: Slot, byte: int, bits: int) -> None:
    """Changes any byte of the entry except its kind of seal; that one is tested below."""
    memory = Memory()
    memory.put()
    at = ENTRIES + slot.place * RECORD.size + (byte if byte < 120 else byte + 1)
    (old,) = os.pread(memory.fd, 1, at)
    os.pwrite(memory.fd, bytes([old ^ bits]), at)
    memory.compare()
    assert memory.ledger.scan() == RECORDS.replace(slot.record, b"") + MARK.record
    assert memory.ledger.damaged == 1
    memory.close()


def test_a_summed_seal_cannot_be_made_a_plain_one_by_its_kind_alone(memory: Memory) -> None:
    memory.put()
    kind = ENTRIES + SLOTS[1].place * RECORD.size + 120
    assert os.pread(memory.fd, 1, kind) == b"\x5a"
    os.pwrite(memory.fd, b"\xa5", kind)
    memory.compare()
    assert memory.ledger.scan() == RECORDS.replace(SLOTS[1].record, b"") + MARK.record


def test_slots_that_change_places_are_lost(memory: Memory) -> None:
    """Each holds the right bytes of the other."""
    memory.put()
    first, last = (slot.place * SLOT_ALIGN for slot in (SLOTS[0], SLOTS[-1]))
    page, other = os.pread(memory.arena, SLOT_ALIGN, first), os.pread(memory.arena, SLOT_ALIGN, last)
    os.pwrite(memory.arena, other, first)
    os.pwrite(memory.arena, page, last)
    assert memory.compare()[2] == 2


def test_what_was_sealed_after_the_sums_is_believed_as_ever(memory: Memory) -> None:
    """A server that was killed in its life leaves no sums of the chunks it stored."""
    memory.put()
    memory.compare()
    late = Slot(61, 1, 44)
    memory.ledger.seal(late.record)
    memory.flip(61 * SLOT_ALIGN)
    assert memory.compare() == (0, 0, 0)
    assert late.record in memory.ledger.scan()


def test_sums_are_put_beside_those_of_which_nobody_knows_whether_they_are_right(memory: Memory) -> None:
    """A start was stopped while it compared: the other sums stay, and the next start compares all."""
    memory.put()
    late = Slot(61, 1, 44)
    memory.ledger.seal(late.record)
    memory.flip(0)
    assert memory.put() == (1, 44, 0)
    assert memory.compare() == (len(SLOTS), PAYLOAD_BYTES - SLOT_ALIGN + 44, 1)


@pytest.mark.parametrize(
    ("arena_bytes", "threads"), [(ARENA_BYTES, 0), (ARENA_BYTES, 65), (ARENA_BYTES + 1, 1), (0, 1)]
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(memory: Memory, arena_bytes: int, threads: int) -> None:
    with pytest.raises(ValueError, match="must be in"):
        memory.ledger.put_sums(memory.arena, arena_bytes, threads)
    assert memory.ledger.scan() == RECORDS + MARK.record


def test_a_slot_that_cannot_be_read_is_given_up_and_no_other() -> None:
    """Memory below the last slot is lost while the first, which is large, is read."""
    units = 1 << 14
    slots = [Slot(0, units, 7), Slot(units, 1, 99)]
    span_bytes = (units + 1) * SLOT_ALIGN
    for _ in range(50):  # the cut may come too late
        arena = os.memfd_create("arena")
        os.ftruncate(arena, span_bytes)
        file = create_memfd("ledger", Ledger.file_bytes(span_bytes))
        ledger = Ledger(file, span_bytes)
        ledger.seal(b"".join(slot.record for slot in slots))
        with ThreadPoolExecutor(1) as cutter:
            cut = cutter.submit(cut_once_read, arena, units * SLOT_ALIGN)
            summed = ledger.put_sums(arena, span_bytes, 1)
            cut.result()
        left = ledger.scan()
        damaged = ledger.damaged
        ledger.close()
        os.close(file)
        os.close(arena)
        if summed[2]:
            break
    assert summed == (1, 7, 1)
    assert left == b""
    assert damaged == 1, "the one that has a sum, which nobody has compared"


def cut_once_read(arena: int, size: int) -> None:
    """Cuts a sparse file as soon as a part of it has been read."""
    until("the arena to be read", lambda: os.fstat(arena).st_blocks > 0)
    os.ftruncate(arena, size)


def test_a_kill_while_sums_are_made_or_compared_loses_nothing() -> None:
    memory = Memory()
    context = multiprocessing.get_context("fork")

    def work() -> None:
        while True:
            memory.put(1)
            memory.compare(1)

    rng = random.Random(4)
    for _ in range(20):
        process = context.Process(target=work, daemon=True)
        process.start()
        time.sleep(rng.random() / 100)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        memory.compare()
        assert memory.ledger.scan() == RECORDS + MARK.record
    memory.close()
