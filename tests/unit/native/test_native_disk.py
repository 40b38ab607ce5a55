"""The disk engine and its stores: written records are found and read, and nothing else is."""

import os
import random
import resource
import select
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

from kvserver._native import DiskEngine, DiskFaults, DiskStore, create_memfd, xxh3
from kvserver.tiers.records import DISK_RECORD
from tests.rigs.native_disk_rig import (
    BLOCK,
    CANCELLED,
    DONE,
    IO_ERROR,
    SEGMENT_BYTES,
    SIZES,
    STALE,
    Extent,
    Kind,
    Record,
    Rig,
    filled,
    kept,
    open_store,
    unpack,
)
from tests.rigs.native_rig import WAIT_MS, until

ROOT = Path(__file__).resolve().parents[3]

SMALL, LARGE = SIZES


@pytest.fixture
def faults() -> Iterator[DiskFaults]:
    """Planned faults. Stalled requests go on at the end, so that a failing test does not hang."""
    faults = DiskFaults()
    yield faults
    faults.release()


def test_xxh3_is_that_of_its_specification() -> None:
    assert xxh3(b"") == 0x2D06800538D394C2
    assert xxh3(b"a") == 0xE6C632B61E964E1F
    assert xxh3(b"abc") == 0x78AF5F94892F3950
    assert xxh3(bytes(range(256)) * 5) == xxh3(bytes(range(256)) * 5)


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_what_was_written_is_read(tmp_path: Path, engine: str) -> None:
    store = open_store(tmp_path)
    assert store.created
    try:
        rig = Rig(store, engine=engine)  # type: ignore[arg-type]
    except ValueError as refusal:
        pytest.skip(str(refusal))
    assert engine[:5] in rig.engine.backend.replace("_", "")
    records = filled()
    assert rig.run("write", records) == [DONE] * 6
    assert rig.run("read", records[::-1]) == [DONE] * 6
    rig.close()
    store.close()
    assert kept(tmp_path) == dict.fromkeys(sorted(records, key=lambda record: record.extent.name), DONE)


PIECE_BYTES = 7 * BLOCK
"""Slots have three blocks: of the first eight, the third and the fifth span two pieces.

The last piece has one block."""


@pytest.fixture
def registering(tmp_path: Path) -> Iterator[Rig]:
    """An engine that registers its arena piece by piece."""
    lockable_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() != 0 and 0 <= lockable_bytes < 8 << 20:
        pytest.skip(f"RLIMIT_MEMLOCK is {lockable_bytes} bytes")
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 19):
        pytest.skip("Linux registers buffers one by one since 5.19")
    try:
        rig = Rig(open_store(tmp_path), engine="uring", registered_piece_bytes=PIECE_BYTES)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    assert rig.arena.size % PIECE_BYTES == BLOCK
    yield rig
    rig.close()


def test_what_has_grown_is_registered_in_whole_pieces_and_in_the_end_all_of_it(registering: Rig) -> None:
    engine, size = registering.engine, registering.arena.size
    for ready, registered in ((PIECE_BYTES, PIECE_BYTES), (3 * PIECE_BYTES - BLOCK, 2 * PIECE_BYTES), (size, size)):
        engine.arena_ready(ready)
        until(lambda registered=registered: engine.registered_bytes >= registered)  # type: ignore[misc]
        registering.run("write", filled())  # turns of the lane, in which it would register more
        assert engine.registered_bytes == registered


def test_registered_memory_carries_the_same_bytes_also_of_slots_in_two_pieces(registering: Rig) -> None:
    registering.engine.arena_ready(registering.arena.size)
    until(lambda: registering.engine.registered_bytes == registering.arena.size)
    for turn in range(5):
        records = [
            Record(Extent(0, segment, position, LARGE), 100 + 10 * turn + 4 * segment + position)
            for segment in (0, 1)
            for position in range(4)
        ]
        assert registering.run("write", records) == [DONE] * 8
        assert registering.run("read", records) == [DONE] * 8


def test_recovery_returns_records_in_the_order_of_their_extents(tmp_path: Path, faults: DiskFaults) -> None:
    """Also when a device reads a later table first."""
    store = open_store(tmp_path)
    rig = Rig(store)
    records = filled()
    rig.run("write", records)
    rig.close()
    store.close()
    store = open_store(tmp_path, segments=3, faults=faults)
    faults.plan(3 + 1, "stall")  # the first of two tables; three labels are read before them
    with ThreadPoolExecutor(1) as pool:
        recovery = pool.submit(store.recover)
        until(lambda: (faults.requests, faults.stalled) == (3 + 2, 1))
        faults.release()
        found = unpack(recovery.result())
    store.close()
    assert found == sorted(records, key=lambda record: record.extent.name)


