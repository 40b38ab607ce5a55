"""systemd as a test plays it, and an engine that stores one prompt before a restart and asks for it after it."""

import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvclient.client import Client
from kvclient.values import Blocks, CacheSpec, HostBuffer, RetrieveResult, full_group
from kvserver._native import create_memfd
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
        count = self.held()
        assert self.retrieve().ok
        return os.pread(self.pool, count * BLOCKS_A_CHUNK * PAGE, 0)

    def retrieve(self) -> RetrieveResult:
        """Retrieves all chunks that the server holds."""
        os.pwrite(self.pool, bytes(BLOCKS * PAGE), 0)
        found = self.client.lookup(NAMESPACE, KEYS)
        assert found.lease is not None
        blocks = array("i", range(found.chunks * BLOCKS_A_CHUNK))
        return self.client.retrieve(self.cache, found.lease, [Blocks(0, 0, blocks)]).result(WAIT_S)

    def close(self) -> None:
        self.client.close()
        os.close(self.pool)


def change(arena: int, chunk: bytes) -> None:
    """Flips one bit in the middle of the slot that holds those bytes."""
    at = os.pread(arena, ARENA_BYTES, 0).index(chunk) + len(chunk) // 2
    (byte,) = os.pread(arena, 1, at)
    os.pwrite(arena, bytes([byte ^ 4]), at)
