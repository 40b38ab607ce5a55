"""A restart of the whole server with arena_path: sealed chunks are served byte by byte, or dropped with a log line."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvserver.supervisor.arena_files import ARENA, LEDGER
from kvserver.transfer.native import free_huge_pages
from tests.process.harness import kill, pids_below, until
from tests.process.restart.scene import (
    ARENA_BYTES,
    BLOCKS,
    BLOCKS_A_CHUNK,
    CHUNKS,
    KEYS,
    PAGE,
    SLAB_BYTES,
    WAIT_S,
    Engine,
    change,
)

HUGE_PAGE_BYTES = 2 << 20
START_S = 90.0
"""Upper bound for slow starts, where every core is busy. No test waits for its end."""


class Place:
    """A server's directories: one for its memory files, one for its socket and log."""

    def __init__(self, memory: Path, other: Path, **keys: object) -> None:
        self.memory, self.other, self._keys = memory, other, keys
        self.program = ""
        """Python program that serves instead of `kvserver serve`; empty for the latter."""

    @property
    def log(self) -> str:
        return (self.other / "log").read_text()

    def lines(self, words: str) -> list[str]:
        return [line for line in self.log.splitlines() if words in line]

    def file(self, what: str) -> Path:
        (path,) = self.memory.glob(f"{what}.*")
        return path

    def command(self, socket: str = "kv.sock", **flags: object) -> list[str]:
        given = {
            "socket": self.other / socket,
            "http_port": 0,
            "cache_dir": self.other,
            "arena_path": self.memory,
            "arena_bytes": ARENA_BYTES,
            "slab_bytes": SLAB_BYTES,
            "chunks_max": 1000,
            **self._keys,
            **flags,
        }
        words = [word for key, value in given.items() for word in ("--" + key.replace("_", "-"), str(value))]
        program = ["-c", self.program] if self.program else ["-m", "kvserver"]
        return [sys.executable, *program, "serve", *words]

    @contextmanager
    def process(self, **flags: object) -> Iterator["subprocess.Popen[bytes]"]:
        """One life, from its first instruction. Ends with SIGTERM if it still runs."""
        with (self.other / "log").open("ab") as log:
            process = subprocess.Popen(self.command(**flags), stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)

    @contextmanager
    def server(self, **flags: object) -> Iterator["subprocess.Popen[bytes]"]:
        """One life, from when the brain has opened its sockets."""
        before = self.log.count("server ready") if (self.other / "log").exists() else 0
        with self.process(**flags) as process:
            until("the server to be ready", lambda: self.log.count("server ready") > before, START_S)
            yield process


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvserver-test-"))
    yield Place(memory, tmp_path)
    shutil.rmtree(memory)


@pytest.fixture
def huge_place(place: Place) -> Iterator[Place]:
    """A Place with its arena on huge pages."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    usable = [
        path for _, path, kind, *_ in mounts if kind == "hugetlbfs" and os.statvfs(path).f_bsize == HUGE_PAGE_BYTES
    ]
    if not usable or not os.access(usable[0], os.W_OK):
        pytest.skip("no hugetlbfs with pages of 2 MiB that this user may write to")
    if free_huge_pages(HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES < ARENA_BYTES:
        pytest.skip("no free huge pages: sysctl vm.nr_hugepages=8")
    memory = Path(tempfile.mkdtemp(dir=usable[0], prefix="kvserver-test-"))
    keys = {"huge_page_bytes": HUGE_PAGE_BYTES, "slab_bytes": HUGE_PAGE_BYTES, "ledger_path": place.memory}
    yield Place(memory, place.other, **keys)
    shutil.rmtree(memory)


def stored(place: Place, end: str = "stop") -> bytes:
    """Runs a first life in which something is stored; returns the stored bytes.

    end: in order, or by SIGKILL of the supervisor or of every process.
    """
    content = os.urandom(BLOCKS * PAGE)
    with place.server() as process:
        engine = Engine(place.other, 1)
        engine.store(content)
        victims = {"supervisor": [process.pid], "all": [process.pid, *pids_below(process.pid)]}
        for pid in victims.get(end, ()):
            kill(pid)
        engine.close()
    return content


def found(place: Place, **flags: object) -> tuple[int, bytes]:
    """(chunks that the next life holds, their bytes)."""
    with place.server(**flags):
        engine = Engine(place.other, 2)
        count = engine.held()
        content = engine.bring() if count else b""
        engine.close()
    return count, content


@pytest.mark.parametrize("end", ["stop", "supervisor", "all"])
def test_every_sealed_chunk_is_back_byte_by_byte(place: Place, end: str) -> None:
    content = stored(place, end)
    assert found(place) == (CHUNKS, content)
    assert found(place) == (CHUNKS, content), "and by the start after that"
    assert place.log.count("memory kept") == 2
    assert "Traceback" not in place.log


@pytest.mark.parametrize("end", ["stop", "all"])
def test_every_sealed_chunk_on_huge_pages_is_back_byte_by_byte(huge_place: Place, end: str) -> None:
    content = stored(huge_place, end)
    assert huge_place.file(ARENA).stat().st_size == ARENA_BYTES
    assert found(huge_place) == (CHUNKS, content)
    assert found(huge_place) == (CHUNKS, content), "and by the start after that"
    assert huge_place.log.count("memory kept") == 2
    assert "Traceback" not in huge_place.log


def test_a_damaged_entry_of_the_ledger_is_dropped_and_counted(place: Place) -> None:
    content = stored(place)
    entries = place.file(LEDGER).read_bytes()
    with place.file(LEDGER).open("r+b") as ledger:
        ledger.seek(entries.index(KEYS[64:96]))  # the third chunk's own entry comes before its child's
        ledger.write(b"\xff")
    assert found(place) == (2, content[: 2 * BLOCKS_A_CHUNK * PAGE])
    assert "damaged=1" in place.log


@pytest.mark.parametrize("end", ["stop", "supervisor", "all"])
def test_a_chunk_whose_bytes_were_changed_meanwhile_is_not_delivered(place: Place, end: str) -> None:
    content = stored(place, end)
    with place.file(ARENA).open("r+b") as arena:
        change(arena.fileno(), content[2 * BLOCKS_A_CHUNK * PAGE :][: BLOCKS_A_CHUNK * PAGE])
    with place.server():
        engine = Engine(place.other, 2)
        result = engine.retrieve()
        assert (result.ok, result.why, result.right_chunks) == (False, "digest", 2)
        assert engine.bring() == content[: 2 * BLOCKS_A_CHUNK * PAGE], "what comes before it is held"
        engine.close()
    (line,) = place.lines("digest mismatch")
    assert f"key={KEYS[64:96].hex()}" in line


def test_without_digests_nobody_notices_and_the_log_says_so(place: Place) -> None:
    """A control of the test before: bytes that were changed are brought."""
    content = stored(place)
    with place.file(ARENA).open("r+b") as arena:
        change(arena.fileno(), content[: BLOCKS_A_CHUNK * PAGE])
    count, brought = found(place, digests="off")
    assert (count, len(brought)) == (CHUNKS, len(content))
    assert sum(one != other for one, other in zip(brought, content, strict=True)) == 1
    assert len(place.lines("digests off")) == 1
