"""Writers and readers of a remote store under faults: no byte is given that no writer wrote.

A reader takes a chunk as a server will: the head first, then the payloads, then each payload's digest compared with the
head's. What passes must be what the write that the head names had written.
"""

import random
from collections import Counter
from collections.abc import Callable

from kvserver.errors import DeviceError
from kvserver.movers import remote_checks
from kvserver.remote.chunk_value import ChunkName, Head, Shard, WrongValue
from kvserver.remote.store import Store, StoreError
from tests.rigs.remote_chunks import name_of, payloads_of, targets_of

KEYS = 40
SHARDS_MAX = 4
FRAGMENT_BYTES = 3001
"""Small, so that small chunks have many of them."""


class Life:
    """What writers wrote, and what readers got."""

    def __init__(self, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._writes = 0
        self._written: dict[int, list[bytes]] = {}
        """Write -> its payloads."""

    def turn(self, store: Store) -> None:
        """One call of a server, or a few that belong together."""
        name = name_of(self._dice.randrange(KEYS))
        match self._dice.choices(("write", "read", "drop", "touch", "note"), (5, 12, 1, 2, 1))[0]:
            case "write":
                self._tell("written", lambda: self._write(store, name))
            case "read":
                self._read(store, name)
            case "drop":
                self._tell("dropped", lambda: store.drop(name, None))
            case "touch":
                self._touch(store, name)
            case "note":
                self._tell("noted", lambda: store.replace_note(name.of, b"note"))

    def _write(self, store: Store, name: ChunkName) -> None:
        self._writes += 1
        sizes = [self._dice.randrange(1, 9000) for _ in range(self._dice.randrange(1, SHARDS_MAX + 1))]
        head = Head(
            namespace=name.of.namespace,
            key=name.key,
            parent=bytes(32),
            epoch=name.epoch,
            write=self._writes,
            written_s=0,
            shards=tuple(Shard(0, number, size, 0) for number, size in enumerate(sizes)),
            fragment_bytes=self._dice.choice((0, FRAGMENT_BYTES)),
        )
        payloads = payloads_of(head)
        self._written[head.write] = [bytes(payload) for payload in payloads]
        shards = tuple(
            shard._replace(digest=remote_checks.digest_of(name, shard, payload) or 0)
            for shard, payload in zip(head.shards, payloads, strict=True)
        )
        store.write(name, head._replace(shards=shards), payloads)

    def _read(self, store: Store, name: ChunkName) -> None:
        head = self._head(store, name)
        if head is None:
            return
        targets = targets_of(head)
        wanted = [target if self._dice.random() < 0.9 else None for target in targets]
        try:
            sums = store.read(name, head, wanted) or remote_checks.sums_of(wanted)
        except DeviceError as problem:
            self.seen[problem.code] += 1
            return
        wrong = remote_checks.wrong_sums(name, head, sums)
        self.seen["wrong digest"] += len(wrong)
        for index, target in enumerate(wanted):
            if target is not None and index not in wrong:
                assert bytes(target) == self._written[head.write][index], f"wrong bytes of write {head.write}"
                self.seen["right"] += 1

    def _touch(self, store: Store, name: ChunkName) -> None:
        head = self._head(store, name)
        if head is not None:
            self._tell("touched", lambda: store.touch(name, head))

    def _head(self, store: Store, name: ChunkName) -> Head | None:
        try:
            (found,) = store.heads([name], SHARDS_MAX)
        except StoreError as problem:
            self.seen[problem.code] += 1
            return None
        if isinstance(found, StoreError | WrongValue):
            self.seen[found.code] += 1
            return None
        if found is None:
            self.seen["miss"] += 1
        return found

    def _tell(self, done: str, call: Callable[[], object]) -> None:
        try:
            call()
            self.seen[done] += 1
        except StoreError as problem:
            self.seen[problem.code] += 1
