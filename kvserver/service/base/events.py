"""Events: everything that happens to the service. The shell makes them from sockets, clocks and processes; the
simulator makes them from a seed."""

from typing import NamedTuple

from kvserver.wire.admin import AnyCommand
from kvserver.wire.messages import Request
from kvserver.wire.orders import Report


class Arrived(NamedTuple):
    """A request from a peer: a ZeroMQ identity or a local connection, numbered by the shell."""

    peer: int
    request: Request
    descriptor: int
    """The shell's number for the descriptor that came with an Offer; -1 otherwise."""


class Commanded(NamedTuple):
    """An operator's command. The shell has already checked that the operator may give it."""

    peer: int
    """The shell's peer number, valid for this command alone."""
    who: str
    """Name of the operator for the audit log."""
    command: AnyCommand


class PeerGone(NamedTuple):
    """A connection was closed. For ZeroMQ, only peers with a session are reported."""

    peer: int


class Unheard(NamedTuple):
    """The reply that granted a lease could not be sent: the client has given up or is gone."""

    lease: int


class WorkerGone(NamedTuple):
    """The process of a session has ended, as its pidfd shows."""

    session: int


class Reported(NamedTuple):
    """A report from a mover."""

    mover: int
    report: Report


class MoverGone(NamedTuple):
    """A mover process has been reaped: no copy of it can still run."""

    mover: int
    how: str


class ArenaGrew(NamedTuple):
    """The first `slabs` slabs of the arena may be used."""

    slabs: int
    problem: str
    placement: str = ""
    """Memory nodes on which the arena lies, for /status."""


class GoOn(NamedTuple):
    """The effect GoOn was carried out."""


class Tick(NamedTuple):
    """Time has passed."""


Event = Arrived | Commanded | PeerGone | Unheard | WorkerGone | Reported | MoverGone | ArenaGrew | GoOn | Tick
