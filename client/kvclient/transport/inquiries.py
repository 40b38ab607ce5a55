"""Lookups whose answers one thread collects later. Each costs that thread a send and a receive.

For an engine's scheduler, which has other work while the server answers. Belongs to one thread. The promises of
Client.lookup() hold here too. Nothing raises because of the server, and a server that is away costs an attribute read.
A server that does not answer in time is not asked again before it shows a sign of life.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, Protocol

from kvclient.base.loop import Lost, Overdue, Trouble
from kvclient.counters import Counters
from kvclient.transport.calls import found_from
from kvclient.transport.gate import Gate, Link
from kvclient.transport.transports import Full, refusal
from kvclient.values import Found, Lease
from kvserver.errors import RequestError
from kvserver.wire import messages as wire

INQUIRIES_MAX = 256
"""Most lookups in flight. Their unread replies fit into a socket's default buffer."""

UNSENT_MAX = 2 * INQUIRIES_MAX


class Compose(Protocol):
    """Makes a checked request. RequestError if the caller is wrong."""

    def __call__(
        self, link: Link | None, namespace: bytes, keys: bytes, chunks_wanted_min: int, *, may_wait: bool
    ) -> wire.Lookup: ...


class Answered(NamedTuple):
    number: int
    found: Found
    refusal: RequestError | None = None
    """A refusal that the server will repeat."""


class _Asked(NamedTuple):
    number: int
    link: Link
    asked_s: float
    due_s: float


