"""The simulated devices and their mover.

A device's contents outlive every process. A record is there or not, with the bytes its slot had when it was written.
A write first deletes what its extent held, so a mover that dies between the two steps leaves nothing. Faults: I/O
errors, partial writes that were reported as success, bytes that rot, I/O in any order, a mover that stops or dies at
any point. A device may be missing when a mover starts, and be back when a later one does.
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvserver.movers.disk_notes import FORGOTTEN, Known, together
from kvserver.tiers.prefix_notes import prefix_from
from kvserver.tiers.records import NO_SUM, DiskRecord, Record, pack_disk, unpack_disk
from kvserver.wire.orders import (
    ArenaReady,
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
)

from .board import Board
from .content import Block
from .memory import Pool, Wrong
from .scrub import scrubbed
from .sums import NOTHING, packed, sum_of

if TYPE_CHECKING:
    from .world import World

RECORDS_A_REPORT = 5


@dataclass(eq=False)
class Stored:
    """One record on a device."""

    record: DiskRecord
    blocks: list[Block]
    sum: int
    """As its header says."""
    fault: str = ""
    """Kind of the fault that has changed its bytes."""


class Devices:
    """The records on all devices, by (device, offset), and their notes."""

    def __init__(self, segment_bytes: int, devices: int) -> None:
        self.records: dict[tuple[int, int], Stored] = {}
        self.notes: list[dict[bytes, Known]] = [{} for _ in range(devices)]
        self.away: set[int] = set()
        """Devices that cannot be opened now. They keep their records and notes."""
        self.notes_fail: Literal["", "full", "broken"] = ""
        """"full": the file system has no room for a note of another namespace. "broken": it takes no note at all."""
        self.given_up: dict[bytes, int] = {}
        """Namespace -> generation up to which it is void, because a cleared prefix's note found no room."""
        self.drains: dict[int, DrainState] = {}
        """Drain mark in each device's directory."""
        self._segment_bytes = segment_bytes

    def withdraw(self, record: DiskRecord) -> None:
        """A write begins: deletes the extent's old record, and a segment's records of another extent size."""
        segment = record.offset // self._segment_bytes
        for at, stored in list(self.records.items()):
            device, offset = at
            same_segment = device == record.device and offset // self._segment_bytes == segment
            if same_segment and (offset == record.offset or stored.record.extent_bytes != record.extent_bytes):
                del self.records[at]

    def put(self, record: DiskRecord, blocks: list[Block], payload_sum: int) -> Stored:
        stored = self.records[record.device, record.offset] = Stored(record, blocks, payload_sum)
        return stored

    def note(self, devices: Iterable[int], namespace: bytes, document: bytes, void: int) -> bool:
        """Notes this on several devices. Returns True if the note is durable on one, including its document."""
        kept = [self._note_on(self.notes[device], namespace, Known(document, void)) for device in devices]
        return any(kept)

    def _note_on(self, notes: dict[bytes, Known], namespace: bytes, note: Known) -> bool:
        before = notes.get(namespace)
        if self.notes_fail == "broken" or (self.notes_fail == "full" and before is None):
            return False
        kept, void = before or Known(b"", 0)
        document = kept if self.notes_fail else note.document or kept
        notes[namespace] = Known(document, max(note.void, void))
        return note.document in (b"", document)

    def complete(self, device: int, known: dict[bytes, Known]) -> bool:
        """A device learns the combined notes. True if it has them all; FORGOTTEN comes last."""
        missing = sorted(known.items() - self.notes[device].items(), key=lambda item: item[0] == FORGOTTEN)
        return all(self.note([device], namespace, *note) for namespace, note in missing)

    def erase(self, device: int) -> None:
        self.drains[device] = "drained"
        self.notes[device] = {}
        self.records = {at: stored for at, stored in self.records.items() if at[0] != device}

    def read(self, wanted: DiskRecord) -> Stored | None:
        """The stored record, or None unless it is exactly `wanted`."""
        stored = self.records.get((wanted.device, wanted.offset))
        if stored is None or _identity(stored.record) != _identity(wanted):
            return None
        return stored


def _identity(record: DiskRecord) -> DiskRecord:
    return record._replace(arena_offset=-1, sum=NO_SUM, stored_s=0)


@dataclass(eq=False)
class DiskRun:
    """An order that the mover is working on."""

    job: int
    kind: Literal["read", "write"]
    left: list[tuple[int, DiskRecord, bool]]
    """(item, record, begun) for each record still to be done."""
    faults: list[ItemFault] = field(default_factory=list)
    sums: dict[int, int] = field(default_factory=dict)
    """Item -> sum of what was read."""
    wrong: list[Record] = field(default_factory=list)
    """What a write has found in the arena with other bytes than were stored."""
    items: int = 0


