"""The host's mover itself, in a thread: what it compares with the ledger, and what it reports of a retrieve."""

import os
import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Self

import pytest

from kvserver.ipc.fd_sockets import Receiver, pair, send
from kvserver.movers.mover import HostMover
from kvserver.tiers.records import NO_PARENT, NO_SUM, Record, names_hash, pack
from kvserver.transfer.native import FAILED, LIVE, SLOT_ALIGN, Board, Completion, CopyEngine, Ledger
from kvserver.wire.messages import BOARD_WORDS, Buffer, GroupSpec, RegionRun
from kvserver.wire.orders import (
    Copy,
    CopyGroup,
    Done,
    JobKind,
    MapBoard,
    MapCache,
    Mapped,
    Order,
    Ready,
    Report,
    Unmapped,
    decode_report,
    encode,
)
from tests.rigs.native_rig import Memory

WAIT_S = 30
NAMESPACE = b"n" * 32
SESSION, CACHE, WORD = 3, 5, 7
BLOCKS = 1100
PAGES = 3, 5
"""Bytes of a page of each group. A block is a chunk."""


def key(chunk: int) -> bytes:
    return chunk.to_bytes(32, "little")


def groups() -> list[GroupSpec]:
    at = [0, BLOCKS * PAGES[0]]
    return [
        GroupSpec(1, BLOCKS, "full", 0, 1, 0, 1, 0, [RegionRun(0, begin, 1, 0, page, page)])
        for begin, page in zip(at, PAGES, strict=True)
    ]


class Brain:
    """The brain's end of the socket, with the mover at the other one. Slots lie one behind the other."""

    def __init__(self, ends: "Ends | None" = None) -> None:
        """ends: takes the place of the engine, and copies nothing."""
        arena_bytes = 2 * BLOCKS * SLOT_ALIGN
        self.arena = Memory(arena_bytes, sealed=True)
        self._ledger_file = Memory(Ledger.file_bytes(arena_bytes))
        self.ledger = Ledger(self._ledger_file.fd, arena_bytes)
        self._words = Memory(BOARD_WORDS * 8, sealed=True)
        self.board = Board(self._words.fd, BOARD_WORDS)
        self.pool = Memory(BLOCKS * sum(PAGES))
        self.pool.fill(11)
        self._end, self._its_end = pair()
        self._end.settimeout(WAIT_S)
        self._receiver = Receiver(1 << 20)
        self._engine = CopyEngine(self.arena.fd, arena_bytes, 1)
        self._ends = ends
        self._mover = HostMover(self._its_end, ends or self._engine, self.ledger)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._mover.run)
        self._jobs = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert isinstance(self.next(), Ready)
        if self._ends is not None:
            return self
        self.order(MapBoard(SESSION), self._words.fd)
        buffers = [Buffer(0, b"", self.pool.size)]
        self.order(MapCache(CACHE, SESSION, 1, buffers, groups(), "direct", "", []), self.pool.fd)
        assert self.next() == Mapped(CACHE)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._its_end.close()
        self._engine.close()
        self.ledger.close()
        self.board.close()
        for memory in (self.arena, self._ledger_file, self._words, self.pool):
            memory.close()

    def order(self, order: Order, *descriptors: int) -> None:
        send(self._end, encode(order), descriptors)

    def next(self) -> Report:
        frame, _, _ = self._receiver.receive(self._end)
        report: Report = decode_report(frame)
        return report

    def begin(self, kind: JobKind, chunks: Sequence[range], *, word: int = WORD, job: int = 0) -> int:
        """Orders a copy of these chunks of each group. Returns its number."""
        self._jobs = job or self._jobs + 1
        generation = self.board.begin(word)
        copies = []
        for group, of_group in enumerate(chunks):
            blocks, slots = array("i", of_group), array("q", [slot_of(group, chunk) for chunk in of_group])
            names = names_hash(NAMESPACE, group, 0, [key(chunk) for chunk in of_group])
            copies.append(CopyGroup(group, of_group.start, blocks.tobytes(), slots.tobytes(), names))
        self.order(Copy(self._jobs, kind, CACHE, word, generation, "direct", copies))
        return self._jobs

    def ended(self) -> Done:
        done = self.next()
        assert isinstance(done, Done)
        return done

    def stored(self, *chunks: range, known: bool = True) -> None:
        """Stores chunks of each group and publishes them, with the sums that the mover made."""
        self.begin("store", chunks)
        done = self.ended()
        sums = [total for (total,) in struct.iter_unpack("<Q", done.sums)]
        places = [(group, chunk) for group, of_group in enumerate(chunks) for chunk in of_group]
        for (group, chunk), total in zip(places, sums, strict=True):
            self.seal(group, chunk, key(chunk), total if known else NO_SUM)

    def seal(self, group: int, chunk: int, name: bytes, total: int) -> None:
        place = slot_of(group, chunk), NAMESPACE, name, NO_PARENT, group, 0
        self.ledger.seal(pack(Record(*place, PAGES[group], 0, SLOT_ALIGN, 1, total)))

    def withdraw(self, group: int, chunk: int) -> None:
        self.ledger.clear(array("q", [slot_of(group, chunk)]).tobytes())


