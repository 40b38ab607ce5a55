"""A server with a disk tier whose processes die, stop and fail, and the promises that must hold in any case."""

import http.client
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvserver.cli import disk
from kvserver.config.config import Config
from kvserver.wire.status import Status
from tests.process.disk_faults import brain as witness
from tests.process.disk_faults.program import STAND_INS
from tests.process.harness import Server, free_port, until

ARENA_BYTES = 1 << 20
SLAB_BYTES = 256 << 10
DISK_BYTES = 5 << 20
SEGMENT_BYTES = 272 << 10
"""Not a whole number of extents or slabs."""
MISSES = ("checksum", "stale", "io", "short")
"""Faults that a working device never shows, whenever the processes die."""
HEALTH_S_MAX = 10.0
"""Longest time for one answer of /healthz, and longest time without a good answer, also on a busy machine."""


class DiskServer(Server):
    """A server whose brain has a witness and whose disk I/O fails as planned. Its store is in `store`."""

    def __init__(self, filled: Path | None = None, **settings: object) -> None:
        """filled: a store to copy as the initial content."""
        self.port = free_port()
        super().__init__(
            **{
                "arena_bytes": ARENA_BYTES,
                "slab_bytes": SLAB_BYTES,
                "disk_bytes": DISK_BYTES,
                "disk_segment_bytes": SEGMENT_BYTES,
                "disk_write_policy": "through",
                "mover_grace_ms": 700,
                "http_port": self.port,
                **settings,
            }
        )
        self.store = self.folder / "store"
        if filled is None:
            self.store.mkdir()
        else:
            shutil.copytree(filled, self.store)
        self.settings["disk_paths"] = str(self.store)
        self.PROGRAM = ("-m", "tests.process.disk_faults.program", str(self.folder))

    def _child(self, module: str) -> int:
        return super()._child(STAND_INS.get(module, module))

    def account(self) -> witness.Account:
        """The brain's content on disk according to the last line of the witness."""
        return witness.read(self.folder)

    def disk_ready(self, within_s: float = 20.0) -> Status:
        """Waits until everything on disk is in the index and the disk mover runs."""

        def ready() -> Status | None:
            status = self.status()
            return status if status.disk_state == "ready" else None

        return until("the disk to be ready", ready, within_s)

    def verified(self) -> Counter[str]:
        """Counts of `kvserver disk verify`, while the server is stopped.

        Checks that the store takes no more than its size."""
        disk_bytes, segment_bytes = self.settings["disk_bytes"], self.settings["disk_segment_bytes"]
        assert isinstance(disk_bytes, int)
        assert isinstance(segment_bytes, int)
        taken_bytes = sum(path.stat().st_blocks * 512 for path in self.store.iterdir() if path.is_file())
        assert taken_bytes <= disk_bytes, "a device takes no more than it was given"
        config = Config(disk_paths=str(self.store), disk_bytes=disk_bytes, disk_segment_bytes=segment_bytes)
        counts = disk.verify(config, lambda done, of: None, print)
        assert not counts["devices not opened"], "nobody has it open, and its superblocks are sound"
        return counts


class Health(threading.Thread):
    """Polls /healthz; keeps the longest answer time and any problem that lasted too long."""

    PAUSE_S = 0.005

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.problem = ""
        """The problem that lasted for HEALTH_S_MAX; empty when there was none."""
        self._port = port
        self._over = threading.Event()

    def is_well(self) -> bool:
        """Asks once."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=HEALTH_S_MAX)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == http.client.OK
        finally:
            connection.close()

    def run(self) -> None:
        unwell_since_s: float | None = None
        while (not self._over.wait(self.PAUSE_S) or unwell_since_s is not None) and not self.problem:
            began_s = time.monotonic()
            try:
                problem = "" if self.is_well() else "/healthz says that it is not"
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - began_s)
            if not problem:
                unwell_since_s = None
            elif unwell_since_s is None:
                unwell_since_s = began_s
            if unwell_since_s is not None and now_s - unwell_since_s > HEALTH_S_MAX:
                self.problem = f"for {now_s - unwell_since_s:.1f} s: {problem}"

    def end(self) -> None:
        """Returns when the server is healthy, or has been unhealthy for too long."""
        self._over.set()
        self.join()


@contextmanager
def healthy(server: DiskServer) -> Iterator[Health]:
    """Checks that /healthz answers while the block runs."""
    health = Health(server.port)
    until("the brain to be well", health.is_well)
    health.start()
    try:
        yield health
    finally:
        health.end()
    assert not health.problem, health.problem
    assert health.longest_s < HEALTH_S_MAX, f"an answer of /healthz took {health.longest_s:.1f} s"


def misses(status: Status) -> dict[str, int]:
    """Device errors that the status counts; empty for a device that worked."""
    faults = status.counters["disk_faults"]
    assert isinstance(faults, dict)
    counts = {name: faults[name] for name in MISSES if faults[name]}
    lost = status.counters["disk_lost"]
    assert isinstance(lost, int)
    return counts | ({"lost": lost} if lost else {})