class SimDiskMover:
    """The mover process of the disks."""

    def __init__(self, world: "World", number: int) -> None:
        self.number = number
        self.state: Literal["starting", "running", "killed", "reaped"] = "starting"
        self.stopped = False
        self.inbox: deque[tuple[Order, Pool | None, Board | None]] = deque()
        self.reports: deque[Report] = deque()
        self.runs: list[DiskRun] = []
        self._open: list[int] = []
        """Devices that this mover has opened."""
        self._known: dict[bytes, Known] = {}
        """The combined notes at the start."""
        self._notes_problem = False
        """A note failed, so we reported that the devices take no writes."""
        self._untold: list[list[DiskRecord]] = []
        """Chunks found by Recover and not yet reported, in reverse order."""
        self._world = world

    @property
    def busy(self) -> bool:
        mends = self._notes_problem and not self._world.devices.notes_fail and self.state == "running"
        return bool(self.inbox or self.runs) or mends or self.state == "starting"

    def step(self) -> None:
        """One step of the process on its own."""
        if self.stopped or self.state == "reaped":
            return
        rng = self._world.rng
        self._mend_notes()
        if self.state == "starting":
            self._start()
        elif self.state == "running" and self.inbox and (not self.runs or rng.random() < 0.5):
            self._take(self.inbox.popleft()[0])
        elif self.runs:
            self._progress(self.runs[int(rng.random() * len(self.runs))])

    def reap(self) -> None:
        """From now on the mover can touch neither the arena nor a device."""
        self.state = "reaped"
        for run in self.runs:
            self._world.promises.disk.over(run.job)
        for order, _, _ in self.inbox:
            if isinstance(order, Demote | Promote):
                self._world.promises.disk.over(order.job)
        self.runs.clear()
        self.inbox.clear()

    def _start(self) -> None:
        if self._world.chance("start-fails"):
            self._world.supervisor.died(self)
            return
        self.state = "running"
        devices = self._world.devices
        _take_away_or_bring_back(self._world)
        every = range(self._world.swarm.bounds.disk_devices)
        self._open = [device for device in every if device not in devices.away]
        self.reports.append(Ready(2000 + self.number, "simulated", []))
        for device in every:
            self._tell(device, "simulated" if self._world.chance("device-fails") else "")
        self._learn()

    def _learn(self) -> None:
        """Every device learns what only some of them know."""
        devices = self._world.devices
        open_devices = self._undrained()
        self._known = together([devices.notes[device] for device in open_devices])
        completed = [devices.complete(device, self._known) for device in open_devices]
        if not all(completed):
            self._fail_notes()

    def _undrained(self) -> list[int]:
        return [device for device in self._open if self._world.devices.drains.get(device) != "drained"]

    def _fail_notes(self) -> None:
        if not self._notes_problem:
            self._notes_problem = True
            for device in range(self._world.swarm.bounds.disk_devices):
                self._tell(device, "its notes cannot be written")

    def _mend_notes(self) -> None:
        if self._world.devices.notes_fail and self._world.chance("notes-mended"):
            self._world.devices.notes_fail = ""
        if self._notes_problem and not self._world.devices.notes_fail and self.state == "running":
            self._notes_problem = False
            self._learn()
            for device in range(self._world.swarm.bounds.disk_devices):
                self._tell(device, "")

    def _tell(self, device: int, problem: str) -> None:
        if device not in self._open:
            self.reports.append(DeviceIs(device, 0, "it is not there", ""))
            return
        state = self._world.devices.drains.get(device, "")
        problem = problem or ("drained" if state == "drained" else "")
        self.reports.append(DeviceIs(device, self._world.swarm.bounds.disk_device_bytes, problem, state))

    def _take(self, order: Order) -> None:
        match order:
            case Demote(job, records):
                self._submit(DiskRun(job, "write", items_of(records)))
            case Promote(job, records):
                self._submit(DiskRun(job, "read", items_of(records)))
            case Scrub():
                self.reports.append(scrubbed(self._world, order))
            case Note():
                self._note(order)
            case ForgetNotes(namespaces, void):
                self._forget(namespaces, void)
            case Recover():
                self._recover()
            case TellRecords():
                self._tell_records()
            case DrainDevice(device):
                if device in self._open:
                    self._world.devices.drains.setdefault(device, "draining")
                self._tell(device, "")
            case EraseDevice(device):
                self._erase(device)
            case ArenaReady():
                pass
            case _:
                raise Wrong(f"{order} was sent to the mover of the disks")

    def _note(self, note: Note) -> None:
        """A prefix note without room makes the whole namespace void instead."""
        world, devices = self._world, self._world.devices
        if not devices.notes_fail and world.chance("notes-fail"):
            devices.notes_fail = world.rng.choice(("full", "broken"))
        numbers, every = self._undrained(), range(world.swarm.bounds.disk_devices)
        is_nothing_left = all(devices.drains.get(device) == "drained" for device in every)
        kept = devices.note(numbers, note.namespace, note.document, note.void) or is_nothing_left
        if not kept:
            world.counts["disk note failed"] += 1
            self._fail_notes()
            prefix = prefix_from(note.document)
            if prefix is not None and devices.note(numbers, prefix.namespace, b"", note.void):
                world.counts["disk prefix noted as its namespace"] += 1
                devices.given_up[prefix.namespace] = max(note.void, devices.given_up.get(prefix.namespace, 0))
                kept = True
        world.counts["notes that a device missed"] += kept and bool(devices.away)
        self.reports.append(Noted(note.namespace, note.void, kept=kept))

    def _forget(self, namespaces: list[bytes], void: int) -> None:
        devices = self._world.devices
        if self._notes_problem or devices.notes_fail:
            self._world.counts["notes not forgotten"] += 1
            self.reports.append(NotesForgotten(namespaces, kept=False))
            return
        records = [stored.record for stored in devices.records.values() if stored.record.device in self._open]
        left = [record for record in records if record.namespace in namespaces]
        if any(record.generation > void for record in left):
            raise Wrong("the note of a namespace is to be forgotten that has newer records")
        for device in self._undrained():
            devices.note([device], FORGOTTEN, b"", void)
            for namespace in namespaces:  # one forgotten by an earlier brain has records but no note
                devices.notes[device].pop(namespace, None)
        self.reports.append(NotesForgotten(namespaces, kept=bool(self._undrained())))

    def _erase(self, device: int) -> None:
        if any(record.device == device for run in self.runs for _, record, _ in run.left):
            raise Wrong(f"device {device} is to be erased while it is read or written")
        if device not in self._open:
            self._tell(device, "")
            return
        self._world.devices.erase(device)
        self._world.counts["device drained"] += 1
        self._tell(device, "")

    def _recover(self) -> None:
        devices = self._world.devices
        found = [stored.record for stored in devices.records.values() if stored.record.device in self._open]
        records = [record._replace(arena_offset=-1) for record in found]
        self._untold = parents_first(records, self._world.rng)
        self._untold.reverse()
        newest: dict[bytes, int] = {}
        for record in records:
            newest[record.namespace] = max(record.generation, newest.get(record.namespace, 0))
        notes, self._known = self._known, {}
        notes.pop(FORGOTTEN, None)
        for namespace in sorted(notes.keys() | newest.keys()):
            document, void = notes.get(namespace, (b"", newest.get(namespace, 0)))
            self.reports.append(FoundNote(namespace, document, void, newest.get(namespace, 0)))
        self.reports.append(Listed(len(records), 0))

    def _tell_records(self) -> None:
        told: list[DiskRecord] = []
        while self._untold and (not told or len(told) + len(self._untold[-1]) <= RECORDS_A_REPORT):
            told += self._untold.pop()
        self.reports.append(FoundRecords(b"".join(map(pack_disk, told))))

    # ---------------------------------------------------------------- I/O

    def _submit(self, run: DiskRun) -> None:
        run.items = len(run.left)
        self.runs.append(run)
        if run.left[0][1].device not in self._open:
            run.faults = [ItemFault(item, "io") for item, _, _ in run.left]
            run.left = []
            self._end(run)

    def _progress(self, run: DiskRun) -> None:
        if not run.left:
            self._end(run)
            return
        place = int(self._world.rng.random() * len(run.left))
        item, record, begun = run.left[place]
        if not begun:
            if run.kind == "write":
                self._world.devices.withdraw(record)
            run.left[place] = (item, record, True)
            return
        del run.left[place]
        fault = self._write(run, record) if run.kind == "write" else self._read(run, item, record)
        if fault:
            run.faults.append(ItemFault(item, fault))

    def _write(self, run: DiskRun, record: DiskRecord) -> Fault | Literal[""]:
        """Writes a slot, unless its sum is not the one that the ledger has."""
        world, slot = self._world, record.arena_offset
        if world.chance("disk-io"):
            return "io"
        blocks = [block or NOTHING for block in world.arena.slot(slot)]
        payload_sum, entry = sum_of(blocks), world.ledger.entries[slot]
        if (entry.namespace, entry.key, entry.group, entry.shard) != record[1:3] + record[4:6]:
            raise Wrong(f"disk job {run.job} writes a slot that holds another chunk than {record}")
        if entry.sum not in (payload_sum, NO_SUM):
            self._notice(run, world.arena.faults_of(slot))
            run.wrong.append(entry)
            return "checksum"
        stored = world.devices.put(record, blocks, payload_sum)
        if world.chance("disk-torn"):
            stored.blocks[int(world.rng.random() * len(blocks))] = world.garbage()
            stored.fault = "disk torn"
            world.counts["planted disk torn"] += 1
        return ""

    def _read(self, run: DiskRun, item: int, record: DiskRecord) -> Fault | Literal[""]:
        world, slot = self._world, record.arena_offset
        if world.chance("disk-io"):
            return "io"
        stored = world.devices.read(record)
        if stored is None:
            return "stale"
        for place, block in enumerate(stored.blocks):
            world.arena.write(slot, record.extent_bytes, len(stored.blocks), place, block)
        if sum_of(stored.blocks) != stored.sum:
            self._notice(run, {stored.fault} - {""})
            return "checksum"
        run.sums[item] = stored.sum
        world.arena.tell(slot, stored.sum)
        return ""

    def _notice(self, run: DiskRun, kinds: set[str]) -> None:
        if not kinds:
            raise Wrong(f"disk job {run.job} finds a payload wrong that no fault has touched")
        for kind in sorted(kinds):
            self._world.counts[f"noticed {kind}"] += 1

    def _end(self, run: DiskRun) -> None:
        self.runs.remove(run)
        self._world.promises.disk.over(run.job)
        if self.state == "running":
            for fault in run.faults:
                self._world.counts[f"disk fault {fault.fault}"] += 1
            sums = [run.sums.get(item, NO_SUM) for item in range(run.items)] if run.kind == "read" else []
            self._world.promises.digests.found(-run.job, run.wrong)
            self.reports.append(Moved(run.job, sorted(run.faults, key=lambda fault: fault.item), 1, packed(sums)))
            self._world.counts[f"disk {run.kind}"] += 1


