"""Engines of different tensor parallel sizes with one server: what one stores the other loads, byte for byte.

With heads, and with latent attention, whose KV is one shard that all ranks hold.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvclient import Blocks, Cache, CacheSpec, Client, HostBuffer, Lease, RetrieveResult, StoreResult, namespace_digest
from kvclient.offload.values import Group
from kvclient.vllm.head_shards import head_shard_specs
from kvclient.vllm.layout import group_specs, layout_of
from tests.process.arena import flip
from tests.process.disk.scene import disk_ready, small
from tests.process.engine import PATIENT, Prompt, prompt
from tests.process.harness import WAIT_S, Server, until
from tests.rigs.head_memory import HeadMemory

HEADS = 4
PER_CHUNK = 3
CHUNKS = 5
LATENT = 1
"""Heads of latent attention, and its shards."""
BLOCKS = {1: 39, 2: 43, 4: 31, 8: 37}
"""Ranks -> blocks of each of their caches."""
SPARE = 2
"""Blocks of which no job may touch a byte."""
OTHER = 500
"""A place of another prompt."""


class Engine:
    """All ranks of an engine, in one process."""

    def __init__(self, path: Path, ranks: int, *, shards: int, order: str = "LBNHC") -> None:
        self.ranks = ranks
        self._shards = shards
        self._namespace = namespace_digest({"test": "head shards", "order": order, "head_shards": shards})
        self._memories, self._clients, self._caches = [], [], []
        heads = LATENT if shards == LATENT else HEADS
        self._holders = max(1, ranks // heads)
        for rank in range(ranks):
            head = rank // self._holders
            memory = HeadMemory(heads=heads, ranks=ranks // self._holders, rank=head, blocks=BLOCKS[ranks], order=order)
            name = f"engine of {ranks}"
            client = Client(path, engine=name, epoch=ranks, ranks=ranks, rank=rank, timeouts=PATIENT)
            specs = self._specs(memory, rank)
            self._memories.append(memory)
            self._clients.append(client)
            self._caches.append([client.register_cache(spec) for spec in specs])
        for cache in (cache for caches in self._caches for cache in caches):
            assert cache.wait_registered(WAIT_S)
        assert all(client.wait_connected(WAIT_S) for client in self._clients)

    def _specs(self, memory: HeadMemory, rank: int) -> list[CacheSpec]:
        spec = CacheSpec(
            name="kv",
            namespace=self._namespace,
            chunk_tokens=PER_CHUNK * memory.block_tokens,
            buffers=[HostBuffer(memory.fd, memory.bytes)],
            groups=[],
        )
        groups = [Group(memory.block_tokens)]
        place = {"ranks": self.ranks, "rank": rank, "replicas": self._holders}
        if self._shards == LATENT:
            layout = layout_of(memory.config, memory.caches)
            return [replace(spec, groups=group_specs(groups, layout, blocks=memory.blocks, **place))]
        here = max(1, self._shards // self.ranks)
        return head_shard_specs(spec, groups, memory.config, memory.caches, here=here, **place)

    def close(self) -> None:
        for client, memory in zip(self._clients, self._memories, strict=True):
            client.close()
            memory.close()

    def store(self, story: Prompt, ids: list[int]) -> None:
        """Compute and store the prompt in these blocks."""
        stores = self.begin_store(story, ids)
        assert [store.result(WAIT_S).chunks for store in stores] == [story.chunks] * self.ranks

    def begin_store(self, story: Prompt, ids: list[int], *, but: Sequence[int] = ()) -> "list[Future[StoreResult]]":
        """Compute the prompt in these blocks, and begin its stores on all ranks `but` these."""
        for memory in self._memories:
            memory.fill({block: place for place, block in enumerate(ids)})
        return [
            client.store(cache, 0, b"", story.keys, [Blocks(0, 0, ids)], beside=beside)
            for rank, (client, (cache, *beside)) in enumerate(self._jobs())
            if rank not in but
        ]

    def found(self, story: Prompt) -> Lease | None:
        found = self._clients[0].lookup(self._namespace, story.keys)
        assert not found.why
        assert (found.lease is None) == (found.chunks == 0)
        assert found.chunks in (0, story.chunks)
        return found.lease

    def chunks_of(self, story: Prompt) -> int:
        found = self._clients[0].lookup(self._namespace, story.keys)
        if found.lease is not None:
            self._clients[0].release(found.lease)
        return found.chunks

    def page(self, block: int) -> bytes:
        """The first page of a block."""
        memory, (cache, *_) = self._memories[0], self._caches[0]
        run = cache.spec.groups[0].regions[0]
        return memory.shard_bytes([run], [block])[: run.page_bytes]

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
@pytest.mark.parametrize("shards", [4, LATENT])
def test_what_an_engine_of_any_size_stores_every_other_one_loads(
    engines: Callable[..., Engine], server: Server, order: str, shards: int
) -> None:
    every = [engines(ranks, shards=shards, order=order) for ranks in BLOCKS]
    assert server.status().caches == sum(max(ranks, shards) for ranks in BLOCKS), "a cache for each shard of a rank"
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


@pytest.mark.parametrize(("shards", "sizes"), [(4, (2, 1)), (4, (4, 8)), (LATENT, (2, 1)), (LATENT, (1, 4))])
def test_a_prompt_that_engines_of_two_sizes_store_is_held_once(
    engines: Callable[..., Engine], server: Server, shards: int, sizes: tuple[int, int]
) -> None:
    story = prompt(4, CHUNKS)
    first, second = (engines(ranks, shards=shards) for ranks in sizes)
    first.store(story, blocks_of(sizes[0], step=2))
    before = server.status()
    second.store(story, blocks_of(sizes[1], step=3))
    after = server.status()
    assert (after.chunks, after.arena.used_bytes) == (before.chunks, before.arena.used_bytes)
    second.load(story, blocks_of(sizes[1], step=4))


@pytest.mark.parametrize(("shards", "sizes"), [(4, (2, 1)), (LATENT, (2, 4)), (LATENT, (4, 1))])
def test_an_engine_awaits_what_one_of_another_size_computes(
    engines: Callable[..., Engine], server: Server, shards: int, sizes: tuple[int, int]
) -> None:
    story = prompt(5, CHUNKS)
    computes, asks = (engines(ranks, shards=shards) for ranks in sizes)
    assert computes.pledge(story) == CHUNKS
    ids = blocks_of(asks.ranks, step=4)
    waits = asks.begin_load(story, ids)
    for chunks in range(1, CHUNKS + 1):
        assert not any(load.done() for load in waits)
        computes.store(story.head(chunks), blocks_of(computes.ranks, step=2)[: chunks * PER_CHUNK])
    assert all(load.result(WAIT_S).ok for load in waits)
    assert asks.wrong(dict(zip(ids, range(len(ids)), strict=True))) == []


@pytest.mark.parametrize("shards", [4, LATENT])
def test_what_a_server_has_on_disk_alone_comes_back_for_an_engine_of_another_size(tmp_path: Path, shards: int) -> None:
    story = prompt(6, CHUNKS)
    with small(tmp_path) as server:
        disk_ready(server)
        two = Engine(server.path, 2, shards=shards)
        two.store(story, blocks_of(2, step=2))
        until("the chunks to be on disk", lambda: server.status().chunks_on_disk == CHUNKS)
        two.close()
        server.kill()
        server.start()
        disk_ready(server)
        for ranks in (1, 4):
            other = Engine(server.path, ranks, shards=shards)
            lease = other.found(story)
            assert lease is not None
            assert ranks != 1 or lease.chunks_on_disk == CHUNKS
            other.load(story, blocks_of(ranks, step=4))
            other.close()


# ---------------------------------------------------------------- latent attention alone


def test_latent_kv_is_written_by_all_ranks_in_turn_and_a_chunk_that_one_left_out_is_not_found(
    engines: Callable[..., Engine], server: Server
) -> None:
    story = prompt(7, CHUNKS)
    four, one = engines(4, shards=LATENT), engines(1, shards=LATENT)
    written = [store.result(WAIT_S) for store in four.begin_store(story, blocks_of(4, step=2), but=[3])]
    assert [result.chunks_written for result in written] == [2, 1, 1], "chunks 0 and 4, 1, 2"
    assert (one.chunks_of(story), four.chunks_of(story)) == (3, 3)
    one.store(story, blocks_of(1, step=2))
    assert (one.chunks_of(story), four.chunks_of(story)) == (CHUNKS, CHUNKS)
    four.load(story, blocks_of(4, step=3))


def test_engines_of_two_sizes_that_store_the_same_prompt_at_once_fill_it_together(
    engines: Callable[..., Engine], server: Server
) -> None:
    story = prompt(8, CHUNKS)
    every = [engines(ranks, shards=LATENT) for ranks in (2, 4, 1)]
    stores = [store for one in every for store in one.begin_store(story, blocks_of(one.ranks, step=2))]
    written = [store.result(WAIT_S) for store in stores]
    assert sum(result.chunks_written for result in written) == CHUNKS, "no chunk is written twice"
    assert all(result.chunks == CHUNKS or result.why == "busy" for result in written)
    for one in every:
        one.load(story, blocks_of(one.ranks, step=3))


@pytest.mark.parametrize(("stores", "loads"), [(2, 4), (4, 1), (1, 2)])
def test_a_chunk_with_other_bytes_than_were_stored_fails_on_every_rank_of_an_engine_of_another_size(
    engines: Callable[..., Engine], server: Server, stores: int, loads: int
) -> None:
    story, wrong = prompt(9, CHUNKS), 3
    writes, reads = engines(stores, shards=LATENT), engines(loads, shards=LATENT)
    ids = blocks_of(stores, step=2)
    writes.store(story, ids)
    flip(server, writes.page(ids[wrong * PER_CHUNK]))
    ended = [load.result(WAIT_S) for load in reads.begin_load(story, blocks_of(loads, step=4))]
    assert not any(result.ok for result in ended)
    # The first rank that finds it out ends the lease, so others may come too late to compare anything.
    told = {(result.why, result.right_chunks) for result in ended}
    assert ("digest", wrong) in told
    assert told <= {("digest", wrong), ("lease-unknown", 0)}
    assert (writes.chunks_of(story), reads.chunks_of(story)) == (wrong, wrong)
    reads.store(story, blocks_of(loads, step=3))
    writes.load(story, blocks_of(stores, step=4))
