"""The mover process of the disks: writes and reads records on orders of the brain, verifies them, and lists them.

One process serves all devices. It holds stores and an engine, never an index. If a device cannot be opened, orders for
it fail at once. The process ends with the brain, as other movers do. Unfinished I/O does no harm then, since the
supervisor starts no other brain before this process is gone.
"""

import gc
import logging
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Never

import msgspec

from kvserver import logs
from kvserver.config.paths import MEMORY_FILE_SYSTEMS, mount_of, opened, takes_memory
from kvserver.ipc.fd_sockets import Receiver, close_all, send
from kvserver.ipc.inheritance import Inheritance, die_with_parent
from kvserver.movers import disk_notes, disk_retire
from kvserver.movers.disk_hits import HitCounts
from kvserver.movers.disk_notes import Known
from kvserver.movers.scrubbing import Scrubbing
from kvserver.tiers.prefix_notes import prefix_from
from kvserver.tiers.records import NO_SUM, unpack_disk
from kvserver.transfer.disk import Unusable, completions, open_store
from kvserver.transfer.native import DiskEngine, DiskStore, RecoveryOrder
from kvserver.wire.orders import (
    DISK_ITEMS_MAX,
    ORDER_BYTES_MAX,
    WARNING_FACT,
    ArenaReady,
    Cancel,
    Demote,
    DeviceIs,
    DrainDevice,
    DrainState,
    EraseDevice,
    Fault,
    ForgetNotes,
    FoundNote,
    FoundRecords,
    ItemFault,
    Listed,
    Moved,
    Note,
    Noted,
    NotesForgotten,
    Order,
    Promote,
    Ready,
    Recover,
    Report,
    Scrub,
    TellRecords,
    decode_order,
    encode,
)

COMPLETIONS_PER_TURN = 256
RECORDS_A_REPORT = 256
"""Records in one report. The brain handles a report without interruption (brain/process.py): 2 ms at 8 us a record."""
SUM_THREADS = 2
ENGINE_REFUSED = "disk-engine:"
NOTES_AGAIN_S, NOTES_AGAIN_S_MAX = 1.0, 64.0
"""Time until notes are tried again after one could not be written: first and longest. It doubles each time."""
DRAINED = f"it was drained; remove {disk_retire.MARK} there, while no server runs, to have it used again"

FAULTS: dict[Fault, str] = {
    "io": "the device failed",
    "checksum": "a record has other bytes than were stored",
    "stale": "a record is not there any more",
    "short": "a file has become shorter",
    "cancelled": "given up",
}
"""Texts for the log when the device gave no errno."""


@dataclass(slots=True)
class Device:
    """One directory of the disk tier. Without a store, `problem` says why."""

    directory: str
    store: DiskStore | None = None
    problem: str = ""
    drain: DrainState = ""
    hits: HitCounts | None = None
    """Read counts; None without a store, or when they cannot be written."""
    notes_problem: str = ""
    """Why a note could not be written; tried again until it can be. Empty: all is well."""
    notes_again_s: float = 0.0
    """Time of the next try, by the monotonic clock."""
    notes_wait_s: float = 0.0
    """Time between the last try and the next one."""


@dataclass(slots=True)
class Job:
    left: int
    sums: list[int]
    """Sums of the records; empty for a write."""
    hit: tuple[Device, bytes] | None
    """Device and namespace whose read count grows when the whole read succeeds; None for what nobody asked for."""
    io_ns: int = 0
    faults: list[ItemFault] = field(default_factory=list)


