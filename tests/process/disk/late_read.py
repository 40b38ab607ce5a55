"""A process that reads a record from a device into an arena and is killed before the read ends: for test_disk_quiet.py.

    python -m tests.process.disk.late_read DIRECTORY ENGINE ARENA_DESCRIPTOR

It prints "ready", starts the read when it receives a line, prints "reading", and waits to be killed."""

import sys

from kvserver.tiers.records import NO_SUM, DiskRecord, pack_disk
from kvserver.transfer.disk import Engine, open_store
from kvserver.transfer.native import DiskEngine

ARENA_BYTES = 1 << 20
PAYLOAD_BYTES = 256 << 10
RECORD = DiskRecord(
    arena_offset=0,
    namespace=b"n" * 32,
    key=b"k" * 32,
    parent=b"p" * 32,
    group=0,
    shard=0,
    payload_bytes=PAYLOAD_BYTES,
    tenant=0,
    extent_bytes=PAYLOAD_BYTES,
    generation=1,
    sum=NO_SUM,
    offset=0,
    device=0,
    stored_s=0,
)


def engine_on(directory: str, arena: int, engine: Engine) -> DiskEngine:
    store, _ = open_store(directory, device=0, capacity_bytes=4 << 20, segment_bytes=1 << 20, engine=engine)
    made = DiskEngine(arena_fd=arena, arena_bytes=ARENA_BYTES, stores=[store], engine=engine, depth=3, sum_threads=1)
    made.arena_ready(ARENA_BYTES)
    return made


def main(directory: str, engine: Engine, arena: str) -> None:
    reader = engine_on(directory, int(arena), engine)
    print("ready", flush=True)
    sys.stdin.readline()
    reader.submit(1, "read", pack_disk(RECORD))
    print("reading", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
