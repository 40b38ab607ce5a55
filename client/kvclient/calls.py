"""The small requests that travel over ZeroMQ and complete a future: lookups that must not block, status, clear.

Status and clear may take the server a while, so they stay off the lane: a lookup must never wait behind them.
"""

import time
from concurrent.futures import Future

from kvclient.connection import Connection
from kvclient.counters import Counters
from kvclient.doors import R
from kvclient.loop import Lost, Overdue, Trouble
from kvclient.values import Found, Lease
from kvserver.errors import RequestError
from kvserver.wire import messages as wire


async def lookup(
    connection: Connection, counters: Counters, request: wire.Lookup, timeout_s: float, answer: "Future[Found]"
) -> None:
    found = Found(0, None, "client-bug")
    problem: RequestError | None = None
    asked_s = time.monotonic()
    try:
        session = connection.session
        if session is None:
            raise Lost("connection-lost")
        reply = await session.zmq.ask(request, wire.Found, asked_s + timeout_s)
        found = found_from(reply, session.welcome.incarnation, asked_s)
    except Trouble as trouble:
        if isinstance(trouble, Overdue):
            connection.trip(trouble.why)
        found = Found(0, None, trouble.why)
    except RequestError as error:
        problem = error
    finally:
        count_lookup(counters, found)
        if problem is not None:
            answer.set_exception(problem)
        else:
            answer.set_result(found)


async def call(
    connection: Connection, request: wire.Status | wire.Clear, expects: type[R], timeout_s: float, answer: "Future[R]"
) -> None:
    """Completes with the reply, or with RequestError or Trouble."""
    problem: Exception | None = Trouble("client-bug")
    try:
        session = connection.session
        if session is None:
            raise Lost("connection-lost")
        reply = await session.zmq.ask(request, expects, time.monotonic() + timeout_s)
        problem = None
    except (Trouble, RequestError) as trouble:
        if isinstance(trouble, Overdue):
            connection.trip(trouble.why)
        problem = trouble
    finally:
        if problem is not None:
            answer.set_exception(problem)
        else:
            answer.set_result(reply)


def found_from(reply: wire.Found, incarnation: int, asked_s: float) -> Found:
    """The lease is counted from before the question, so it never seems to live longer than it does."""
    lease = None
    if reply.lease:
        lease = Lease(reply.lease, reply.chunks, incarnation, asked_s + reply.ttl_ms / 1000)
    return Found(reply.chunks, lease)


def count_lookup(counters: Counters, found: Found) -> None:
    counters.add("lookups")
    counters.add("chunks_found", found.chunks)
    if found.why:
        counters.add("lookups_unserved")
