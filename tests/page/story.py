"""A page without a brain: the real HTTP server answers with the status documents of a test."""

import time
from types import TracebackType

import msgspec

from kvserver.brain.http.server import HttpServer, Snapshot, SnapshotBoard
from kvserver.service.telling.counters import Counters
from kvserver.wire.status import (
    ArenaStatus,
    CacheStatus,
    DiskStatus,
    MoverStatus,
    SessionStatus,
    SlotSize,
    Status,
)

MIB = 1 << 20


def a_status(**changes: object) -> Status:
    """A status with one of everything."""
    status = Status(
        server="kvserver 7.5.3",
        incarnation=11,
        uptime_s=3725.0,
        arena=ArenaStatus(
            total_bytes=64 * MIB,
            ready_bytes=48 * MIB,
            used_bytes=16 * MIB,
            slab_bytes=4 * MIB,
            slabs_total=16,
            slabs_ready=12,
        ),
        disks=[
            DiskStatus(
                device=0,
                directory="/nvme/0",
                total_bytes=400 * MIB,
                used_bytes=100 * MIB,
                takes_writes=True,
                problem="",
                said="takes writes",
                queued_bytes=3,
                written_bytes=1000,
                read_bytes=2000,
                write_bytes_per_s=3.3e9,
                read_bytes_per_s=3.6e9,
            )
        ],
        disk_state="ready",
        chunks_on_disk=1300,
        clean_bytes=4 * MIB,
        slot_sizes=[SlotSize(slot_bytes=4096, slabs=1, slots=1024, slots_used=517)],
        namespaces=3,
        chunks=1313,
        chunks_max=1717,
        sessions=1,
        caches=1,
        leases=4,
        pins=6,
        stores=1,
        retrieves=2,
        movers=[
            MoverStatus(
                mover=1, device="host", state="ready", pid=99, backend="2 threads", facts={"a": "b"}, caches=1, jobs=3
            )
        ],
        shown_sessions=[
            SessionStatus(
                session=5, engine="vllm", epoch=1, rank=2, software="kvclient 7", attached=True, caches=1, jobs=3
            )
        ],
        shown_caches=[
            CacheStatus(
                cache=9,
                name="kv",
                session=5,
                owner="vllm rank 2",
                namespace="ab" * 32,
                mover=1,
                mode="direct",
                state="mapped",
                jobs=3,
            )
        ],
        reuse="7.5 % of all chunks asked for so far were held, an infinite cache: 87.5 %",
        counters=Counters().totals(),
    )
    return msgspec.structs.replace(status, **changes)


def asked(status: Status, *, seconds: float, **tokens: int) -> Status:
    """The same server `seconds` later, after lookups asked for more tokens."""
    counters = dict(status.counters)
    before = counters["lookup_tokens"]
    assert isinstance(before, dict)
    after = {result: count + tokens.get(result, 0) for result, count in before.items()}
    sums = {"lookup_tokens_asked": sum(after.values()), "lookup_tokens_hit": after["dram"] + after["disk"]}
    counters |= {"lookup_tokens": after, **sums}
    return msgspec.structs.replace(status, uptime_s=status.uptime_s + seconds, counters=counters)


class Story:
    """A running HTTP server; `tell` publishes a status as its brain would."""

    def __init__(self, port: int = 0) -> None:
        self._board = SnapshotBoard()
        self._server = HttpServer(self._board, host="127.0.0.1", port=port)
        self._server.start()
        self.port = self._server.port

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def __enter__(self) -> "Story":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tell(self, status: Status) -> None:
        self._board.publish(Snapshot(time.monotonic(), status, Counters()))

    def close(self) -> None:
        self._server.close()
