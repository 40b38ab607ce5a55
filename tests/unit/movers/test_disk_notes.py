"""Notes on a device: a Clear holds also where the file system has no room for another file."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvserver.movers import disk_notes
from kvserver.movers.disk_notes import NOTE_BYTES_MAX, Known
from kvserver.tiers.records import DOCUMENT_BYTES_MAX
from kvserver.wire.orders import ORDER_BYTES_MAX, FoundNote, encode
from tests.rigs.full_disk import fill, make_room, mounted

NAMESPACE, OTHER = b"n" * 32, b"o" * 32
DOCUMENT = b"document" * 37


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(getattr(request, "param", "tmpfs"), tmp_path, 2 << 20) as root:
        yield root


def known(disk: Path) -> dict[bytes, Known]:
    notes, damaged = disk_notes.load(str(disk))
    assert damaged == 0
    return notes


@pytest.mark.parametrize("disk", ["tmpfs", "ext4"], indirect=True)
def test_a_note_that_exists_takes_a_later_void_on_a_full_file_system(disk: Path) -> None:
    disk_notes.save(str(disk), NAMESPACE, DOCUMENT, 3)
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(bytes(9))
    for void in (5, 1 << 17, 1 << 40):
        disk_notes.save(str(disk), NAMESPACE, DOCUMENT, void)
        assert known(disk) == {NAMESPACE: Known(DOCUMENT, void)}
    disk_notes.save(str(disk), NAMESPACE, b"", (1 << 40) + 7)
    assert known(disk) == {NAMESPACE: Known(DOCUMENT, (1 << 40) + 7)}


def test_a_note_of_a_new_namespace_has_no_room_and_leaves_nothing_behind(disk: Path) -> None:
    disk_notes.save(str(disk), NAMESPACE, DOCUMENT, 3)
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        disk_notes.save(str(disk), OTHER, DOCUMENT, 5)
    assert [path.name for path in (disk / disk_notes.FOLDER).iterdir()] == [f"{NAMESPACE.hex()}.note"]
    make_room(disk)
    disk_notes.save(str(disk), OTHER, DOCUMENT, 5)
    assert known(disk) == {NAMESPACE: Known(DOCUMENT, 3), OTHER: Known(DOCUMENT, 5)}


def test_another_document_is_not_said_to_be_kept_and_the_void_holds_all_the_same(disk: Path) -> None:
    disk_notes.save(str(disk), NAMESPACE, DOCUMENT, 3)
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        disk_notes.save(str(disk), NAMESPACE, DOCUMENT * 2, 5)
    assert known(disk) == {NAMESPACE: Known(DOCUMENT, 5)}


def test_a_note_of_the_release_before_is_read_and_takes_a_later_void(disk: Path) -> None:
    """The note's numbers have their shortest encoding."""
    crc32 = disk_notes._crc(NAMESPACE, DOCUMENT, 3)
    note = disk_notes._encode(disk_notes.NoteFile(1, NAMESPACE, DOCUMENT, 3, crc32))
    folder = disk / disk_notes.FOLDER
    folder.mkdir()
    (folder / f"{NAMESPACE.hex()}.note").write_bytes(note)
    os.sync()
    assert known(disk) == {NAMESPACE: Known(DOCUMENT, 3)}
    fill(disk)
    disk_notes.save(str(disk), NAMESPACE, b"", 1 << 20)
    assert known(disk) == {NAMESPACE: Known(DOCUMENT, 1 << 20)}


def test_a_note_that_no_report_has_room_for_is_damaged_and_can_be_replaced(tmp_path: Path) -> None:
    longest = bytes(DOCUMENT_BYTES_MAX)
    disk_notes.save(str(tmp_path), NAMESPACE, longest, 7)
    assert known(tmp_path) == {NAMESPACE: Known(longest, 7)}
    assert len(encode(FoundNote(NAMESPACE, bytes(NOTE_BYTES_MAX), 7, 7))) < ORDER_BYTES_MAX
    disk_notes.save(str(tmp_path), NAMESPACE, bytes(NOTE_BYTES_MAX), 7)
    assert disk_notes.load(str(tmp_path)) == ({}, 1)
    disk_notes.save(str(tmp_path), NAMESPACE, b"", 8)
    assert known(tmp_path) == {NAMESPACE: Known(b"", 8)}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_a_damaged_note_and_hides_no_other_one(make: Callable[[Path], None], tmp_path: Path) -> None:
    disk_notes.save(str(tmp_path), NAMESPACE, DOCUMENT, 7)
    other = bytes(31) + b"o"
    make(tmp_path / disk_notes.FOLDER / f"{other.hex()}.note")
    assert disk_notes.load(str(tmp_path)) == ({NAMESPACE: Known(DOCUMENT, 7)}, 1)
    if make is os.mkfifo:
        disk_notes.save(str(tmp_path), other, DOCUMENT, 8)
        assert known(tmp_path).keys() == {NAMESPACE, other}
    else:
        with pytest.raises(OSError, match="directory"):
            disk_notes.save(str(tmp_path), other, DOCUMENT, 8)


def test_an_older_void_does_not_overwrite_a_later_one(tmp_path: Path) -> None:
    for void in (7, 5):
        disk_notes.save(str(tmp_path), NAMESPACE, DOCUMENT, void)
    assert known(tmp_path) == {NAMESPACE: Known(DOCUMENT, 7)}