def slot_of(group: int, chunk: int) -> int:
    return (group * BLOCKS + chunk) * SLOT_ALIGN


@pytest.fixture
def brain() -> Iterator[Brain]:
    with Brain() as brain:
        yield brain


def test_a_retrieve_is_done_when_every_chunk_has_its_name_and_its_bytes(brain: Brain) -> None:
    brain.stored(range(3), range(1, 3))
    before = brain.pool.view[:]
    brain.pool.fill(12)
    brain.begin("retrieve", [range(3), range(1, 3)])
    done = brain.ended()
    assert (done.status, done.wrong, done.unverified) == ("done", (), 0)
    begin = BLOCKS * PAGES[0]
    assert brain.pool.view[: 3 * PAGES[0]] == before[: 3 * PAGES[0]]
    assert brain.pool.view[begin + PAGES[1] : begin + 3 * PAGES[1]] == before[begin + PAGES[1] : begin + 3 * PAGES[1]]


def test_slots_that_hold_other_chunks_are_found_out_before_a_byte_moves(brain: Brain) -> None:
    brain.stored(range(3), range(2, 3))
    brain.withdraw(1, 2)
    brain.seal(1, 2, key(9), NO_SUM)
    brain.pool.fill(12)
    before = brain.pool.view[:]
    brain.begin("retrieve", [range(3), range(2, 3)])
    done = brain.ended()
    assert (done.status, done.code, done.bytes, done.wrong) == ("failed", "digest", 0, (3,))
    assert brain.pool.view[:] == before
    assert brain.board.state(WORD)[1] == LIVE, "no mover has begun it, and the client gives it up"


def test_every_wrong_chunk_is_told_however_many_there_are(brain: Brain) -> None:
    """The first one decides what a client may use. It may be in the last group."""
    brain.stored(range(BLOCKS), range(1))
    for chunk in range(1, BLOCKS):
        brain.arena.view[slot_of(0, chunk)] ^= 1
    brain.arena.view[slot_of(1, 0)] ^= 1
    brain.begin("retrieve", [range(BLOCKS), range(1)])
    done = brain.ended()
    assert (done.status, done.code) == ("failed", "digest")
    assert done.wrong == tuple(range(1, BLOCKS + 1))
    assert brain.board.state(WORD)[1] == FAILED


def test_chunks_that_nobody_summed_are_counted(brain: Brain) -> None:
    brain.stored(range(2), range(0), known=False)
    brain.stored(range(2, 3), range(0))
    brain.begin("retrieve", [range(3), range(0)])
    done = brain.ended()
    assert (done.status, done.unverified) == ("done", 2)


class Ends:
    """An engine whose ends come in the order that the test says."""

    backend = "test"

    def __init__(self, *ends: Completion) -> None:
        self.eventfd = os.eventfd(0)
        self._ends = [tuple(end) for end in ends]

    def completions(self, _most: int) -> list[Any]:
        ends, self._ends = self._ends, []
        return ends

    def submit(self, *_: object, digests: bool) -> None:
        assert digests
        os.eventfd_write(self.eventfd, 1)


def test_the_end_of_a_cache_takes_no_count_of_a_job_with_its_number() -> None:
    ends = Ends(
        Completion(6, "unmapped", 0, 0, "", "", "direct", b"", []),
        Completion(6, "done", 3, 1, "", "", "direct", b"", []),
    )
    with Brain(ends) as brain:
        brain.seal(0, 0, key(0), NO_SUM)
        brain.begin("retrieve", [range(1)], job=6)
        assert brain.next() == Unmapped(6)
        assert brain.ended().unverified == 1
    os.close(ends.eventfd)
