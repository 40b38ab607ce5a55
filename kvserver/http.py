"""/, /healthz, /readyz, /metrics, /status and /env, from the brain's process and never at the brain's expense.

The brain publishes an immutable snapshot several times a second; a thread with an event loop of its own answers from
the last one. It never calls into the service, and waits for nobody: every connection has CONNECTION_S in all, there
are at most CONNECTIONS_MAX (the oldest makes room for a new one), one request each, GET or HEAD, without a body.

/          A page for people that shows /status over time, see page/.
/healthz   200 while the brain publishes, else 503 with the age of its last snapshot.
/readyz    200 when it is healthy and a slab of the arena may be used, else 503 and what is missing. Movers are started
           by the first registration, so none is needed.
/metrics   Prometheus text, see metrics.py.
/status    JSON, see wire/status.py.
/env       JSON: the brain's environment, see environment.py. Secrets are not in it.

metrics.py is imported on this thread: prometheus_client takes 50 ms, which no start of the brain waits for.

No library, though it is HTTP: what is needed is GET of six documents that lie ready, one a connection. What matters is
what this file promises about clients that do not read, do not write or come in thousands, and about the GIL; around a
library that would have to be enforced as well, and http.server has a thread for each connection. Whoever needs
keep-alive or TLS should think again.
"""

import asyncio
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from kvserver import admin_door
from kvserver.environment import shown_environment
from kvserver.errors import ConfigError
from kvserver.page import page
from kvserver.service.counters import Counters
from kvserver.wire.status import Status, encode_status

FRESH_S = 2.0
"""A brain whose last snapshot is older is stuck; it publishes at least every PUBLISH_S."""
PUBLISH_S = 0.25

CONNECTIONS_MAX = 64
CONNECTION_S = 2.0
HEAD_BYTES_MAX = 8192
LEFTOVER_BYTES_MAX = 1 << 20
"""Unread input that is thrown away before closing, so that a refusal reaches its client; a reset would overtake it."""
CLOSE_S = 5.0

SWITCH_S = 0.0005
"""How long this thread may hold the GIL while the brain waits for it. Python's default of 5 ms is longer than a lookup
may take; rendering /metrics takes about 1 ms."""

_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]\r\n")
_BODY = re.compile(rb"\r\n(?:content-length:[ \t]*0*[1-9]|transfer-encoding:)", re.IGNORECASE)

JSON = "application/json"

log = logging.getLogger("kvserver.http")


class Snapshot(NamedTuple):
    """What the brain last said of itself. Nobody writes to it any more."""

    published_s: float
    """time.monotonic()"""
    status: Status
    counters: Counters


class SnapshotBoard:
    """Hands the last snapshot from the brain's thread to others. Publishing is one assignment."""

    def __init__(self) -> None:
        self._last: Snapshot | None = None

    @property
    def last(self) -> Snapshot | None:
        return self._last

    def publish(self, snapshot: Snapshot) -> None:
        self._last = snapshot


