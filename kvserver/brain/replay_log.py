"""What is told again to subscribers that have missed something: the last batches, and how far each of them has come.

Nobody is told more than REPLAY_AHEAD messages before it has read what was told before: so somebody who does not read
costs that many, whatever it asked for, and the rest waits here as a number. No I/O: the publisher hands in how to send.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum

from kvserver.wire.kv_events import REPLAY_END, SEQUENCE_BYTES, Batch, KvEvent, Missed, Refused, encode_batch

RING_BATCHES = 10_000
RING_BYTES = 64 << 20
REPLAYS_MAX = 16
"""Under way at a time, those included that wait for a reader."""
REPLAY_AHEAD = 8
"""Messages that ZeroMQ keeps for whoever asked."""
BATCHES_PER_TURN = 64
"""To one reader, before it is the next one's turn, and the publisher looks at what is new."""


class Sent(Enum):
    YES = 0
    LATER = 1
    """It has not read what it was sent."""
    GONE = 2


Send = Callable[[bytes, bytes, bytes], Sent]
"""To an identity: sequence, payload. Never waits."""


class Replays:
    """Of one publisher, on its thread."""

    def __init__(self, incarnation: int, send: Send) -> None:
        self._incarnation = incarnation
        self._send = send
        self._ring: OrderedDict[int, bytes] = OrderedDict()
        self._ring_bytes = 0
        self._last = 0
        self._wanted: dict[bytes, int] = {}
        """By identity: the next sequence that it has to be told."""

    def __len__(self) -> int:
        return len(self._wanted)

    def keep(self, sequence: int, payload: bytes) -> None:
        """Sequences rise; some may be left out."""
        self._ring[sequence] = payload
        self._ring_bytes += len(payload)
        self._last = sequence
        while len(self._ring) > RING_BATCHES or (self._ring_bytes > RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popitem(last=False)[1])

    def ask(self, identity: bytes, first: int) -> None:
        """All batches from a sequence on. Takes the place of what the same reader asked for before."""
        if identity not in self._wanted and len(self._wanted) >= REPLAYS_MAX:
            refused = Refused("replays", f"{len(self._wanted)} replays are under way, at most {REPLAYS_MAX}; ask later")
            self._send(identity, REPLAY_END, self._batch(refused))
            return
        self._wanted[identity] = max(1, first)

    def turn(self) -> bool:
        """Tells each reader what it takes now. Whether any of them took something."""
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
        """The message for whoever has all before `wanted`, and what it wants after that; 0: nothing."""
        if wanted > self._last:
            return REPLAY_END, b"", 0
        if (payload := self._ring.get(wanted)) is not None:
            return _packed(wanted), payload, wanted + 1
        kept = next(sequence for sequence in self._from(wanted) if sequence in self._ring)
        return _packed(kept - 1), self._batch(Missed(wanted, kept - 1)), kept

    def _from(self, wanted: int) -> Iterator[int]:
        """Where to look for the next one that is kept. The last batch always is, however large."""
        return iter(range(max(wanted, next(iter(self._ring))), self._last + 1))

    def _batch(self, event: KvEvent) -> bytes:
        return encode_batch(Batch(time.time(), [event], self._incarnation))


def _packed(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
