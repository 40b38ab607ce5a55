"""The door of operators: POST /admin/VERB on the HTTP port, with a bearer token, from this machine only.

HTTP because the server has it already, and because curl and every tool speak it. Loopback only, whatever address the
port is bound to, because a token must not cross a network unencrypted. Commands do not come in over the engines'
sockets, since a client that may use the cache may not command the server.

Two threads meet here. Reading, parsing and waiting happen on the HTTP thread. The command runs on the brain's loop,
which gets at most COMMANDS_MAX of them at a time and never waits.
"""

import asyncio
import ipaddress
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple, Protocol

import msgspec

from kvserver.config import admin_tokens
from kvserver.config.config import KEYS, Config
from kvserver.errors import ConfigError
from kvserver.wire.admin import RELOADABLE, AnyCommand, Outcome, Reload
from kvserver.wire.messages import CHUNKS_MAX, Cleared, Draining, Error

PATH = re.compile(rb"[A-Z]{1,16} /admin/")
"""Matches the head of a request that is answered here."""
BODY_BYTES_MAX = CHUNKS_MAX * 68 + 4096
"""Room for as many keys as a command may name, in hexadecimal and quoted."""
COMMANDS_MAX = 16
COMMAND_S = 30.0
"""Longest time for a command; a clear waits until the disks have noted it."""
ANSWER_S = 2.0
REFUSALS_A_LINE_S = 1.0

STATUSES = {
    "request": HTTPStatus.BAD_REQUEST,
    "resource": HTTPStatus.SERVICE_UNAVAILABLE,
    "device": HTTPStatus.BAD_GATEWAY,
}

_VERB = re.compile(rb"([A-Z]{1,16}) /admin/([a-z-]{1,32}) HTTP/1\.[01]\r\n")
_TOKEN = re.compile(rb"\r\nauthorization:[ \t]*bearer[ \t]+([!-~]{1,1024})[ \t]*\r\n", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)

TellOutcome = Callable[[Outcome], None]
log = logging.getLogger("kvserver.admin")


class Said(NamedTuple):
    """The reply to a request."""

    status: HTTPStatus
    body: bytes
    headers: tuple[str, ...] = ()


class Body(Protocol):
    """The body that follows a request's head."""

    async def readexactly(self, count: int, /) -> bytes:
        """Reads so many bytes. Raises asyncio.IncompleteReadError when the connection ends before."""


