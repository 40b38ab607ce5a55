"""Stores and an engine with an arena, driven as a disk mover would, and the expected bytes of each record."""

import hashlib
import os
import random
import select
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from kvserver._native import DiskEngine, DiskFaults, DiskStore, digest_sum, xxh3
from kvserver.tiers.records import DISK_RECORD, NO_SUM
from kvserver.transfer.disk import COMPLETION
from tests.rigs.native_rig import WAIT_MS, Memory

BLOCK = 4096
ENTRY = 256
FINGERPRINT = b"fingerprint".ljust(32, b".")
SEGMENT_BYTES = 13 * BLOCK
TABLE_BYTES = BLOCK
"""Size of each segment's table in the file of headers; the segment's other bytes are a row of payloads."""
SIZES = (BLOCK, 3 * BLOCK)
"""Extent sizes: twelve to a segment, and four. Payloads are not a whole number of blocks."""

DONE, IO_ERROR, CHECKSUM, STALE, SHORT, CANCELLED = range(6)

Kind = Literal["write", "read", "withdraw"]


def sum_of(payload: bytes) -> int:
    return digest_sum(payload, 0, len(payload), 0)[0]


class Extent(NamedTuple):
    device: int
    segment: int
    position: int
    extent_bytes: int

    @property
    def name(self) -> int:
        return self.segment * SEGMENT_BYTES + self.position * self.extent_bytes


class Record(NamedTuple):
    """A shard in an extent; its bytes are a function of its generation."""

    extent: Extent
    generation: int

    @property
    def payload_bytes(self) -> int:
        return self.extent.extent_bytes - self.generation % 1021

    @property
    def payload(self) -> bytes:
        return random.Random(self.generation).randbytes(self.payload_bytes)

    @property
    def sum(self) -> int:
        return sum_of(self.payload)

    def digest(self, what: str) -> bytes:
        return hashlib.sha256(f"{what} {self.generation}".encode()).digest()

    def packed(self, slot: int = -1, *, stored_s: int = 0) -> bytes:
        extent = self.extent
        head = (slot, self.digest("namespace"), self.digest("key"), self.digest("parent"))
        shard = (self.generation % 5, self.generation % 3, self.payload_bytes, self.generation % 7)
        units = extent.extent_bytes // BLOCK
        return DISK_RECORD.pack(*head, *shard, units, self.generation, NO_SUM, extent.name, extent.device, stored_s)


def filled(device: int = 0) -> list[Record]:
    """A segment of small extents and one of large ones, with a hole in each."""
    small = [Record(Extent(device, 0, position, SIZES[0]), 100 + position) for position in (0, 1, 3, 5)]
    return small + [Record(Extent(device, 2, position, SIZES[1]), 200 + position) for position in (2, 0)]