def items_of(records: bytes) -> list[tuple[int, DiskRecord, bool]]:
    return [(item, record, False) for item, record in enumerate(unpack_disk(records))]


def _take_away_or_bring_back(world: "World") -> None:
    """Before a mover opens its devices, one device may come back, or one may leave. Not both: a device that comes back
    learns from one that was there meanwhile what it missed. Devices used in turns know nothing of each other."""
    devices = world.devices
    if world.swarm.bounds.disk_devices < 2 or devices.notes_fail or not world.chance("disk-away"):
        return
    if devices.away and world.rng.random() < 0.6:
        device = world.rng.choice(sorted(devices.away))
        devices.away.discard(device)
        world.counts["device came back"] += 1
        world.counts["records on a device that came back"] += sum(at[0] == device for at in devices.records)
        return
    here = [device for device in range(world.swarm.bounds.disk_devices) if device not in devices.away]
    if len(here) > 1:
        devices.away.add(world.rng.choice(here))
        world.counts["device left"] += 1


def rot(world: "World") -> None:
    """Damages one random block of a random record."""
    records = list(world.devices.records.values())
    if records:
        stored = world.rng.choice(records)
        stored.blocks[int(world.rng.random() * len(stored.blocks))] = world.garbage()
        stored.fault = "disk rot"
        world.counts["planted disk rot"] += 1


def parents_first(records: list[DiskRecord], rng: random.Random) -> list[list[DiskRecord]]:
    """Chunks with parents before children, each with its newest record first.

    Does what kvserver._native.RecoveryOrder does, in one of the orders that it may choose.
    """
    chunks: dict[tuple[bytes, bytes], list[DiskRecord]] = {}
    for record in rng.sample(records, len(records)):
        chunks.setdefault((record.namespace, record.key), []).append(record)
    told: list[list[DiskRecord]] = []
    while chunks:
        heads = [chunk for chunk in chunks.values() if (chunk[0].namespace, chunk[0].parent) not in chunks]
        for chunk in heads or [next(iter(chunks.values()))]:
            del chunks[chunk[0].namespace, chunk[0].key]
            told.append(sorted(chunk, key=lambda record: -record.generation))
    return told