class Answer(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes
    headers: tuple[str, ...] = ()
    """Whole lines, beside those that every answer has."""
    allow: str = "GET, HEAD"
    """What may be done there."""


class HttpServer:
    """The thread. The port is taken by the constructor, so that a bad one stops the start; close() gives it back."""

    def __init__(
        self,
        board: SnapshotBoard,
        *,
        host: str,
        port: int,
        admin: admin_door.AdminDoor | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """admin: answers what is below /admin/; without it there is nothing."""
        self._admin = admin
        self._pages = Pages(board, clock_s)
        self._listener = _listen(host, port)
        self._loop = asyncio.SelectorEventLoop()
        self._closing = asyncio.Event()
        self._connections: dict[asyncio.Task[None], None] = {}
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    def close(self) -> None:
        """Ends every connection and the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_S)
        elif not self._loop.is_closed():
            self._loop.close()
        self._listener.close()

    def _run(self) -> None:
        from kvserver import metrics  # noqa: F401, PLC0415

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=HEAD_BYTES_MAX)
        await self._closing.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its beginning to its end."""
        if len(self._connections) >= CONNECTIONS_MAX:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        try:
            async with asyncio.timeout(CONNECTION_S) as limit:
                await self._exchange(reader, writer, limit)
        except (TimeoutError, OSError) as error:
            log.debug("http connection ended early", extra={"fields": (("why", repr(error)),)})
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: asyncio.Timeout
    ) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            head = b""
            answer = _refusal(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has {HEAD_BYTES_MAX} bytes at most"
            )
        except asyncio.IncompleteReadError:
            return
        else:
            if self._admin is not None and admin_door.PATH.match(head):
                address = (writer.get_extra_info("peername") or ("",))[0]  # None: it was gone at once
                said = await self._admin.answer(head, reader, address, limit)
                answer = Answer(said.status, JSON, said.body, headers=said.headers, allow="POST")
            else:
                answer = self._pages.answer(head)
        writer.transport.set_write_buffer_limits(high=0)  # drained means that the kernel has all of it
        writer.write(_frame(answer, with_body=not head.startswith(b"HEAD ")))
        await writer.drain()
        writer.write_eof()
        await _throw_away(reader)


class Pages:
    """What each path answers. Called on the HTTP thread only."""

    def __init__(self, board: SnapshotBoard, clock_s: Callable[[], float]) -> None:
        self._board = board
        self._clock_s = clock_s
        self._metrics = b""
        self._metrics_s = float("-inf")

    def answer(self, head: bytes) -> Answer:
        """The answer to one request's head, which ends in an empty line."""
        request = _REQUEST.match(head)
        if request is None:
            return _refusal(HTTPStatus.BAD_REQUEST, "expected a request line such as: GET /healthz HTTP/1.1")
        method, target = request.groups()
        if method not in (b"GET", b"HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"expected GET or HEAD, got {method.decode()}")
        if _BODY.search(head):
            return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request here has no body")
        match target.partition(b"?")[0]:
            case b"/":
                return Answer(HTTPStatus.OK, "text/html; charset=utf-8", *page())
            case b"/healthz":
                return self._health()
            case b"/readyz":
                return self._readiness()
            case b"/metrics":
                return self._scrape()
            case b"/status":
                return self._status()
            case b"/env":
                return Answer(HTTPStatus.OK, JSON, msgspec.json.encode(shown_environment(os.environ)))
            case _:
                return _refusal(HTTPStatus.NOT_FOUND, "there are /, /healthz, /readyz, /metrics, /status and /env")

    def _health(self) -> Answer:
        problem = self._stuck()
        return _verdict("ok" if not problem else "stuck", [problem] if problem else [])

    def _readiness(self) -> Answer:
        missing = [problem] if (problem := self._stuck()) else []
        last = self._board.last
        if last is not None and last.status.arena.slabs_ready == 0:
            reason = last.status.arena.problem or "it is still being touched"
            missing.append(f"no slab of the arena is ready: {reason}")
        return _verdict("ready" if not missing else "not ready", missing)

    def _stuck(self) -> str:
        """Why the brain does not count as alive; empty while it does."""
        last = self._board.last
        if last is None:
            return "the brain has not published anything yet"
        age_s = self._clock_s() - last.published_s
        return f"the brain's last sign of life is {age_s:.1f} s old, at most {FRESH_S:.1f}" if age_s >= FRESH_S else ""

    def _scrape(self) -> Answer:
        from kvserver import metrics  # noqa: PLC0415

        last = self._board.last
        if last is None:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, self._stuck())
        now_s = self._clock_s()
        if now_s - self._metrics_s >= PUBLISH_S:  # at most one rendering a publication, however many ask
            self._metrics = metrics.render(last.status, last.counters, now_s - last.published_s)
            self._metrics_s = now_s
        return Answer(HTTPStatus.OK, metrics.CONTENT_TYPE, self._metrics)

    def _status(self) -> Answer:
        last = self._board.last
        if last is None:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, self._stuck())
        return Answer(HTTPStatus.OK, JSON, encode_status(last.status))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=CONNECTIONS_MAX)
    except OSError as error:
        raise ConfigError(
            "http-port", f"cannot listen on http_host={host} http_port={port}: {error.strerror or error}"
        ) from None


def _verdict(word: str, problems: list[str]) -> Answer:
    status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
    return Answer(status, JSON, msgspec.json.encode({"status": word, "problems": problems}))


def _refusal(status: HTTPStatus, message: str) -> Answer:
    return Answer(status, JSON, msgspec.json.encode({"error": message}))


def _frame(answer: Answer, *, with_body: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        f"Allow: {answer.allow}",
        "Cache-Control: no-store",
        "Connection: close",
        "X-Content-Type-Options: nosniff",
        *answer.headers,
    ]
    head = "\r\n".join([*lines, "", ""]).encode()
    return head + answer.body if with_body else head


async def _throw_away(reader: asyncio.StreamReader) -> None:
    """Reads until the client closes, or has sent more than it is worth waiting for."""
    left = LEFTOVER_BYTES_MAX
    while left > 0 and (piece := await reader.read(left)):
        left -= len(piece)
