"""The HTTP server: /, /healthz, /readyz, /metrics, /status, /config and /env, on a thread of the brain's process.

The brain publishes an immutable snapshot several times a second. A thread with its own event loop answers from the last
one. It never calls into the service, and no client can hold it up: every connection has CONNECTION_S in all, and one
request, GET or HEAD, without a body.

A new connection is always accepted. At most SILENT_MAX connections have not sent their request, fewer where the limit
of open files is low (descriptor_limit.py), and at most ANSWERED_MAX are being answered. Above that the oldest of the
same kind is closed, so a flood of silent connections closes only silent ones. /healthz is answered in the step that has
read its request: the answer fits into the socket's buffer, so it waits for no other connection.

/          A page for people that shows /status over time, see page/.
/healthz   200 while the brain publishes, else 503 with the age of its last snapshot.
/readyz    200 when it is healthy and a slab of the arena may be used, else 503 and what is missing. Movers are started
           by the first registration, so none is needed.
           Both name as a problem that no disk can be used, and stay 200: a restart mends no disk, and DRAM still
           serves.
/metrics   Prometheus text, see metrics.py.
/status    JSON, see wire/status.py.
/config    JSON: the configuration in force, and the keys that were changed since the start.
/env       JSON: the brain's environment, see environment.py. Secrets are not in it.

All but /healthz and /readyz must be asked for by a name of this server (host_names.py).

metrics.py is imported on this thread: prometheus_client takes 50 ms, and the brain's start does not wait for that.

HTTP is implemented here without a library. All that is needed is GET of seven prepared documents, one per connection.
The difficult part is what this file promises about the GIL, and about clients that do not read, do not write or come in
thousands. That would have to be enforced around a library too, and http.server has a thread for each connection. If
keep-alive or TLS is needed one day, a library is worth another look.
"""

import asyncio
import errno
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from kvserver.brain.http import admin as admin_door
from kvserver.brain.http.environment import shown_environment
from kvserver.brain.http.host_names import Names
from kvserver.brain.http.page import page
from kvserver.config.descriptor_limit import SILENT_MAX
from kvserver.errors import ConfigError
from kvserver.service.telling.counters import Counters
from kvserver.wire.status import Status, encode_status

FRESH_S = 2.0
"""The brain counts as stuck when its last snapshot is older; it publishes at least every PUBLISH_S."""
PUBLISH_S = 0.25

ANSWERED_MAX = 64
ACCEPTS_PER_TURN = 32
"""Connections accepted before those that exist already have their turn."""
BACKLOG = 4096
"""Linux cuts it to net.core.somaxconn. A connection that does not fit is tried again by its client after 1 s."""
ACCEPT_AGAIN_S = 0.05
CONNECTION_S = 2.0
CROWDED_S = 60.0
"""At most one log line in this time about connections that were closed for others."""
HEAD_BYTES_MAX = 8192
HEAD_END = b"\r\n\r\n"
LEFTOVER_BYTES_MAX = 1 << 20
"""Unread input that is discarded before closing. Closing with more unread input sends a reset, which would overtake a
refusal."""
CLOSE_S = 5.0

SWITCH_S = 0.0005
"""Longest time that this thread holds the GIL while the brain waits for it. Python's default of 5 ms is longer than a
lookup may take; rendering /metrics takes about 1 ms."""

_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]\r\n")
_PROBE = re.compile(rb"(?:GET|HEAD) /(?:healthz|readyz)[? ]")
"""Probes are answered under any Host name: they reveal nothing, and a probe that fails restarts the server."""
_BODY = re.compile(rb"\r\n(?:content-length:[ \t]*0*[1-9]|transfer-encoding:)", re.IGNORECASE)

JSON = "application/json"

log = logging.getLogger("kvserver.brain.http.server")


class Snapshot(NamedTuple):
    """The brain's last published status and counters. Immutable once published."""

    published_s: float
    """Time of time.monotonic()."""
    status: Status
    counters: Counters


class SnapshotBoard:
    """Passes the last snapshot from the brain's thread to others. Publishing is one assignment, so it needs no lock."""

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
    """Whole header lines, beside those that every answer has."""
    allow: str = "GET, HEAD"
    """Methods allowed at this path (the Allow header)."""


class _Ended(Exception):
    """The client closed before its request was complete."""


