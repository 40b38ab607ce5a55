"""The Nth request to a device fails, for every N: a miss, never a wrong byte, never an item without an end."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import pytest

from kvserver._native import DiskFaults
from tests.rigs.native_disk_rig import (
    CHECKSUM,
    DONE,
    IO_ERROR,
    SHORT,
    SIZES,
    STALE,
    Extent,
    Kind,
    Record,
    Rig,
    kept,
    open_store,
    unpack,
)
from tests.rigs.native_rig import until

SMALL, LARGE = SIZES
Fault = Literal["error", "short", "ragged", "torn", "flip", "misdirect"]
HONEST = ("error", "short", "ragged")
"""Faults that the device itself reports."""

FIRST = [Record(Extent(0, 0, position, SMALL), 10 + position) for position in range(4)] + [
    Record(Extent(0, 1, position, LARGE), 20 + position) for position in range(3)
]
SECOND = [
    Record(Extent(0, 0, 1, SMALL), 31),  # overwrites
    Record(Extent(0, 1, 2, LARGE), 32),
    Record(Extent(0, 2, 0, LARGE), 33),  # a new segment
    Record(Extent(0, 2, 1, LARGE), 34),
]
GONE = [FIRST[3], FIRST[4]]


class Told:
    """The engine's report of a run, which decides what may be found afterwards."""

    def __init__(self) -> None:
        self.written: set[Record] = set()
        """Records reported as written, and not overwritten or withdrawn since."""
        self.withdrawn: set[Record] = set()
        self.outcomes: set[int] = set()


def scenario(rig: Rig) -> Told:
    told = Told()
    for batch in (FIRST, SECOND):
        taken = {record.extent for record in batch}
        told.written = {record for record in told.written if record.extent not in taken}
        outcomes = rig.run("write", batch)
        told.outcomes |= set(outcomes)
        told.written |= {record for record, outcome in zip(batch, outcomes, strict=True) if outcome == DONE}
    outcomes = rig.run("withdraw", GONE)
    told.outcomes |= set(outcomes)
    told.withdrawn = {record for record, outcome in zip(GONE, outcomes, strict=True) if outcome == DONE}
    told.written -= set(GONE)
    told.outcomes |= set(rig.run("read", [*FIRST, *SECOND]))
    return told


def requests_of_a_run(tmp_path: Path) -> int:
    faults = DiskFaults()
    directory = tmp_path / "untouched"
    directory.mkdir()
    store = open_store(directory, faults=faults)
    rig = Rig(store)
    told = scenario(rig)
    assert told.outcomes == {DONE, STALE}
    rig.close()
    store.close()
    assert kept(directory) == dict.fromkeys(told.written, DONE)
    return faults.requests


