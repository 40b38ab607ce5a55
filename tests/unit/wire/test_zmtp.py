"""ZMTP in the server: a peer's bytes come out as messages, however they are cut, and few of them are kept."""

import random

import pytest

from kvserver.wire.zmtp import GREETING, Alien, Message, Stream, packed

FRAME_MAX, DROPPED_MAX = 700, 1500
PING = b"\4\x0b\4PING\0\x0aabcd"


def ready(kind: bytes, name: bytes = b"Socket-Type") -> bytes:
    body = b"\5READY" + bytes((len(name),)) + name + len(kind).to_bytes(4, "big") + kind
    return bytes((4, len(body))) + body


def part(content: bytes, *, more: bool = True) -> bytes:
    whole = packed(content)
    return bytes((whole[0] | more,)) + whole[1:]


def taken(stream: Stream, said: bytes, piece: int) -> list[Message]:
    messages = []
    for start in range(0, len(said), piece):
        stream.feed(said[start : start + piece])
        while (message := stream.next()) is not None:
            messages.append(message)
    return messages


def opened() -> Stream:
    stream = Stream(FRAME_MAX, DROPPED_MAX)
    assert taken(stream, GREETING + ready(b"DEALER"), 1000) == []
    stream.replies = b""
    return stream


@pytest.mark.parametrize("piece", [1, 2, 7, 63, 64, 65, 255, 10_000])
def test_messages_come_out_however_they_are_cut(piece: int) -> None:
    contents = [b"", b"x", bytes(range(255)), random.Random(piece).randbytes(256), bytes(FRAME_MAX)]
    said = GREETING + ready(b"DEALER") + b"".join(map(packed, contents))
    stream = Stream(FRAME_MAX, DROPPED_MAX)
    assert taken(stream, said, piece) == [Message(content, len(content), 1) for content in contents]
    assert stream.held == 0


@pytest.mark.parametrize("piece", [1, 13, 10_000])
def test_what_is_no_message_of_one_part_is_counted_and_not_kept(piece: int) -> None:
    stream = opened()
    long, most = bytes(FRAME_MAX + 1), bytes(DROPPED_MAX)
    said = packed(long) + part(b"abc") + part(most) + part(b"de", more=False) + packed(most) + packed(b"after")
    assert taken(stream, said, piece) == [
        Message(None, FRAME_MAX + 1, 1),
        Message(None, 3 + DROPPED_MAX + 2, 3),
        Message(None, DROPPED_MAX, 1),
        Message(b"after", 5, 1),
    ]


def test_no_more_than_a_frame_is_kept() -> None:
    stream = opened()
    stream.feed(part(bytes(DROPPED_MAX))[:-1])
    assert stream.next() is None
    assert stream.held == 0, "it will be thrown away, so nobody waits for its end"
    stream.feed(b"\0")
    for _ in range(1000):
        stream.feed(part(b"another"))
        assert stream.next() is None
        assert stream.held == 0


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0",
        b"\1\0hello, as ZMTP 1 has it",
        GREETING[:9] + b"\0",
        GREETING[:10] + b"\2",
        GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
        GREETING + packed(b"no READY before"),
        GREETING + ready(b"SUB"),
        GREETING + ready(b"DEALER", b"Socket-Typ"),
        GREETING + b"\4\x0b\5READY\x0bSock",
        GREETING + b"\4\7\5READY\xff",
        GREETING + b"\6" + (1 << 40).to_bytes(8, "big"),
        GREETING + ready(b"DEALER") + b"\x08\0",
        GREETING + ready(b"DEALER") + b"\5\0",
        GREETING + ready(b"DEALER") + b"\2" + (DROPPED_MAX + 1).to_bytes(8, "big"),
        GREETING + ready(b"DEALER") + b"\2" + b"\xff" * 8,
    ],
)
@pytest.mark.parametrize("piece", [1, 10_000])
def test_who_speaks_something_else_is_found_out(said: bytes, piece: int) -> None:
    with pytest.raises(Alien):
        taken(Stream(FRAME_MAX, DROPPED_MAX), said, piece)


def test_random_bytes_are_messages_or_found_out() -> None:
    generator = random.Random(17)
    for _ in range(2000):
        stream = opened()
        said = bytearray(b"".join(packed(generator.randbytes(generator.randrange(300))) for _ in range(3)))
        for _ in range(3):
            said[generator.randrange(len(said))] = generator.randrange(256)
        try:
            messages = taken(stream, bytes(said), generator.randrange(1, 400))
        except Alien:
            continue
        assert sum(message.bytes for message in messages) <= len(said) + 3 * DROPPED_MAX
        assert stream.held <= FRAME_MAX + 9


def test_a_ping_is_answered_and_other_commands_are_passed_over() -> None:
    stream = opened()
    assert taken(stream, b"\4\4\3foo" + PING + packed(b"next"), 1) == [Message(b"next", 4, 1)]
    assert stream.replies == b"\4\x09\4PONGabcd"
