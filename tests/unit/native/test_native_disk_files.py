"""Directories at the opening of a store: our own files, foreign, damaged or moved ones, and other sizes."""

import contextlib
import errno
import gc
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver._native import DiskStore, xxh3
from tests.rigs.native_disk_rig import (
    BLOCK,
    CHECKSUM,
    DONE,
    ENTRY,
    FINGERPRINT,
    IO_ERROR,
    SEGMENT_BYTES,
    SHORT,
    SIZES,
    TABLE_BYTES,
    Extent,
    Record,
    Rig,
    filled,
    kept,
    open_store,
    outcomes_of,
    relabelled,
    unpack,
)
from tests.rigs.slow_digest import ShardName, slow_digest

ROOT = Path(__file__).resolve().parents[3]

SMALL, LARGE = SIZES
HEADS = 2 * BLOCK
"""Bytes of the superblocks in each of the two files."""
ROW_BYTES = SEGMENT_BYTES - TABLE_BYTES
HALVES = {DiskStore.FILE: ROW_BYTES, DiskStore.HEADERS: TABLE_BYTES}
"""Bytes of a segment, by file."""


def store_with(directory: Path, records: list[Record], *, segments: int = 3) -> None:
    store = open_store(directory, segments=segments)
    if not store.created:
        store.recover()
    rig = Rig(store)
    assert set(rig.run("write", records)) <= {DONE}
    rig.close()
    store.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def shifted(records: list[Record], by: int) -> list[Record]:
    return [record._replace(generation=record.generation + by) for record in records]


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="disk-locked"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


TELL_SYNCED = """
#include <cstdio>
#include <unistd.h>
extern "C" int fdatasync(int fd) {
    char link[64], path[4096];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t bytes = readlink(link, path, sizeof path);
    std::fprintf(stderr, "%.*s\\n", bytes < 0 ? 0 : static_cast<int>(bytes), path);
    return fsync(fd);
}
"""


def test_a_flush_reaches_both_files(tmp_path: Path) -> None:
    """No test can cut the power, so this one checks the process's system calls."""
    library, directory = tmp_path / "synced.so", tmp_path / "store"
    directory.mkdir()
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=TELL_SYNCED, text=True, check=True)
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from tests.rigs.native_disk_rig import *\n"
        "open_store(Path(sys.argv[1])).flush()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory), str(ROOT)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stderr.split("\n")) >= {str(directory / name) for name in (DiskStore.FILE, DiskStore.HEADERS)}


def test_a_refused_store_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    """In use, of another kind, of another owner, without headers, without a directory."""
    in_use, foreign, unknown, bare = (tmp_path / name for name in ("in use", "foreign", "unknown", "bare"))
    for directory in (in_use, foreign, unknown, bare):
        directory.mkdir()
        if directory != unknown:
            open_store(directory).close()
    (foreign / DiskStore.FILE).write_bytes(bytes(BLOCK) + (foreign / DiskStore.FILE).read_bytes()[BLOCK:])
    (foreign / DiskStore.HEADERS).write_bytes((bare / DiskStore.HEADERS).read_bytes())
    (unknown / DiskStore.FILE).write_bytes(b"a letter" * 4096)
    (bare / DiskStore.HEADERS).unlink()
    held = open_store(in_use)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for directory, code in ((in_use, "locked"), (foreign, "foreign"), (unknown, "unknown"), (bare, "foreign")):
        with pytest.raises(ValueError, match=f"disk-{code}"):
            open_to_read(directory)
        if directory != bare:
            with pytest.raises(ValueError, match=f"disk-{code}"):
                open_store(directory)
    with pytest.raises(FileNotFoundError):
        open_store(tmp_path / "nowhere")
    assert len(os.listdir("/proc/self/fd")) == before
    held.close()


