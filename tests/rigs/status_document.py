"""A status document of a server that is well, with figures that differ from each other."""

import msgspec

from kvserver.service.telling.counters import Counters
from kvserver.wire.status import ArenaStatus, MoverStatus, RemoteStatus, SlotSize, Status


def a_status(*, slabs_ready: int = 3, problem: str = "") -> Status:
    return Status(
        server="kvserver 7.5.3",
        incarnation=11,
        uptime_s=1.5,
        arena=ArenaStatus(
            total_bytes=5 * 8192,
            ready_bytes=slabs_ready * 8192,
            used_bytes=4096,
            slab_bytes=8192,
            slabs_total=5,
            slabs_ready=slabs_ready,
            problem=problem,
        ),
        slot_sizes=[SlotSize(slot_bytes=4096, slabs=1, slots=2, slots_used=1)],
        namespaces=1,
        chunks=13,
        chunks_max=17,
        sessions=2,
        caches=3,
        leases=4,
        pins=6,
        stores=1,
        retrieves=2,
        movers=[
            MoverStatus(
                mover=1, device="host", state="ready", pid=99, backend="host, 2 threads", facts={}, caches=3, jobs=3
            )
        ],
        shown_sessions=[],
        shown_caches=[],
        counters=Counters().totals(),
    )


def a_remote(**changes: object) -> RemoteStatus:
    """A remote store that is well, or different in what `changes` says."""
    fine = RemoteStatus(
        name="fleet",
        url="valkey://10.0.0.7",
        usable=True,
        namespaces=3,
        namespaces_known=3,
        namespaces_heard=3,
        looked_for=2,
        queued_chunks=17,
        reading_bytes=0,
        writing_bytes=0,
        read_bytes_per_s=0.0,
        clears_owed=0,
    )
    return msgspec.structs.replace(fine, **changes)
