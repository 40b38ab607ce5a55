"""`kvserver disk`: what lies on a device, looked at while no server uses it."""

import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator

from kvserver import disk_leave, disk_notes
from kvserver.config import Config, show_bytes
from kvserver.errors import ConfigError, DeviceError
from kvserver.tiers.records import DiskRecord, pack_disk, unpack_disk
from kvserver.transfer.disk import Unusable, completions, open_store
from kvserver.transfer.engines import DiskEngine, DiskStore, create_memfd

BATCH = 32
"""Records that are verified at once, each in a slot of its own."""


def inspect(config: Config) -> Iterator[str]:
    """Lines about each device: how full it is, of what, and how old. Raises ConfigError."""
    for device, directory in enumerate(_directories(config)):
        if _is_drained(directory):
            yield f"device {device}  {directory}: drained"
            continue
        store, packed = _open(config, device, directory)
        records = list(unpack_disk(packed))
        notes, damaged = disk_notes.load(directory)
        payload_bytes = sum(record.payload_bytes for record in records)
        yield f"device {device}  {directory}: {store.segments} segments of {show_bytes(config.disk_segment_bytes)}"
        yield f"  {len(records):,} records, {payload_bytes:,} bytes, {store.damaged + damaged} damaged"
        chunks: dict[bytes, set[bytes]] = {}
        for record in records:
            chunks.setdefault(record.namespace, set()).add(record.key)
        voids = {note.namespace: note.void for note in notes}
        for namespace, keys in chunks.items():
            mine = [record for record in records if record.namespace == namespace]
            void = sum(record.generation <= voids.get(namespace, 0) for record in mine)
            age_s = time.time() - min(record.stored_s for record in mine)
            sizes = Counter(record.extent_bytes for record in mine)
            yield (
                f"  namespace {namespace[:6].hex()}: {len(keys):,} chunks, {len(mine):,} records ({void} void), "
                f"oldest {age_s:,.0f} s, "
                + ", ".join(f"{count} x {show_bytes(size)}" for size, count in sorted(sizes.items()))
            )
        store.close()


def verify(config: Config, tell: Callable[[int, int], None]) -> Counter[str]:
    """Reads every record and compares its checksum; counts what is wrong, by fault, and "right". tell: (done, all)."""
    counts: Counter[str] = Counter()
    for device, directory in enumerate(_directories(config)):
        if _is_drained(directory):
            continue
        store, packed = _open(config, device, directory)
        records = list(unpack_disk(packed))
        if records:
            _verify_store(store, records, counts, tell)
        store.close()
    return counts


def _verify_store(
    store: DiskStore, records: list[DiskRecord], counts: Counter[str], tell: Callable[[int, int], None]
) -> None:
    slot_bytes = max(record.extent_bytes for record in records)
    arena = create_memfd("kvserver-verify", BATCH * slot_bytes)
    engine = DiskEngine(
        arena_fd=arena,
        arena_bytes=BATCH * slot_bytes,
        stores=[store],
        engine="auto",
        depth=BATCH,
        hash_threads=2,
    )
    engine.arena_ready(BATCH * slot_bytes)
    poll = select.poll()
    poll.register(engine.eventfd, select.POLLIN)
    for first in range(0, len(records), BATCH):
        batch = records[first : first + BATCH]
        packed = [pack_disk(record._replace(arena_offset=at * slot_bytes)) for at, record in enumerate(batch)]
        engine.submit(first + 1, "read", b"".join(packed))
        left = len(batch)
        while left:
            poll.poll()
            os.eventfd_read(engine.eventfd)
            for done in completions(engine, BATCH):
                left -= 1
                counts[done.fault or "right"] += 1
        tell(first + len(batch), len(records))
    engine.close()
    os.close(arena)


def _is_drained(directory: str) -> bool:
    return disk_leave.is_marked(directory) and disk_leave.is_empty(directory)


def _directories(config: Config) -> tuple[str, ...]:
    if not config.disk_directories:
        raise ConfigError("config-disk", 'disk_paths="" names no directory')
    return config.disk_directories


def _open(config: Config, device: int, directory: str) -> tuple[DiskStore, bytes]:
    """Raises DeviceError for what is no store of ours, or belongs to a server that lives. Makes none."""
    if not os.path.exists(os.path.join(directory, DiskStore.FILE)):
        raise DeviceError("disk-path", f"there is no store in {directory}")
    try:
        return open_store(
            directory, device=device, capacity_bytes=config.disk_bytes, segment_bytes=config.disk_segment_bytes
        )
    except Unusable as why:
        raise DeviceError("disk-path", str(why)) from why
