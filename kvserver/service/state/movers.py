"""Mover processes, as the brain knows them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvserver.service.base.effects import Instruct
from kvserver.service.state.table import Table
from kvserver.service.state.transitions import MOVER, MoverState, moved
from kvserver.wire.orders import MoverKind, Ready

if TYPE_CHECKING:
    from kvserver.service.state.caches import Cache


@dataclass(slots=True, eq=False)
class Mover:
    """One mover process."""

    number: int
    device: MoverKind
    device_id: str
    """The GPU's id; empty for host and disk."""
    state: MoverState = "starting"
    pid: int = 0
    backend: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    queue: list[Instruct] = field(default_factory=list)
    """Orders that wait until the mover is ready."""
    caches: dict[int, "Cache"] = field(default_factory=dict)
    boards: set[int] = field(default_factory=set)
    """Sessions whose board the mover has mapped."""
    jobs: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The mover's device, for logs and /status."""
        return f"{self.device}:{self.device_id}" if self.device_id else self.device

    def become_ready(self, report: Ready) -> list[Instruct]:
        """The process has mapped the arena. Returns the orders that waited for it."""
        self.state = moved(MOVER, self.state, "ready")
        self.tells(report)
        return self._take_queue()

    def tells(self, report: Ready) -> None:
        """The process says what it is and what it knows of its device. It may learn more later."""
        self.pid, self.backend, self.facts = report.pid, report.backend, dict(report.facts)

    def become_killed(self) -> list[Instruct]:
        """The process is killed, or has been reaped. Returns the orders that it was never told."""
        if self.state != "killed":
            self.state = moved(MOVER, self.state, "killed")
        return self._take_queue()

    def take_back(self, orders: Iterable[Instruct]) -> None:
        """Removes orders that the mover was not told yet."""
        for order in orders:
            self.queue.remove(order)

    def _take_queue(self) -> list[Instruct]:
        queue, self.queue = self.queue, []
        return queue


class Movers(Table[Mover]):
    """All mover processes that may exist."""

    def start(self, mover: Mover) -> None:
        self._rows[mover.number] = mover

    def reaped(self, mover: Mover) -> None:
        del self._rows[mover.number]

    def of_device(self, device: MoverKind, device_id: str) -> Mover | None:
        """The mover that serves a device."""
        for mover in self._rows.values():
            if mover.state != "killed" and (mover.device, mover.device_id) == (device, device_id):
                return mover
        return None
