"""The wire format: the bytes of every frame, and the answers to bytes that are no frame."""

import random
import tracemalloc
from typing import get_args

import msgspec
import pytest

from kvserver.errors import RequestError
from kvserver.wire import orders
from kvserver.wire.codec import MESSAGE_CHARS_MAX, Malformed, decode_reply, decode_request, encode
from kvserver.wire.messages import (
    BUFFERS_MAX,
    FRAME_BYTES_MAX,
    GROUPS_MAX,
    HANDLE_BYTES,
    NAME_BYTES_MAX,
    PLACES_MAX,
    PROTOCOL,
    REGION_RUNS_MAX,
    Attach,
    Buffer,
    Error,
    Frame,
    GroupSpec,
    RegionRun,
    Register,
    Reply,
    Request,
    Staging,
    Status,
)
from tests.rigs.bad_frames import BadFrames
from tests.rigs.golden_frames import GOLDEN, REPLIES, REQUESTS


def refusal(frame: bytes) -> Error:
    with pytest.raises(Malformed) as caught:
        decode_request(frame)
    return caught.value.reply


# ---------------------------------------------------------------- frames


def test_every_frame_has_golden_bytes() -> None:
    kinds = [type(frame) for frame, _ in GOLDEN]
    assert sorted(kind.__name__ for kind in kinds) == sorted(
        kind.__name__ for kind in (*get_args(Request), *get_args(Reply))
    )


@pytest.mark.parametrize(("frame", "golden"), GOLDEN, ids=[type(frame).__name__ for frame, _ in GOLDEN])
def test_the_bytes_of_a_frame_never_change_unnoticed(frame: Frame, golden: str) -> None:
    assert encode(frame).hex() == golden


@pytest.mark.parametrize(("frame", "golden"), REQUESTS, ids=[type(frame).__name__ for frame, _ in REQUESTS])
def test_a_request_comes_back_from_its_bytes(frame: Request, golden: bytes) -> None:
    assert decode_request(golden) == frame
    assert decode_request(memoryview(golden)) == frame


@pytest.mark.parametrize(("frame", "golden"), REPLIES, ids=[type(frame).__name__ for frame, _ in REPLIES])
def test_a_reply_comes_back_from_its_bytes(frame: Reply, golden: bytes) -> None:
    assert decode_reply(golden) == frame


def test_requests_and_replies_have_different_tags() -> None:
    tags = [kind.__struct_config__.tag for kind in (*get_args(Request), *get_args(Reply))]
    assert len(set(tags)) == len(tags)
    for _, golden in REPLIES:
        assert refusal(golden).code == "frame"
    for _, golden in REQUESTS:
        with pytest.raises(RequestError, match=f"not a reply of protocol {PROTOCOL}"):
            decode_reply(golden)


HUGE = (1 << 62) + 1


