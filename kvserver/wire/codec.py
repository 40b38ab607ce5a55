"""Frames to messages and back, with the refusals that a client can cause."""

from typing import Annotated

import msgspec

from kvserver.errors import DeviceError, RequestError, ResourceError
from kvserver.wire.messages import FRAME_BYTES_MAX, PROTOCOL, REGISTER_BYTES_MAX, Error, Reply, Request

_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class _Head(msgspec.Struct, array_like=True):
    """The first fields of any array; the others are skipped."""

    tag: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()
    third: msgspec.Raw = msgspec.Raw()


ID_MAX = (1 << 63) - 1
_head_decoder = msgspec.msgpack.Decoder(_Head)
_id_decoder = msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)], strict=True)
encode = msgspec.msgpack.Encoder().encode
HELLO = msgspec.Raw(encode("hello"))

SHOWN_BYTES = 1000
REGISTER, TAG_BYTES = b"register", 16
"""A frame with this word in its first TAG_BYTES is a Register, or no request at all."""
MESSAGE_CHARS_MAX = 500
"""Longest quote of a bad frame in a refusal: the reply must fit every transport."""


class Malformed(Exception):
    """A frame that is not a request; carries the Error frame that answers it."""

    def __init__(self, reply: Error) -> None:
        super().__init__(reply.message)
        self.reply = reply


def decode_request(frame: bytes | memoryview) -> Request:
    """Raises Malformed for anything that is not exactly a request of this protocol version."""
    if len(frame) > FRAME_BYTES_MAX:
        raise Malformed(Error(0, "request", "frame-size", f"{len(frame)} bytes, at most {FRAME_BYTES_MAX} are read"))
    if len(frame) > REGISTER_BYTES_MAX and REGISTER in bytes(frame[:TAG_BYTES]):  # it has many pieces to decode
        text = f"{len(frame)} bytes of register, at most {REGISTER_BYTES_MAX} are read"
        raise Malformed(Error(_id(_head(frame)), "request", "frame-size", text))
    try:
        request: Request = _decoder.decode(frame)
        return request
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise Malformed(_explain(frame, problem)) from problem


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Raises RequestError("frame") when the server speaks something else."""
    try:
        reply: Reply = _reply_decoder.decode(frame)
        return reply
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise RequestError("frame", f"not a reply of protocol {PROTOCOL}: {problem}") from problem


def error_reply(request_id: int, error: RequestError | ResourceError | DeviceError) -> Error:
    return Error(request_id, error.family, error.code, _clipped(error.message))


def protocol_mismatch(got: object) -> RequestError:
    return RequestError("protocol", f"this server speaks protocol {PROTOCOL}, the client said {got!r}")


def _explain(frame: bytes | memoryview, problem: Exception) -> Error:
    """The refusal with the request's id, if it has one. A Hello of another protocol is named as such."""
    head = _head(frame)
    if head is None:
        return Error(0, "request", "frame", _clipped(f"not a msgpack array [tag, id, ...]: {problem}"))
    said = memoryview(head.third)
    if head.tag == HELLO and said and said != encode(PROTOCOL):
        return error_reply(_id(head), protocol_mismatch(_shown(said)))
    return Error(_id(head), "request", "frame", _clipped(str(problem)))


def _head(frame: bytes | memoryview) -> _Head | None:
    """The first fields of a bad frame. The others are skipped, because decoding them can take 100 ms."""
    try:
        head = _head_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return head if memoryview(head.tag) else None


def _id(head: _Head | None) -> int:
    try:
        return _id_decoder.decode(head.id) if head is not None else 0
    except msgspec.MsgspecError:
        return 0


def _shown(field: memoryview) -> object:
    """The field's value; only its first bytes if it is long."""
    if len(field) > SHOWN_BYTES:
        return bytes(field[:SHOWN_BYTES])
    try:
        return msgspec.msgpack.decode(field)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return bytes(field)


def _clipped(message: str) -> str:
    if len(message) <= MESSAGE_CHARS_MAX:
        return message
    return f"{message[:MESSAGE_CHARS_MAX]}… ({len(message)} characters)"
