"""Replays for subscribers that have missed batches: the last batches, and the position of each reader.

A reader has at most REPLAY_AHEAD unread messages. So a reader that stops costs only these, however much it asked for;
its position is kept here as one number. This module does no I/O: the publisher passes the function that sends.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum

from kvserver.wire.kv_events import REPLAY_END, SEQUENCE_BYTES, Batch, KvEvent, Missed, Refused, encode_batch

RING_BATCHES = 10_000
RING_BYTES = 64 << 20
REPLAYS_MAX = 16
"""Replays under way at the same time, including those whose reader does not read."""
REPLAY_AHEAD = 8
"""Messages that ZeroMQ queues for one reader."""
BATCHES_PER_TURN = 64
"""Batches sent to one reader before the next reader's turn. After all readers the publisher looks for new batches."""


class Sent(Enum):
    YES = 0
    LATER = 1
    """The reader's queue is full; try again later."""
    GONE = 2


Send = Callable[[bytes, bytes, bytes], Sent]
"""Sends to a reader. Arguments: identity, sequence, payload. Never waits."""


class Replays:
    """The replays of one publisher. Used on its thread only."""

    def __init__(self, incarnation: int, send: Send, *, batches_max: int | None = None) -> None:
        """batches_max: RING_BATCHES if None."""
        self._incarnation = incarnation
        self._batches_max = batches_max
        self._send = send
        self._ring: OrderedDict[int, bytes] = OrderedDict()
        self._ring_bytes = 0
        self._last = 0
        self._wanted: dict[bytes, int] = {}
        """Reader's identity -> the next sequence to send it."""

    def __len__(self) -> int:
        return len(self._wanted)

    def keep(self, sequence: int, payload: bytes) -> None:
        """Keeps a sent batch for replays. Sequences rise; some may be left out."""
        self._ring[sequence] = payload
        self._ring_bytes += len(payload)
        self._last = sequence
        batches_max = RING_BATCHES if self._batches_max is None else self._batches_max
        while len(self._ring) > batches_max or (self._ring_bytes > RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popitem(last=False)[1])

    def ask(self, identity: bytes, first: int) -> None:
        """Starts a replay from the sequence `first`, in place of an earlier one of the same reader."""
        if identity not in self._wanted and len(self._wanted) >= REPLAYS_MAX:
            refused = Refused("replays", f"{len(self._wanted)} replays are under way, at most {REPLAYS_MAX}; ask later")
            self._send(identity, REPLAY_END, self._batch(refused))
            return
        self._wanted[identity] = max(1, first)

    def turn(self) -> bool:
        """Sends each reader as much as it takes now. Whether any reader made progress."""
        before = dict(self._wanted)
        for identity in before:
            self._tell(identity)
        return self._wanted != before

    def _tell(self, identity: bytes) -> None:
        for _ in range(BATCHES_PER_TURN):
            sequence, payload, after = self._next(self._wanted[identity])
            match self._send(identity, sequence, payload):
                case Sent.LATER:
                    return
                case Sent.YES if after:
                    self._wanted[identity] = after
                case _:
                    del self._wanted[identity]
                    return

    def _next(self, wanted: int) -> tuple[bytes, bytes, int]:
        """The sequence and payload to send to a reader that has everything before `wanted`, and its next position.

        Position 0: the replay has ended."""
        if wanted > self._last:
            return REPLAY_END, b"", 0
        if (payload := self._ring.get(wanted)) is not None:
            return packed(wanted), payload, wanted + 1
        kept = next(sequence for sequence in self._from(wanted) if sequence in self._ring)
        return packed(kept - 1), self._batch(Missed(wanted, kept - 1)), kept

    def _from(self, wanted: int) -> Iterator[int]:
        """The sequences that may be kept from `wanted` on. The last batch is always kept, however large."""
        return iter(range(max(wanted, next(iter(self._ring))), self._last + 1))

    def _batch(self, event: KvEvent) -> bytes:
        return encode_batch(Batch(time.time(), [event], self._incarnation))


def packed(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
