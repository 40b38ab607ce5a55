"""A server of today starts over files of earlier releases: it drops them, says so, and uses their places again.

Memory and records of 0.1.0 and 0.2.0 have no digests, so nothing can vouch for their bytes.

releases/0.1.0.json and releases/0.2.0.json have every byte of these files. A server of each release wrote them, and its
own client stored the chunks: releases/record.py, run with that package. Today's code made nothing of it.
"""

import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient import Blocks, CacheSpec, Client, HostBuffer, RegionRun, chunk_keys, full_group, namespace_digest
from kvserver._native import create_memfd
from kvserver.supervisor.arena_files import ARENA, LEDGER
from kvserver.wire.messages import PROTOCOL
from tests.process.engine import PATIENT
from tests.process.harness import WAIT_S, Server, until
from tests.process.restart.releases.record import (
    BLOCK_TOKENS,
    BLOCKS,
    BLOCKS_A_CHUNK,
    CHUNK_TOKENS,
    CHUNKS,
    CONTENT,
    FACTS,
    PAGE_BYTES,
    POOL_BYTES,
    REGIONS,
    SETTINGS,
    TOKENS,
    store,
)

RELEASES = "0.1.0", "0.2.0"
OF_ANOTHER_RELEASE = "its ledger cannot be read: the ledger's header is damaged, or of another release"
PROTOCOL_BEFORE = 5
"""Protocol of both releases."""


@pytest.fixture(params=RELEASES)
def recorded(request: pytest.FixtureRequest) -> dict[str, dict[str, dict[str, object]]]:
    """The files of a release."""
    text = (Path(__file__).parent / "releases" / f"{request.param}.json").read_text()
    files: dict[str, dict[str, dict[str, object]]] = json.loads(text)
    assert files["release"] == request.param
    return files


