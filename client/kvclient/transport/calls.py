"""Small requests over ZeroMQ that complete a future: lookups that must not block, status, clear.

Status and clear may take the server a while. They do not use the lane, so that no lookup waits for them.
"""

import time
from concurrent.futures import Future
from typing import Any

from kvclient.base.loop import Lost, Overdue, Trouble
from kvclient.counters import Counters
from kvclient.transport.connection import Connection
from kvclient.transport.gate import Slots
from kvclient.transport.session import Session
from kvclient.transport.transports import R
from kvclient.values import Found, Lease
from kvserver.errors import RequestError
from kvserver.wire import messages as wire

Question = wire.Status | wire.Clear | wire.Drain | wire.Explain
"""Requests that may take the server a while and wait for no job."""


class Calls:
    """The conversations of small requests. Each completes its future in every case."""

    def __init__(self, connection: Connection, counters: Counters, lookup_slots: Slots) -> None:
        self._connection = connection
        self._counters = counters
        self._lookup_slots = lookup_slots

    async def lookup(self, request: wire.Lookup, timeout_s: float, answer: "Future[Found]") -> None:
        """Ask for the prefix, and complete `answer`. Takes over a slot."""
        found = Found(0, None, "client-bug")
        problem: RequestError | None = None
        asked_s = time.monotonic()
        try:
            session = self._session()
            reply = await self._ask(session, request, wire.Found, timeout_s)
            found = found_from(reply, session.welcome.incarnation, asked_s)
        except Trouble as trouble:
            found = Found(0, None, trouble.why)
        except RequestError as error:
            problem = error
        finally:
            self._counters.add_lookup(found.chunks, served=not found.why)
            self._lookup_slots.give()
            _complete(answer, found, problem)

    async def call(self, request: Question, expects: type[R], timeout_s: float, answer: "Future[R]") -> None:
        """Complete `answer` with the reply, or with RequestError or Trouble."""
        reply: R | None = None
        problem: Exception | None = Trouble("client-bug")
        try:
            reply = await self._ask(self._session(), request, expects, timeout_s)
            problem = None
        except (Trouble, RequestError) as error:
            problem = error
        finally:
            _complete(answer, reply, problem)

    def _session(self) -> Session:
        if self._connection.session is None:
            raise Lost("connection-lost")
        return self._connection.session

    async def _ask(self, session: Session, request: wire.Request, expects: type[R], timeout_s: float) -> R:
        try:
            return await session.zmq.ask(request, expects, time.monotonic() + timeout_s)
        except Overdue as overdue:
            self._connection.trip(overdue.why)
            raise


def found_from(reply: wire.Found, incarnation: int, asked_s: float) -> Found:
    """Found with its lease. The lease's time counts from before the request, so that it never seems longer than
    it is."""
    lease = None
    if reply.lease:
        expires_s = asked_s + reply.ttl_ms / 1000
        lease = Lease(reply.lease, reply.chunks, incarnation, expires_s, reply.chunks_on_disk)
    found = Found(reply.chunks, lease, reply.why, reply.coming)
    if not isinstance(reply, wire.Awaited) or lease is None:
        return found
    lease = lease._replace(awaited=reply.awaited)
    return found._replace(lease=lease, awaited=reply.awaited, producer=reply.producer)


def _complete(answer: "Future[Any]", result: object, problem: Exception | None) -> None:
    if problem is not None:
        answer.set_exception(problem)
    else:
        answer.set_result(result)