def runs(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    for nth in range(1, requests_of_a_run(tmp_path) + 1):
        directory = tmp_path / str(nth)
        directory.mkdir()
        yield nth, directory


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", get_args(Fault))
def test_whatever_goes_wrong_is_a_miss(tmp_path: Path, fault: Fault, lasting: bool) -> None:
    seen = set()
    for nth, directory in runs(tmp_path):
        faults = DiskFaults()
        faults.plan(nth, fault, errno=errno.ENOSPC if nth % 2 else errno.EIO, lasting=lasting)
        store = open_store(directory, faults=faults)
        rig = Rig(store)
        told = scenario(rig)
        seen |= told.outcomes
        rig.close()
        store.close()
        found = kept(directory)
        assert set(found.values()) <= {DONE, CHECKSUM}
        assert set(found) <= {*FIRST, *SECOND}
        if fault in HONEST:
            # Every promised record is there and right, and no withdrawn one is back.
            assert {record for record, outcome in found.items() if outcome == DONE} >= told.written
            assert CHECKSUM not in found.values()
            assert not told.withdrawn & set(found)
    assert seen >= ({IO_ERROR} if fault == "error" else set())
    # A request that was cut short is completed by another.
    assert (SHORT in seen) == (fault in ("short", "ragged"))
    assert (CHECKSUM in seen) == (fault not in HONEST)


@pytest.mark.parametrize("nth", [2, 4])
@pytest.mark.parametrize("fault", ["short", "ragged"])
def test_a_payload_that_is_cut_short_is_moved_on_from_a_whole_block(tmp_path: Path, fault: Fault, nth: int) -> None:
    """Requests: label, payload, header, and the payload again to read it. The device refuses what O_DIRECT would."""
    faults = DiskFaults()
    faults.plan(nth, fault)
    rig = Rig(open_store(tmp_path, faults=faults))
    assert rig.run("write", FIRST[4:5]) == [DONE]
    assert rig.run("read", FIRST[4:5]) == [DONE]
    assert faults.requests == 5
    rig.close()


def test_the_errno_of_the_device_is_told(tmp_path: Path) -> None:
    faults = DiskFaults()
    faults.plan(2, "error", errno=errno.ENOSPC)
    rig = Rig(open_store(tmp_path, faults=faults))
    job = rig.submit("write", FIRST[:1])
    assert rig.wait(1) == [(job, 0, IO_ERROR, errno.ENOSPC)]
    rig.close()


@pytest.mark.parametrize("nth", range(1, 6))
def test_every_request_may_stall_and_go_on(tmp_path: Path, nth: int) -> None:
    faults = DiskFaults()
    faults.plan(nth, "stall")
    store = open_store(tmp_path, faults=faults)
    rig = Rig(store)
    steps: list[tuple[Kind, int]] = [("write", 3), ("read", 1), ("withdraw", 1)]
    requests = 0
    for kind, its_requests in steps:
        job = rig.submit(kind, FIRST[:1])
        if requests < nth <= requests + its_requests:
            until(lambda: faults.stalled == 1)
            assert rig.engine.completions(9) == b""
            faults.release()
        requests += its_requests
        assert rig.wait(1) == [(job, 0, DONE, 0)]
    assert faults.requests == requests
    rig.close()
    store.close()
    assert kept(tmp_path) == {}


@pytest.mark.parametrize("fault", get_args(Fault))
def test_what_goes_wrong_in_a_recovery_costs_what_it_hid(tmp_path: Path, fault: Fault) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    told = scenario(rig)
    rig.close()
    store.close()
    counted = 0
    for nth in range(1, 7):
        faults = DiskFaults()
        faults.plan(nth, fault)
        store = open_store(tmp_path, faults=faults)
        found = unpack(store.recover())
        counted += store.damaged + store.unreadable
        assert set(found) <= told.written
        rig = Rig(store)
        assert set(rig.run("read", found)) <= {DONE}
        rig.close()
        store.close()
        assert set(kept(tmp_path)) == told.written  # neither overwritten nor withdrawn
    assert faults.requests >= 6
    assert counted > 0 or fault == "torn"


def test_what_a_recovery_could_not_read_does_not_come_back_after_it_was_overwritten(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    old = FIRST[:4]
    rig.run("write", old)
    rig.close()
    store.close()
    # The fourth request reads the table of segment 0; the flip hits its first header.
    hidden: list[tuple[Fault, int]] = [("error", 1), ("flip", 0), ("short", 2)]
    for fault, position in hidden:
        new = Record(Extent(0, 0, position, SMALL), 50 + position)
        faults = DiskFaults()
        faults.plan(4, fault)
        store = open_store(tmp_path, faults=faults)
        assert len(unpack(store.recover())) < 4
        # The payload lands, its header does not: the old header must not vouch for it.
        rig = Rig(store)
        faults.plan(faults.requests + 3, "error")
        rig.submit("write", [new])
        assert rig.wait(1)[0][2] == IO_ERROR
        rig.close()
        store.close()
        assert CHECKSUM not in kept(tmp_path).values()


def test_a_device_that_reads_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    faults = DiskFaults()
    faults.plan(1, "error", lasting=True)
    store = open_store(tmp_path, faults=faults)
    with pytest.raises(OSError, match="readable") as failure:
        store.recover()
    assert failure.value.errno == errno.EIO
