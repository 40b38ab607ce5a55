"""Effects: actions that the service wants done. The shell carries them out in their order.

The order matters in one place, and `Service.handle` guarantees it. First ledger entries are published, before the reply
that promises them. Then others are withdrawn, before the order that lets a mover write into the slot again. All other
effects follow.
"""

from typing import NamedTuple

from kvserver.wire.admin import LogLevel, Outcome
from kvserver.wire.kv_events import KvEvent
from kvserver.wire.messages import Reply
from kvserver.wire.orders import Order, Wish


class Publish(NamedTuple):
    """Seals these packed records in the ledger."""

    records: bytes


class Withdraw(NamedTuple):
    """Withdraws the ledger entries at these packed int64 arena offsets."""

    offsets: bytes


class PutNamespace(NamedTuple):
    """Writes the document of a namespace to the ledger, at its number."""

    number: int
    document: bytes


class DropNamespace(NamedTuple):
    number: int


class Answer(NamedTuple):
    """A reply to a peer."""

    peer: int
    reply: Reply | Outcome


class AnswerWithBoard(NamedTuple):
    """The reply Attached, with the session's board. The shell makes the board now and keeps it until CloseSession."""

    peer: int
    reply: Reply
    session: int


class AnswerWithMover(NamedTuple):
    """The reply Watched, with the pidfd of a mover."""

    peer: int
    reply: Reply
    mover: int


class Instruct(NamedTuple):
    """An order to a mover that is ready. `descriptors` are numbers of offered descriptors, which are passed in this
    order."""

    mover: int
    order: Order
    descriptors: tuple[int, ...] = ()
    board: int = 0
    """Session whose board travels with the order; 0: none."""


class Ask(NamedTuple):
    """A wish to the supervisor."""

    wish: Wish


class CloseDescriptors(NamedTuple):
    numbers: tuple[int, ...]


class CloseSession(NamedTuple):
    """Ends a session's connections and drops its board and pidfd."""

    session: int
    peers: tuple[int, ...]


class GoOn(NamedTuple):
    """Asks for the event GoOn after the other waiting events, because some work is done in pieces."""


class Log(NamedTuple):
    """A log line, one per state change: `event key=value …`."""

    level: int
    event: str
    fields: tuple[tuple[str, object], ...]


class Audit(NamedTuple):
    """A line of the audit log, one per operator's command, whatever the log level."""

    fields: tuple[tuple[str, object], ...]


class Tell(NamedTuple):
    """Events for subscribers: changes that this event made to the chunks held."""

    events: list[KvEvent]


class ChangeLogLevel(NamedTuple):
    """The least severe level that this process logs from now on."""

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
