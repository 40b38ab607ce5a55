"""The disk devices, as the mover reports them."""

from kvserver.service.holdings.place_owners import ExtentOwner
from kvserver.service.state.bounds import Bounds
from kvserver.service.state.drains import Drain
from kvserver.service.state.transitions import DEVICE, DeviceState, moved
from kvserver.tiers.extents import Extents
from kvserver.tiers.placement import Placement

FAILURES_MAX = 8
"""Failed jobs in a row after which a device takes no more writes."""


class Device:
    """One disk device."""

    def __init__(self, number: int, directory: str, placement: Placement, extents: Extents[ExtentOwner]) -> None:
        self.number = number
        self.directory = directory
        """Empty when nobody has said it."""
        self.placement = placement
        self.problem = ""
        """Why it takes no writes; empty: it takes them."""
        self.state: DeviceState = "open"
        self.drain: Drain | None = None
        """Its drain, also after the drain has ended."""
        self._extents = extents
        self._failures = 0
        """Jobs that failed in a row."""
        self._stall_told = False

    @property
    def fields(self) -> tuple[tuple[str, object], ...]:
        """Log fields that name the device."""
        return ("device", self.number), *((("directory", self.directory),) if self.directory else ())

    @property
    def takes_writes(self) -> bool:
        return self._extents.takes_writes[self.number]

    @property
    def is_open(self) -> bool:
        return self.state in ("open", "listed")

    def say_open(self, *, is_open: bool) -> None:
        """The mover says whether the device's store is open."""
        if is_open != self.is_open:
            after: dict[DeviceState, DeviceState] = {
                "open": "closed", "closed": "open", "listed": "away", "away": "listed"
            }  # fmt: skip
            self.state = moved(DEVICE, self.state, after[self.state])

    def say_listed(self) -> None:
        """The mover has listed the records of all devices that are open."""
        if self.state == "open":
            self.state = moved(DEVICE, self.state, "listed")
        elif self.state == "away":
            self.state = moved(DEVICE, self.state, "closed")

    def set_problem(self, problem: str) -> None:
        """Says why the device takes no writes. An empty problem lets it take writes, unless it is drained."""
        self.problem = problem
        self._extents.let_write(self.number, not problem and self.drain is None)

    def begin_anew(self) -> None:
        """Another mover has opened its devices."""
        self._failures = 0
        self.set_problem("")

    def begin_drain(self) -> Drain:
        self.drain = self.drain or Drain(self.number)
        self.set_problem(self.problem)
        return self.drain

    def job_ended(self, *, failed: bool) -> bool:
        """Counts failed jobs in a row. True when the device has just been given up for writes."""
        self._failures = self._failures + 1 if failed else 0
        if self._failures != FAILURES_MAX or not self.takes_writes:
            return False
        self.set_problem(f"{FAILURES_MAX} reads or writes in a row failed")
        return True

    def tell_of_stall(self, *, stalled: bool) -> bool:
        """True when that has changed since somebody was told."""
        changed, self._stall_told = self._stall_told != stalled, stalled
        return changed


def devices(bounds: Bounds, extents: Extents[ExtentOwner], now_ns: int) -> list[Device]:
    """All devices, by their numbers. Nothing is known of them yet."""
    directories = bounds.disk_directories or ("",) * bounds.disk_devices
    limits = {"daily_bytes": bounds.disk_daily_write_bytes, "queue_ms": bounds.disk_write_queue_ms}
    return [
        Device(number, directory, Placement(**limits, now_ns=now_ns), extents)
        for number, directory in enumerate(directories)
    ]
