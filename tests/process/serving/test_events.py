"""KV events of a real server: a subscriber knows which chunks are held, also after the brain has died."""

import shutil
import tempfile
from pathlib import Path

from kvserver.wire.kv_events import Begun, ChunksRemoved, ChunksStored, KvEvent, NamespaceCleared
from tests.process.engine import NAMESPACE, Engine, prompt
from tests.process.harness import Server, kill, until
from tests.rigs.event_reader import Reader


class Router:
    """A minimal cache-aware router: takes batches in order and asks for the ones that it missed."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.held: dict[str, set[bytes]] = {"dram": set(), "disk": set()}
        self.incarnation = 0
        self.begun = 0
        self._last = 0

    def listen(self) -> bool:
        """Takes in the next batch, and any batch before it that was missed."""
        sequence, batch = self.reader.next()
        if batch.incarnation != self.incarnation:
            self.incarnation, self._last = batch.incarnation, 0
            self.held = {"dram": set(), "disk": set()}
        if sequence > self._last:
            for number, events in self.reader.replay(self._last + 1):
                self._take(events)
                self._last = number
        return True

    def _take(self, events: list[KvEvent]) -> None:
        for event in events:
            match event:
                case Begun():
                    self.begun += 1
                case ChunksStored(namespace, tier, _, keys):
                    assert namespace == NAMESPACE
                    self.held[tier].update(keys)
                case ChunksRemoved(_, tier, keys):
                    self.held[tier].difference_update(keys)
                case NamespaceCleared():
                    self.held = {"dram": set(), "disk": set()}

    def until(self, tier: str, keys: set[bytes]) -> None:
        until(f"the subscriber to know what {tier} holds", lambda: self.listen() and self.held[tier] == keys)


def test_a_subscriber_knows_what_is_held_and_hears_of_another_brain(tmp_path: Path) -> None:
    endpoint = f"ipc://{tempfile.mkdtemp(prefix='kv-')}/events"
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = {"disk_paths": disk, "disk_bytes": 16 << 20, "disk_segment_bytes": 1 << 20}
    with Server(events_endpoint=endpoint, disk_write_policy="through", **settings) as server:
        router = Router(Reader(endpoint))
        story = prompt(1, 5)
        keys = {story.key(chunk) for chunk in range(5)}
        with Engine(server.path).register().ready() as engine:
            until("the subscription to arrive", router.listen)
            engine.store(story)
            router.until("dram", keys)
            router.until("disk", keys)
            first = router.incarnation
            kill(server.brain_pid())
            until("the next brain to be heard", lambda: router.listen() and router.incarnation != first)
            router.until("dram", keys)
            router.until("disk", keys)
            assert router.begun == 2
            engine.ready()
            engine.client.clear(NAMESPACE)
            router.until("dram", set())
            assert router.held["disk"] == set()
        router.reader.close()
    shutil.rmtree(Path(endpoint.removeprefix("ipc://")).parent)