@pytest.fixture
def memory(recorded: dict[str, dict[str, dict[str, object]]]) -> Iterator[Path]:
    """A directory on tmpfs with the arena and the ledger of an earlier release."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvserver-test-"))
    lay_out(recorded["memory"], directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def disk(tmp_path: Path, recorded: dict[str, dict[str, dict[str, object]]]) -> Path:
    """The directory of a device of an earlier release."""
    lay_out(recorded["disk"], tmp_path / "disk")
    return tmp_path / "disk"


def lay_out(files: dict[str, dict[str, object]], root: Path) -> None:
    """Writes recorded files, with their holes."""
    for name, file in files.items():
        path = root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("xb") as out:
            os.fchmod(out.fileno(), int(file["mode"], 8))
            out.truncate(file["bytes"])
            for offset, digits in file["content"].items():
                os.pwrite(out.fileno(), bytes.fromhex(digits), int(offset))


def server_over(memory: Path | None, disk: Path | None) -> Server:
    """A server with the settings that the earlier one had, over what it left."""
    settings = dict(SETTINGS)
    if disk is None:
        settings = {name: value for name, value in settings.items() if not name.startswith("disk_")}
    places = {"arena_path": memory, "disk_paths": disk}
    return Server(**settings, **{name: place for name, place in places.items() if place is not None})


def brought(server: Server, *, from_disk: int) -> bytes:
    """What a client of today finds, loaded into blocks in another order; a page that was not loaded is zeros.

    from_disk: the chunks that must be read from disk for it."""
    pool = create_memfd("upgrade-pool", POOL_BYTES)
    namespace, keys = namespace_digest(FACTS), chunk_keys(array("I", TOKENS), CHUNK_TOKENS)
    pages = RegionRun(0, 0, REGIONS, BLOCKS * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
    spec = CacheSpec(
        name="kv",
        namespace=namespace,
        chunk_tokens=CHUNK_TOKENS,
        buffers=[HostBuffer(pool, POOL_BYTES)],
        groups=[full_group(block_tokens=BLOCK_TOKENS, blocks=BLOCKS, regions=[pages])],
    )
    client = Client(str(server.path), timeouts=PATIENT)
    cache = client.register_cache(spec)
    cache.wait_registered(WAIT_S)
    found = client.lookup(namespace, keys)
    taken = list(range(BLOCKS - 1, BLOCKS - 1 - found.chunks * BLOCKS_A_CHUNK, -1))
    if found.lease is not None:
        assert found.lease.chunks_on_disk == from_disk
        assert client.retrieve(cache, found.lease, [Blocks(0, 0, array("i", taken))]).result(WAIT_S).ok
    client.close()
    held = os.pread(pool, POOL_BYTES, 0)
    os.close(pool)
    content = bytearray(POOL_BYTES)
    for region in range(REGIONS):
        for stored, block in enumerate(taken):
            source, target = ((region * BLOCKS + at) * PAGE_BYTES for at in (block, stored))
            content[target : target + PAGE_BYTES] = held[source : source + PAGE_BYTES]
    return bytes(content)


def wait_for_disk(server: Server) -> None:
    until("the disk to be read", lambda: server.status().disk_state == "ready")


def test_the_arena_of_an_earlier_release_is_dropped_and_said(memory: Path) -> None:
    (ledger,) = memory.glob(f"{LEDGER}.*")
    assert ledger.open("rb").read(8) == b"\0KVLDGR1"
    with server_over(memory, None) as server:
        assert brought(server, from_disk=0) == bytes(POOL_BYTES)
        log = server.log()
    assert "WARNING supervisor kept memory dropped" in log
    assert OF_ANOTHER_RELEASE in log
    assert "memory kept" not in log
    assert not ledger.exists()
    assert len(list(memory.glob(f"{ARENA}.*"))) == 1, "the memory of the old one is given back"


def test_a_device_of_an_earlier_release_is_emptied_and_used_again(disk: Path) -> None:
    notes = sorted(path.name for path in disk.glob("kvserver.notes/*"))
    with server_over(None, disk) as server:
        wait_for_disk(server)
        assert brought(server, from_disk=0) == bytes(POOL_BYTES)
        store(server.path)
        until("the chunks to be on disk", lambda: server.status().chunks_on_disk == CHUNKS)
        log = server.log()
    emptied = f"WARNING disk mover disk of an older release emptied directory={disk} format_found=2 format_needed=3"
    assert log.count(emptied) == 1
    assert "problem=none" in log
    assert "disk recovered chunks=0 records=0" in log
    assert {path.name for path in disk.glob("kvserver.notes/*")} >= set(notes), "what was cleared stays cleared"
    with server_over(None, disk) as server:
        wait_for_disk(server)
        assert brought(server, from_disk=CHUNKS) == CONTENT
        assert "emptied" not in server.log()


def test_both_together_are_dropped(memory: Path, disk: Path) -> None:
    with server_over(memory, disk) as server:
        wait_for_disk(server)
        assert brought(server, from_disk=0) == bytes(POOL_BYTES)
        status = server.status()
        assert (status.chunks, status.chunks_on_disk) == (0, 0)
        log = server.log()
    assert "kept memory dropped" in log
    assert "disk of an older release emptied" in log


def test_a_device_of_a_later_release_is_left_as_it_is(disk: Path) -> None:
    for name in ("kvserver.store", "kvserver.headers"):
        with (disk / name).open("r+b") as file:
            for copy in (0, 4096):
                file.seek(copy + 8)
                file.write(b"\4")
    before = {path: path.read_bytes() for path in disk.glob("kvserver.*") if path.is_file()}
    with server_over(None, disk) as server:
        wait_for_disk(server)
        assert brought(server, from_disk=0) == bytes(POOL_BYTES)
        log = server.log()
    assert "ERROR disk mover disk not usable" in log
    assert "is of format 4, expected 3: use the version that wrote it, or move it away" in log
    assert {path: path.read_bytes() for path in before} == before


def test_a_device_that_others_may_write_to_was_accepted_and_is_refused_by_name(disk: Path) -> None:
    disk.chmod(0o775)
    server = server_over(None, disk)
    try:
        assert server.spawn().wait(WAIT_S) == 2
        assert f"disk-owner: {disk}" in server.log()
    finally:
        server.close()


def test_clients_of_earlier_releases_speak_another_protocol() -> None:
    """So engines are upgraded with the server, as docs/OPERATING.md says."""
    assert PROTOCOL != PROTOCOL_BEFORE
