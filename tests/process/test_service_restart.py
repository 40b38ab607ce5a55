"""A restart of the whole service: kept chunks are served byte by byte, or dropped with a log line."""

import os
import re
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvclient.client import Client
from kvclient.values import Blocks, CacheSpec, HostBuffer, full_group
from kvserver._native import create_memfd
from kvserver.supervisor.arena_files import ARENA, LEDGER
from kvserver.wire.messages import RegionRun
from tests.process.engine import PATIENT
from tests.process.harness import until

WAIT_S = 20.0
ARENA_BYTES, SLAB_BYTES = 8 << 20, 1 << 20
CHUNKS, BLOCKS_A_CHUNK, PAGE = 5, 3, 1000
BLOCKS = CHUNKS * BLOCKS_A_CHUNK
NAMESPACE = b"restart!" * 4
KEYS = b"".join(bytes([chunk + 1]) * 32 for chunk in range(CHUNKS))


class Store:
    """Plays systemd: reads the service's notifications, keeps its descriptors and passes them on."""

    def __init__(self, directory: Path) -> None:
        self.said: list[str] = []
        self.kept: dict[str, int] = {}
        self._path = directory / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(self._path))

    def hear(self, word: str) -> bool:
        """Whether the service has sent that since its last start."""
        while True:
            try:
                message, beside, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(8))
            except BlockingIOError:
                return any(word in text for text in self.said)
            self.said.append(message.decode())
            fields = dict(line.split("=", 1) for line in message.decode().splitlines())
            for _, _, content in beside:
                (descriptor,) = array("i", content)
                if (old := self.kept.get(fields["FDNAME"])) is not None:
                    os.close(old)
                self.kept[fields["FDNAME"]] = descriptor
            if "FDSTOREREMOVE" in fields:
                os.close(self.kept.pop(fields["FDNAME"]))

    @contextmanager
    def service(self, directory: Path, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
        """One start of the service, from READY=1 on. Ends with SIGTERM if it still runs."""
        self.said.clear()
        names = list(self.kept)
        moves = " ".join(f"{3 + place}<&{self.kept[name]}" for place, name in enumerate(names))
        serve = f"{sys.executable} -m kvserver serve --socket {directory}/kv.sock --http-port 0 --cache-dir {directory}"
        sizes = f"--arena-bytes {ARENA_BYTES} --slab-bytes {SLAB_BYTES} --chunks-max 1000"
        listen = f"LISTEN_PID=$$ LISTEN_FDS={len(names)} LISTEN_FDNAMES={':'.join(names)}" if names else ""
        command = f"{listen} exec {serve} {sizes} {' '.join(flags)} {moves}"
        log = (directory / "log").open("ab")
        environment = {**os.environ, "NOTIFY_SOCKET": str(self._path), "WATCHDOG_USEC": "9000000"}
        process = subprocess.Popen(
            ["bash", "-c", command], stderr=log, pass_fds=list(self.kept.values()), env=environment
        )
        try:
            until("the service to be ready", lambda: self.hear("READY=1"), WAIT_S)
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)
            log.close()
            self.hear("")

    def close(self) -> None:
        self._socket.close()
        for descriptor in self.kept.values():
            os.close(descriptor)


class Engine:
    """A worker whose KV pool the test can read."""

    def __init__(self, directory: Path, epoch: int) -> None:
        self.pool = create_memfd("restart-pool", BLOCKS * PAGE)
        run = RegionRun(0, 0, 1, BLOCKS * PAGE, PAGE, PAGE)
        group = full_group(block_tokens=4, blocks=BLOCKS, regions=[run])
        spec = CacheSpec(
            name="kv",
            namespace=NAMESPACE,
            chunk_tokens=4 * BLOCKS_A_CHUNK,
            buffers=[HostBuffer(self.pool, BLOCKS * PAGE)],
            groups=[group],
        )
        self.client = Client(f"{directory}/kv.sock", engine="restart", epoch=epoch, rank=0, timeouts=PATIENT)
        self.cache = self.client.register_cache(spec)
        self.cache.wait_registered(WAIT_S)

    def store(self, content: bytes) -> None:
        os.pwrite(self.pool, content, 0)
        result = self.client.store(self.cache, 0, b"", KEYS, [Blocks(0, 0, array("i", range(BLOCKS)))]).result(WAIT_S)
        assert result.chunks == CHUNKS, result

    def held(self) -> int:
        found = self.client.lookup(NAMESPACE, KEYS)
        if found.lease is not None:
            self.client.release(found.lease)
        return found.chunks

    def bring(self) -> bytes:
        """The bytes that the server returns for the chunks that it holds."""
        os.pwrite(self.pool, bytes(BLOCKS * PAGE), 0)
        found = self.client.lookup(NAMESPACE, KEYS)
        assert found.lease is not None
        blocks = array("i", range(found.chunks * BLOCKS_A_CHUNK))
        self.client.retrieve(self.cache, found.lease, [Blocks(0, 0, blocks)]).result(WAIT_S)
        return os.pread(self.pool, found.chunks * BLOCKS_A_CHUNK * PAGE, 0)

    def close(self) -> None:
        self.client.close()
        os.close(self.pool)


