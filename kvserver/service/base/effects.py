"""What the service wants done. The shell carries effects out in the order in which they stand.

Order matters in one place, and `Service.handle` guarantees it: ledger entries are published (that precedes the reply
that promises them), then withdrawn (that precedes the order that lets a mover write into the slot again), then the
rest.
"""

from typing import NamedTuple

from kvserver.wire.admin import LogLevel, Outcome
from kvserver.wire.kv_events import KvEvent
from kvserver.wire.messages import Reply
from kvserver.wire.orders import Order, Wish


class Publish(NamedTuple):
    """Ledger: these packed records are sealed."""

    records: bytes


class Withdraw(NamedTuple):
    """Ledger: nothing is held at these packed int64 arena offsets any more."""

    offsets: bytes


class PutNamespace(NamedTuple):
    """Ledger: the document of a namespace, at its number."""

    number: int
    document: bytes


class DropNamespace(NamedTuple):
    number: int


class Answer(NamedTuple):
    """A reply to a peer."""

    peer: int
    reply: Reply | Outcome


class AnswerWithBoard(NamedTuple):
    """Attached, with the session's board, which the shell makes now and keeps until CloseSession."""

    peer: int
    reply: Reply
    session: int


class AnswerWithMover(NamedTuple):
    """Watched, with the pidfd of a mover."""

    peer: int
    reply: Reply
    mover: int


class Instruct(NamedTuple):
    """An order to a mover that is ready. `descriptors` are numbers of offered descriptors, passed in this order."""

    mover: int
    order: Order
    descriptors: tuple[int, ...] = ()
    board: int = 0
    """Not 0: the board of this session travels with the order."""


class Ask(NamedTuple):
    """A wish to the supervisor."""

    wish: Wish


class CloseDescriptors(NamedTuple):
    numbers: tuple[int, ...]


class CloseSession(NamedTuple):
    """Ends a session's connections, and drops its board and pidfd."""

    session: int
    peers: tuple[int, ...]


class GoOn(NamedTuple):
    """Something is to be gone on with in pieces: the event of that name shall come, after others that wait."""


class Log(NamedTuple):
    """One line per state change: `event key=value …`."""

    level: int
    event: str
    fields: tuple[tuple[str, object], ...]


class Audit(NamedTuple):
    """One line per command of an operator, whatever is logged otherwise."""

    fields: tuple[tuple[str, object], ...]


class Tell(NamedTuple):
    """Subscribers are told what this event has changed of what is held."""

    events: list[KvEvent]


class ChangeLogLevel(NamedTuple):
    """The least level that this process logs from now on."""

    level: LogLevel


Effect = (
    Publish
    | Withdraw
    | PutNamespace
    | DropNamespace
    | Answer
    | AnswerWithBoard
    | AnswerWithMover
    | Instruct
    | Ask
    | CloseDescriptors
    | CloseSession
    | GoOn
    | Log
    | Audit
    | Tell
    | ChangeLogLevel
)
