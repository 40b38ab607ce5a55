"""The thread that tells subscribers which chunks are held: a PUB socket, and a ROUTER socket for missed batches.

The brain hands over batches and never waits. A subscriber that does not read loses what ZeroMQ does not keep for it. It
notices the gap in the sequence of the next batch or sign of life, and asks for the missing ones (replay_log.py).

The memory for a subscriber that does not read is bounded, and so is the number of connections
(zmq_connection_limit.py).
"""

import logging
import os
import queue
import threading
import time
from functools import partial

import zmq

from kvserver import logs
from kvserver.brain.listeners import admit, make_way
from kvserver.brain.replay_log import REPLAY_AHEAD, Replays, Sent, packed
from kvserver.brain.zmq_connection_limit import Guests
from kvserver.config.config import Config
from kvserver.errors import ConfigError
from kvserver.wire.kv_events import SEQUENCE_BYTES, TOPIC, Batch, KvEvent, encode_batch, replay_endpoint

BACKLOG_BATCHES = 10_000
"""Batches that were handed over and are not sent yet. Further ones are lost; every subscriber misses their
sequences."""
SENT_MAX = 1_000
"""Messages that ZeroMQ keeps for a subscriber that does not read. The subscriber asks for the ones above that."""
REQUESTS_MAX = 64
CONNECTIONS_MAX = 32
"""Connections at each of the two sockets."""
HANDSHAKE_MS = 5_000
"""How long a connection may take for ZeroMQ's handshake."""
ALIVE_S = 1.0
SOON_MS, LATER_MS = 1, 200
"""Retry intervals for readers whose queue was full: SOON_MS while any of them reads, then doubled up to LATER_MS."""
FAREWELL_MS = 500
CLOSE_S = 5.0


class Publisher:
    """Publishes batches of events. The constructor binds the endpoints, so that wrong ones stop the start."""

    def __init__(self, config: Config, incarnation: int) -> None:
        self._incarnation = incarnation
        replays = replay_endpoint(config.events_endpoint)
        for endpoint in (config.events_endpoint, replays):
            if path := _path(endpoint):
                make_way(path)
        self._context = zmq.Context(1)
        self._sender, self._replayer = self._socket(zmq.PUB), self._socket(zmq.ROUTER)
        doors = ("events", self._sender, config.events_endpoint), ("replays", self._replayer, replays)
        self._guests = [
            Guests(bound, "events refused", name, CONNECTIONS_MAX, partial(_bind, bound, endpoint, config))
            for name, bound, endpoint in doors
        ]
        for _, bound, endpoint in doors:
            try:
                _bind(bound, endpoint, config)
            except zmq.ZMQError as problem:
                self._context.destroy(linger=0)
                raise ConfigError(
                    "events-endpoint", f"events_endpoint: {endpoint}: {zmq.strerror(problem.errno or 0)}"
                ) from None
        self._batches: queue.SimpleQueue[tuple[int, Batch] | None] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sequence = 0
        self._lost = 0
        self._replays = Replays(incarnation, self._tell)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def publish(self, events: list[KvEvent]) -> None:
        """Queues a batch; called on the brain's thread. The caller must not change the events afterwards."""
        self._sequence += 1
        if self._batches.qsize() >= BACKLOG_BATCHES:
            self._lost += 1
            return
        self._batches.put((self._sequence, Batch(time.time(), events, self._incarnation)))
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Sends the queued batches and ends the thread."""
        self._batches.put(None)
        os.eventfd_write(self._bell, 1)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._bell)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._bell, self._replayer, *(guests.monitor for guests in self._guests)):
            poller.register(source, zmq.POLLIN)
        last, lost, said_s, patience_ms = 0, 0, time.monotonic(), LATER_MS
        while True:
            wait_ms = max(0, int(1000 * (said_s + ALIVE_S - time.monotonic())))
            ready = dict(poller.poll(min(wait_ms, patience_ms) if self._replays else wait_ms))
            if time.monotonic() - said_s >= ALIVE_S:
                alive = encode_batch(Batch(time.time(), [], self._incarnation))
                self._sender.send_multipart((TOPIC, packed(last), alive), zmq.NOBLOCK)
                said_s = time.monotonic()
            if self._bell in ready:
                os.eventfd_read(self._bell)
                while not self._batches.empty():
                    item = self._batches.get()
                    if item is None:
                        self._end()
                        return
                    last, batch = item
                    self._send(last, encode_batch(batch))
                    said_s = time.monotonic()
            for guests in self._guests:
                guests.look()
            self._sender.getsockopt(zmq.EVENTS)  # takes in subscriptions, also of refused connections
            if self._replayer in ready:
                self._take_request()
            patience_ms = SOON_MS if self._replays.turn() else min(2 * patience_ms, LATER_MS)
            if self._lost != lost:
                lost = self._lost
                why = "more was handed over than could be sent"
                logs.event(logging.WARNING, "events lost", ("batches", lost), ("why", why))

    def _send(self, sequence: int, payload: bytes) -> None:
        self._replays.keep(sequence, payload)
        self._sender.send_multipart((TOPIC, packed(sequence), payload))

    def _take_request(self) -> None:
        identity, *frames = self._replayer.recv_multipart()
        if len(frames) == 2 and not frames[0] and len(frames[1]) == SEQUENCE_BYTES:  # others get no reply
            self._replays.ask(identity, int.from_bytes(frames[1], "big"))

    def _tell(self, identity: bytes, sequence: bytes, payload: bytes) -> Sent:
        try:
            self._replayer.send_multipart((identity, b"", sequence, payload), zmq.NOBLOCK)
        except zmq.Again:
            return Sent.LATER
        except zmq.ZMQError:  # host unreachable: it has gone
            return Sent.GONE
        return Sent.YES

    def _end(self) -> None:
        for guests in self._guests:
            guests.close()
        self._context.destroy(linger=FAREWELL_MS)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, SENT_MAX if kind == zmq.PUB else REPLAY_AHEAD)
        made.setsockopt(zmq.RCVHWM, REQUESTS_MAX)
        made.setsockopt(zmq.MAXMSGSIZE, 4096)
        made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        made.setsockopt(zmq.ZAP_DOMAIN, b"kvserver")  # refuses ZMTP 1 and 2, where any bytes are messages
        if kind == zmq.ROUTER:
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return made


def _bind(bound: "zmq.Socket[bytes]", endpoint: str, config: Config) -> None:
    """Binds a socket. A path gets the same owner and mode as the sockets for engines. Raises zmq.ZMQError."""
    bound.bind(endpoint)
    if path := _path(endpoint):
        admit(config, path)


def _path(endpoint: str) -> str:
    """The path of an ipc endpoint; empty for any other."""
    return endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else ""
