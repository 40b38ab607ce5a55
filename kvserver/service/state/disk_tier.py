"""The disk tier: its chunks, devices, writes, waits and notes, and the mover process."""

from collections import Counter

from kvserver.index.eviction import NO_ROOM, REFUSED
from kvserver.index.space import Node
from kvserver.service.holdings.chunks import Chunks
from kvserver.service.holdings.disk_chunks import disk_chunks
from kvserver.service.state.bounds import Bounds
from kvserver.service.state.chunk_waits import ChunkWaits
from kvserver.service.state.clear_notes import ClearNotes
from kvserver.service.state.clears import Clears
from kvserver.service.state.devices import Device, devices
from kvserver.service.state.drains import Drain
from kvserver.service.state.movers import Mover
from kvserver.service.state.outbox import Outbox
from kvserver.service.state.recovery import Recovery
from kvserver.service.state.write_queue import WriteQueue
from kvserver.wire.orders import Order


class DiskTier:
    """Everything that exists only with disks."""

    def __init__(self, bounds: Bounds, out: Outbox, chunks: Chunks, clears: Clears, now_ns: int) -> None:
        self._out = out
        self.chunks = disk_chunks(
            chunks,
            out.counters,
            devices=bounds.disk_devices,
            device_bytes=bounds.disk_device_bytes,
            segment_bytes=bounds.disk_segment_bytes,
            quotas=bounds.tenants,
        )
        self.devices = devices(bounds, self.chunks.extents, now_ns)
        self.recovery = Recovery()
        self.waits = ChunkWaits()
        self.writes = WriteQueue(bounds.chunks_max if bounds.disk_second_touch else 0)
        self.notes = ClearNotes(out, chunks, self.chunks, clears, self.tell)
        self.mover: Mover | None = None
        self.start_at_ns = now_ns
        """The mover is started at this time."""

    def mover_started(self, mover: Mover) -> None:
        self.mover = mover

    def mover_ended(self, start_at_ns: int) -> None:
        """It has been reaped. start_at_ns: when the next one is started."""
        self.mover, self.start_at_ns = None, start_at_ns
        self.notes.mover_ended()
        self.recovery.begin_anew()

    def drains(self) -> list[Drain]:
        """The drains of all devices, also those that have ended."""
        return [device.drain for device in self.devices if device.drain is not None]

    def tell(self, order: Order) -> bool:
        """Gives the mover an order. False when there is no mover."""
        if self.mover is None:
            return False
        self._out.instruct(self.mover, order)
        return True

    def stalled(self, device: Device, now_ns: int) -> tuple[int, str]:
        """How long (ns) the device has taken no write although writes wait for it, and why."""
        if not device.takes_writes:
            return 0, ""
        return device.placement.stalled(now_ns, waits=bool(self.writes.parked.get(device.number)))

    def asked_for(self, tail: Node) -> None:
        """Notes that the prefix ending in `tail` was asked for. An earlier refusal to write it may no longer hold."""
        self.writes.touched.add(tail.key)
        tail.unmark(REFUSED | NO_ROOM)

    @property
    def readable(self) -> bool:
        return self.mover is not None and self.mover.state == "ready"

    @property
    def recovered(self) -> bool:
        return self.recovery.complete

    def is_at_hand(self, device: Device) -> bool:
        """The device is open, and its records are known or will be."""
        return device.is_open and (device.state == "listed" or not self.recovery.listed)

    @property
    def all_known(self) -> bool:
        """Every device is open with known records, or drained."""
        return all(
            self.is_at_hand(device) or (device.drain is not None and device.drain.state == "drained")
            for device in self.devices
        )

    def may_have(self, note: bytes) -> bool:
        """A device has records under this note, or may have some."""
        return not self.recovery.listed or note in self.notes.noted or not self.all_known

    def void(self, digest: bytes) -> None:
        """Makes the records of a cleared namespace void, if the devices may know it."""
        if self.may_have(digest):
            self.notes.void(digest, listed=self.recovery.listed)

    def why_not_noted(self) -> str:
        """Why no device could write a note: each device that has a problem, by its directory, else its number."""
        return " and ".join(f"{device.fields[-1][1]} ({device.problem})" for device in self.devices if device.problem)

    @property
    def in_flight(self) -> Counter[str]:
        return Counter(job.kind for job in self.chunks.jobs.values())
