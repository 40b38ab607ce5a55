"""Messages between the replay and its worker processes, one per pipe message."""

import msgspec

from kvserver.sizing.outcome import Outcome


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """Replay → worker: one prompt."""

    index: int
    tokens: int
    blocks: list[int]


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """Replay → worker: all prompts have ended. Reply: Left."""


class Here(msgspec.Struct, array_like=True, tag="here"):
    """Worker → replay: registered; send prompts."""

    worker: int


class Over(msgspec.Struct, array_like=True, tag="over"):
    """Worker → replay: one prompt has ended."""

    outcome: Outcome


class Left(msgspec.Struct, array_like=True, tag="left"):
    """Worker → replay: last message of a worker that was told to stop."""

    worker: int
    hbm_evictions: int


class Broken(msgspec.Struct, array_like=True, tag="broken"):
    """Worker → replay: last message of a worker that cannot go on."""

    worker: int
    message: str


ToWorker = Begin | Stop
FromWorker = Here | Over | Left | Broken

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