def test_the_longest_orders_fit_one_message() -> None:
    """A longer order would end the mover, and every client's caches with it."""
    run = RegionRun(HUGE, HUGE, HUGE, HUGE, HUGE, HUGE)
    group = GroupSpec(HUGE, HUGE, "window", HUGE, HUGE, HUGE, HUGE, HUGE, [run] * (REGION_RUNS_MAX // GROUPS_MAX))
    buffers, staging = [Buffer(-1, bytes(HANDLE_BYTES), HUGE)] * BUFFERS_MAX, Staging(bytes(HANDLE_BYTES), HUGE, HUGE)
    mapping = orders.MapCache(HUGE, HUGE, HUGE, buffers, [group] * GROUPS_MAX, "server-gather", "dmabuf", [staging])
    assert len(orders.encode(mapping)) <= orders.ORDER_BYTES_MAX
    chunks = PLACES_MAX // 3 // GROUPS_MAX
    copied = orders.CopyGroup(HUGE, HUGE, bytes(4 * chunks), bytes(8 * chunks), bytes(8))
    copy = orders.Copy(HUGE, "retrieve", HUGE, HUGE, HUGE, "server-gather", [copied] * GROUPS_MAX)
    assert 390_000 < len(orders.encode(copy)) <= orders.ORDER_BYTES_MAX


# ---------------------------------------------------------------- bytes that are no request


@pytest.mark.parametrize(("frame", "golden"), REQUESTS, ids=[type(frame).__name__ for frame, _ in REQUESTS])
def test_a_request_that_was_cut_anywhere_is_refused(frame: Request, golden: bytes) -> None:
    for end in range(len(golden)):
        reply = refusal(golden[:end])
        assert (reply.family, reply.code) == ("request", "frame")


@pytest.mark.parametrize(("frame", "golden"), REQUESTS, ids=[type(frame).__name__ for frame, _ in REQUESTS])
def test_what_follows_a_request_is_refused(frame: Request, golden: bytes) -> None:
    assert "trailing characters" in refusal(golden + b"\0").message
    fields = msgspec.msgpack.decode(golden)
    reply = refusal(encode([*fields, None]))
    assert (reply.id, reply.code) == (frame.id, "frame")
    assert f"at most length {len(fields) - 1}, got {len(fields)}" in reply.message


@pytest.mark.parametrize(("frame", "golden"), REQUESTS, ids=[type(frame).__name__ for frame, _ in REQUESTS])
def test_a_field_of_another_type_is_named(frame: Request, golden: bytes) -> None:
    fields = msgspec.msgpack.decode(golden)
    for position, right in enumerate(fields):
        other = 3 if isinstance(right, bool) else True
        for wrong in (None, other, 1.5, {"a": 1}, "word" if isinstance(right, int | bytes) else 7):
            reply = refusal(encode([*fields[:position], wrong, *fields[position + 1 :]]))
            is_protocol = fields[0] == "hello" and position == 2
            assert (reply.family, reply.code) == ("request", "protocol" if is_protocol else "frame")
            assert reply.id == (0 if position == 1 else frame.id)
            assert is_protocol or f"$[{position}]" in reply.message


def test_another_protocol_is_refused_naming_both_versions() -> None:
    for hello in (
        ["hello", 7, 1, "engine", 1, 1, 0],
        ["hello", 7, PROTOCOL + 1, {"a": "shape"}, "that nobody knows yet"],
        ["hello", 7, "2.1"],
    ):
        reply = refusal(encode(hello))
        assert (reply.id, reply.family, reply.code) == (7, "request", "protocol")
        assert reply.message == f"this server speaks protocol {PROTOCOL}, the client said {hello[2]!r}"


def test_an_unknown_tag_is_named() -> None:
    reply = refusal(encode(["prefetch", 5, b"x"]))
    assert (reply.id, reply.code) == (5, "frame")
    assert "'prefetch'" in reply.message


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"\xc0", b"\x90", b"\x80", b"\x93", b"\xff" * 9, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"],
)
def test_what_is_no_array_is_refused_without_an_id(frame: bytes) -> None:
    reply = refusal(frame)
    assert (reply.id, reply.code) == (0, "frame")


@pytest.mark.parametrize("nesting", [b"\x91", b"\x81", b"\x81\x01", b"\x92\xa5hello\x91"])
def test_deep_nesting_is_refused(nesting: bytes) -> None:
    assert refusal(nesting * (FRAME_BYTES_MAX // len(nesting))).code == "frame"


def test_a_frame_that_is_too_long_is_refused_unread() -> None:
    longest = encode(Attach(1, bytes(FRAME_BYTES_MAX - 16)))
    padded = encode(Attach(1, bytes(2 * FRAME_BYTES_MAX - 16 - len(longest))))
    assert len(padded) == FRAME_BYTES_MAX
    assert decode_request(padded).id == 1
    reply = refusal(padded + b"\0")
    assert reply == Error(
        0, "request", "frame-size", f"{FRAME_BYTES_MAX + 1} bytes, at most {FRAME_BYTES_MAX} are read"
    )


@pytest.mark.parametrize(
    "fields",
    [
        ["x" * 500_000, 1],
        ["hello", 1, "y" * 500_000],
        ["hello", 1, list(range(100_000))],
        ["register", 1, "n", b"", 1, "z" * 200_000, "", "", "direct", "", [], [], [], 0, ""],
    ],
)
def test_a_refusal_quotes_only_the_beginning_of_what_came(fields: list[object]) -> None:
    reply = refusal(encode(fields))
    assert reply.id == 1
    assert len(reply.message) <= MESSAGE_CHARS_MAX + 30
    assert "characters)" in reply.message


@pytest.mark.parametrize(
    "fields",
    [
        ["lookup", 5, b"n", [{1: 1}] * 250_000],
        [{7: {}}] * 200_000,
        ["register", 5, *([[[[]]]] * 300_000)],
        ["store", 5, 1, 1, 1, 1, 0, b"", b"", [[0, 0, b""]] * 200_000],
    ],
)
def test_a_refusal_does_not_build_what_it_refuses(fields: list[object]) -> None:
    """Objects of 1 MiB of nonsense would keep the server busy for 100 ms, again and again."""
    frame = encode(fields)
    tracemalloc.start()
    reply = refusal(frame)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 300_000
    assert reply.id == (5 if fields[1] == 5 else 0)


def test_a_register_that_is_longer_than_any_can_be_is_refused_with_its_id() -> None:
    run = RegionRun(255, 1 << 50, 16, 1 << 50, 1 << 50, 1 << 50)
    buffers = [Buffer(-1, bytes(HANDLE_BYTES), 1 << 50)] * BUFFERS_MAX
    names = ["n" * NAME_BYTES_MAX] * 3
    group = GroupSpec(1 << 20, 1 << 30, "window", 1 << 30, 256, 255, 256, 255, [run] * (REGION_RUNS_MAX // GROUPS_MAX))

    def register(groups: int) -> bytes:
        return encode(
            Register(
                1 << 60, names[0], bytes(32), 1 << 20, "rocm", "u" * 65, "legacy", "staged", names[1], buffers,
                [group] * groups, [], 1 << 40, names[2],
            )
        )  # fmt: skip

    assert isinstance(decode_request(register(GROUPS_MAX)), Register)
    reply = refusal(register(2 * GROUPS_MAX))
    assert (reply.id, reply.code) == (1 << 60, "frame-size")


def test_numbers_that_are_too_large_or_negative_are_no_ids() -> None:
    assert refusal(encode(["status", 1 << 63, 1])).id == 0
    assert refusal(encode(["status", -1, 1])).id == 0
    assert decode_request(encode(["status", (1 << 64) - 1])) == Status((1 << 64) - 1)
    assert decode_reply(encode(Error((1 << 64) - 1, "request", "frame", ""))).id == (1 << 64) - 1


def test_random_frames_are_requests_or_malformed_and_never_another_error() -> None:
    """`pytest -k random_frames` prints the seed when it fails; BadFrames(seed) gives the same frames again."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    requests, refusals = [], []
    for frame in BadFrames(seed, [golden for _, golden in REQUESTS]).take(10_000):
        try:
            requests.append(decode_request(frame))
        except Malformed as problem:
            refusals.append(problem.reply)
    assert len(requests) > 100, "mutations that leave a request belong to the test"
    assert len(refusals) > 5000
    for request in requests:
        assert decode_request(encode(request)) == request
    for reply in refusals:
        assert decode_reply(encode(reply)) == reply
        assert len(reply.message) < 2 * MESSAGE_CHARS_MAX
