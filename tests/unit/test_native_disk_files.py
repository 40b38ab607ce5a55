"""What lies in a directory when a store is opened: ours, somebody else's, damaged, moved, or of another size."""

import errno
import os
import random
import struct
import tempfile
from pathlib import Path

import pytest
from native_disk_rig import (
    BLOCK,
    CHECKSUM,
    DONE,
    FINGERPRINT,
    SEGMENT_BYTES,
    SIZES,
    Extent,
    Record,
    Rig,
    filled,
    kept,
    open_store,
    unpack,
)

from kvserver._native import DiskStore, xxh3

SMALL, LARGE = SIZES


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="disk-locked"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"mine")
    (tmp_path / "sub").mkdir()
    open_store(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == sorted(["notes", "sub", DiskStore.FILE])
    assert (tmp_path / "notes").read_bytes() == b"mine"


def test_a_file_of_that_name_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    content = b"precious" * 5000
    (tmp_path / DiskStore.FILE).write_bytes(content)
    for recreate in (False, True):
        with pytest.raises(ValueError, match="disk-unknown"):
            open_store(tmp_path, recreate=recreate)
    assert (tmp_path / DiskStore.FILE).read_bytes() == content
    (tmp_path / DiskStore.FILE).unlink()
    (tmp_path / DiskStore.FILE).symlink_to("/dev/null")
    with pytest.raises(ValueError, match="disk-unknown"):
        open_store(tmp_path)


@pytest.mark.parametrize("what", ["fingerprint", "segment", "format", "damage"])
def test_another_store_of_ours_is_refused_or_begun_anew(tmp_path: Path, what: str) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    rig.run("write", filled())
    rig.close()
    store.close()
    path = tmp_path / DiskStore.FILE
    options = {
        "device": 0,
        "capacity_bytes": 2 * BLOCK + 3 * SEGMENT_BYTES,
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
            image[copy + (8 if what == "format" else 30)] ^= 2
        path.write_bytes(image)
    with pytest.raises(ValueError, match="disk-foreign"):
        DiskStore(str(tmp_path), **options)  # type: ignore[arg-type]
    anew = DiskStore(str(tmp_path), recreate=True, **options)  # type: ignore[arg-type]
    assert anew.created
    assert anew.recover() == b""
    assert anew.damaged == 0
    anew.close()
    again = DiskStore(str(tmp_path), **options)  # type: ignore[arg-type]
    assert not again.created
    again.close()


def test_one_damaged_superblock_does_no_harm(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    rig.run("write", filled())
    rig.close()
    store.close()
    with (tmp_path / DiskStore.FILE).open("r+b") as file:
        file.write(random.Random(1).randbytes(BLOCK))
    assert set(kept(tmp_path)) == set(filled())


def test_a_store_grows_and_shrinks_with_its_capacity(tmp_path: Path) -> None:
    store = open_store(tmp_path, segments=3)
    rig = Rig(store)
    rig.run("write", filled())
    rig.close()
    store.close()
    grown = open_store(tmp_path, segments=5)
    assert grown.segments == 5
    assert len(unpack(grown.recover())) == 6
    assert (tmp_path / DiskStore.FILE).stat().st_blocks * 512 >= grown.file_bytes == 2 * BLOCK + 5 * SEGMENT_BYTES
    grown.close()
    assert set(kept(tmp_path, segments=1)) == set(filled()[:4])
    assert (tmp_path / DiskStore.FILE).stat().st_size == 2 * BLOCK + SEGMENT_BYTES


def test_a_truncated_file_costs_what_was_cut_off(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    rig.run("write", filled())
    rig.close()
    store.close()
    os.truncate(tmp_path / DiskStore.FILE, 2 * BLOCK + 2 * SEGMENT_BYTES + 3000)
    assert set(kept(tmp_path)) == set(filled()[:4])
    os.truncate(tmp_path / DiskStore.FILE, 0)
    assert kept(tmp_path) == {}


def test_a_file_that_is_truncated_while_it_is_used_gives_misses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    records = filled()
    rig.run("write", records)
    os.truncate(tmp_path / DiskStore.FILE, 2 * BLOCK + 2 * SEGMENT_BYTES)
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
    files = [tmp_path / name / DiskStore.FILE for name in ("a", "b")]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)
    assert {record.generation for record in kept(tmp_path / "a")} == {r.generation + 1000 for r in filled()}


def test_a_segment_copied_from_another_store_is_not_believed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        store = open_store(tmp_path / name)
        if name == "a":
            rig = Rig(store)
            rig.run("write", filled())
            rig.close()
        store.close()
    images = [bytearray((tmp_path / name / DiskStore.FILE).read_bytes()) for name in ("a", "b")]
    images[1][2 * BLOCK :] = images[0][2 * BLOCK :]
    (tmp_path / "b" / DiskStore.FILE).write_bytes(images[1])
    assert kept(tmp_path / "b") == {}
    moved = images[0]
    first = slice(2 * BLOCK, 2 * BLOCK + SEGMENT_BYTES)
    moved[2 * BLOCK + SEGMENT_BYTES : 2 * BLOCK + 2 * SEGMENT_BYTES] = moved[first]
    (tmp_path / "a" / DiskStore.FILE).write_bytes(moved)
    assert set(kept(tmp_path / "a")) == set(filled())


def test_every_flipped_bit_of_a_header_or_payload_is_noticed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rig = Rig(store)
    record = Record(Extent(0, 0, 2, SMALL), 1021 * 3 + 1000)
    rig.run("write", [record])
    rig.close()
    store.close()
    path = tmp_path / DiskStore.FILE
    image = path.read_bytes()
    header = 2 * BLOCK + (1 + 2) * BLOCK
    payload = 2 * BLOCK + 7 * BLOCK + 2 * SMALL
    assert image[payload : payload + record.payload_bytes] == record.payload
    for byte in (*range(header, header + 192), *range(payload, payload + record.payload_bytes, 7)):
        broken = bytearray(image)
        broken[byte] ^= 1 << byte % 8
        path.write_bytes(broken)
        outcomes = kept(tmp_path)
        assert outcomes == ({} if byte < payload else {record: CHECKSUM}), byte - header


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
    with pytest.raises(OSError, match="preallocating") as too_large:
        DiskStore(str(tmp_path), **options(capacity_bytes=1 << 45))  # type: ignore[arg-type]
    assert too_large.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert os.listdir(tmp_path) == []
    assert DiskStore.extents_per_segment(SEGMENT_BYTES, 12 * BLOCK) == 0


def test_the_header_on_disk_is_as_documented(tmp_path: Path) -> None:
    """docs/disk-format.md in numbers: whoever changes one of these makes another format."""
    store = open_store(tmp_path)
    rig = Rig(store)
    record = Record(Extent(0, 1, 2, LARGE), 77)
    rig.run("write", [record])
    rig.close()
    image = (tmp_path / DiskStore.FILE).read_bytes()
    magic, version, block, segment_bytes = struct.unpack_from("<8sIIQ", image)
    assert (magic, version, block, segment_bytes) == (b"\0KVDISK1", 1, BLOCK, SEGMENT_BYTES)
    store_id, fingerprint, seal = struct.unpack_from("<16s32sQ", image, 24)
    assert (fingerprint, seal) == (FINGERPRINT, xxh3(image[:72]))
    label = 2 * BLOCK + SEGMENT_BYTES
    fields = struct.unpack_from("<8s16sQQQQ", image, label)
    assert fields[:4] == (b"\0KVSEGM1", store_id, 1, LARGE)
    assert fields[5] == xxh3(image[label : label + 48])
    header = label + 3 * BLOCK
    found = struct.unpack_from("<8s16sQQQ32s32s32sHHIIIQQIIQ", image, header)
    assert found[:5] == (b"\0KVRECD1", store_id, fields[4], 1, 2)
    assert found[5:8] == (record.digest("namespace"), record.digest("key"), record.digest("parent"))
    assert found[8:14] == (77 % 5, 77 % 3, record.payload_bytes, 77 % 7, LARGE // BLOCK, 77)
    assert found[14] == xxh3(record.payload)
    assert found[17] == xxh3(image[header : header + 184])
    store.close()