class Inquiries:
    """The lookups of one thread, made by Client.inquiries(). The caller numbers them; take() answers each once."""

    def __init__(
        self,
        gate: Gate,
        ids: Iterator[int],
        counters: Counters,
        *,
        timeout_s: float,
        compose: Compose,
        shut_gate: Callable[[Link, Trouble], None],
    ) -> None:
        self._gate = gate
        self._ids = ids
        self._counters = counters
        self._timeout_s = timeout_s
        self._compose = compose
        self._shut_gate = shut_gate
        self._asked: dict[int, _Asked] = {}
        """Request id -> lookup, oldest first."""
        self._answered: list[Answered] = []
        self._unsent: deque[wire.Lookup | wire.Release] = deque()
        """Requests for which the lane has no room yet, in the order of the calls."""
        self._unsent_on: Link | None = None
        self._unreleased: deque[Lease] = deque(maxlen=UNSENT_MAX)
        """Leases to give back as soon as their server answers."""

    def __len__(self) -> int:
        """Number of lookups without an answer."""
        return len(self._asked)

    @property
    def ready(self) -> bool:
        """Whether take() can return something without reading the lane."""
        return bool(self._answered)

    def ask(
        self, number: int, namespace: bytes, keys: bytes, *, chunks_wanted_min: int = 1, may_wait: bool = False
    ) -> None:
        """Send a lookup as Client.lookup() does, but do not wait for the answer. RequestError if the caller is
        wrong."""
        link = self._gate.link
        request = self._compose(link, namespace, keys, chunks_wanted_min, may_wait=may_wait)
        now_s = time.monotonic()
        if link is None or not keys or len(self._asked) >= INQUIRIES_MAX:
            why = "" if not keys else "busy" if link is not None else self._gate.why or "connection-lost"
            self._end(number, Found(0, None, why))
            return
        try:
            self._send(link, request)
        except Trouble as trouble:
            self._shut_gate(link, trouble)
            self._end(number, Found(0, None, trouble.why))
        else:
            self._asked[request.id] = _Asked(number, link, now_s, now_s + self._timeout_s)

    def release(self, lease: Lease) -> None:
        """Give a lease back when its server answers. No reply is awaited; a release that fails leaves the lease to
        expire."""
        self._unreleased.append(lease)
        link = self._gate.link
        if link is None:
            return
        try:
            self._release_all(link)
        except Trouble as trouble:
            self._shut_gate(link, trouble)

    def take(self) -> list[Answered]:
        """The lookups that were answered or became overdue since the last call."""
        self._receive(0.0)
        self._end_overdue()
        taken, self._answered = self._answered, []
        return taken

    def wait(self, due_s: float) -> None:
        """Wait until take() has something, at most until due_s."""
        while self._asked and not self._answered and time.monotonic() < due_s:
            self._receive(due_s)
            self._end_overdue()

    # ---------------------------------------------------------------- helpers

    def _send(self, link: Link, request: wire.Lookup | wire.Release) -> None:
        """Send a request after the unsent ones, or queue it if the lane is full.

        A dozen lookups of long prompts fill the lane, and the server reads them in a millisecond. If it does not, they
        become overdue like any other.
        """
        if self._unsent:
            self._send_unsent(link)
        if not self._unsent:
            try:
                link.lane.send(request)
            except Full:
                pass  # sent later
            else:
                return
        if len(self._unsent) < UNSENT_MAX:  # only releases ever get this far; their leases expire
            self._unsent.append(request)
            self._unsent_on = link

    def _release_all(self, link: Link) -> None:
        while self._unreleased:
            lease = self._unreleased[0]
            if lease.incarnation == link.incarnation:
                self._send(link, wire.Release(next(self._ids), lease.number))
            self._unreleased.popleft()

    def _send_unsent(self, link: Link) -> None:
        if self._unsent_on is not link:
            self._unsent.clear()
        due_s, before = time.monotonic() + self._timeout_s, len(self._unsent)
        with suppress(Full):
            while self._unsent:
                link.lane.send(self._unsent[0])
                self._count_from_now(self._unsent.popleft(), due_s)
        if len(self._unsent) < before:
            # The server reads, so waiting requests are not late. The first one's due time decides for all after it.
            first = next((request for request in self._unsent if request.id in self._asked), None)
            if first is not None:
                self._count_from_now(first, due_s)

    def _count_from_now(self, request: wire.Lookup | wire.Release, due_s: float) -> None:
        if (asked := self._asked.get(request.id)) is not None:
            self._asked[request.id] = asked._replace(due_s=due_s)

    def _receive(self, due_s: float) -> None:
        link = self._gate.link
        if link is None:
            return
        try:
            if self._unreleased:
                self._release_all(link)
            if self._unsent:
                self._send_unsent(link)
            for reply in link.lane.take(due_s):
                self._take(link, reply)
        except Trouble as trouble:
            self._shut_gate(link, trouble)

    def _take(self, link: Link, reply: wire.Reply) -> None:
        asked = self._asked.pop(reply.id, None)
        if asked is None:  # a reply to a release
            return
        if isinstance(reply, wire.Found):
            self._end(asked.number, found_from(reply, link.incarnation, asked.asked_s))
        elif isinstance(reply, wire.Error):
            problem = refusal(reply)
            why = problem.code if isinstance(problem, RequestError) else problem.why
            self._end(asked.number, Found(0, None, why), problem if isinstance(problem, RequestError) else None)
            if isinstance(problem, Lost):
                self._shut_gate(link, problem)
        else:
            self._end(asked.number, Found(0, None, "frame"))
            self._shut_gate(link, Lost("frame", f"expected Found, the server said {type(reply).__name__}"))

    def _end_overdue(self) -> None:
        """End lookups on a lane that is gone, and all others once the oldest is overdue."""
        for asked in list(self._asked.values()):
            if asked.link is self._gate.link:
                if time.monotonic() < asked.due_s:
                    break
                self._shut_gate(asked.link, Overdue())
            del self._asked[next(iter(self._asked))]
            self._end(asked.number, Found(0, None, self._gate.why or "connection-lost"))

    def _end(self, number: int, found: Found, problem: RequestError | None = None) -> None:
        self._counters.add_lookup(found.chunks, served=not found.why)
        self._answered.append(Answered(number, found, problem))
