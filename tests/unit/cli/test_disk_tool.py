"""`kvserver disk inspect` and `verify` on every kind of directory; neither changes anything there."""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver.cli import disk
from kvserver.config.config import Config
from kvserver.errors import ConfigError
from kvserver.movers import disk_notes, disk_retire
from kvserver.movers.disk_hits import HitCounts, Hits
from kvserver.tiers.prefix_notes import ClearedPrefix, prefix_document, prefix_note
from kvserver.transfer.disk import open_store
from kvserver.transfer.native import create_memfd
from kvserver.units import show_bytes
from tests.rigs.native_disk_rig import ENTRY, SEGMENT_BYTES, TABLE_BYTES, Record, Rig, filled

HEADS = 2 * 4096
ROW_BYTES = SEGMENT_BYTES - TABLE_BYTES


def made(directory: Path, *, void: int | None = 0) -> list[Record]:
    """A device with six records, each in its own namespace. `void` is set in the note of each; None: without notes."""
    directory.mkdir()
    store, _ = open_store(str(directory), device=0, capacity_bytes=SEGMENT_BYTES * 4, segment_bytes=SEGMENT_BYTES)
    rig = Rig(store)
    rig.run("write", filled())
    rig.close()
    store.close()
    for record in filled():
        if void is not None:
            disk_notes.save(str(directory), record.digest("namespace"), b"document", void)
    return filled()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def config(*directories: Path) -> Config:
    """A Config whose sizes differ from the devices': both verbs take the devices as they are."""
    return Config(disk_paths=",".join(map(str, directories)), disk_bytes=1 << 20, disk_segment_bytes=64 << 10)


def inspected(*directories: Path) -> tuple[bool, str]:
    said: list[str] = []
    whole = disk.inspect(config(*directories), said.append)
    return whole, "\n".join(said)


def verified(*directories: Path) -> dict[str, int]:
    return dict(disk.verify(config(*directories), lambda done, of: None, lambda line: None))


def test_a_look_takes_a_device_as_it_is_and_changes_nothing(tmp_path: Path) -> None:
    records = made(tmp_path / "a", void=records_void())
    before = contents(tmp_path)
    whole, said = inspected(tmp_path / "a")
    assert whole
    assert "3 segments of 52KiB" in said
    payload_bytes = sum(record.payload_bytes for record in records)
    assert f"6 records, {payload_bytes:,} bytes, 25.6% full, 0 damaged, 0 unreadable" in said  # ten blocks of 39
    assert said.count("1 chunks, 1 records (1 void)") == 4
    assert said.count("1 chunks, 1 records (0 void)") == 2
    assert verified(tmp_path / "a") == {"right": 6}
    assert contents(tmp_path) == before


def records_void() -> int:
    """The `void` that covers exactly the four small records: the generation of the youngest."""
    return filled()[3].generation


def test_segments_are_said_by_the_size_of_their_extents_with_their_fill(tmp_path: Path) -> None:
    """Four records of one block in a segment of twelve places, two of three blocks in one of four."""
    made(tmp_path / "a")
    said = inspected(tmp_path / "a")[1]
    assert "1 segments for 4KiB: 4 of 12 extents (33.3%), oldest " in said
    assert "1 segments for 12KiB: 2 of 4 extents (50.0%), oldest " in said
    assert "  1 segments without a record" in said


def test_what_was_read_is_said_of_the_device_and_of_each_namespace(tmp_path: Path) -> None:
    first, second = (record.digest("namespace") for record in made(tmp_path / "a")[:2])
    said = inspected(tmp_path / "a")[1]
    assert "  reads are not counted yet: no kvserver.hits" in said
    assert said.count(" 0 chunks read") == len(filled())
    now_s = int(time.time())
    gone = bytes(32)  # none of its records is there any more
    hits = {first: Hits(1200, now_s - 40), gone: Hits(34, now_s)}
    counts = HitCounts(str(tmp_path / "a"), now_s - 5000, hits)
    counts.add(gone)
    counts.save()
    before = contents(tmp_path)
    device, *others = inspected(tmp_path / "a")[1].splitlines()
    assert device.startswith("device 0")
    assert "  1,235 chunks read, counted for 1 h 23 min" in others
    (line,) = [line for line in others if f"namespace {first[:6].hex()}" in line]
    assert "1,200 chunks read, the last 0 min 4" in line
    (line,) = [line for line in others if f"namespace {second[:6].hex()}" in line]
    assert line.endswith(" 0 chunks read")
    assert contents(tmp_path) == before


def test_what_would_not_be_found_at_a_start_is_said(tmp_path: Path) -> None:
    made(tmp_path / "a", void=None)
    assert inspected(tmp_path / "a")[1].count("without a note") == 6


def test_notes_of_prefixes_are_said_with_their_namespace(tmp_path: Path) -> None:
    namespace = made(tmp_path / "a")[0].digest("namespace")
    for key in (b"one", b"two"):
        prefix = ClearedPrefix(namespace, key)
        disk_notes.save(str(tmp_path / "a"), prefix_note(prefix), prefix_document(prefix), 9)
    (line,) = [line for line in inspected(tmp_path / "a")[1].splitlines() if "prefixes cleared" in line]
    assert f"namespace {namespace[:6].hex()}: " in line
    assert line.endswith("2 prefixes cleared: more is void than was counted")