@pytest.mark.parametrize("name", HALVES)
def test_a_store_that_others_may_read_or_write_is_refused_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    store_with(tmp_path, filled())
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).chmod(0o604)
    with pytest.raises(ValueError, match=rf"disk-owner: {tmp_path}/{name} belongs to user \d+ and has mode 0604"):
        open_store(tmp_path)
    assert (tmp_path / name).read_bytes() == before
    (tmp_path / name).chmod(0o600)
    assert kept(tmp_path) == dict.fromkeys(filled(), DONE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_unfinished_store_of_another_user_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / f"{DiskStore.FILE}.new").touch(0o600)
    os.chown(tmp_path / f"{DiskStore.FILE}.new", 65_534, 65_534)
    with pytest.raises(ValueError, match=r"disk-owner: .*\.new belongs to user 65534"):
        open_store(tmp_path)


@pytest.mark.parametrize("name", HALVES)
def test_a_file_that_was_cut_is_told_from_a_store_that_was_resized(tmp_path: Path, name: str) -> None:
    store_with(tmp_path, filled())
    for segments in (7, 3, 5):
        store = open_store(tmp_path, segments=segments)
        assert (store.segments_cut, store.segments) == (0, segments)
        store.close()
    os.truncate(tmp_path / name, HEADS + 3 * HALVES[name] - 1)
    store = open_store(tmp_path, segments=5)
    assert store.segments_cut == 3, "two of five were whole"
    store.close()
    store = open_store(tmp_path, segments=5)
    assert store.segments_cut == 0, "it is whole again"
    store.close()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"mine")
    (tmp_path / "sub").mkdir()
    open_store(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == sorted(["notes", "sub", DiskStore.FILE, DiskStore.HEADERS])
    assert (tmp_path / "notes").read_bytes() == b"mine"


@pytest.mark.parametrize("name", [DiskStore.FILE, DiskStore.HEADERS])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside its other half"])
def test_a_file_of_that_name_that_is_not_ours_is_refused_and_left_alone(
    tmp_path: Path, name: str, beside: bool
) -> None:
    if beside:
        open_store(tmp_path).close()
        (tmp_path / name).unlink()
    content = b"precious" * 5000
    (tmp_path / name).write_bytes(content)
    there = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=f"disk-unknown.*{name}"):
        open_store(tmp_path)
    assert (tmp_path / name).read_bytes() == content
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/null")
    with pytest.raises(ValueError, match="disk-unknown"):
        open_store(tmp_path)
    assert sorted(os.listdir(tmp_path)) == there


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("fingerprint", "store has records of another kind"),
        ("segment", rf"segments of {SEGMENT_BYTES} bytes, expected disk_segment_bytes={SEGMENT_BYTES - BLOCK}: set"),
        ("format", "store is of format 7, expected 3: use"),
        ("damage", "store has damaged superblocks"),
        ("headers' format", "headers is of format 7, expected 3: use"),
        ("headers' damage", "headers has damaged superblocks"),
    ],
)
def test_another_store_of_ours_is_refused_and_left_as_it_is(tmp_path: Path, what: str, says: str) -> None:
    store_with(tmp_path, filled())
    path = tmp_path / (DiskStore.HEADERS if "headers" in what else DiskStore.FILE)
    options = {
        "device": 0,
        "capacity_bytes": 4 * BLOCK + 3 * SEGMENT_BYTES,
        "segment_bytes": SEGMENT_BYTES,
        "fingerprint": FINGERPRINT,
    }
    if what == "fingerprint":
        options["fingerprint"] = bytes(32)
    elif what == "segment":
        options["segment_bytes"] = SEGMENT_BYTES - BLOCK
    else:
        image = bytearray(path.read_bytes())
        for copy in (0, BLOCK):
            image[copy + (8 if "format" in what else 30)] ^= 4
        path.write_bytes(image)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"disk-foreign.*{says}.*move it away"):
        DiskStore(str(tmp_path), **options)  # type: ignore[arg-type]
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [DiskStore.FILE, DiskStore.HEADERS])
def test_one_damaged_superblock_does_no_harm(tmp_path: Path, name: str) -> None:
    store_with(tmp_path, filled())
    with (tmp_path / name).open("r+b") as file:
        file.write(random.Random(1).randbytes(BLOCK))
    assert set(kept(tmp_path)) == set(filled())


