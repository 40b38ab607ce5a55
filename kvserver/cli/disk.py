"""`kvserver disk inspect` and `verify`: reads devices without changing anything on them.

Inspecting reads headers, which works while a server uses the device. Verifying reads payloads, which a running server
may overwrite meanwhile, so it refuses a device in use.
"""

import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvserver.config.config import Config
from kvserver.config.paths import holder_of, is_locked, opened
from kvserver.errors import ConfigError
from kvserver.movers import disk_notes, disk_retire
from kvserver.movers.disk_hits import FILE as HITS
from kvserver.movers.disk_hits import HitCounts
from kvserver.movers.disk_notes import Known
from kvserver.tiers.prefix_notes import prefix_from
from kvserver.tiers.records import DiskRecord, pack_disk, unpack_disk
from kvserver.transfer.disk import Unusable, completions, open_to_read
from kvserver.transfer.native import DiskEngine, DiskStore, create_memfd
from kvserver.units import duration, show_bytes

BATCH = 32
"""Records verified at once, each in its own slot; fewer if they need more than BATCH_BYTES of memory."""
BATCH_BYTES = 256 << 20

Say = Callable[[str], None]
"""Prints one line."""


class Device(NamedTuple):
    """An open device and its packed records."""

    number: int
    directory: str
    store: DiskStore
    records: bytes


def inspect(config: Config, say: Say) -> bool:
    """Prints how full each device is, with which namespaces, their ages and how often they were read.

    False when a device could not be opened. Raises ConfigError."""
    failed: list[str] = []
    notes, damaged = _notes(config, say)
    for device in _opened(config, failed, say, alone=False):
        _say_of(device, notes, damaged.get(device.directory, 0), say)
    return not failed


def verify(config: Config, tell: Callable[[int, int], None], say: Say) -> Counter[str]:
    """Reads every record, compares its digest, and prints a line for each device. Raises ConfigError.

    Counts the "right" records, the faults of the others, and devices that could not be opened. tell: progress within a
    device, (done, all)."""
    total: Counter[str] = Counter()
    failed: list[str] = []
    for device in _opened(config, failed, say, alone=True):
        counts = Counter({"damaged headers": device.store.damaged, "unreadable headers": device.store.unreadable})
        if device.records:
            _verify(device, counts, tell)
        say(f"device {device.number}  {device.directory}: {said(counts)}")
        total += counts
    total["devices not opened"] = len(failed)
    return +total


def said(counts: Counter[str]) -> str:
    """The counts of verify(), in words."""
    return ", ".join(f"{count:,} {fault}" for fault, count in (+counts).most_common()) or "no records"


def _opened(config: Config, failed: list[str], say: Say, *, alone: bool) -> Iterator[Device]:
    """Opens each device that is not drained, one after the other, and closes it afterwards.

    Prints why a device is skipped. Adds those that cannot be opened to `failed`."""
    if not config.disk_directories:
        raise ConfigError("config-disk", 'disk_paths="" names no directory')
    for number, directory in enumerate(config.disk_directories):
        if disk_retire.is_drained(directory):
            say(f"device {number}  {directory}: drained")
            continue
        try:
            store, records = open_to_read(directory, device=number, alone=alone)
        except Unusable as why:
            say(f"device {number}  {directory}: {why}{_wait_for(directory)}")
            failed.append(directory)
            continue
        yield Device(number, directory, store, records)
        store.close()


def _is_in_use(directory: str) -> bool:
    with opened(directory) as descriptor:
        return is_locked(descriptor)


def _wait_for(directory: str) -> str:
    """Advice for a device that could not be opened because a server has it; empty in other cases."""
    try:
        with opened(directory) as descriptor:
            if not is_locked(descriptor):
                return ""
            return f"{holder_of(descriptor)}. Verify it when that has stopped; it can be inspected"
    except OSError:
        return ""


# ---------------------------------------------------------------- inspect


