"""Read counts kept beside a store: whole or not at all, bounded, and with few writes."""

import os
from pathlib import Path

import pytest

from kvserver.movers import disk_hits
from kvserver.movers.disk_hits import FILE, HitCounts, Hits


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def at(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets both clocks to this time."""
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(disk_hits.time, clock, lambda: seconds)


def counted(directory: Path) -> dict[bytes, Hits]:
    return HitCounts.load(str(directory)).by_namespace


def test_what_was_counted_is_kept_and_counting_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(1000, monkeypatch)
    hits = HitCounts.load(str(tmp_path))
    for number in (1, 2, 1):
        hits.add(name(number))
    hits.save()
    at(2000, monkeypatch)
    hits = HitCounts.load(str(tmp_path))
    assert (hits.since_s, hits.by_namespace) == (1000, {name(1): Hits(2, 1000), name(2): Hits(1, 1000)})
    hits.add(name(1))
    hits.save()
    assert counted(tmp_path) == {name(1): Hits(3, 2000), name(2): Hits(1, 1000)}
    assert os.listdir(tmp_path) == [FILE]


def test_it_is_written_every_ten_seconds_in_which_something_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(1000, monkeypatch)
    hits = HitCounts.load(str(tmp_path))
    hits.save()
    (tmp_path / FILE).unlink()
    assert hits.save_when_due() is None
    hits.add(name(1))
    at(1007, monkeypatch)
    assert hits.save_when_due() == 3
    assert os.listdir(tmp_path) == []
    at(1010, monkeypatch)
    assert hits.save_when_due() is None
    assert counted(tmp_path) == {name(1): Hits(1, 1000)}
    (tmp_path / FILE).unlink()
    at(2000, monkeypatch)
    assert hits.save_when_due() is None
    assert os.listdir(tmp_path) == []


def test_the_least_recently_read_of_too_many_namespaces_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_hits, "NAMESPACES_MAX", 3)
    hits = HitCounts.load(str(tmp_path))
    for second, number in enumerate((1, 2, 3, 1, 4)):
        at(second, monkeypatch)
        hits.add(name(number))
    assert hits.by_namespace == {name(1): Hits(2, 3), name(3): Hits(1, 2), name(4): Hits(1, 4)}


def test_the_largest_file_is_read_back(tmp_path: Path) -> None:
    hits = HitCounts(str(tmp_path), 1 << 40, {name(number): Hits(1 << 62, 1 << 40) for number in range(1023)})
    hits.add(name(1023))
    hits.save()
    assert len(counted(tmp_path)) == disk_hits.NAMESPACES_MAX


def test_no_damaged_file_is_believed(tmp_path: Path) -> None:
    """Turns each bit of the file, and tries each shorter length."""
    hits = HitCounts.load(str(tmp_path))
    hits.add(name(1))
    hits.save()
    sound = (tmp_path / FILE).read_bytes()
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / FILE).write_bytes(damaged)
        assert counted(tmp_path) == {}
    for length in range(len(sound)):
        (tmp_path / FILE).write_bytes(sound[:length])
        assert counted(tmp_path) == {}
    (tmp_path / FILE).write_bytes(sound)
    assert len(counted(tmp_path)) == 1


def test_the_counts_of_a_store_that_was_there_before_are_not_those_of_a_new_one(tmp_path: Path) -> None:
    old = HitCounts.load(str(tmp_path))
    old.add(name(1))
    old.save()
    HitCounts.begin(str(tmp_path)).save()
    assert counted(tmp_path) == {}


def test_nothing_is_left_of_it_in_a_directory_that_is_given_back(tmp_path: Path) -> None:
    hits = HitCounts.begin(str(tmp_path))
    hits.save()
    (tmp_path / f"{FILE}.new").touch()
    disk_hits.erase(str(tmp_path))
    assert os.listdir(tmp_path) == []
    disk_hits.erase(str(tmp_path))