class Wrong(Exception):
    """A refusal: the request is not carried out."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        challenge = ("WWW-Authenticate: Bearer",) if status == HTTPStatus.UNAUTHORIZED else ()
        self.said = Said(status, msgspec.json.encode({"error": message, "code": code}), challenge)
        self.code = code


class AdminDoor:
    """Answers operators' requests. Made on the brain's thread; answer() is called on the HTTP thread."""

    def __init__(self, config: Config, run: Callable[[str, AnyCommand, TellOutcome], None]) -> None:
        """run: called on the brain's loop; carries out a command and passes its outcome to the callback, then or later.

        Without valid tokens every command is refused. A server does not start like that, but a restarted brain does,
        because engines still need it."""
        self._config = config
        self._run = run
        self._brain = asyncio.get_running_loop()
        try:
            self._tokens = self._load()
        except ConfigError as wrong:
            log.error("admin off", extra={"fields": (("why", wrong.message),)})
            self._tokens = admin_tokens.Tokens({})
        self._waiting = 0
        self._refused = 0
        self._refused_s = float("-inf")

    async def answer(self, head: bytes, reader: Body, address: str, limit: asyncio.Timeout) -> Said:
        """The answer to one request. head: ends in an empty line. address: the client's.

        limit: the connection's deadline, which is moved for a client with a valid token."""
        try:
            who = self._admit(head, address)
            verb, body = await self._read(head, reader)
            limit.reschedule(asyncio.get_running_loop().time() + COMMAND_S + ANSWER_S)
            async with asyncio.timeout(COMMAND_S):
                return await self._command(who, verb, body)
        except Wrong as wrong:
            self._note_refusal(address, wrong)
            return wrong.said
        except TimeoutError:
            return Wrong(
                HTTPStatus.GATEWAY_TIMEOUT, "late", f"no end within {COMMAND_S:g} s; it may still come to one"
            ).said

    # ---------------------------------------------------------------- who, and what

    def _admit(self, head: bytes, address: str) -> str:
        """The name of the token's owner. Checked before anything else of the request is looked at."""
        if not _is_local(address):
            raise Wrong(HTTPStatus.FORBIDDEN, "not-local", "commands are taken from this machine only")
        if not self._tokens:
            raise Wrong(HTTPStatus.FORBIDDEN, "admin-off", "this server has no admin token (admin_token_file)")
        presented = _TOKEN.search(head)
        who = self._tokens.who(presented[1].decode()) if presented is not None else None
        if who is None:
            raise Wrong(HTTPStatus.UNAUTHORIZED, "token", "expected a header Authorization: Bearer with a known token")
        return who

    async def _read(self, head: bytes, reader: Body) -> tuple[str, bytes]:
        request = _VERB.match(head)
        if request is None:
            raise Wrong(HTTPStatus.NOT_FOUND, "verb", "expected POST /admin/VERB; docs/admin.md has the verbs")
        if request[1] != b"POST":
            raise Wrong(HTTPStatus.METHOD_NOT_ALLOWED, "method", "a command is a POST")
        length = _LENGTH.search(head)
        count = int(length[1]) if length is not None else 0
        if count > BODY_BYTES_MAX or re.search(rb"\r\ntransfer-encoding:", head, re.IGNORECASE):
            raise Wrong(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body", f"expected a Content-Length of {BODY_BYTES_MAX} at most"
            )
        try:
            return request[2].decode(), await reader.readexactly(count)
        except asyncio.IncompleteReadError:
            raise Wrong(HTTPStatus.BAD_REQUEST, "body", f"the connection ended before {count} bytes had come") from None

    async def _command(self, who: str, verb: str, body: bytes) -> Said:
        command = _parsed(verb, body)
        told: dict[str, object] = {}
        if isinstance(command, Reload):
            command, told["needs_restart"] = self._split(command)
            self._tokens = self._load_again()
        outcome = await self._carried_out(f"token {who}", command)
        match outcome:
            case Error(family=family, code=code, message=message):
                return Said(STATUSES[family], msgspec.json.encode({"error": message, "code": code}))
            case Cleared(chunks=chunks):
                told["chunks"] = chunks
            case Draining():
                pass
            case _:
                told |= {name: getattr(outcome, name) for name in outcome.__struct_fields__ if name != "id"}
        return Said(HTTPStatus.OK, msgspec.json.encode(told))

    def _split(self, command: Reload) -> tuple[Reload, list[str]]:
        """The reload of the keys that can change now, and the names of the other keys with a different value."""
        try:
            for name, value in command.values.items():
                _KEYS[name].check(value)
        except KeyError as unknown:
            raise Wrong(HTTPStatus.BAD_REQUEST, "config-key", f"unknown key {unknown}") from None
        except ConfigError as wrong:
            raise Wrong(HTTPStatus.BAD_REQUEST, wrong.code, wrong.message) from None
        now = {name: value for name, value in command.values.items() if name in RELOADABLE}
        later = command.values.keys() - now.keys()
        return Reload(values=now), sorted(name for name in later if command.values[name] != getattr(self._config, name))

    def _load(self) -> admin_tokens.Tokens:
        return admin_tokens.load(self._config.admin_token_file, os.environ)

    def _load_again(self) -> admin_tokens.Tokens:
        try:
            return self._load()
        except ConfigError as wrong:
            raise Wrong(HTTPStatus.BAD_REQUEST, wrong.code, wrong.message) from None

    # ---------------------------------------------------------------- between the threads

    async def _carried_out(self, who: str, command: AnyCommand) -> Outcome:
        if self._waiting >= COMMANDS_MAX:
            raise Wrong(HTTPStatus.SERVICE_UNAVAILABLE, "busy", f"{COMMANDS_MAX} commands are under way")
        here = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = here.create_future()

        def end(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        def tell(outcome: Outcome) -> None:
            with suppress(RuntimeError):  # the HTTP thread has ended, and nobody waits any more
                here.call_soon_threadsafe(end, outcome)

        self._waiting += 1
        try:
            self._brain.call_soon_threadsafe(self._run, who, command, tell)
            return await future
        finally:
            self._waiting -= 1

    def _note_refusal(self, address: str, wrong: Wrong) -> None:
        """Logs a refusal, at most one line a second: guessing tokens must not fill the log. Never logs the token."""
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._refused_s >= REFUSALS_A_LINE_S:
            fields = ("address", address), ("why", wrong.code), ("so_far", self._refused)
            log.warning("admin refused", extra={"fields": fields})
            self._refused_s = now_s


_KEYS = {key.name: key for key in KEYS}
_decoder = msgspec.json.Decoder(dict[str, object])


def _parsed(verb: str, body: bytes) -> AnyCommand:
    """The command in a JSON object. Hexadecimal texts are decoded to bytes."""
    try:
        fields = _decoder.decode(body or b"{}")
        if "do" in fields:
            raise msgspec.ValidationError("Object contains unknown field `do`")
        fields["do"] = verb
        match fields.get("keys"):
            case [*keys]:
                fields["keys"] = "".join(map(str, keys))
        for name in ("namespace", "key", "keys"):
            match fields.get(name):
                case str(text):
                    fields[name] = _from_hex(name, text)
        command: AnyCommand = msgspec.convert(fields, AnyCommand, builtin_types=(bytes,))
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise Wrong(HTTPStatus.BAD_REQUEST, "command", f"{verb}: {problem}"[:300]) from None
    return command


def _from_hex(name: str, text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"{name}={text[:32]!r} is not hexadecimal: a digest is 64 digits 0-9, a-f") from None


def _is_local(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
