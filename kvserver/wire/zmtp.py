"""The part of ZMTP 3.0 that the server's ZeroMQ door speaks: a ROUTER, NULL mechanism, messages of one part (RFC 23).

Bytes in, messages out; no sockets. At most one frame of `frame_bytes_max` is kept for a peer. Longer frames, and all
parts of a message with several, are counted and dropped as they come. So the refusal can say how long they were.
"""

from collections.abc import Callable
from typing import NamedTuple

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
MAJOR, MINOR = 3, 0
MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = SIGNATURE + bytes((MAJOR, MINOR)) + MECHANISM + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
PEERS = (b"DEALER", b"REQ", b"ROUTER")
"""Socket types that may talk to a ROUTER."""
COMMAND_BYTES_MAX = 4096
PING_CONTEXT_BYTES_MAX = 16


class Alien(Exception):
    """The peer speaks another protocol; the connection is useless."""


class Message(NamedTuple):
    frame: bytes | None
    """None: the message was too long, or had several parts."""
    bytes: int
    parts: int


class Stream:
    """Parses the bytes of one peer."""

    __slots__ = ("_bytes", "_dropping", "_frame_bytes_max", "_held", "_more", "_most", "_parts", "_stage", "replies")

    def __init__(self, frame_bytes_max: int, dropped_bytes_max: int) -> None:
        """dropped_bytes_max: a longer frame is not dropped; it ends the connection."""
        self._frame_bytes_max, self._most = frame_bytes_max, dropped_bytes_max
        self._held = bytearray()
        self._stage: Callable[[Stream], Message | bool | None] = Stream._greeting
        self._dropping = 0
        self._more = False
        self._parts = 0
        self._bytes = 0
        self.replies = GREETING + _command(b"READY", _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b""))
        """Bytes for the peer. The owner of the socket sends them and empties this."""

    @property
    def held(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._held)

    def feed(self, data: bytes) -> None:
        self._held += data

    def next(self) -> Message | None:
        """The next message; None until all of it has come. Raises Alien."""
        while (part := self._stage(self)) is not None:
            if isinstance(part, Message):
                return part
        return None

    # ---------------------------------------------------------------- stages: None when more bytes are needed

    def _greeting(self) -> bool | None:
        held = self._held
        old = len(held) > 10 and held[10] < MAJOR
        if old or not SIGNATURE.startswith(held[:1]) or (len(held) > 9 and not held[9] & 1):
            raise Alien("it does not greet as ZMTP 3 does")
        if len(held) < len(GREETING):
            return None
        if held[12:32] != MECHANISM:
            raise Alien("its security mechanism is not NULL")
        del held[: len(GREETING)]
        self._stage = Stream._ready
        return True

    def _ready(self) -> bool | None:
        found = self._frame()
        if found is None:
            return None
        flags, body = found
        if not flags & COMMAND or not body.startswith(b"\5READY"):
            raise Alien("its first frame is not READY")
        if _properties(body[6:]).get(b"socket-type") not in PEERS:
            raise Alien("its socket is of a type that does not talk to a ROUTER")
        self._stage = Stream._traffic
        return True

    def _traffic(self) -> Message | bool | None:
        if self._dropping:
            gone = min(self._dropping, len(self._held))
            del self._held[:gone]
            self._dropping -= gone
            return None if self._dropping else self._end_of_part(None)
        found = self._frame()
        if found is None:
            return True if self._dropping else None
        flags, body = found
        if flags & COMMAND:
            self._answer(body)
            return True
        self._begin_part(flags, len(body))
        return self._end_of_part(body)

    def _begin_part(self, flags: int, size: int) -> None:
        self._more = bool(flags & MORE)
        self._parts += 1
        self._bytes += size

    def _end_of_part(self, body: bytes | None) -> Message | bool:
        if self._more:
            return True
        message = Message(body if self._parts == 1 else None, self._bytes, self._parts)
        self._parts = self._bytes = 0
        return message

    def _frame(self) -> tuple[int, bytes] | None:
        """Takes out the next frame: (flags, body). A frame that is too long begins to be dropped."""
        held = self._held
        if len(held) < 2:
            return None
        flags = held[0]
        if flags & ~(MORE | LONG | COMMAND) or (flags & COMMAND and flags & MORE):
            raise Alien(f"a frame has flags {flags:#x}")
        start = 9 if flags & LONG else 2
        if len(held) < start:
            return None
        size = int.from_bytes(held[1:start], "big")
        most = COMMAND_BYTES_MAX if flags & COMMAND or self._stage is Stream._ready else self._most
        if size > most:
            raise Alien(f"a frame has {size} bytes, at most {most} are read")
        if size > self._frame_bytes_max:
            del held[:start]
            self._begin_part(flags, size)
            self._dropping = size
            return None
        if len(held) < start + size:
            return None
        body = bytes(memoryview(held)[start : start + size])
        del held[: start + size]
        return flags, body

    def _answer(self, command: bytes) -> None:
        """Answers PING with its context. A ROUTER ignores other commands."""
        if command.startswith(b"\4PING"):
            self.replies += _command(b"PONG", command[7 : 7 + PING_CONTEXT_BYTES_MAX])


def packed(frame: bytes) -> bytes:
    """The bytes of a message with one part."""
    size = len(frame)
    return (bytes((0, size)) if size < 256 else b"\2" + size.to_bytes(8, "big")) + frame


def _command(name: bytes, content: bytes) -> bytes:
    body = bytes((len(name),)) + name + content
    return bytes((COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(content: bytes) -> dict[bytes, bytes]:
    """Property -> value, with names in lower case, because case has no meaning. Raises Alien."""
    found = {}
    while content:
        name_end = 1 + content[0]
        value_at = name_end + 4
        end = value_at + int.from_bytes(content[name_end:value_at], "big")
        if end > len(content) or value_at > len(content):
            raise Alien("a property is longer than its READY")
        found[content[1:name_end].lower()] = content[value_at:end]
        content = content[end:]
    return found