def test_wrong_bytes_and_headers_are_counted(tmp_path: Path) -> None:
    made(tmp_path / "a")
    with (tmp_path / "a" / "kvserver.store").open("r+b") as file:
        file.seek(HEADS + 3 * 4096 + 5)  # in the payload of the third record
        file.write(b"!")
    with (tmp_path / "a" / "kvserver.headers").open("r+b") as file:
        file.seek(HEADS + ENTRY + 60)  # in the first header
        file.write(b"!")
    assert verified(tmp_path / "a") == {"right": 4, "checksum": 1, "damaged headers": 1}
    assert "1 damaged" in inspected(tmp_path / "a")[1]


def test_what_was_cut_off_is_counted_and_stays_cut_off(tmp_path: Path) -> None:
    made(tmp_path / "a")
    os.truncate(tmp_path / "a" / "kvserver.store", HEADS + 2 * ROW_BYTES)
    made(tmp_path / "b")
    os.truncate(tmp_path / "b" / "kvserver.headers", HEADS + 2 * TABLE_BYTES)
    before = contents(tmp_path)
    assert verified(tmp_path / "a") == {"right": 4, "short": 2}
    assert verified(tmp_path / "b") == {"right": 4, "unreadable headers": 1}
    assert contents(tmp_path) == before


def test_a_device_that_cannot_be_looked_at_is_named_and_the_others_are_looked_at(tmp_path: Path) -> None:
    made(tmp_path / "good")
    made(tmp_path / "swapped")
    headers = (tmp_path / "good" / "kvserver.headers").read_bytes()
    (tmp_path / "swapped" / "kvserver.headers").write_bytes(headers)
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "kvserver.store").write_bytes(b"a letter" * 2000)
    places = [tmp_path / name for name in ("absent", "empty", "foreign", "swapped", "good")]
    before = contents(tmp_path)
    whole, said = inspected(*places)
    assert not whole
    for number, why in enumerate(
        ("No such file or directory", "is missing or empty", "is no file of ours", "belongs to another store")
    ):
        line = said.splitlines()[number]
        assert line.startswith(f"device {number}  {places[number]}: ")
        assert why in line
    assert "device 4" in said
    assert verified(*places) == {"right": 6, "devices not opened": 4}
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "foreign", "good", "swapped"]


def test_a_drained_device_is_no_failure(tmp_path: Path) -> None:
    made(tmp_path / "a")
    disk_retire.mark(str(tmp_path / "a"))
    disk_retire.erase(str(tmp_path / "a"))
    assert inspected(tmp_path / "a") == (True, f"device 0  {tmp_path / 'a'}: drained")
    assert verified(tmp_path / "a") == {}


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A device that a server, here this process, has open."""
    made(tmp_path / "a")
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield tmp_path / "a"
    os.close(descriptor)


def test_a_device_in_use_is_inspected_and_not_verified(locked: Path) -> None:
    """Verify would report records as wrong while they are being overwritten."""
    whole, said = inspected(locked)
    assert whole
    assert f"device 0  {locked}: 3 segments of 52KiB, {show_bytes(3 * SEGMENT_BYTES + 2 * HEADS)}, in use" in said
    assert "6 records, " in said
    lines: list[str] = []
    assert disk.verify(config(locked), lambda done, of: None, lines.append) == {"devices not opened": 1}
    (line,) = lines
    assert "disk-locked" in line
    assert line.endswith(f"(process {os.getpid()}). Verify it when that has stopped; it can be inspected")


def test_each_device_is_verified_for_itself(tmp_path: Path) -> None:
    """With several devices, the report names the wrong one."""
    made(tmp_path / "a")
    made(tmp_path / "b")
    with (tmp_path / "b" / "kvserver.store").open("r+b") as file:
        file.seek(HEADS + 3 * 4096 + 5)  # in the payload of the third record
        file.write(b"!")
    lines: list[str] = []
    counts = disk.verify(config(tmp_path / "a", tmp_path / "b"), lambda done, of: None, lines.append)
    assert lines == [f"device 0  {tmp_path}/a: 6 right", f"device 1  {tmp_path}/b: 5 right, 1 checksum"]
    assert counts == {"right": 11, "checksum": 1}


def test_what_is_verified_at_once_takes_no_more_memory_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "a")
    largest = 3 * 4096  # extents of filled() have one block or three
    taken: list[int] = []

    def create(name: str, count: int) -> int:
        taken.append(count)
        return create_memfd(name, count)

    monkeypatch.setattr(disk, "create_memfd", create)
    for most, slots in ((disk.BATCH_BYTES, disk.BATCH), (3 * largest - 1, 2), (1, 1)):
        monkeypatch.setattr(disk, "BATCH_BYTES", most)
        assert verified(tmp_path / "a") == {"right": 6}
        assert taken.pop() == slots * largest


def test_without_directories_there_is_nothing_to_look_at() -> None:
    with pytest.raises(ConfigError, match="names no directory"):
        inspected()
