"""The thread that tells subscribers what is held: a PUB socket, and a ROUTER for what somebody has missed.

The brain hands over batches and waits for nobody. A subscriber that does not read loses what ZeroMQ does not keep for
it, sees that by the sequence of the next batch, or of the next sign of life, and asks for the rest: of the last
RING_BATCHES batches it gets all that it names, of older ones it is told which it has missed.
"""

import logging
import os
import queue
import threading
import time
from collections import deque

import zmq

from kvserver.config import Config
from kvserver.doors import admit, make_way
from kvserver.errors import ConfigError
from kvserver.wire.kv_events import REPLAY_END, SEQUENCE_BYTES, TOPIC, Batch, KvEvent, Missed, encode_batch

RING_BATCHES = 10_000
RING_BYTES = 64 << 20
BACKLOG_BATCHES = 10_000
"""Handed over and not sent yet. Further ones are lost, and their sequences missed by everybody."""
SENT_MAX = 1_000
"""Messages that ZeroMQ keeps for a subscriber that does not read. What it has missed then, it asks for."""
REQUESTS_MAX = 64
ALIVE_MS = 1_000
FAREWELL_MS = 500
CLOSE_S = 5.0


class Publisher:
    """The endpoints are taken by the constructor, so that wrong ones stop the start."""

    def __init__(self, config: Config, incarnation: int) -> None:
        self._incarnation = incarnation
        replays = replay_endpoint(config.events_endpoint)
        for endpoint in (config.events_endpoint, replays):
            if path := _path(endpoint):
                make_way(path)
        self._context = zmq.Context(1)
        self._sender = self._bind(zmq.PUB, config.events_endpoint, config)
        self._replayer = self._bind(zmq.ROUTER, replays, config)
        self._batches: queue.SimpleQueue[tuple[int, Batch] | None] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sequence = 0
        self._lost = 0
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def publish(self, events: list[KvEvent]) -> None:
        """On the brain's thread; nobody changes the events any more."""
        self._sequence += 1
        if self._batches.qsize() >= BACKLOG_BATCHES:
            self._lost += 1
            return
        self._batches.put((self._sequence, Batch(time.time(), events, self._incarnation)))
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Sends what was handed over."""
        self._batches.put(None)
        os.eventfd_write(self._bell, 1)
        self._thread.join(CLOSE_S)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._replayer, zmq.POLLIN)
        last, lost = 0, 0
        while True:
            ready = dict(poller.poll(ALIVE_MS))
            if not ready:
                alive = encode_batch(Batch(time.time(), [], self._incarnation))
                self._sender.send_multipart((TOPIC, _packed(last), alive), zmq.NOBLOCK)
            if self._bell in ready:
                os.eventfd_read(self._bell)
                while not self._batches.empty():
                    item = self._batches.get()
                    if item is None:
                        self._context.destroy(linger=FAREWELL_MS)
                        return
                    last, batch = item
                    self._send(last, encode_batch(batch))
            if self._replayer in ready:
                self._replay()
            if self._lost != lost:
                lost = self._lost
                fields = (("batches", lost), ("why", "more was handed over than could be sent"))
                logging.getLogger("kvserver").warning("events lost", extra={"fields": fields})

    def _send(self, sequence: int, payload: bytes) -> None:
        self._ring.append((sequence, payload))
        self._ring_bytes += len(payload)
        while len(self._ring) > RING_BATCHES or self._ring_bytes > RING_BYTES:
            self._ring_bytes -= len(self._ring.popleft()[1])
        self._sender.send_multipart((TOPIC, _packed(sequence), payload))

    def _replay(self) -> None:
        """One request: all batches from a sequence on."""
        identity, *frames = self._replayer.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE_BYTES:
            return  # nothing could be said that this peer would understand
        wanted = max(1, int.from_bytes(frames[1], "big"))
        known = iter(self._ring)
        try:
            for sequence, payload in known:
                if sequence < wanted:
                    continue
                if sequence > wanted:
                    missed = encode_batch(Batch(time.time(), [Missed(wanted, sequence - 1)], self._incarnation))
                    self._tell(identity, _packed(sequence - 1), missed)
                self._tell(identity, _packed(sequence), payload)
                wanted = sequence + 1
            self._tell(identity, REPLAY_END, b"")
        except zmq.ZMQError:
            return  # it has gone, or does not read what it has asked for

    def _tell(self, identity: bytes, sequence: bytes, payload: bytes) -> None:
        self._replayer.send_multipart((identity, b"", sequence, payload), zmq.NOBLOCK)

    def _bind(self, kind: int, endpoint: str, config: Config) -> "zmq.Socket[bytes]":
        """A path is open to whom the doors of engines are."""
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.LINGER, 0)
        bound.setsockopt(zmq.SNDHWM, SENT_MAX if kind == zmq.PUB else RING_BATCHES + 2)
        bound.setsockopt(zmq.RCVHWM, REQUESTS_MAX)
        bound.setsockopt(zmq.MAXMSGSIZE, 4096)
        if kind == zmq.ROUTER:
            bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as problem:
            self._context.destroy(linger=0)
            raise ConfigError("events-endpoint", f"events_endpoint: {endpoint}: {problem}") from None
        if path := _path(endpoint):
            admit(config, path)
        return bound


def replay_endpoint(endpoint: str) -> str:
    """Where to ask for what was missed. Raises ConfigError unless the endpoint is tcp://HOST:PORT or ipc://PATH."""
    if endpoint.startswith("ipc:///"):
        return f"{endpoint}.replay"
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not port.isdecimal() or not 1 <= int(port) < 65_535:
        raise ConfigError("events-endpoint", f"events_endpoint={endpoint!r} must be tcp://HOST:PORT or ipc:///PATH")
    return f"tcp://{host}:{int(port) + 1}"


def _path(endpoint: str) -> str:
    """Empty where it is none."""
    return endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else ""


def _packed(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