def test_a_store_grows_and_shrinks_with_its_capacity(tmp_path: Path) -> None:
    store_with(tmp_path, filled())
    grown = open_store(tmp_path, segments=5)
    assert grown.segments == 5
    assert len(unpack(grown.recover())) == 6
    files = [(tmp_path / name).stat() for name in (DiskStore.FILE, DiskStore.HEADERS)]
    assert sum(file.st_size for file in files) == grown.file_bytes == 2 * HEADS + 5 * SEGMENT_BYTES
    assert all(file.st_blocks * 512 >= file.st_size for file in files)
    grown.close()
    assert set(kept(tmp_path, segments=1)) == set(filled()[:4])
    assert (tmp_path / DiskStore.FILE).stat().st_size == HEADS + ROW_BYTES
    assert (tmp_path / DiskStore.HEADERS).stat().st_size == HEADS + TABLE_BYTES


def test_truncated_payloads_cost_what_was_cut_off(tmp_path: Path) -> None:
    store_with(tmp_path, filled())
    os.truncate(tmp_path / DiskStore.FILE, HEADS + 2 * ROW_BYTES + 3000)
    assert kept(tmp_path) == dict.fromkeys(filled()[:4], DONE)
    assert kept(tmp_path) == dict.fromkeys(filled()[:4], DONE)  # also now that the file is whole again
    os.truncate(tmp_path / DiskStore.FILE, 0)
    assert kept(tmp_path) == {}


def test_truncated_headers_cost_what_was_cut_off(tmp_path: Path) -> None:
    store_with(tmp_path, filled())
    os.truncate(tmp_path / DiskStore.HEADERS, HEADS + ENTRY + 4 * ENTRY)  # the label, positions 0 to 3
    assert kept(tmp_path) == dict.fromkeys(filled()[:3], DONE)
    store_with(tmp_path, shifted(filled(), 10))  # as if no record had been there
    assert kept(tmp_path) == dict.fromkeys(shifted(filled(), 10), DONE)


@pytest.mark.parametrize("empty", [False, True], ids=["missing", "empty"])
def test_a_store_without_headers_is_begun_anew(tmp_path: Path, empty: bool) -> None:
    store_with(tmp_path, filled())
    (tmp_path / DiskStore.HEADERS).unlink()
    if empty:
        (tmp_path / DiskStore.HEADERS).touch()
    store = open_store(tmp_path)
    assert store.created
    assert store.recover() == b""
    store.close()
    store_with(tmp_path, filled()[:2])
    assert kept(tmp_path) == dict.fromkeys(filled()[:2], DONE)


def test_headers_without_their_store_are_replaced(tmp_path: Path) -> None:
    """Left by a server that died while it made a store, or by a user who removed one of the two files."""
    store_with(tmp_path, filled())
    (tmp_path / DiskStore.FILE).unlink()
    for name in HALVES:
        (tmp_path / f"{name}.new").write_bytes(b"half")
        (tmp_path / f"{name}.new").chmod(0o600)
    store = open_store(tmp_path)
    assert store.created
    assert store.recover() == b""
    store.close()
    assert sorted(os.listdir(tmp_path)) == sorted([DiskStore.FILE, DiskStore.HEADERS])