def change(arena: int, chunk: bytes) -> None:
    """Flips one bit in the middle of the slot that holds those bytes."""
    at = os.pread(arena, ARENA_BYTES, 0).index(chunk) + len(chunk) // 2
    (byte,) = os.pread(arena, 1, at)
    os.pwrite(arena, bytes([byte ^ 4]), at)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


def stored(store: Store, directory: Path, *, end: int = signal.SIGTERM) -> bytes:
    """Runs a first life of the service, in which something is stored; returns the stored bytes.

    end: the signal that ends it."""
    content = os.urandom(BLOCKS * PAGE)
    with store.service(directory) as process:
        engine = Engine(directory, 1)
        engine.store(content)
        until("signs of life", lambda: store.hear("WATCHDOG=1"), WAIT_S)
        engine.close()
        process.send_signal(end)
        process.wait(WAIT_S)
    assert store.kept.keys() == {ARENA, LEDGER}
    return content


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_every_sealed_chunk_is_back_byte_by_byte(store: Store, tmp_path: Path, end: int) -> None:
    content = stored(store, tmp_path, end=end)
    with store.service(tmp_path):
        engine = Engine(tmp_path, 2)
        assert engine.held() == CHUNKS
        assert engine.bring() == content
        engine.close()
    log = (tmp_path / "log").read_text()
    assert "memory kept" in log
    assert (store.hear("STOPPING=1"), "Traceback" in log) == (True, False)


def test_a_damaged_entry_of_the_ledger_is_dropped_with_what_lies_behind_it(store: Store, tmp_path: Path) -> None:
    content = stored(store, tmp_path)
    ledger = store.kept[LEDGER]
    third = KEYS[64:96]
    entries = os.pread(ledger, os.fstat(ledger).st_size, 0)
    at = entries.index(third)  # its own entry comes before that of the chunk that names it as its parent
    os.pwrite(ledger, b"\xff", at)
    with store.service(tmp_path):
        engine = Engine(tmp_path, 2)
        assert engine.held() == 2
        assert engine.bring() == content[: 2 * BLOCKS_A_CHUNK * PAGE]
        engine.close()


def test_a_chunk_whose_bytes_were_changed_meanwhile_is_dropped_with_what_lies_behind_it(
    store: Store, tmp_path: Path
) -> None:
    content = stored(store, tmp_path)
    change(store.kept[ARENA], content[2 * BLOCKS_A_CHUNK * PAGE :][: BLOCKS_A_CHUNK * PAGE])
    with store.service(tmp_path):
        engine = Engine(tmp_path, 2)
        assert engine.held() == 2
        assert engine.bring() == content[: 2 * BLOCKS_A_CHUNK * PAGE]
        engine.close()
    log = (tmp_path / "log").read_text()
    assert re.search(r'"?kept memory compared"? .*slots=4 .*damaged=1', log), log


def test_memory_of_another_size_is_given_back_and_made_anew(store: Store, tmp_path: Path) -> None:
    stored(store, tmp_path)
    with store.service(tmp_path, f"--arena-bytes {2 * ARENA_BYTES}"):
        engine = Engine(tmp_path, 2)
        assert engine.held() == 0
        engine.store(os.urandom(BLOCKS * PAGE))
        engine.close()
    assert store.hear(f"FDSTOREREMOVE=1\nFDNAME={ARENA}")
    assert f'why="{ARENA} has {ARENA_BYTES} bytes' in (tmp_path / "log").read_text()
    assert store.kept.keys() == {ARENA, LEDGER}, "what was made anew is kept"


def test_a_ledger_that_is_none_is_given_back(store: Store, tmp_path: Path) -> None:
    stored(store, tmp_path)
    os.pwrite(store.kept[LEDGER], os.urandom(4096), 0)
    with store.service(tmp_path):
        engine = Engine(tmp_path, 2)
        assert engine.held() == 0
        engine.close()
    assert 'why="its ledger cannot be read' in (tmp_path / "log").read_text()
