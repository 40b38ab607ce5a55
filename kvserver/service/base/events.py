"""What happens to the service. The shell makes these from sockets, clocks and processes; the simulator from a seed."""

from typing import NamedTuple

from kvserver.wire.admin import AnyCommand
from kvserver.wire.messages import Request
from kvserver.wire.orders import Report


class Arrived(NamedTuple):
    """A request came in from a peer: a ZeroMQ identity or a local connection, numbered by the shell."""

    peer: int
    request: Request
    descriptor: int
    """Number that the shell gave to the descriptor that came with an Offer; -1 otherwise."""


class Commanded(NamedTuple):
    """An operator wants something. Whether this one may was decided before."""

    peer: int
    """Numbered by the shell as others are, for this command alone."""
    who: str
    """For the audit log."""
    command: AnyCommand


class PeerGone(NamedTuple):
    """A connection was closed. At the ZeroMQ door that is told only of peers with a session."""

    peer: int


class Unheard(NamedTuple):
    """The reply that granted a lease could not be sent: whoever asked has given up, or is gone."""

    lease: int


class WorkerGone(NamedTuple):
    """The process of a session has ended (its pidfd says so)."""

    session: int


class Reported(NamedTuple):
    """A mover said something."""

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
    """On which memory nodes it lies, for /status."""


class GoOn(NamedTuple):
    """The effect of that name was carried out."""


class Tick(NamedTuple):
    """Time has passed."""


Event = Arrived | Commanded | PeerGone | Unheard | WorkerGone | Reported | MoverGone | ArenaGrew | GoOn | Tick
