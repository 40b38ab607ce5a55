"""The server's events (docs/events.md), followed without ever waiting.

A missed batch is asked for again. While a replay is under way the published messages stay in ZeroMQ's queue, so the
events come in order, each once. Three things mean that all earlier events are void: Begun, Missed, and silence.

Memory is bounded by ZeroMQ's queues, and a call's time by its caller. Belongs to one thread.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec
import zmq

from kvserver.wire.kv_events import (
    REPLAY_END,
    SEQUENCE_BYTES,
    TOPIC,
    Batch,
    Begun,
    KvEvent,
    Missed,
    NamespaceCleared,
    decode_batch,
    replay_endpoint,
)

QUEUED_MAX = 1_000
"""Messages in ZeroMQ's queue for a reader that is idle. Later ones are asked for again."""
REPLAYED_MAX = 16
SILENT_S = 10.0
"""Without a message for so long, the server counts as away. It speaks at least once a second."""
REPLAY_S = 5.0
"""Without a message of a replay for so long, it is asked for again."""
LATER_S = 1.0
"""Pause after a replay that was refused, or that could not be asked for."""


class Order:
    """Puts published and replayed batches in order. No I/O.

    A new life of the server begins with Begun. A synthetic Begun stands for one that was missed; the true one follows
    in the replay.
    """

    def __init__(self) -> None:
        self.lacks = 1
        """The first sequence that a replay is needed from; 0 if none is."""
        self._incarnation = 0
        self._next = 1
        self._seen = 0
        """The highest sequence of this life that was seen."""

    def published(self, sequence: int, batch: Batch) -> list[KvEvent] | None:
        """The events that are in order now; None for a late message of an earlier life, which has a lower incarnation.

        A batch without events repeats the last sequence.
        """
        if (void := self._void(batch)) is None:
            return None
        if batch.events and sequence == self._next:
            self._next += 1
            self.lacks = 0
            return void + batch.events
        self._seen = max(self._seen, sequence)
        if sequence >= self._next:
            self.lacks = self._next
        return void

    def replayed(self, sequence: int, batch: Batch) -> list[KvEvent] | None:
        if (void := self._void(batch)) is None:
            return None
        match batch.events:
            case [Missed(first, last)]:
                if not first <= self._next <= last:
                    return void
                self._next = last + 1
                return void + batch.events
            case events if sequence == self._next:
                self._next += 1
                return void + events
        return void

    def replay_ended(self) -> list[KvEvent]:
        self.lacks = 0
        if self._next > self._seen:
            return []
        # The server has not told what it has published: it is another life, whose sequences are lower.
        return self.start_anew()

    def server_away(self) -> list[KvEvent]:
        """Any life may follow: its clock may be behind."""
        self._incarnation = 0
        return self.start_anew()

    def start_anew(self) -> list[KvEvent]:
        """Forget everything that was told: a replay from the first sequence is needed."""
        self._next = self.lacks = 1
        self._seen = 0
        return [Begun(0)]

    def _void(self, batch: Batch) -> list[KvEvent] | None:
        """The answer that a batch's life alone gives; None if it is past."""
        if batch.incarnation == self._incarnation:
            return []
        if batch.incarnation < self._incarnation:
            return None
        self._incarnation = batch.incarnation
        return self.start_anew()


class Sockets(Protocol):
    """The two ways from the server. Nothing here waits."""

    def published(self) -> list[bytes] | None:
        """The frames of the next published message; None if there is none."""

    def replayed(self) -> list[bytes] | None:
        """The frames of the next answer to ask(); None if there is none."""

    def ask(self, first: int) -> bool:
        """Ask for a replay from this sequence on. Returns whether the question could be sent."""

    def drop_replayed(self) -> None:
        """Drop answers to earlier questions, also those that are still on their way."""

    def close(self) -> None:
        """Close both."""


