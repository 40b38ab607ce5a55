"""Frames to messages and back, with the refusals that a client can cause."""

import msgspec

from kvserver.errors import DeviceError, RequestError, ResourceError
from kvserver.wire.messages import FRAME_BYTES_MAX, PROTOCOL, Error, Reply, Request

_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.Encoder().encode

ID_MAX = (1 << 63) - 1
MESSAGE_CHARS_MAX = 500
"""Of what came, a refusal quotes this much: its frame must fit wherever the reply travels."""


class Malformed(Exception):
    """A frame that is not a request; carries the Error frame that answers it."""

    def __init__(self, reply: Error) -> None:
        super().__init__(reply.message)
        self.reply = reply


def decode_request(frame: bytes | memoryview) -> Request:
    """Raises Malformed for anything that is not exactly a request of this protocol version."""
    if len(frame) > FRAME_BYTES_MAX:
        raise Malformed(Error(0, "request", "frame-size", f"{len(frame)} bytes, at most {FRAME_BYTES_MAX} are read"))
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
    """Finds the request's id where there is one, and names a Hello of another protocol as what it is."""
    try:
        raw = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raw = None
    if not isinstance(raw, list) or not raw:
        return Error(0, "request", "frame", _clipped(f"not a msgpack array [tag, id, ...]: {problem}"))
    request_id = raw[1] if len(raw) > 1 and type(raw[1]) is int and 0 <= raw[1] <= ID_MAX else 0
    if raw[0] == "hello" and len(raw) > 2 and raw[2] != PROTOCOL:
        return error_reply(request_id, protocol_mismatch(raw[2]))
    return Error(request_id, "request", "frame", _clipped(str(problem)))


def _clipped(message: str) -> str:
    if len(message) <= MESSAGE_CHARS_MAX:
        return message
    return f"{message[:MESSAGE_CHARS_MAX]}… ({len(message)} characters)"
