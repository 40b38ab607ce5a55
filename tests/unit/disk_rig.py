"""A Rig whose service has a disk tier: its disk mover does at once what it is told, or waits for finish_disk()."""

from brain_rig import SLAB_BYTES, Rig

from kvserver.tiers.records import DiskRecord, pack_disk, unpack_disk
from kvserver.wire.orders import (
    Demote,
    DeviceIs,
    DrainDevice,
    DrainState,
    EraseDevice,
    Fault,
    FoundNote,
    FoundRecords,
    ItemFault,
    Moved,
    Note,
    Noted,
    Order,
    Promote,
    Recover,
    Recovered,
)

SEGMENT_BYTES = 20 << 10
"""Four extents of a page, and a page for their headers."""
DISK = {
    "arena_bytes": 4 * SLAB_BYTES,
    "disk_devices": 1,
    "disk_device_bytes": 200 * SEGMENT_BYTES,
    "disk_segment_bytes": SEGMENT_BYTES,
    "disk_write_through": True,
}


class DiskRig(Rig):
    def __init__(self, **bounds: int) -> None:
        self.disk_works = True
        """False: reads and writes stay under way until finish_disk()."""
        self.moving: list[tuple[int, Demote | Promote]] = []
        """(mover, order) of what is under way."""
        self.written: list[list[DiskRecord]] = []
        """The records of each write, in the order of the writes."""
        self.read: list[list[DiskRecord]] = []
        self.notes: list[Note] = []
        self.notes_kept = True
        """Some device could write them."""
        self.devices: dict[tuple[int, int], DiskRecord] = {}
        self.drains: dict[int, DrainState] = {}
        """What the directories say."""
        self.unopened: set[int] = set()
        """Devices whose store the mover cannot open."""
        self.fault: Fault | None = None
        """What happens to the first record of each job."""
        super().__init__(**{**DISK, **bounds})
        self.wait_ms(50)

    def finish_disk(self) -> None:
        moving, self.moving = self.moving, []
        for mover, order in moving:
            records = list(unpack_disk(order.records))
            if isinstance(order, Demote):
                self.devices.update({(record.device, record.offset): record for record in records})
            faults = [ItemFault(0, self.fault)] if self.fault is not None else []
            self.report(mover, Moved(order.job, faults, 1))

    def keys_written(self) -> list[bytes]:
        return [records[0].key for records in self.written]

    def _obey(self, mover: int, order: Order) -> None:
        match order:
            case Demote() | Promote():
                log = self.written if isinstance(order, Demote) else self.read
                log.append(list(unpack_disk(order.records)))
                self.moving.append((mover, order))
                if self.disk_works:
                    self.finish_disk()
            case Note(namespace, _, void):
                self.notes.append(order)
                self.report(mover, Noted(namespace, void, self.notes_kept))
            case Recover():
                for note in self.notes:
                    self.report(mover, FoundNote(note.namespace, note.document, note.void))
                for device in range(self.bounds.disk_devices):
                    self.report(mover, self._device_is(device))
                records = b"".join(pack_disk(record._replace(arena_offset=-1)) for record in self.devices.values())
                self.report(mover, FoundRecords(records))
                self.report(mover, Recovered(0))
            case DrainDevice(device) if device in self.unopened:
                self.report(mover, self._device_is(device))
            case DrainDevice(device):
                self.drains[device] = "draining"
                self.report(mover, self._device_is(device))
            case EraseDevice(device):
                assert device not in self.unopened, "nobody knows what it holds"
                self.drains[device] = "drained"
                self.devices = {at: record for at, record in self.devices.items() if at[0] != device}
                self.report(mover, self._device_is(device))
            case _:
                super()._obey(mover, order)

    def _device_is(self, device: int) -> DeviceIs:
        drain = self.drains.get(device, "")
        if device in self.unopened:
            return DeviceIs(device, 0, "foreign", drain)
        return DeviceIs(device, 0, "drained", drain) if drain == "drained" else DeviceIs(device, 1 << 20, "", drain)
