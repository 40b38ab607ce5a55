"""A server under abuse, an engine whose chunks it keeps meanwhile, and a raw session that may send anything.

with Victim() as victim:
    ...                     # whatever a client must not do
    victim.unharmed()       # waits until all is as it was, and compares every byte that was stored before
"""

import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from kvserver._native import Board, create_memfd
from kvserver.wire import messages as wire
from kvserver.wire.codec import encode
from kvserver.wire.messages import Buffer, GroupBlocks, GroupSpec, RegionRun
from tests.process.checked import CheckedServer
from tests.process.engine import Engine, prompt
from tests.process.harness import OBSERVER_SESSIONS, RawLocal, RawSession, descriptors_of, until

STORY = prompt(901, chunks=5)
CHUNK_TOKENS, BLOCKS, PAGE_BYTES = 6, 11, 129
POOL_BYTES = 5003
NAMESPACE = b"\x77" * wire.NAMESPACE_BYTES
"""Namespace in which abusive clients store."""
GROUP = GroupSpec(2, BLOCKS, "full", 0, 1, 0, 1, 0, [RegionRun(0, 13, 2, BLOCKS * 130, 130, PAGE_BYTES)])
"""Three blocks per chunk, in a pool of POOL_BYTES."""
MEMORY_GROWTH_BYTES_MAX = 24 << 20
"""Memory that allocators may keep after a storm. A leak from 10,000 requests of a few KB each would be larger."""


class Victim:
    """A server with a short attach_ttl, so that it drops strangers and half-open sessions soon."""

    def __init__(self, **settings: object) -> None:
        small: dict[str, object] = {"attach_ttl_ms": 400, "arena_bytes": 16 << 20, "slab_bytes": 1 << 20}
        self.server = CheckedServer(**{**small, **settings})
        self._kept_bytes: list[int] = []
        self._descriptors: dict[int, Counter[str]] = {}

    def __enter__(self) -> "Victim":
        self.server.__enter__()
        self.keeper = Engine(self.server.path, name="keeper")
        assert self.keeper.ready().store(STORY).chunks == STORY.chunks
        until("the arena to be touched", lambda: (arena := self.server.status().arena).slabs_ready == arena.slabs_total)
        self.unharmed()
        self.processes = (self.server.brain_pid(), self.server.mover_pid())
        self._kept_bytes = [memory_bytes(pid) for pid in self.processes]
        self._descriptors = {pid: _descriptors(pid) for pid in self.processes}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keeper.close()
        self.server.__exit__(kind, error, trace)

    @property
    def path(self) -> Path:
        return self.server.path

    def serves(self) -> None:
        """Checks that the server answers another client now."""
        assert self.keeper.retrieve(STORY) == STORY.chunks

    def unharmed(self) -> None:
        """Checks that the abuse holds no resources any more, no process died and the stored bytes are right."""
        self.serves()
        self.keeper.client.clear(NAMESPACE)
        until("sessions, caches, leases, pins and jobs to be given back", self._is_quiet)
        for pid, before in self._descriptors.items():
            assert os.path.exists(f"/proc/{pid}"), "a process of the server died"
            what = f"the descriptors of process {pid} to be closed"
            until(what, lambda pid=pid, before=before: _descriptors(pid) <= before)  # type: ignore[misc]
        self.unharmed_memory()

    def unharmed_memory(self) -> None:
        """Checks that brain and mover are the same processes as before and have hardly grown."""
        if self._kept_bytes:
            assert (self.server.brain_pid(), self.server.mover_pid()) == self.processes
            for pid, kept_bytes in zip(self.processes, self._kept_bytes, strict=True):
                assert memory_bytes(pid) < kept_bytes + MEMORY_GROWTH_BYTES_MAX

    def _is_quiet(self) -> bool:
        now = self.server.status()
        held = (now.sessions, now.caches, now.leases, now.pins, now.stores, now.retrieves, now.chunks, now.namespaces)
        return held == (OBSERVER_SESSIONS + 1, 1, 0, 0, 0, 0, STORY.chunks, 1)