class ZeroMqSockets:
    """A SUB and a DEALER socket."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: the server's events_endpoint. Raises ConfigError if it cannot be one."""
        self._replay_endpoint = replay_endpoint(endpoint)
        self._context = zmq.Context(1)
        self._publisher = self._context.socket(zmq.SUB)
        self._publisher.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._publisher.setsockopt(zmq.RCVHWM, QUEUED_MAX)
        self._publisher.connect(endpoint)
        self._replayer = self._opened()

    def published(self) -> list[bytes] | None:
        return _received(self._publisher)

    def replayed(self) -> list[bytes] | None:
        return _received(self._replayer)

    def ask(self, first: int) -> bool:
        try:
            self._replayer.send_multipart((b"", first.to_bytes(SEQUENCE_BYTES, "big")), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def drop_replayed(self) -> None:
        self._replayer.close()
        self._replayer = self._opened()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _opened(self) -> "zmq.Socket[bytes]":
        opened = self._context.socket(zmq.DEALER)
        opened.setsockopt(zmq.RCVHWM, REPLAYED_MAX)
        opened.setsockopt(zmq.LINGER, 0)
        opened.connect(self._replay_endpoint)
        return opened


def _received(source: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return source.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class EventStream:
    """The events of one server, in order."""

    def __init__(self, sockets: Sockets, now: Callable[[], float] = time.monotonic) -> None:
        self._sockets = sockets
        self._now = now
        self._order = Order()
        self._heard_s = 0.0
        self._is_silent = True
        self._is_asked = False
        """Whether a replay is under way."""
        self._due_s = 0.0
        """When a replay that is under way counts as lost; otherwise the earliest time to ask for one."""

    @property
    def is_followed(self) -> bool:
        """Whether the server has spoken lately and nothing is missing, as far as known."""
        return not (self._is_silent or self._order.lacks)

    def take(self, *, until_s: float) -> list[KvEvent]:
        """The next events in order, read until the given time or until no more are there.

        Raises msgspec.DecodeError if the publisher is no kvserver.
        """
        events: list[KvEvent] = []
        while (told := self._next()) is not None:
            events += told
            if self._now() >= until_s:
                return events
        if not self._is_silent and self._now() - self._heard_s > SILENT_S:
            self._is_silent = True
            events += self._order.server_away()
        return events

    def close(self) -> None:
        self._sockets.close()

    def _next(self) -> list[KvEvent] | None:
        """The events of the next message; None if there is no message."""
        if self._is_asked:
            if (frames := self._sockets.replayed()) is not None:
                return self._replayed(frames)
            if self._now() < self._due_s:
                return None
            self._sockets.drop_replayed()  # late answers would be taken for those to the next question
            self._is_asked = False
        if self._order.lacks and self._now() >= self._due_s:
            self._is_asked = self._sockets.ask(self._order.lacks)
            self._due_s = self._now() + (REPLAY_S if self._is_asked else LATER_S)
            return []
        if (frames := self._sockets.published()) is None:
            return None
        sequence, payload = _checked(frames)
        return self._heard(self._order.published(int.from_bytes(sequence, "big"), read_batch(payload)))

    def _replayed(self, frames: list[bytes]) -> list[KvEvent]:
        sequence, payload = _checked(frames)
        self._due_s = self._now() + REPLAY_S
        if sequence != REPLAY_END:
            return self._heard(self._order.replayed(int.from_bytes(sequence, "big"), read_batch(payload)))
        self._is_asked = False
        if payload:  # refused
            self._due_s = self._now() + LATER_S
            return []
        self._due_s = 0.0
        return self._order.replay_ended()

    def _heard(self, told: list[KvEvent] | None) -> list[KvEvent]:
        if told is None:
            return []
        self._heard_s, self._is_silent = self._now(), False
        return told


def _checked(frames: list[bytes]) -> tuple[bytes, bytes]:
    """Sequence and payload of a message."""
    if len(frames) != 3:
        raise msgspec.DecodeError(f"{len(frames)} frames; expected topic, sequence and batch")
    return frames[1], frames[2]


class _Raw(msgspec.Struct, array_like=True):
    time_s: float
    events: list[msgspec.Raw]
    incarnation: int


_decode_raw = msgspec.msgpack.Decoder(_Raw).decode
_decode_event = msgspec.msgpack.Decoder(KvEvent).decode
_UNKNOWN = NamespaceCleared(b"")
"""Stands for an event that this release does not know: no namespace has an empty name."""


def read_batch(payload: bytes) -> Batch:
    """Decode a batch. msgspec.DecodeError if it is none."""
    with suppress(msgspec.ValidationError):
        return decode_batch(payload)
    raw = _decode_raw(payload)
    events: list[KvEvent] = []
    for event in raw.events:
        try:
            events.append(_decode_event(event))
        except msgspec.ValidationError:
            events.append(_UNKNOWN)
    return Batch(raw.time_s, events, raw.incarnation)