def test_a_store_that_was_being_made_is_taken_over(tmp_path: Path) -> None:
    """Its preallocation goes on where it was; headers that lie there are not believed."""
    made, other = tmp_path / "made", tmp_path / "other"
    for directory in (made, other):
        directory.mkdir()
    store_with(other, filled())
    for name in HALVES:
        (made / f"{name}.new").write_bytes((other / name).read_bytes() + b"of a larger one")
        (made / f"{name}.new").chmod(0o600)
    with (made / f"{DiskStore.FILE}.new").open() as begun:  # kept open, or another file could get its number
        store = open_store(made)
        assert (made / DiskStore.FILE).samefile(f"/proc/self/fd/{begun.fileno()}")
    assert store.created
    assert (store.recover(), store.damaged) == (b"", 0)
    store.close()
    assert {name: (made / name).stat().st_size for name in os.listdir(made)} == {
        name: (other / name).stat().st_size for name in os.listdir(other)
    }
    store_with(made, filled()[:2])
    assert kept(made) == dict.fromkeys(filled()[:2], DONE)


def test_headers_of_another_store_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        store_with(tmp_path / name, filled())
    theirs = (tmp_path / "b" / DiskStore.HEADERS).read_bytes()
    (tmp_path / "a" / DiskStore.HEADERS).write_bytes(theirs)
    with pytest.raises(ValueError, match=r"disk-foreign.*belongs to another store than kvserver.store"):
        open_store(tmp_path / "a")
    assert (tmp_path / "a" / DiskStore.HEADERS).read_bytes() == theirs


def test_headers_of_an_earlier_day_vouch_for_no_byte_that_was_written_since(tmp_path: Path) -> None:
    """For example after a power cut that took the page cache, or with a backup put back."""
    before, after = filled(), shifted(filled(), 10)[1:]
    store_with(tmp_path, before)
    earlier = (tmp_path / DiskStore.HEADERS).read_bytes()
    store_with(tmp_path, after)
    (tmp_path / DiskStore.HEADERS).write_bytes(earlier)
    assert kept(tmp_path) == {before[0]: DONE} | dict.fromkeys(before[1:], CHECKSUM)


def test_a_file_that_is_truncated_while_it_is_used_gives_misses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    records = filled()
    rig.run("write", records)
    os.truncate(tmp_path / DiskStore.FILE, HEADS + 2 * ROW_BYTES)
    outcomes = rig.run("read", records)
    assert outcomes[:4] == [DONE] * 4
    assert DONE not in outcomes[4:]
    rig.close()


