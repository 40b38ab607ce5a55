"""Engines of different tensor parallel sizes with one server: what one stores the other loads, byte for byte."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvclient import Blocks, Cache, CacheSpec, Client, HostBuffer, Lease, RetrieveResult, namespace_digest
from kvclient.offload.values import Group
from kvclient.vllm.head_shards import head_shard_specs
from tests.process.disk.scene import disk_ready, small
from tests.process.engine import PATIENT, Prompt, prompt
from tests.process.harness import WAIT_S, Server, until
from tests.rigs.head_memory import HeadMemory

HEADS = 4
PER_CHUNK = 3
CHUNKS = 5
BLOCKS = {1: 39, 2: 43, 4: 31}
"""Ranks -> blocks of each of their caches."""
SPARE = 2
"""Blocks of which no job may touch a byte."""
OTHER = 500
"""A place of another prompt."""


class Engine:
    """All ranks of an engine, in one process."""

    def __init__(self, path: Path, ranks: int, *, shards: int, order: str = "LBNHC") -> None:
        self.ranks = ranks
        self._namespace = namespace_digest({"test": "head shards", "order": order, "head_shards": shards})
        self._memories, self._clients, self._caches = [], [], []
        for rank in range(ranks):
            memory = HeadMemory(heads=HEADS, ranks=ranks, rank=rank, blocks=BLOCKS[ranks], order=order)
            name = f"engine of {ranks}"
            client = Client(path, engine=name, epoch=ranks, ranks=ranks, rank=rank, timeouts=PATIENT)
            specs = self._specs(memory, rank, here=shards // ranks)
            self._memories.append(memory)
            self._clients.append(client)
            self._caches.append([client.register_cache(spec) for spec in specs])
        for cache in (cache for caches in self._caches for cache in caches):
            assert cache.wait_registered(WAIT_S)
        assert all(client.wait_connected(WAIT_S) for client in self._clients)

    def _specs(self, memory: HeadMemory, rank: int, *, here: int) -> list[CacheSpec]:
        spec = CacheSpec(
            name="kv",
            namespace=self._namespace,
            chunk_tokens=PER_CHUNK * memory.block_tokens,
            buffers=[HostBuffer(memory.fd, memory.bytes)],
            groups=[],
        )
        groups = [Group(memory.block_tokens)]
        return head_shard_specs(spec, groups, memory.config, memory.caches, here=here, ranks=self.ranks, rank=rank)

    def close(self) -> None:
        for client, memory in zip(self._clients, self._memories, strict=True):
            client.close()
            memory.close()

    def store(self, story: Prompt, ids: list[int]) -> None:
        """Compute and store the prompt in these blocks."""
        for memory in self._memories:
            memory.fill({block: place for place, block in enumerate(ids)})
        stores = [
            client.store(cache, 0, b"", story.keys, [Blocks(0, 0, ids)], beside=beside)
            for client, (cache, *beside) in self._jobs()
        ]
        assert [store.result(WAIT_S).chunks for store in stores] == [story.chunks] * self.ranks

    def found(self, story: Prompt) -> Lease | None:
        found = self._clients[0].lookup(self._namespace, story.keys)
        assert not found.why
        assert (found.lease is None) == (found.chunks == 0)
        assert found.chunks in (0, story.chunks)
        return found.lease

    def load(self, story: Prompt, ids: list[int], *, first: int = 0) -> None:
        """Load blocks from `first` on. Everything else must stay as it is."""
        loads = self.begin_load(story, ids, first=first)
        assert all(load.result(WAIT_S).ok for load in loads)
        assert self.wrong({block: place if place >= first else OTHER for place, block in enumerate(ids)}) == []

    def begin_load(self, story: Prompt, ids: list[int], *, first: int = 0) -> "list[Future[RetrieveResult]]":
        """Spoil the blocks and load them, waiting for what another engine computes."""
        lease = self._clients[0].lookup(self._namespace, story.keys, may_wait=True).lease
        assert lease is not None
        assert lease.chunks + lease.awaited == story.chunks
        for memory in self._memories:
            memory.fill(dict.fromkeys([*ids, *range(SPARE)], OTHER))
        return [
            client.retrieve(cache, lease, [Blocks(0, first, ids[first:])], beside=beside)
            for client, (cache, *beside) in self._jobs()
        ]

    def wrong(self, wanted: dict[int, int]) -> list[tuple[int, ...]]:
        """Cells with other content than wanted, of all ranks: in these blocks, and in those that no job may touch."""
        spare = dict.fromkeys(range(SPARE), OTHER)
        return [cell for memory in self._memories for cell in memory.wrong(wanted | spare)]

    def pledge(self, story: Prompt) -> int:
        return self._clients[0].pledge(self._namespace, story.keys).chunks

    def _jobs(self) -> Iterator[tuple[Client, list[Cache]]]:
        return zip(self._clients, self._caches, strict=True)


@pytest.fixture
def engines(server: Server) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def engine(ranks: int, **settings: Any) -> Engine:
        made.append(Engine(server.path, ranks, **settings))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def blocks_of(ranks: int, *, step: int) -> list[int]:
    """Blocks of a whole prompt, in no order, elsewhere in each engine."""
    usable = BLOCKS[ranks] - SPARE
    return [SPARE + (7 * ranks + step * place) % usable for place in range(CHUNKS * PER_CHUNK)]


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC"])
def test_what_an_engine_of_any_size_stores_every_other_one_loads(
    engines: Callable[..., Engine], server: Server, order: str
) -> None:
    every = [engines(ranks, shards=4, order=order) for ranks in BLOCKS]
    assert server.status().caches == 4 * len(every), "each engine has a cache for each shard"
    for number, stores in enumerate(every):
        story = prompt(number, CHUNKS)
        assert all(engine.found(story) is None for engine in every)
        stores.store(story, blocks_of(stores.ranks, step=2))
        for loads in every:
            loads.load(story, blocks_of(loads.ranks, step=4), first=PER_CHUNK + 1)
            loads.load(story, blocks_of(loads.ranks, step=3))
    assert server.status().chunks == CHUNKS * len(every)
    until("the leases to end", lambda: server.status().leases == 0)


def test_engines_with_another_number_of_shards_share_nothing(engines: Callable[..., Engine]) -> None:
    story = prompt(1, CHUNKS)
    two, other = engines(2, shards=2), engines(2, shards=4)
    two.store(story, blocks_of(2, step=2))
    assert other.found(story) is None
    assert two.found(story) is not None


def test_a_prompt_that_engines_of_two_sizes_store_is_held_once(engines: Callable[..., Engine], server: Server) -> None:
    story = prompt(4, CHUNKS)
    two, one = engines(2, shards=4), engines(1, shards=4)
    two.store(story, blocks_of(2, step=2))
    before = server.status()
    one.store(story, blocks_of(1, step=3))
    after = server.status()
    assert (after.chunks, after.arena.used_bytes) == (before.chunks, before.arena.used_bytes)
    one.load(story, blocks_of(1, step=4))


def test_an_engine_awaits_what_one_of_another_size_computes(engines: Callable[..., Engine], server: Server) -> None:
    story = prompt(5, CHUNKS)
    two, one = engines(2, shards=4), engines(1, shards=4)
    assert two.pledge(story) == CHUNKS
    ids = blocks_of(1, step=4)
    waits = one.begin_load(story, ids)
    for chunks in range(1, CHUNKS + 1):
        assert not any(load.done() for load in waits)
        two.store(story.head(chunks), blocks_of(2, step=2)[: chunks * PER_CHUNK])
    assert all(load.result(WAIT_S).ok for load in waits)
    assert one.wrong(dict(zip(ids, range(len(ids)), strict=True))) == []


def test_what_a_server_has_on_disk_alone_comes_back_for_an_engine_of_another_size(tmp_path: Path) -> None:
    story = prompt(6, CHUNKS)
    with small(tmp_path) as server:
        disk_ready(server)
        two = Engine(server.path, 2, shards=4)
        two.store(story, blocks_of(2, step=2))
        until("the chunks to be on disk", lambda: server.status().chunks_on_disk == CHUNKS)
        two.close()
        server.kill()
        server.start()
        disk_ready(server)
        one = Engine(server.path, 1, shards=4)
        lease = one.found(story)
        assert lease is not None
        assert lease.chunks_on_disk == CHUNKS
        one.load(story, blocks_of(1, step=4))
        one.close()