def test_reading_something_else_than_the_extent_holds_is_stale(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    records = filled()
    rig.run("write", records)
    one = records[0]
    other_key = bytearray(one.packed(0))
    other_key[40] ^= 1
    other_namespace = bytearray(one.packed(0))
    other_namespace[8] ^= 1
    for packed in (
        bytes(other_key),
        bytes(other_namespace),
        one._replace(generation=101).packed(0),
        Record(Extent(0, 0, 2, SMALL), 100).packed(0),  # nothing was written there
        Record(Extent(0, 1, 0, SMALL), 100).packed(0),  # nor in that segment
        Record(Extent(0, 0, 0, LARGE), 100).packed(0),  # of another size
    ):
        rig.engine.submit(77, "read", packed)
        assert rig.wait(1) == [(77, 0, STALE, 0)]
    assert rig.run("read", [one]) == [DONE]
    rig.close()


@pytest.mark.parametrize("kind", ["read", "withdraw"])
@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_any_number_of_records_that_are_stale_end_without_a_request(
    tmp_path: Path, engine: Literal["auto", "threads"], kind: Kind
) -> None:
    """More records than a lane looks at in one turn.

    Stale ones make no request whose end would wake it for the rest."""
    rig = Rig(open_store(tmp_path), engine=engine)
    rig.engine.submit(7, kind, Record(Extent(0, 0, 0, SMALL), 1).packed(0) * 331)
    assert {(job, outcome) for job, _, outcome, _ in rig.wait(331)} == {(7, STALE)}
    rig.close()


def test_items_that_have_ended_make_room_for_others(tmp_path: Path) -> None:
    """At most 2^20 items may be in flight, over all jobs; here that many end, and another one fits."""
    rig = Rig(open_store(tmp_path))
    at_once = 1 << 17
    stale = Record(Extent(0, 0, 0, SMALL), 1).packed(0) * at_once
    for job in range(9):
        rig.engine.submit(job, "withdraw", stale)
        left = at_once * DiskEngine.COMPLETION_BYTES
        while left:
            assert select.select([rig.engine.eventfd], [], [], WAIT_MS / 1000)[0]
            os.eventfd_read(rig.engine.eventfd)
            left -= len(rig.engine.completions(at_once))
    rig.close()


def test_overwritten_and_withdrawn_records_are_gone_for_good(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    old = filled()
    rig.run("write", old)
    new = old[1]._replace(generation=900)
    assert rig.run("write", [new]) == [DONE]
    assert rig.run("withdraw", [old[2], old[4]]) == [DONE, DONE]
    assert rig.run("withdraw", [old[1], old[2]]) == [STALE, STALE]
    assert rig.run("read", [old[1], old[2], old[4], new]) == [STALE, STALE, STALE, DONE]
    rig.close()
    store.close()
    assert set(kept(tmp_path)) == {old[0], new, old[3], old[5]}


def test_an_overwrite_sends_its_payload_only_after_the_old_header_is_gone(tmp_path: Path, faults: DiskFaults) -> None:
    store = open_store(tmp_path, faults=faults)
    rig = Rig(store)
    old = Record(Extent(0, 1, 2, LARGE), 70)
    rig.run("write", [old])
    faults.record()
    new = old._replace(generation=71)
    assert rig.run("write", [new]) == [DONE]
    rig.close()
    begun = {request: (file, bytes) for event, request, file, _, bytes in faults.trace() if event == "begin"}
    (void, payload, header) = begun
    assert [event[:2] for event in faults.trace()] == [
        (event, request) for request in (void, payload, header) for event in ("begin", "end")
    ]
    assert begun[void] == ("headers", bytes(256))
    assert begun[payload][0] == "payloads"
    assert begun[payload][1][: new.payload_bytes] == new.payload
    assert (begun[header][0], len(begun[header][1])) == ("headers", 256)


def test_a_segment_that_changes_its_size_loses_its_records_and_no_other(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    records = filled()
    rig.run("write", records)
    # Back and forth: records of this size from before must not come back to life.
    large = [Record(Extent(0, 0, position, LARGE), 300 + position) for position in (1, 2)]
    assert rig.run("write", large) == [DONE, DONE]
    small = Record(Extent(0, 0, 3, SMALL), 400)
    assert rig.run("write", [small]) == [DONE]
    assert rig.run("read", [*records, *large, small]) == [STALE] * 4 + [DONE] * 2 + [STALE] * 2 + [DONE]
    rig.close()
    store.close()
    assert set(kept(tmp_path)) == {*records[4:], small}


def test_writes_of_one_job_to_one_extent_happen_in_order(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    versions = [Record(Extent(0, 1, 0, SMALL if turn % 3 else LARGE), 500 + turn) for turn in range(20)]
    assert rig.run("write", versions) == [DONE] * 20
    assert rig.run("read", versions) == [STALE] * 19 + [DONE]
    rig.close()
    store.close()
    assert kept(tmp_path) == {versions[-1]: DONE}


def test_a_thousand_random_writes_end_as_in_a_dict(tmp_path: Path) -> None:
    seed = random.Random(5)
    stores = []
    for device in (0, 7):
        (tmp_path / str(device)).mkdir()
        stores.append(open_store(tmp_path / str(device), device=device))
    rig = Rig(*stores)
    model: dict[Extent, Record] = {}
    generation = 0
    for _ in range(60):
        batch = []
        for _ in range(seed.randrange(1, 30)):
            generation += 1
            size = SIZES[seed.random() < 0.2]
            per_segment = DiskStore.extents_per_segment(SEGMENT_BYTES, size)
            extent = Extent(seed.choice((0, 7)), seed.randrange(3), seed.randrange(per_segment), size)
            batch.append(Record(extent, generation))
            for held in list(model):
                if held[:2] == extent[:2] and (held.extent_bytes != size or held.position == extent.position):
                    del model[held]
            model[extent] = batch[-1]
        assert set(rig.run("write", batch)) == {DONE}
    assert rig.run("read", list(model.values())) == [DONE] * len(model)
    rig.close()
    for device, store in zip((0, 7), stores, strict=True):
        store.close()
        there = {record for record in model.values() if record.extent.device == device}
        assert kept(tmp_path / str(device), device=device) == dict.fromkeys(there, DONE)


def test_what_a_killed_process_has_written_needs_no_flush(tmp_path: Path) -> None:
    """The process ends without flush or close."""
    script = (
        "import sys, os; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from tests.rigs.native_disk_rig import *\n"
        "rig = Rig(open_store(Path(sys.argv[1])))\n"
        "assert set(rig.run('write', filled())) == {DONE}; os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert kept(tmp_path) == dict.fromkeys(filled(), DONE)


# ---------------------------------------------------------------- invalid requests of the caller


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (0, 2048, "aligned"),
        (0, -BLOCK, "aligned"),
        (0, Rig.SLOTS * Rig.SLOT_BYTES, "aligned"),
        (6, 0, "payload_bytes=0"),
        (6, SMALL + 1, f"payload_bytes={SMALL + 1}"),
        (8, 0, "extent="),
        (8, 1 << 19, "extent="),
        (9, 0, "generation=0"),
        (11, 12 * SMALL, "extent="),
        (11, 1, "extent="),
        (11, 3 * SEGMENT_BYTES, "extent="),
        (11, -SMALL, "extent="),
        (12, 1, "device=1"),
        (12, 64, "device=64"),
    ],
)
def test_impossible_orders_are_refused_and_nothing_of_them_happens(
    tmp_path: Path, field: int, value: int, says: str
) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    good = Record(Extent(0, 0, 0, SMALL), 1)
    fields = list(DISK_RECORD.unpack(good.packed(0)))
    fields[field] = value
    with pytest.raises(ValueError, match=says):
        rig.engine.submit(5, "write", good.packed(0) + DISK_RECORD.pack(*fields))
    assert rig.run("read", [good]) == [STALE]
    rig.close()


def test_job_numbers_are_used_once_at_a_time(tmp_path: Path, faults: DiskFaults) -> None:
    store = open_store(tmp_path, faults=faults)
    rig = Rig(store)
    faults.plan(1, "stall")
    job = rig.submit("write", [Record(Extent(0, 0, 0, SMALL), 1)])
    with pytest.raises(ValueError, match="under way"):
        rig.engine.submit(job, "read", Record(Extent(0, 0, 0, SMALL), 1).packed(0))
    with pytest.raises(ValueError, match="multiple of 152"):
        rig.engine.submit(99, "read", b"12345")
    with pytest.raises(ValueError, match="one record"):
        rig.engine.submit(99, "read", b"")
    faults.release()
    assert rig.wait(1) == [(job, 0, DONE, 0)]
    rig.close()
    with pytest.raises(ValueError, match="closed"):
        rig.engine.submit(99, "read", Record(Extent(0, 0, 0, SMALL), 1).packed(0))


def test_cancelled_items_that_have_not_begun_end_at_once_and_the_others_as_usual(
    tmp_path: Path, faults: DiskFaults
) -> None:
    store = open_store(tmp_path, faults=faults)
    rig = Rig(store, depth=1)
    faults.plan(1, "stall")  # the segment's label: all others wait for it
    records = [Record(Extent(0, 0, position, SMALL), 10 + position) for position in range(5)]
    job = rig.submit("write", records)
    until(lambda: faults.stalled == 1)
    rig.engine.cancel(job + 55)
    rig.engine.cancel(job)
    assert {(item, outcome) for _, item, outcome, _ in rig.wait(4)} == {(item, CANCELLED) for item in range(1, 5)}
    faults.release()
    assert rig.wait(1) == [(job, 0, DONE, 0)]
    rig.close()
    store.close()
    assert set(kept(tmp_path)) == {records[0]}


def test_a_write_gets_its_turn_while_reads_go_on(tmp_path: Path, faults: DiskFaults) -> None:
    """A slow write gets its mover killed, and reads may keep coming for longer than that.

    The reads fail here: a read that succeeds is hashed, and then none may be waiting."""
    store = open_store(tmp_path, faults=faults)
    rig = Rig(store, depth=1)
    *read, written = (
        Record(Extent(0, segment, at, SMALL), 20 * segment + at + 1) for segment in (0, 1, 2) for at in range(11)
    )
    rig.run("write", read)
    slot = (rig.SLOTS - 1) * rig.SLOT_BYTES
    rig.arena.view[slot : slot + written.payload_bytes] = written.payload
    stalled = faults.requests + 1
    faults.plan(stalled, "stall")
    faults.plan(stalled + 1, "error", lasting=True)
    rig.submit("read", read)
    until(lambda: faults.stalled == 1)
    faults.record()
    rig.engine.submit(99, "write", written.packed(slot))
    faults.release()
    assert {outcome for _, _, outcome, _ in rig.wait(len(read) + 1)} == {DONE, IO_ERROR}
    (payload,) = (request for event, request, *_ in faults.trace() if event == "begin")
    assert payload < stalled + len(read) // 2
    rig.close()
    store.close()


def test_a_device_that_stalls_holds_up_no_other(tmp_path: Path, faults: DiskFaults) -> None:
    stores = []
    for device in (0, 1):
        (tmp_path / str(device)).mkdir()
        faulty = {"faults": faults} if device == 0 else {}
        stores.append(open_store(tmp_path / str(device), device=device, **faulty))
    rig = Rig(*stores)
    faults.plan(1, "stall", lasting=True)
    stalled = rig.submit("write", filled(0))
    assert rig.run("write", filled(1)) == [DONE] * 6
    assert rig.run("read", filled(1)) == [DONE] * 6
    until(lambda: faults.stalled == 2)  # the labels of two segments
    faults.release()
    assert {job for job, _, outcome, _ in rig.wait(6) if outcome == DONE} == {stalled}
    rig.close()


def test_an_engine_says_what_it_cannot_do(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fd = create_memfd("arena", 5 * BLOCK)
    options = {"arena_fd": fd, "arena_bytes": 5 * BLOCK, "engine": "auto", "depth": 1, "sum_threads": 1}
    for changed, says in (
        ({"depth": 0}, "depth=0"),
        ({"sum_threads": 0}, "sum_threads=0"),
        ({"arena_bytes": 6 * BLOCK}, "arena_bytes"),
        ({"registered_piece_bytes": 0}, "registered_piece_bytes=0"),
        ({"registered_piece_bytes": BLOCK + 1}, f"registered_piece_bytes={BLOCK + 1}"),
        ({"registered_piece_bytes": (1 << 30) + BLOCK}, f"registered_piece_bytes={(1 << 30) + BLOCK}"),
        ({"engine": "fast"}, "engine=fast"),
        ({"stores": [store, store]}, "device=0"),
    ):
        with pytest.raises(ValueError, match=says):
            DiskEngine(**(options | {"stores": [store]} | changed))  # type: ignore[arg-type]
    os.close(fd)
