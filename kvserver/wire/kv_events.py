"""Events about held chunks, for routers that send a request to where its prefix is (docs/events.md).

A message is `[topic, sequence, batch]`: the topic TOPIC, 8 bytes big-endian, and a msgpack array `[time, events,
incarnation]` of arrays `[tag, field, ...]` in the order in which the fields stand here. Sequences and framing are those
of vLLM's KV events, so that one reader serves both; the events are our own, since a chunk is not a block.

Fields may be added at the end. Readers ignore what they do not know.
"""

from typing import Literal

import msgspec

from kvserver.errors import ConfigError

TOPIC = b"kvserver"
SEQUENCE_BYTES = 8
REPLAY_END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The sequence that ends a replay. Its payload is empty, or a batch with Refused."""

Tier = Literal["dram", "disk"]


class ChunksStored(msgspec.Struct, array_like=True, tag="chunks-stored", frozen=True):
    """A tier now holds these chunks, each the parent of the next, as far as a prefix needs them.

    A chunk is served when all chunks before it are held, too, in any tier."""

    namespace: bytes
    tier: Tier
    parent: bytes
    """Parent of the first key. Empty when the first key begins a prompt."""
    keys: list[bytes]
    chunk_tokens: int


class ChunksRemoved(msgspec.Struct, array_like=True, tag="chunks-removed", frozen=True):
    """A tier no longer holds these chunks."""

    namespace: bytes
    tier: Tier
    keys: list[bytes]


class NamespaceCleared(msgspec.Struct, array_like=True, tag="namespace-cleared", frozen=True):
    """No tier holds a chunk of the namespace any more."""

    namespace: bytes


class Begun(msgspec.Struct, array_like=True, tag="begun", frozen=True):
    """The first event of an incarnation: all earlier events are void. The chunks found in DRAM and on disk follow as
    ChunksStored, bit by bit."""

    chunks: int
    """Chunks in DRAM that will follow."""


class Missed(msgspec.Struct, array_like=True, tag="missed", frozen=True):
    """Only in a replay: these sequences are gone. The reader's view of the server may be wrong."""

    first: int
    last: int


class Refused(msgspec.Struct, array_like=True, tag="refused", frozen=True):
    """In place of a replay, with its last sequence: a bound is reached. Ask again later."""

    code: str
    message: str


KvEvent = ChunksStored | ChunksRemoved | NamespaceCleared | Begun | Missed | Refused


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """The changes of one event, in order. Without events: a sign of life, with the sequence of the last batch."""

    time_s: float
    """Seconds since 1970."""
    events: list[KvEvent]
    incarnation: int
    """The brain's, as in Welcome."""


encode_batch = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(Batch).decode


def replay_endpoint(endpoint: str) -> str:
    """The endpoint for replays. Raises ConfigError unless the endpoint is tcp://HOST:PORT or ipc:///PATH."""
    if endpoint.startswith("ipc:///"):
        return f"{endpoint}.replay"
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not port.isdecimal() or not 1 <= int(port) < 65_535:
        raise ConfigError("events-endpoint", f"events_endpoint={endpoint!r} must be tcp://HOST:PORT or ipc:///PATH")
    return f"tcp://{host}:{int(port) + 1}"