class DiskMover:
    """Turns orders into calls of the engine, and completions into reports."""

    def __init__(self, brain: socket.socket, inherited: Inheritance) -> None:
        config = inherited.config
        self._brain = brain
        self._slab_bytes = config.slab_bytes
        self._receiver = Receiver(ORDER_BYTES_MAX)
        self._jobs: dict[int, Job] = {}
        self._errors = 0
        self._found: list[bytes] = []
        """The records of each device. Released at the first write: that brain knows them, and will not ask."""
        self._telling: RecoveryOrder | None = None
        """The records that are not reported to the brain yet; None when none are left."""
        self._known: dict[bytes, Known] = {}
        """The combined notes at the start; empty after the brain has asked for them."""
        self._damaged_notes = 0
        self._devices = [Device(directory) for directory in config.disk_directories]
        self._aside = disk_notes.aside_of(config.cache_dir, config.disk_directories)
        for number, device in enumerate(self._devices):
            if disk_retire.is_marked(device.directory):
                device.drain = "draining"
                if disk_retire.is_drained(device.directory):
                    device.drain, device.problem = "drained", DRAINED
                    continue
            before_bytes = _file_bytes(device.directory)
            try:
                store, found = open_store(
                    device.directory,
                    device=number,
                    capacity_bytes=config.disk_bytes,
                    segment_bytes=config.disk_segment_bytes,
                    engine=config.disk_engine,
                )
                _check_notes(device.directory)
                device.store = store
                self._found.append(found)
                if store.emptied_format:
                    _tell_emptied(device.directory, store)
                else:
                    _tell_size(device.directory, before_bytes, store)
                counts = HitCounts.begin if device.store.created else HitCounts.load
                device.hits = counts(device.directory)
            except Unusable as why:
                device.problem = str(why)
                logs.event(logging.ERROR, "disk not usable", ("directory", device.directory), ("why", device.problem))
        self._engine = self._open_engine(inherited)
        self._scrubbing = Scrubbing(inherited)

    def _open_engine(self, inherited: Inheritance) -> DiskEngine | None:
        """The engine; None without a store, or if the configured engine is refused. Then no device is used."""
        config = inherited.config
        stores = [device.store for device in self._devices if device.store is not None]
        if not stores:
            return None
        try:
            return DiskEngine(
                arena_fd=inherited.arena,
                arena_bytes=config.arena_bytes,
                stores=stores,
                engine=config.disk_engine,
                depth=config.disk_depth,
                sum_threads=SUM_THREADS,
                ledger_fd=inherited.ledger,
                ledger_bytes=config.ledger_span_bytes,
            )
        except ValueError as why:
            if not str(why).startswith(ENGINE_REFUSED):
                raise
            logs.event(logging.ERROR, "disk not usable", ("disk_engine", config.disk_engine), ("why", why))
            self._found = []
            for device in self._devices:
                if device.store is not None:
                    device.store = None
                    device.problem = f"{why} (disk_engine={config.disk_engine})"
            return None

    def run(self) -> None:
        """Serves until the brain's end of the socket closes."""
        backend = self._engine.backend if self._engine is not None else "no device"
        self._report(Ready(os.getpid(), backend, self._facts()))
        for number in range(len(self._devices)):
            self._tell_device(number)
        self._read_notes()
        poll = select.poll()
        poll.register(self._brain, select.POLLIN)
        eventfd = self._engine.eventfd if self._engine is not None else -1
        if eventfd >= 0:
            poll.register(eventfd, select.POLLIN)
        if self._scrubbing.eventfd >= 0:
            poll.register(self._scrubbing.eventfd, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(self._patience_ms()):
                if descriptor == eventfd:
                    self._complete()
                elif descriptor == self._scrubbing.eventfd:
                    for report in self._scrubbing.reports():
                        self._report(report)
                elif not self._take_order():
                    return
            self._try_notes_again()

    def _facts(self) -> list[tuple[str, str]]:
        return [
            (f"device {number} {name}", value)
            for number, device in enumerate(self._devices)
            if device.store is not None
            for name, value in (*device.store.facts, *_warnings(device.directory))
        ]

    # ---------------------------------------------------------------- orders

    def _take_order(self) -> bool:
        frame, descriptors, cut = self._receiver.receive(self._brain)
        assert not cut, "the brain sends no order that is longer than ORDER_BYTES_MAX"
        close_all(descriptors)
        if not frame:
            return False
        self._carry_out(decode_order(frame))
        return True

    def _carry_out(self, order: Order) -> None:
        match order:
            case Demote(job, records):
                self._found = []
                self._submit(job, "write", records)
            case Promote(job, records, asked):
                self._submit(job, "read", records, asked=asked)
            case Scrub():
                self._scrubbing.begin(order)
            case Note(namespace, document, void):
                self._note(namespace, document, void)
            case ForgetNotes(namespaces, void):
                self._forget(namespaces, void)
            case Recover():
                self._recover()
            case TellRecords():
                self._tell_records()
            case DrainDevice(device):
                self._drain(device)
            case EraseDevice(device):
                self._erase(device)
            case ArenaReady(slabs):
                if self._engine is not None:
                    self._engine.arena_ready(slabs * self._slab_bytes)
            case Cancel(job):
                if self._engine is not None:
                    self._engine.cancel(job)
            case _:
                raise AssertionError(f"{type(order).__name__} is no order for disks")

    def _submit(self, job: int, kind: Literal["write", "read"], records: bytes, *, asked: bool = False) -> None:
        """Submits a job to the engine. All its records are for one device. asked: a read that counts as a hit."""
        count = len(records) // DiskStore.RECORD_BYTES
        first = next(unpack_disk(records))
        device = self._devices[first.device]
        sums = [NO_SUM] * count if kind == "read" else []
        if self._engine is None or device.store is None:
            faults = [ItemFault(item, "io") for item in range(count)]
            self._report(Moved(job, faults, io_ns=0, sums=_packed(sums)))
            return
        self._jobs[job] = Job(count, sums, (device, first.namespace) if asked else None)
        self._engine.submit(job, kind, records)

    def _note(self, namespace: bytes, document: bytes, void: int) -> None:
        """Saves a note durably on every open device, and reports whether at least one has it.

        Closed devices cannot be written. Their records stay void while another device has the note, so only a note that
        no device could write is reported as lost. If no device has room for the note of a cleared prefix, the whole
        namespace becomes void instead, since its note exists already. Then less is found at the next start, but nothing
        of the prefix.

        This blocks the loop: 2 ms on a virtual disk, 3 ms (12 at most) beside four readers. Reads continue meanwhile,
        only their reports wait; and Clears are as rare as new weights."""
        numbers = [number for number, device in enumerate(self._devices) if device.drain != "drained"]
        kept = self._save(numbers, namespace, document, void) or not numbers
        prefix = prefix_from(document) if not kept else None
        if not kept:
            self._keep_aside(namespace, document if prefix is not None else b"", void)
        if prefix is not None and self._save(numbers, prefix.namespace, b"", void):
            kept = True
            logs.event(logging.WARNING, "prefix noted as its namespace", ("namespace", prefix.namespace[:6].hex()))
        self._report(Noted(namespace, void, kept))

    def _keep_aside(self, namespace: bytes, document: bytes, void: int) -> None:
        """Keeps a note aside for the next start. It does not count as kept: it does not travel with the devices."""
        facts = ("namespace", namespace[:6].hex()), ("directory", self._aside)
        try:
            disk_notes.save_aside(self._aside, namespace, document, void)
        except OSError as problem:
            logs.event(logging.ERROR, "note not kept aside", *facts, ("why", problem.strerror))
        else:
            logs.event(logging.WARNING, "note kept aside", *facts)

    def _load_aside(self) -> dict[bytes, Known]:
        try:
            return disk_notes.load_aside(self._aside)
        except OSError as problem:
            logs.event(logging.ERROR, "notes not read", ("directory", self._aside), ("why", problem.strerror))
            return {}

    def _save(self, numbers: list[int], namespace: bytes, document: bytes, void: int) -> bool:
        """Saves a note on these devices. Whether at least one has it."""
        kept = [self._writes_notes(n, lambda at: disk_notes.save(at, namespace, document, void)) for n in numbers]
        return any(kept)

    def _forget(self, namespaces: list[bytes], void: int) -> None:
        """Removes notes, but not on a device with a problem: the note of a living namespace may be missing there."""
        well = [n for n, device in enumerate(self._devices) if not device.problem and not device.notes_problem]
        kept = [self._writes_notes(n, lambda at: disk_notes.forget(at, namespaces, void)) for n in well]
        self._report(NotesForgotten(namespaces, any(kept)))

    def _writes_notes(self, number: int, write: Callable[[str], None]) -> bool:
        """Calls write() with a device's directory. Whether it succeeded.

        A device that fails takes no more writes until notes can be written there again."""
        device = self._devices[number]
        if device.store is None:
            return False
        try:
            write(device.directory)
        except OSError as problem:
            if not device.notes_problem:
                now_s = time.monotonic()
                was_well = now_s - device.notes_again_s > NOTES_AGAIN_S_MAX
                wait_s = 0.0 if was_well else min(2 * device.notes_wait_s, NOTES_AGAIN_S_MAX)
                device.notes_wait_s = max(NOTES_AGAIN_S, wait_s)
                device.notes_again_s = now_s + device.notes_wait_s
                device.notes_problem = f"its notes cannot be written: {problem.strerror}"
                logs.event(logging.ERROR, "disk fails", ("directory", device.directory), ("why", device.notes_problem))
                self._tell_device(number)
            return False
        return True

    def _try_notes_again(self) -> None:
        """Tries devices again whose notes failed. One that works gets the other devices' notes.

        The brain sends the rest again."""
        for number, device in enumerate(self._devices):
            now_s = time.monotonic()
            if not device.notes_problem or now_s < device.notes_again_s:
                continue
            device.notes_wait_s = min(2 * device.notes_wait_s, NOTES_AGAIN_S_MAX)
            device.notes_again_s = now_s + device.notes_wait_s
            with suppress(OSError):
                disk_notes.try_to_write(device.directory)
                loaded, _ = self._load_notes()
                disk_notes.complete(device.directory, disk_notes.together(list(loaded.values())))
                device.notes_problem = ""
                logs.event(logging.INFO, "notes written again", ("directory", device.directory))
                self._tell_device(number)

    def _drain(self, number: int) -> None:
        """Marks a device as draining. If that fails it is drained all the same, but a restart would use it again.

        A device that is not open is left as it is."""
        device = self._devices[number]
        if device.store is None:
            self._tell_device(number)
            return
        device.drain = device.drain or "draining"
        try:
            disk_retire.mark(device.directory)
        except OSError as problem:
            device.problem = device.problem or f"cannot be marked as leaving: {problem.strerror}"
            logs.event(logging.WARNING, "disk not marked", ("directory", device.directory), ("why", problem.strerror))
        self._tell_device(number)

    def _erase(self, number: int) -> None:
        """Erases a drained device, which no order names any more.

        A device that is not open is left alone: nobody knows what it holds."""
        device = self._devices[number]
        if device.store is None:
            self._tell_device(number)
            return
        device.store, device.hits, device.notes_problem = None, None, ""
        device.drain, device.problem = "drained", DRAINED
        try:
            disk_retire.erase(device.directory)
        except OSError as problem:
            device.problem = f"it was drained, but its files are still there: {problem.strerror}"
            logs.event(logging.ERROR, "disk not erased", ("directory", device.directory), ("why", problem.strerror))
        self._tell_device(number)

    def _tell_device(self, number: int) -> None:
        device = self._devices[number]
        file_bytes = device.store.file_bytes if device.store is not None else 0
        problem = device.problem or device.notes_problem
        self._report(DeviceIs(device=number, bytes=file_bytes, problem=problem, drain=device.drain))

    def _load_notes(self) -> tuple[dict[int, dict[bytes, Known]], int]:
        """Number of the device -> its notes, and how many notes cannot be read on all devices."""
        found: dict[int, dict[bytes, Known]] = {}
        damaged = 0
        for number, device in enumerate(self._devices):
            if device.store is None:
                continue
            try:
                found[number], broken = disk_notes.load(device.directory)
            except OSError as problem:
                logs.event(logging.ERROR, "notes not read", ("directory", device.directory), ("why", problem.strerror))
                found[number], broken = {}, 1
            damaged += broken
        return found, damaged

    def _read_notes(self) -> None:
        """Reads all notes and copies them to every device, since the others may be gone at the next start.

        Notes kept aside are removed when all devices have them."""
        found, self._damaged_notes = self._load_notes()
        aside = self._load_aside()
        self._known = disk_notes.together([*found.values(), aside])
        lacking = [number for number, mine in found.items() if mine != self._known]
        told = [self._writes_notes(n, lambda at: disk_notes.complete(at, self._known)) for n in lacking]
        if aside and all(told) and all(device.store or device.drain == "drained" for device in self._devices):
            with suppress(OSError):
                disk_notes.erase(self._aside)

    def _recover(self) -> None:
        telling = self._telling = RecoveryOrder(self._found, chunk_most=DISK_ITEMS_MAX)
        self._found = []
        newest = telling.namespaces
        if unnoted := len(newest.keys() - self._known.keys()):
            why = "they have no notes: forgotten, or lost"
            logs.event(logging.INFO, "disk namespaces left out", ("namespaces", unnoted), ("why", why))
        known = {namespace: Known(b"", void) for namespace, void in newest.items()} | self._known
        known.pop(disk_notes.FORGOTTEN, None)
        self._known = {}
        for namespace, (document, void) in sorted(known.items(), key=lambda item: newest.get(item[0], item[1].void)):
            found = FoundNote(namespace=namespace, document=document, void=void, newest=newest.get(namespace, 0))
            self._report(found)
        stores = [device.store for device in self._devices if device.store is not None]
        damaged = sum(store.damaged + store.unreadable for store in stores) + self._damaged_notes
        self._report(Listed(records=telling.records, damaged=damaged))

    def _tell_records(self) -> None:
        records = self._telling.next(RECORDS_A_REPORT) if self._telling is not None else b""
        if not records:
            self._telling = None
        self._report(FoundRecords(records))

    # ---------------------------------------------------------------- completions

    def _complete(self) -> None:
        assert self._engine is not None
        os.eventfd_read(self._engine.eventfd)
        while True:
            seen = 0
            for done in completions(self._engine, COMPLETIONS_PER_TURN):
                seen += 1
                job = self._jobs[done.job]
                job.left -= 1
                job.io_ns = max(job.io_ns, done.io_ns)
                if job.sums:
                    job.sums[done.item] = done.sum
                if done.fault is not None:
                    job.faults.append(ItemFault(done.item, done.fault))
                    self._tell_error(done.fault, done.errno)
                if not job.left:
                    del self._jobs[done.job]
                    self._report(Moved(done.job, job.faults, io_ns=job.io_ns, sums=_packed(job.sums)))
                    if job.hit is not None and not job.faults:
                        device, namespace = job.hit
                        if device.hits is not None:
                            device.hits.add(namespace)
            if seen < COMPLETIONS_PER_TURN:
                return

    def _patience_ms(self) -> int | None:
        """Time until something is due without an event; None: nothing is. Saves read counts that are due."""
        waits_ms = [wait_ms for wait_ms in (self._keep_hits(),) if wait_ms is not None]
        now_s = time.monotonic()
        for device in self._devices:
            if device.notes_problem:
                waits_ms.append(max(0, int((device.notes_again_s - now_s) * 1000) + 1))
        return min(waits_ms, default=None)

    def _keep_hits(self) -> int | None:
        """Saves the read counts that are due. Returns the milliseconds until others are; None: never.

        A device whose counts cannot be saved stays in use, without counts."""
        waits_s = []
        for device in self._devices:
            if device.hits is None:
                continue
            try:
                waits_s.append(device.hits.save_when_due())
            except OSError as problem:
                device.hits = None
                logs.event(logging.WARNING, "hits not kept", ("directory", device.directory), ("why", problem.strerror))
        due_s = [wait_s for wait_s in waits_s if wait_s is not None]
        return int(min(due_s) * 1000) + 1 if due_s else None

    def _tell_error(self, fault: Fault, errno: int) -> None:
        """Logs the 1st, 10th, 100th error and so on: a failing disk must not fill the log."""
        self._errors += 1
        if str(self._errors).rstrip("0") == "1":
            why = os.strerror(errno) if errno else FAULTS[fault]
            logs.event(logging.WARNING, "disk errors", ("so_far", self._errors), ("last", why))

    def _report(self, report: Report) -> None:
        send(self._brain, encode(report))


def _packed(sums: list[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def _file_bytes(directory: str) -> int:
    """Bytes of both files of a store; 0 unless both exist."""
    try:
        return sum(os.stat(os.path.join(directory, name)).st_size for name in disk_retire.STORE_FILES)
    except OSError:
        return 0


def _check_notes(directory: str) -> None:
    """Raises Unusable if notes cannot be written."""
    try:
        disk_notes.try_to_overwrite(directory)
    except OSError as problem:
        why = "nothing of it is served, as it may lack the note of a clear"
        raise Unusable(f"its notes cannot be written: {problem.strerror}; {why}") from problem


def _warnings(directory: str) -> list[tuple[str, str]]:
    with opened(directory) as descriptor:
        file_system = mount_of(descriptor).file_system
    return [(WARNING_FACT, takes_memory(file_system))] if file_system in MEMORY_FILE_SYSTEMS else []


def _tell_size(directory: str, before_bytes: int, store: DiskStore) -> None:
    """Logs a changed size. Records beyond the end of a device that became smaller are gone.

    If one file is shorter than the other, it was cut by somebody, or by a repair of the file system: changing
    disk_bytes does not cause that."""
    facts = ("directory", directory), ("from_bytes", before_bytes), ("bytes", store.file_bytes)
    if store.segments_cut:
        logs.event(logging.WARNING, "disk was cut", *facts, ("segments_lost", store.segments_cut))
    elif before_bytes not in (0, store.file_bytes):
        level = logging.WARNING if store.file_bytes < before_bytes else logging.INFO
        logs.event(level, "disk resized", *facts)


def _tell_emptied(directory: str, store: DiskStore) -> None:
    logs.event(
        logging.WARNING,
        "disk of an older release emptied",
        ("directory", directory),
        ("format_found", store.emptied_format),
        ("format_needed", DiskStore.FORMAT),
    )


def main() -> Never:
    """The process `python -m kvserver.movers.disk_mover INHERITANCE`, which the supervisor starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited = msgspec.json.decode(sys.argv[1], type=Inheritance)
    die_with_parent(inherited.parent)
    config = inherited.config
    logs.start(level=config.log_level, form=config.log_format, process="disk mover")
    gc.freeze()
    try:
        DiskMover(socket.socket(fileno=inherited.control), inherited).run()
    except (BrokenPipeError, ConnectionResetError):
        logs.event(logging.INFO, "mover ends", ("why", "the brain is gone"))
    os._exit(0)


if __name__ == "__main__":
    main()