class Region:
    """The segments of a device that serve extents of one size."""

    def __init__(self) -> None:
        self.segments: set[int] = set()
        self.records = 0
        self.oldest_s = time.time()

    def add(self, record: DiskRecord, segment_bytes: int) -> None:
        self.segments.add(record.offset // segment_bytes)
        self.records += 1
        self.oldest_s = min(self.oldest_s, record.stored_s)


class Content:
    """The records of one namespace on a device."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.records = self.void = 0
        self.oldest_s = time.time()
        self.sizes: Counter[int] = Counter()

    def add(self, record: DiskRecord, void: int) -> None:
        self.keys.add(record.key)
        self.records += 1
        self.void += record.generation <= void
        self.oldest_s = min(self.oldest_s, record.stored_s)
        self.sizes[record.extent_bytes] += 1


def _notes(config: Config, say: Say) -> tuple[dict[bytes, Known], dict[str, int]]:
    """The combined notes of all devices, and the number of damaged notes in each directory."""
    found: list[dict[bytes, Known]] = []
    damaged: dict[str, int] = {}
    for directory in config.disk_directories:
        try:
            notes, damaged[directory] = disk_notes.load(directory)
            found.append(notes)
        except OSError as problem:
            say(f"{directory}: its notes cannot be read: {problem.strerror}")
    return disk_notes.together(found), damaged


def _say_of(device: Device, notes: dict[bytes, Known], damaged_notes: int, say: Say) -> None:
    store = device.store
    contents: dict[bytes, Content] = {}
    regions: dict[int, Region] = {}
    payload_bytes = 0
    for record in unpack_disk(device.records):
        payload_bytes += record.payload_bytes
        regions.setdefault(record.extent_bytes, Region()).add(record, store.segment_bytes)
        contents.setdefault(record.namespace, Content()).add(
            record, notes[record.namespace].void if record.namespace in notes else 0
        )
    say(
        f"device {device.number}  {device.directory}: {store.segments} segments of {show_bytes(store.segment_bytes)}, "
        f"{show_bytes(store.file_bytes)}{', in use' if _is_in_use(device.directory) else ''}"
    )
    records = sum(content.records for content in contents.values())
    damaged = f"{store.damaged + damaged_notes} damaged, {store.unreadable} unreadable"
    taken_bytes = sum(size * count for content in contents.values() for size, count in content.sizes.items())
    fill = taken_bytes / (store.segments * store.segment_bytes)
    say(f"  {records:,} records, {payload_bytes:,} bytes, {fill:.1%} full, {damaged}")
    _say_of_regions(store, regions, say)
    hits = HitCounts.load(device.directory)
    total = sum(one.chunks for one in hits.by_namespace.values())
    counted = f"{total:,} chunks read, counted for {_ago(hits.since_s)}"
    say(f"  {counted}" if hits.kept else f"  reads are not counted yet: no {HITS}")
    prefixes = Counter(prefix.namespace for note in notes.values() if (prefix := prefix_from(note.document)))
    for namespace, content in contents.items():
        known = "" if namespace in notes else ", without a note: not found at a start"
        if namespace in prefixes:
            known += f", {prefixes[namespace]} prefixes cleared: more is void than was counted"
        hit = hits.by_namespace.get(namespace)
        read = f"{hit.chunks:,} chunks read, the last {_ago(hit.last_s)} ago" if hit is not None else "0 chunks read"
        sizes = ", ".join(f"{count} x {show_bytes(size)}" for size, count in sorted(content.sizes.items()))
        say(
            f"  namespace {namespace[:6].hex()}: {len(content.keys):,} chunks, {content.records:,} records "
            f"({content.void} void), oldest {_ago(content.oldest_s)}, {sizes}, {read}{known}"
        )


def _say_of_regions(store: DiskStore, regions: dict[int, Region], say: Say) -> None:
    """Prints the segments and extents of each size.

    A segment serves one size until all its records are gone, so extents may be free while no segment is."""
    for size, region in sorted(regions.items()):
        places = len(region.segments) * DiskStore.extents_per_segment(store.segment_bytes, size)
        say(
            f"  {len(region.segments):,} segments for {show_bytes(size)}: {region.records:,} of {places:,} extents "
            f"({region.records / places:.1%}), oldest {_ago(region.oldest_s)}"
        )
    say(f"  {store.segments - sum(len(region.segments) for region in regions.values()):,} segments without a record")


def _ago(when_s: float) -> str:
    return duration(max(0.0, time.time() - when_s))


# ---------------------------------------------------------------- verify


def _verify(device: Device, counts: Counter[str], tell: Callable[[int, int], None]) -> None:
    slot_bytes = max(record.extent_bytes for record in unpack_disk(device.records))
    most = max(1, min(BATCH, BATCH_BYTES // slot_bytes))
    arena_bytes = most * slot_bytes
    arena = create_memfd("kvserver-verify", arena_bytes)
    engine = DiskEngine(
        arena_fd=arena, arena_bytes=arena_bytes, stores=[device.store], engine="auto", depth=BATCH, sum_threads=2
    )
    engine.arena_ready(arena_bytes)
    poll = select.poll()
    poll.register(engine.eventfd, select.POLLIN)
    step = most * DiskStore.RECORD_BYTES
    for first in range(0, len(device.records), step):
        batch = list(unpack_disk(device.records[first : first + step]))
        packed = [pack_disk(record._replace(arena_offset=at * slot_bytes)) for at, record in enumerate(batch)]
        engine.submit(first + 1, "read", b"".join(packed))
        left = len(batch)
        while left:
            poll.poll()
            os.eventfd_read(engine.eventfd)
            for done in completions(engine, most):
                left -= 1
                counts[done.fault or "right"] += 1
        tell(first // DiskStore.RECORD_BYTES + len(batch), len(device.records) // DiskStore.RECORD_BYTES)
    engine.close()
    os.close(arena)