def test_memory_is_a_device_too(tmp_path: Path) -> None:
    """tmpfs, with O_DIRECT or without."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        store = open_store(Path(name))
        assert ("direct", "yes" if store.direct else "no") in store.facts
        rig = Rig(store)
        assert ("O_DIRECT" if store.direct else "page cache") in rig.engine.backend
        assert rig.run("write", filled()) == [DONE] * 6
        rig.close()
        store.close()
        assert set(kept(Path(name)).values()) == {DONE}


def test_files_that_changed_places_bring_their_records_along(tmp_path: Path) -> None:
    for name, shift in (("a", 0), ("b", 1000)):
        (tmp_path / name).mkdir()
        store = open_store(tmp_path / name)
        rig = Rig(store)
        rig.run("write", [record._replace(generation=record.generation + shift) for record in filled()])
        rig.close()
        store.close()
    for half in (DiskStore.FILE, DiskStore.HEADERS):
        files = [tmp_path / name / half for name in ("a", "b")]
        contents = [file.read_bytes() for file in files]
        for file, content in zip(files, reversed(contents), strict=True):
            file.write_bytes(content)
    assert {record.generation for record in kept(tmp_path / "a")} == {r.generation + 1000 for r in filled()}


def test_a_segment_copied_from_another_store_is_not_believed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        store_with(tmp_path / name, filled() if name == "a" else [])
    ours, theirs = ({half: bytearray((tmp_path / name / half).read_bytes()) for half in HALVES} for name in ("a", "b"))
    for half in HALVES:
        theirs[half][HEADS:] = ours[half][HEADS:]
        (tmp_path / "b" / half).write_bytes(theirs[half])
    assert kept(tmp_path / "b") == {}
    for half, span in HALVES.items():
        ours[half][HEADS + span : HEADS + 2 * span] = ours[half][HEADS : HEADS + span]
        (tmp_path / "a" / half).write_bytes(ours[half])
    assert set(kept(tmp_path / "a")) == set(filled())


def test_a_header_in_anothers_place_is_not_believed(tmp_path: Path) -> None:
    store_with(tmp_path, filled())
    headers = bytearray((tmp_path / DiskStore.HEADERS).read_bytes())
    first = HEADS + ENTRY
    headers[first + 2 * ENTRY : first + 3 * ENTRY] = headers[first : first + ENTRY]  # where no record was written
    headers[first + 3 * ENTRY : first + 4 * ENTRY] = headers[first : first + ENTRY]
    (tmp_path / DiskStore.HEADERS).write_bytes(headers)
    assert set(kept(tmp_path)) == set(filled()) - {filled()[2]}


def test_every_flipped_bit_of_a_header_or_payload_is_noticed(tmp_path: Path) -> None:
    record = Record(Extent(0, 0, 2, SMALL), 1021 * 3 + 1000)
    store_with(tmp_path, [record])
    header = HEADS + (1 + 2) * ENTRY
    payload = HEADS + 2 * SMALL
    assert (tmp_path / DiskStore.FILE).read_bytes()[payload:][: record.payload_bytes] == record.payload
    broken: list[tuple[str, range, dict[Record, int]]] = [
        (DiskStore.HEADERS, range(header, header + 192), {}),
        (DiskStore.FILE, range(payload, payload + record.payload_bytes, 7), {record: CHECKSUM}),
    ]
    for name, places, expected in broken:
        image = (tmp_path / name).read_bytes()
        for byte in places:
            flipped = bytearray(image)
            flipped[byte] ^= 1 << byte % 8
            (tmp_path / name).write_bytes(flipped)
            assert kept(tmp_path) == expected, byte - places.start
        (tmp_path / name).write_bytes(image)


def test_bad_sizes_and_places_say_what_is_wrong(tmp_path: Path) -> None:
    def options(**changed: object) -> dict[str, object]:
        good = {"device": 0, "capacity_bytes": 1 << 20, "segment_bytes": SEGMENT_BYTES, "fingerprint": FINGERPRINT}
        return good | changed

    for changed, says in (
        ({"capacity_bytes": SEGMENT_BYTES}, "disk-size"),
        ({"segment_bytes": SEGMENT_BYTES + 1}, "disk-size"),
        ({"segment_bytes": BLOCK}, "disk-size"),
        ({"device": 64}, "device=64"),
        ({"fingerprint": b"short"}, "32"),
    ):
        with pytest.raises(ValueError, match=says):
            DiskStore(str(tmp_path), **options(**changed))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="opening the disk directory") as missing:
        DiskStore(str(tmp_path / "missing"), **options())  # type: ignore[arg-type]
    assert missing.value.errno == errno.ENOENT
    # Bounded, since the kernel would try: for a moment other tests on this disk would have no space.
    with files_at_most(1 << 40), pytest.raises(OSError, match="preallocating") as too_large:
        DiskStore(str(tmp_path), **options(capacity_bytes=1 << 45))  # type: ignore[arg-type]
    assert too_large.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert os.listdir(tmp_path) == []
    assert DiskStore.extents_per_segment(SEGMENT_BYTES, 13 * BLOCK) == 0


# ---------------------------------------------------------------- an older format


def older_store(directory: Path, version: int = 2) -> None:
    store_with(directory, filled())
    for name in HALVES:
        relabelled(directory / name, version)


@pytest.mark.parametrize("version", [1, 2])
def test_a_store_of_an_older_format_is_emptied_and_used_again(tmp_path: Path, version: int) -> None:
    older_store(tmp_path, version)
    before = (tmp_path / DiskStore.FILE).stat()
    store = open_store(tmp_path)
    assert (store.emptied_format, store.created, store.segments_cut) == (version, True, 0)
    assert (tmp_path / DiskStore.FILE).stat().st_ino == before.st_ino, "there may be no room for another"
    assert (store.recover(), store.damaged, store.unreadable) == (b"", 0, 0)
    store.close()
    store = open_store(tmp_path)
    assert (store.emptied_format, store.created) == (0, False)
    store.close()
    assert kept(tmp_path) == {}
    store_with(tmp_path, filled()[:2])
    assert kept(tmp_path) == dict.fromkeys(filled()[:2], DONE)
    assert sorted(os.listdir(tmp_path)) == sorted(HALVES)
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in HALVES)


@pytest.mark.parametrize("segments", [1, 5])
def test_an_older_store_takes_the_size_that_it_is_given(tmp_path: Path, segments: int) -> None:
    """Also segments of another size: none of its own are left."""
    older_store(tmp_path)
    store = DiskStore(
        str(tmp_path),
        device=0,
        capacity_bytes=4 * BLOCK + segments * 2 * SEGMENT_BYTES,
        segment_bytes=2 * SEGMENT_BYTES,
        fingerprint=FINGERPRINT,
    )
    assert (store.emptied_format, store.segments, store.segment_bytes) == (2, segments, 2 * SEGMENT_BYTES)
    assert sum((tmp_path / name).stat().st_size for name in HALVES) == store.file_bytes
    store.close()


@pytest.mark.parametrize("left", ["missing", "empty", "damaged", "new", "one copy"])
def test_an_older_store_is_emptied_whatever_its_headers_are(tmp_path: Path, left: str) -> None:
    """new: a server was killed while it emptied the store. one copy: and it had begun with the last step."""
    older_store(tmp_path)
    headers = tmp_path / DiskStore.HEADERS
    if left == "missing":
        headers.unlink()
    elif left == "empty":
        os.truncate(headers, 0)
    elif left == "damaged":
        with headers.open("r+b") as file:
            file.seek(30)
            file.write(b"\xff" * 5)
    else:
        relabelled(headers, 3)
    if left == "one copy":
        with (tmp_path / DiskStore.FILE).open("r+b") as file:
            file.seek(30)
            file.write(b"\xff" * 5)
    store = open_store(tmp_path)
    assert (store.emptied_format, store.created) == (2, True)
    store.close()
    assert kept(tmp_path) == {}


@pytest.mark.parametrize("why", ["newer", "damaged", "fingerprint", "owner", "headers not ours", "no room"])
def test_another_store_is_not_emptied(tmp_path: Path, why: str) -> None:
    older_store(tmp_path)
    path = tmp_path / DiskStore.FILE
    options = {"segments": 3}
    says = "disk-foreign"
    if why == "newer":
        relabelled(path, 4)
        says = "disk-foreign.*store is of format 4, expected 3: use the version that wrote it"
    elif why == "damaged":
        with path.open("r+b") as file:
            for copy in (0, BLOCK):
                file.seek(copy + 30)
                file.write(b"\xff" * 5)
        says = "disk-foreign.*damaged superblocks"
    elif why == "fingerprint":
        image = bytearray(path.read_bytes())
        for copy in (0, BLOCK):
            image[copy + 40] ^= 1
        path.write_bytes(image)
        relabelled(path, 2)
        says = "disk-foreign.*records of another kind"
    elif why == "owner":
        path.chmod(0o604)
        says = "disk-owner"
    elif why == "headers not ours":
        (tmp_path / DiskStore.HEADERS).write_bytes(b"precious" * 5000)
        says = "disk-unknown"
    else:
        options, says = {"segments": 9}, "preallocating"
    before = contents(tmp_path)
    with files_at_most(HEADS + 3 * ROW_BYTES + BLOCK), pytest.raises((ValueError, OSError), match=says):
        open_store(tmp_path, **options)
    assert contents(tmp_path) == before


def test_an_older_store_is_not_read_by_who_only_looks(tmp_path: Path) -> None:
    older_store(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"disk-foreign.*of format 2 of an older release, expected 3"):
        open_to_read(tmp_path)
    assert contents(tmp_path) == before


# ---------------------------------------------------------------- opened for reading


def open_to_read(directory: Path) -> DiskStore:
    return DiskStore.open_to_read(str(directory), device=0, fingerprint=FINGERPRINT)


def test_a_store_opened_to_read_has_its_own_sizes_and_is_not_changed(tmp_path: Path) -> None:
    store_with(tmp_path, filled())
    before = contents(tmp_path)
    store = open_to_read(tmp_path)
    assert (store.segments, store.segment_bytes) == (3, SEGMENT_BYTES)
    with pytest.raises(ValueError, match="disk-locked"):
        open_to_read(tmp_path)
    assert outcomes_of(store) == dict.fromkeys(filled(), DONE)
    assert contents(tmp_path) == before


def test_a_store_in_use_is_read_beside_its_server_and_is_in_nobodys_way(tmp_path: Path) -> None:
    server = open_store(tmp_path)
    rig = Rig(server)
    assert rig.run("write", filled()[:2]) == [DONE] * 2
    beside = DiskStore.open_to_read(str(tmp_path), device=0, fingerprint=FINGERPRINT, alone=False)
    assert len(beside.recover()) == 2 * DiskStore.RECORD_BYTES
    assert rig.run("write", filled()[2:]) == [DONE] * 4
    assert len(beside.recover()) == 6 * DiskStore.RECORD_BYTES
    rig.close()
    server.close()
    assert outcomes_of(open_store(tmp_path)) == dict.fromkeys(filled(), DONE), "the lock is free"
    beside.close()


def test_a_store_opened_to_read_takes_no_write(tmp_path: Path) -> None:
    store_with(tmp_path, filled())
    before = contents(tmp_path)
    store = open_to_read(tmp_path)
    store.recover()
    rig = Rig(store)
    assert rig.run("write", shifted(filled(), 10)) == [IO_ERROR] * 6
    rig.close()
    store.close()
    assert contents(tmp_path) == before


def test_what_a_file_has_lost_shows_to_who_opens_it_to_read(tmp_path: Path) -> None:
    store_with(tmp_path, filled())
    os.truncate(tmp_path / DiskStore.FILE, HEADS + 2 * ROW_BYTES + 3000)
    assert outcomes_of(open_to_read(tmp_path)) == dict.fromkeys(filled()[:4], DONE) | dict.fromkeys(filled()[4:], SHORT)
    (tmp_path / "b").mkdir()
    store_with(tmp_path / "b", filled())
    os.truncate(tmp_path / "b" / DiskStore.HEADERS, HEADS + 2 * TABLE_BYTES)
    store = open_to_read(tmp_path / "b")
    assert outcomes_of(store) == dict.fromkeys(filled()[:4], DONE)


@pytest.mark.parametrize("name", [DiskStore.FILE, DiskStore.HEADERS])
def test_half_a_store_is_not_opened_to_read(tmp_path: Path, name: str) -> None:
    store_with(tmp_path, filled())
    os.truncate(tmp_path / name, 0)
    with pytest.raises(ValueError, match=f"disk-foreign.*{name} is missing or empty"):
        open_to_read(tmp_path)
    (tmp_path / name).unlink()
    there = contents(tmp_path)
    with pytest.raises(ValueError, match=f"disk-foreign.*{name} is missing or empty"):
        open_to_read(tmp_path)
    assert contents(tmp_path) == there


def test_a_size_of_segments_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    """The seal is right, so the size itself must be checked before anything is divided by it."""
    store_with(tmp_path, filled())
    for half in HALVES:
        image = bytearray((tmp_path / half).read_bytes())
        for copy in (0, BLOCK):
            struct.pack_into("<Q", image, copy + 16, BLOCK)
            struct.pack_into("<Q", image, copy + 72, xxh3(bytes(image[copy : copy + 72])))
        (tmp_path / half).write_bytes(image)
    with pytest.raises(ValueError, match="disk-foreign"):
        open_to_read(tmp_path)


@contextlib.contextmanager
def files_at_most(limit_bytes: int) -> Iterator[None]:
    """Limits the size of files, as if the file system had room for headers and not for payloads."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_store_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    with files_at_most(HEADS + ROW_BYTES + BLOCK), pytest.raises(OSError, match="preallocating"):
        open_store(tmp_path, segments=3)
    assert os.listdir(tmp_path) == []
    store_with(tmp_path, filled()[:4], segments=1)
    sizes = {name: (tmp_path / name).stat().st_size for name in HALVES}
    with files_at_most(HEADS + ROW_BYTES + BLOCK), pytest.raises(OSError, match="preallocating"):
        open_store(tmp_path, segments=3)
    assert {name: (tmp_path / name).stat().st_size for name in HALVES} == sizes
    assert set(kept(tmp_path, segments=1)) == set(filled()[:4])


