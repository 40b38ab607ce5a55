"""Lookups whose answers one thread collects when it comes by: what they cost it is a send and a receive.

For an engine's scheduler, which has other work while the server answers. Belongs to one thread, as a scheduler does.
What Client.lookup() promises holds here as well: nothing raises for the server's sake, a server that is away costs an
attribute read, and one that does not answer in time is not asked again before it has given a sign of life.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from kvclient.calls import found_from
from kvclient.counters import Counters
from kvclient.doors import Full, refusal
from kvclient.gate import Gate, Link
from kvclient.loop import Lost, Overdue, Trouble
from kvclient.values import Found, Lease
from kvserver.errors import RequestError
from kvserver.wire import messages as wire

INQUIRIES_MAX = 256
"""In flight. Their replies, unread, fit into what the kernel grants a socket by default."""

UNSENT_MAX = 2 * INQUIRIES_MAX

Compose = Callable[[Link | None, bytes, bytes, int], wire.Lookup]
"""A checked request of namespace, keys and chunks_wanted_min; RequestError when the caller is wrong."""


class Answered(NamedTuple):
    number: int
    found: Found
    refusal: RequestError | None = None
    """What the server will go on refusing."""


class _Asked(NamedTuple):
    number: int
    link: Link
    asked_s: float
    due_s: float


class Inquiries:
    """Made by Client.inquiries(). `numbers` name lookups for whoever asks; each is answered once, by take()."""

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
        """By the id of the request, oldest first."""
        self._answered: list[Answered] = []
        self._unsent: deque[wire.Lookup | wire.Release] = deque()
        """For which the lane has no room yet; in the order of the calls."""
        self._unsent_on: Link | None = None
        self._unreleased: deque[Lease] = deque(maxlen=UNSENT_MAX)
        """Leases to give back as soon as their server answers."""

    def __len__(self) -> int:
        """That have no answer yet."""
        return len(self._asked)

    @property
    def ready(self) -> bool:
        """Whether take() has something, without listening."""
        return bool(self._answered)

    def ask(self, number: int, namespace: bytes, keys: bytes, *, chunks_wanted_min: int = 1) -> None:
        """Client.lookup() without the answer. RequestError when the caller is wrong."""
        link = self._gate.link
        request = self._compose(link, namespace, keys, chunks_wanted_min)
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
        """Gives a lease back when the server that granted it answers, without asking whether that came to pass:
        otherwise it expires."""
        self._unreleased.append(lease)
        link = self._gate.link
        if link is None:
            return
        try:
            self._release_all(link)
        except Trouble as trouble:
            self._shut_gate(link, trouble)

    def take(self) -> list[Answered]:
        """What has been answered since the last call, or was to be answered by now."""
        self._receive(0.0)
        self._end_overdue()
        taken, self._answered = self._answered, []
        return taken

    def wait(self, due_s: float) -> None:
        """Until take() has something, and until due_s at most."""
        while self._asked and not self._answered and time.monotonic() < due_s:
            self._receive(due_s)
            self._end_overdue()

    # ---------------------------------------------------------------- helpers

    def _send(self, link: Link, request: wire.Lookup | wire.Release) -> None:
        """Behind what is unsent, and later if the lane is full: a dozen lookups of long prompts fill it, which a server
        reads in a millisecond. If it does not, they are overdue as any other."""
        if self._unsent:
            self._send_unsent(link)
        if not self._unsent:
            try:
                link.lane.send(request)
            except Full:
                pass  # later, then
            else:
                return
        if len(self._unsent) < UNSENT_MAX:  # only releases ever come so far; leases expire
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
            # The server reads, so what still waits is not late, and by the first of it all behind are judged.
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
        if asked is None:  # to a release
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
        """What was asked on a lane that is gone will have no reply; and a server that is late is not asked for now."""
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