class Abuser:
    """An attached session with a pool and no client-side checks."""

    def __init__(self, victim: Victim, engine: str = "abuser", *, ranks: int = 1, rank: int = 0) -> None:
        self.raw = RawSession(victim.path, engine=engine, ranks=ranks, rank=rank)
        self.board = Board(self.raw.board, wire.BOARD_WORDS)
        self.pool = create_memfd("abuser-pool", POOL_BYTES, sealed=False)
        self.cache = 0
        self._ids = itertools.count(1000)
        self._words = itertools.count()

    def __enter__(self) -> "Abuser":
        return self

    def __exit__(self, *_: object) -> None:
        self.board.close()
        self.raw.close()
        os.close(self.pool)

    @property
    def local(self) -> RawLocal:
        assert self.raw.local is not None
        return self.raw.local

    def next_id(self) -> int:
        return next(self._ids)

    def ask(self, request: wire.Request, **changes: Any) -> Any:
        return self.raw.zmq.ask(msgspec.structs.replace(request, **changes))

    def send(self, request: wire.Request) -> int:
        """Sends a request and returns its id."""
        self.raw.zmq.send(encode(request))
        return request.id

    # ---------------------------------------------------------------- valid requests, to be spoiled

    def offer(self, descriptor: int) -> int:
        reply = self.local.ask(wire.Offer(self.next_id()), [descriptor])
        assert isinstance(reply, wire.Offered), reply
        return reply.descriptor

    def registration(
        self, descriptor: int, *, name: str = "kv", namespace: bytes = NAMESPACE, buffer_bytes: int = POOL_BYTES
    ) -> wire.Register:
        buffers = [Buffer(self.offer(descriptor), b"", buffer_bytes)]
        head = self.next_id(), name, namespace, CHUNK_TOKENS
        return wire.Register(*head, "host", "", "", "direct", "", buffers, [GROUP], [], 0, "")

    def register(self) -> "Abuser":
        reply = self.ask(self.registration(self.pool))
        assert isinstance(reply, wire.Registered), reply
        self.cache = reply.cache
        return self

    def begin_word(self) -> tuple[int, int]:
        """Makes a free word of the board live; returns the word and its generation."""
        word = next(self._words)
        return word, self.board.begin(word)

    def storing(self, keys: bytes, blocks: Sequence[int]) -> wire.Store:
        word, generation = self.begin_word()
        groups = [GroupBlocks(0, 0, pack(blocks))]
        return wire.Store(self.next_id(), self.cache, word, generation, 10_000, 0, b"", keys, groups)

    def retrieving(self, lease: int, blocks: Sequence[int], first_block: int = 0) -> wire.Retrieve:
        word, generation = self.begin_word()
        groups = [GroupBlocks(0, first_block, pack(blocks))]
        return wire.Retrieve(self.next_id(), self.cache, lease, word, generation, 10_000, groups, False)

    def lookup(self, keys: bytes, namespace: bytes = NAMESPACE) -> wire.Found:
        reply = self.ask(wire.Lookup(self.next_id(), namespace, keys, 1))
        assert isinstance(reply, wire.Found), reply
        return reply


def pack(blocks: Sequence[int]) -> bytes:
    return b"".join(block.to_bytes(4, "little", signed=True) for block in blocks)


def refusal(reply: object, family: str, code: str, *says: str) -> None:
    """Asserts that the reply is a typed error whose message contains all of these."""
    assert isinstance(reply, wire.Error), reply
    assert (reply.family, reply.code) == (family, code), reply
    for text in says:
        assert text in reply.message, (text, reply.message)


def memory_bytes(pid: int) -> int:
    """Private resident memory, without the shared arena."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def _descriptors(pid: int) -> Counter[str]:
    """Counts of open descriptors by kind; numbers that change are masked."""
    return Counter(re.sub(r"\d+", "N", text) for text in descriptors_of(pid))
