"""A reader of KV events, over the sockets that a router would use."""

import zmq

from kvserver.brain.publisher import replay_endpoint
from kvserver.wire.kv_events import REPLAY_END, TOPIC, Batch, KvEvent, decode_batch

WAIT_MS = 20_000


class Reader:
    """A subscriber of its own thread's publisher."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context(1)
        self.heard = self.context.socket(zmq.SUB)
        self.heard.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self.heard.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.heard.connect(endpoint)
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.asking.connect(replay_endpoint(endpoint))

    def next(self) -> tuple[int, Batch]:
        topic, sequence, payload = self.heard.recv_multipart()
        assert topic == TOPIC
        return int.from_bytes(sequence, "big"), decode_batch(payload)

    def next_batch(self) -> tuple[int, Batch]:
        """The next batch with events. Skips the signs of life that come when nothing else has come for a while."""
        while not (found := self.next())[1].events:
            pass
        return found

    def replay(self, first: int) -> list[tuple[int, list[KvEvent]]]:
        self.asking.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, list[KvEvent]]] = []
        while True:
            empty, sequence, payload = self.asking.recv_multipart()
            assert empty == b""
            if sequence == REPLAY_END:
                return found
            found.append((int.from_bytes(sequence, "big"), decode_batch(payload).events))

    def close(self) -> None:
        self.context.destroy(linger=0)