def test_the_header_on_disk_is_as_documented(tmp_path: Path) -> None:
    """The numbers of docs/disk-format.md: changing one of them makes another format."""
    store = open_store(tmp_path)
    rig = Rig(store)
    record = Record(Extent(0, 1, 2, LARGE), 77)
    rig.run("write", [record])
    rig.close()
    image, headers = ((tmp_path / half).read_bytes() for half in HALVES)
    assert headers[:HEADS] == image[:HEADS]
    magic, version, block, segment_bytes = struct.unpack_from("<8sIIQ", image)
    assert (magic, version, block, segment_bytes) == (b"\0KVDISK1", 3, BLOCK, SEGMENT_BYTES)
    store_id, fingerprint, seal = struct.unpack_from("<16s32sQ", image, 24)
    assert (fingerprint, seal) == (FINGERPRINT, xxh3(image[:72]))
    label = HEADS + TABLE_BYTES
    fields = struct.unpack_from("<8s16sQQQQ", headers, label)
    assert fields[:4] == (b"\0KVSEGM1", store_id, 1, LARGE)
    assert fields[5] == xxh3(headers[label : label + 48])
    header = label + 3 * ENTRY
    found = struct.unpack_from("<8s16sQQQ32s32s32sHHIIIQQIIQ", headers, header)
    assert found[:5] == (b"\0KVRECD1", store_id, fields[4], 1, 2)
    assert found[5:8] == (record.digest("namespace"), record.digest("key"), record.digest("parent"))
    assert found[8:14] == (77 % 5, 77 % 3, record.payload_bytes, 77 % 7, LARGE // BLOCK, 77)
    name = ShardName(record.digest("namespace"), record.digest("key"), 77 % 5, 77 % 3)
    assert found[14] == slow_digest(record.payload, name)
    assert found[17] == xxh3(headers[header : header + 184])
    assert image[HEADS + ROW_BYTES + 2 * LARGE :][: record.payload_bytes] == record.payload
    store.close()


def test_a_header_of_another_store_is_no_record_whatever_its_label_says(tmp_path: Path) -> None:
    """Blocks of an earlier store may lie where a file system puts a new one."""
    record = Record(Extent(0, 1, 2, LARGE), 77)
    for name in ("earlier", "new"):
        (tmp_path / name).mkdir(mode=0o700)
        store_with(tmp_path / name, [record])
    earlier, new = (bytearray((tmp_path / name / DiskStore.HEADERS).read_bytes()) for name in ("earlier", "new"))
    label = HEADS + TABLE_BYTES
    header = slice(label + 3 * ENTRY, label + 4 * ENTRY)
    new[header] = earlier[header]
    new[label + 40 : label + 48] = earlier[label + 40 : label + 48]  # the epoch
    new[label + 48 : label + 56] = xxh3(bytes(new[label : label + 48])).to_bytes(8, "little")
    (tmp_path / "new" / DiskStore.HEADERS).write_bytes(new)
    assert kept(tmp_path / "new") == {}
    assert kept(tmp_path / "earlier") == {record: DONE}