class _Client:
    """One connection, as coroutines of the HTTP thread use it. Data that has arrived is read without a wait."""

    def __init__(self, end: socket.socket, address: str) -> None:
        self.end = end
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()

    @property
    def has_said_more(self) -> bool:
        """Whether data waits to be read."""
        try:
            return bool(self.end.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    async def head(self) -> bytes:
        """The request's head up to and including its empty line; empty if that is not within HEAD_BYTES_MAX.

        Raises _Ended."""
        while (at := self._unread.find(HEAD_END)) < 0 and len(self._unread) <= HEAD_BYTES_MAX:
            await self._read_more()
        count = at + len(HEAD_END) if 0 <= at <= HEAD_BYTES_MAX else 0
        return self._take(count)

    async def readexactly(self, count: int) -> bytes:
        """Reads so many bytes, like asyncio.StreamReader, for http/admin.py."""
        try:
            while len(self._unread) < count:
                await self._read_more()
        except _Ended:
            raise asyncio.IncompleteReadError(bytes(self._unread), count) from None
        return self._take(count)

    async def say(self, answer: bytes) -> None:
        """Sends the answer, then waits until the client closes or has sent LEFTOVER_BYTES_MAX."""
        await self._loop.sock_sendall(self.end, answer)
        self.end.shutdown(socket.SHUT_WR)
        left = LEFTOVER_BYTES_MAX
        while left > 0 and (piece := await self._loop.sock_recv(self.end, left)):
            left -= len(piece)

    async def _read_more(self) -> None:
        piece = await self._loop.sock_recv(self.end, HEAD_BYTES_MAX)
        if not piece:
            raise _Ended
        self._unread += piece

    def _take(self, count: int) -> bytes:
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken


class _Crowd:
    """Connections of one kind, oldest first, with a bound."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._clients: dict[asyncio.Task[None], _Client] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, task: asyncio.Task[None], client: _Client) -> bool:
        """Adds a connection. Whether another one was closed for it."""
        crowded = len(self._clients) >= self._most and self.put_one_out()
        self._clients[task] = client
        return crowded

    def remove(self, task: asyncio.Task[None]) -> None:
        self._clients.pop(task, None)

    def put_one_out(self) -> bool:
        """Closes the oldest connection without unread data, or the oldest if all have some. False if there is none.

        A connection with unread data is served in the next turn; closing it would punish it for our slowness."""
        task = next((task for task, client in self._clients.items() if not client.has_said_more), None)
        task = task or next(iter(self._clients), None)
        if task is None:
            return False
        del self._clients[task]
        task.cancel()
        return True


class HttpServer:
    """The HTTP thread. The constructor binds the port, so that a bad one stops the start; close() releases it."""

    def __init__(
        self,
        board: SnapshotBoard,
        *,
        host: str,
        port: int,
        names: str = "",
        config: Mapping[str, int | str] | None = None,
        admin: admin_door.AdminDoor | None = None,
        silent_max: int = SILENT_MAX,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """names: further names of this server, with commas between them (host_names.py).
        config: the configuration with which the server began.
        admin: answers requests below /admin/; without it these are not found.
        silent_max: bound on connections that have not sent their request."""
        self._admin = admin
        self._names = Names(host, names)
        self._pages = Pages(board, config or {}, clock_s)
        self._listener = _listen(host, port)
        self._loop = asyncio.SelectorEventLoop()
        self._closing = asyncio.Event()
        self._silent, self._answered = _Crowd(silent_max), _Crowd(ANSWERED_MAX)
        self._put_out = 0
        self._told_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        return len(self._silent) + len(self._answered)

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
        from kvserver.brain.http import metrics  # noqa: F401, PLC0415

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._closing.wait()
        accepting.cancel()

    # ---------------------------------------------------------------- connections

    async def _accept(self) -> None:
        while True:
            for _ in range(ACCEPTS_PER_TURN):
                try:
                    end, address = await self._loop.sock_accept(self._listener)
                except OSError as problem:
                    if problem.errno != errno.ECONNABORTED and not self._silent.put_one_out():
                        await asyncio.sleep(ACCEPT_AGAIN_S)  # no descriptor is left, and there is nothing to close
                    break
                self._take_in(_Client(end, str(address[0])))
            await asyncio.sleep(0)

    def _take_in(self, client: _Client) -> None:
        task = self._loop.create_task(self._converse(client))
        task.add_done_callback(lambda _: client.end.close())  # also if it was cancelled before it began
        self._note_put_out(self._silent.add(task, client))

    async def _converse(self, client: _Client) -> None:
        """Serves one connection from its beginning to its end."""
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(CONNECTION_S) as limit:
                head = await client.head()
                self._silent.remove(task)
                self._note_put_out(self._answered.add(task, client))
                answer = await self._answer(head, client, limit)
                await client.say(_frame(answer, with_body=not head.startswith(b"HEAD ")))
        except (_Ended, TimeoutError, OSError) as error:
            log.debug("http connection ended early", extra={"fields": (("why", repr(error)),)})
        finally:
            self._silent.remove(task)
            self._answered.remove(task)

    def _note_put_out(self, crowded: bool) -> None:
        """Logs closed connections, at most one line a minute: a flood must not fill the log."""
        self._put_out += crowded
        now_s = time.monotonic()
        if self._put_out and now_s - self._told_s >= CROWDED_S:
            fields = ("put_out", self._put_out), ("silent", len(self._silent)), ("answered", len(self._answered))
            log.warning("http crowded", extra={"fields": fields})
            self._put_out, self._told_s = 0, now_s

    async def _answer(self, head: bytes, client: _Client, limit: asyncio.Timeout) -> Answer:
        if not head:
            return _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has {HEAD_BYTES_MAX} bytes at most")
        if _PROBE.match(head) is None and (problem := self._names.problem(head)):
            return _refusal(*problem)
        if self._admin is None or not admin_door.PATH.match(head):
            return self._pages.answer(head)
        said = await self._admin.answer(head, client, client.address, limit)
        return Answer(said.status, JSON, said.body, headers=said.headers, allow="POST")


class Pages:
    """The answer of each path. Used on the HTTP thread only."""

    def __init__(self, board: SnapshotBoard, config: Mapping[str, int | str], clock_s: Callable[[], float]) -> None:
        self._board = board
        self._config = config
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
            case b"/config":
                return self._in_force()
            case b"/env":
                return Answer(HTTPStatus.OK, JSON, msgspec.json.encode(shown_environment(os.environ)))
            case _:
                return _refusal(
                    HTTPStatus.NOT_FOUND, "there are /, /healthz, /readyz, /metrics, /status, /config and /env"
                )

    def _health(self) -> Answer:
        problem = self._stuck()
        return self._verdict("ok" if not problem else "stuck", [problem] if problem else [])

    def _readiness(self) -> Answer:
        missing = [problem] if (problem := self._stuck()) else []
        last = self._board.last
        if last is not None and last.status.arena.slabs_ready == 0:
            reason = last.status.arena.problem or "it is still being touched"
            missing.append(f"no slab of the arena is ready: {reason}")
        return self._verdict("ready" if not missing else "not ready", missing)

    def _verdict(self, word: str, problems: list[str]) -> Answer:
        """The answer to a probe: 503 with problems. A disk tier that cannot be used is named beside them, and decides
        nothing."""
        last = self._board.last
        disk = [last.status.disk_problem] if last is not None and last.status.disk_problem else []
        status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
        return Answer(status, JSON, msgspec.json.encode({"status": word, "problems": [*problems, *disk]}))

    def _stuck(self) -> str:
        """Why the brain counts as stuck; empty while it is alive."""
        last = self._board.last
        if last is None:
            return "the brain has not published anything yet"
        age_s = self._clock_s() - last.published_s
        return f"the brain's last sign of life is {age_s:.1f} s old, at most {FRESH_S:.1f}" if age_s >= FRESH_S else ""

    def _scrape(self) -> Answer:
        from kvserver.brain.http import metrics  # noqa: PLC0415

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

    def _in_force(self) -> Answer:
        last = self._board.last
        if last is None:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, self._stuck())
        changed = sorted(name for name, value in last.status.settings.items() if self._config.get(name) != value)
        values = {**self._config, **last.status.settings}
        return Answer(HTTPStatus.OK, JSON, msgspec.json.encode({"values": values, "changed_since_start": changed}))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) or not error.errno else os.strerror(error.errno)
        raise ConfigError("http-port", f"cannot listen on http_host={host} http_port={port}: {why}") from None


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