def unpack(records: bytes) -> list[Record]:
    """The records that recover() returned; every field must be as it was written."""
    found = []
    for fields in DISK_RECORD.iter_unpack(records):
        units, generation, _, name, device, stored_s = fields[8:]
        segment, rest = divmod(name, SEGMENT_BYTES)
        record = Record(Extent(device, segment, rest // (units * BLOCK), units * BLOCK), generation)
        assert record.packed(stored_s=stored_s) == DISK_RECORD.pack(*fields)
        found.append(record)
    return found


def open_store(directory: Path, *, device: int = 0, segments: int = 3, faults: DiskFaults | None = None) -> DiskStore:
    capacity = 4 * BLOCK + segments * SEGMENT_BYTES + 1234
    return DiskStore(
        str(directory),
        device=device,
        capacity_bytes=capacity,
        segment_bytes=SEGMENT_BYTES,
        fingerprint=FINGERPRINT,
        faults=faults,
    )


def relabelled(path: Path, version: int) -> None:
    """Writes another format version into superblocks, with the seals that belong to it."""
    image = bytearray(path.read_bytes())
    for copy in (0, BLOCK):
        struct.pack_into("<I", image, copy + 8, version)
        struct.pack_into("<Q", image, copy + 72, xxh3(bytes(image[copy : copy + 72])))
    path.write_bytes(image)


class Rig:
    """An engine on recovered stores, and slots for as many records as a test has."""

    SLOTS = 40
    SLOT_BYTES = 3 * BLOCK

    def __init__(
        self,
        *stores: DiskStore,
        engine: Literal["auto", "uring", "threads"] = "auto",
        depth: int = 3,
        registered_piece_bytes: int = 256 << 20,
        ledger_fd: int = -1,
    ) -> None:
        self.arena = Memory(self.SLOTS * self.SLOT_BYTES, sealed=True)
        self.engine = DiskEngine(
            arena_fd=self.arena.fd,
            arena_bytes=self.arena.size,
            stores=list(stores),
            engine=engine,
            depth=depth,
            sum_threads=2,
            registered_piece_bytes=registered_piece_bytes,
            ledger_fd=ledger_fd,
            ledger_bytes=self.arena.size if ledger_fd >= 0 else 0,
        )
        self.jobs = 0
        self.sums: dict[tuple[int, int], int] = {}
        """Sum in the completion of each item, by job and item."""

    def submit(self, kind: Kind, records: Iterable[Record]) -> int:
        """Submits a job, with record i in slot i."""
        packed = b""
        for index, record in enumerate(records):
            slot = index * self.SLOT_BYTES
            if kind == "write":
                self.arena.view[slot : slot + record.payload_bytes] = record.payload
            packed += record.packed(slot)
        self.jobs += 1
        self.engine.submit(self.jobs, kind, packed)
        return self.jobs

    def wait(self, count: int) -> list[tuple[int, int, int, int]]:
        """Waits for exactly `count` items; returns (job, item, outcome, errno) of each."""
        ended = []
        poll = select.poll()
        poll.register(self.engine.eventfd, select.POLLIN)
        while len(ended) < count:
            assert poll.poll(WAIT_MS), f"{len(ended)} of {count} items ended: {ended}"
            os.eventfd_read(self.engine.eventfd)
            for job, item, outcome, errno, payload_bytes, _, _, told in COMPLETION.iter_unpack(
                self.engine.completions(min(3, count - len(ended)))
            ):
                assert (payload_bytes > 0) == (outcome == DONE)
                self.sums[job, item] = told
                ended.append((job, item, outcome, errno))
        return ended

    def run(self, kind: Kind, records: list[Record]) -> list[int]:
        """Runs a job; returns the outcome of each record. Checks the bytes of each read that succeeded."""
        if not records:
            return []
        if kind == "read":
            self.arena.view[:] = bytes(self.arena.size)
        job = self.submit(kind, records)
        ended = {item: outcome for its_job, item, outcome, _ in self.wait(len(records)) if its_job == job}
        assert sorted(ended) == list(range(len(records)))
        for index, record in enumerate(records):
            read = kind == "read" and ended[index] == DONE
            assert self.sums[job, index] == (record.sum if read else NO_SUM)
        if kind == "read":
            for index, record in enumerate(records):
                slot = index * self.SLOT_BYTES
                right = self.arena.view[slot : slot + record.payload_bytes] == record.payload
                assert ended[index] != DONE or right, f"wrong bytes of {record}"
        return [ended[index] for index in range(len(records))]

    def close(self) -> None:
        self.engine.close()
        self.arena.close()


def kept(directory: Path, *, device: int = 0, segments: int = 3) -> dict[Record, int]:
    """The records that a restart finds, each with the outcome of reading it."""
    return outcomes_of(open_store(directory, device=device, segments=segments))


def outcomes_of(store: DiskStore) -> dict[Record, int]:
    """The records in a store, each with the outcome of reading it. Closes the store."""
    found = unpack(store.recover())
    rig = Rig(store)
    outcomes = dict(zip(found, rig.run("read", found), strict=True))
    rig.close()
    store.close()
    return outcomes
