"""Head shards: ranks of engines of different sizes store equal bytes under the same shard, whatever the layout."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.offload.values import Group
from kvclient.values import CacheSpec, HostBuffer
from kvclient.vllm.head_shards import SHARDS_HERE_MAX, HeadShards, check_head_shards, head_shard_specs
from kvclient.vllm.layout import HeadShard, group_specs, layout_of
from kvserver.errors import RequestError
from kvserver.transfer.layout import Layout
from kvserver.wire.messages import Buffer, RegionRun, Register
from tests.rigs.head_memory import CONTENT, ITEM_BYTES, LAYERS, ORDERS, TOKENS, FullAttentionSpec, HeadMemory

HEADS = 12
BLOCKS = {1: 4, 2: 7, 3: 3, 4: 6, 6: 5, 12: 2, 24: 8}
"""Ranks -> blocks of each of their caches: engines of different sizes have different numbers of blocks."""
SIZES = {shards: [ranks for ranks in BLOCKS if shards % ranks == 0] for shards in (2, 3, 4, 6)}
SIZES[HEADS] = [*BLOCKS]
PROMPT = 2
"""Blocks of the prompt whose bytes are compared. Each engine keeps them elsewhere."""


def memories(order: str, ranks: int, kernel_blocks: int, heads: int = HEADS) -> Iterator[tuple[int, HeadMemory]]:
    """Each rank and its memory. If there are more ranks than heads, neighbours hold the same head."""
    holders = max(1, ranks // heads)
    for rank in range(ranks):
        memory = HeadMemory(
            heads=heads,
            ranks=ranks // holders,
            rank=rank // holders,
            blocks=BLOCKS[ranks],
            order=order,
            kernel_blocks=kernel_blocks,
        )
        memory.fill({block: place for place, block in enumerate(blocks_of(ranks))})
        yield rank, memory
        memory.close()


def blocks_of(ranks: int) -> list[int]:
    return [(place + ranks) % BLOCKS[ranks] for place in range(PROMPT)]


def spec_of(memory: HeadMemory) -> CacheSpec:
    return CacheSpec(
        name="kv",
        namespace=b"n" * 32,
        chunk_tokens=memory.block_tokens * PROMPT,
        buffers=[HostBuffer(memory.fd, memory.bytes)],
        groups=[],
    )


def stored(order: str, ranks: int, shards: int, kernel_blocks: int = 1) -> dict[int, tuple[Any, bytes]]:
    """Shard -> its page shapes and its bytes of the prompt, as an engine of so many ranks registers and stores them."""
    found: dict[int, tuple[Any, bytes]] = {}
    turns: dict[int, list[tuple[int, int]]] = {}
    holders = max(1, ranks // shards)
    for rank, memory in memories(order, ranks, kernel_blocks):
        for spec in head_shard_specs(
            spec_of(memory),
            [Group(memory.block_tokens)],
            memory.config,
            memory.caches,
            here=max(1, shards // ranks),
            ranks=ranks,
            rank=rank,
            replicas=holders,
        ):
            group = parsed(spec, memory).groups[0]
            here = group.pages, memory.shard_bytes(spec.groups[0].regions, blocks_of(ranks))
            assert found.setdefault(group.shard, here) == here, "ranks that hold a shard hold the same bytes"
            turns.setdefault(group.shard, []).append((group.writers, group.writer))
    assert all(told == [(holders, writer) for writer in range(holders)] for told in turns.values())
    return found


def latent(order: str, ranks: int, kernel_blocks: int) -> Iterator[tuple[Any, bytes]]:
    """As stored(), for each rank of an engine whose ranks all hold the one shard of latent attention."""
    for rank, memory in memories(order, ranks, kernel_blocks, heads=1):
        groups = group_specs(
            [Group(memory.block_tokens)],
            layout_of(memory.config, memory.caches),
            blocks=memory.blocks,
            ranks=ranks,
            rank=rank,
            replicas=ranks,
        )
        layout = parsed(replace(spec_of(memory), groups=groups), memory)
        agreed, own = layout.geometry.groups[0], layout.groups[0]
        assert (agreed.shards, own.shard, own.writers, own.writer) == (1, 0, ranks, rank)
        yield (layout.geometry, own.pages), memory.shard_bytes(groups[0].regions, blocks_of(ranks))


def parsed(spec: CacheSpec, memory: HeadMemory) -> Layout:
    """As the server reads the registration: pages that overlap or leave their buffer are refused."""
    return Layout.parse(
        Register(
            id=1,
            name=spec.name,
            namespace=spec.namespace,
            device="host",
            device_id="",
            mode="direct",
            ipc_mode="",
            chunk_tokens=spec.chunk_tokens,
            buffers=[Buffer(0, b"", memory.bytes)],
            groups=list(spec.groups),
            staging=[],
            tenant="",
            tokens_max=0,
            model="",
        )
    )


@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("shards", SIZES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_shard_has_the_same_pages_and_bytes_at_every_number_of_ranks(
    order: str, shards: int, kernel_blocks: int
) -> None:
    engines = {ranks: stored(order, ranks, shards, kernel_blocks) for ranks in SIZES[shards]}
    assert all(sorted(engine) == list(range(shards)) for engine in engines.values())
    wanted = engines[1]
    assert len({data for _, data in wanted.values()}) == shards, "no two shards have the same bytes"
    assert sum(len(data) for _, data in wanted.values()) == (
        LAYERS * HEADS * PROMPT * kernel_blocks * TOKENS * CONTENT * ITEM_BYTES
    )
    for ranks, engine in engines.items():
        assert engine == wanted, f"{ranks} ranks store other bytes than one"


@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_latent_kv_has_the_same_geometry_and_bytes_on_every_rank_of_every_engine(
    order: str, kernel_blocks: int
) -> None:
    every = [found for ranks in BLOCKS for found in latent(order, ranks, kernel_blocks)]
    assert len(every) == sum(BLOCKS)
    assert len(every[0][1]) == LAYERS * PROMPT * kernel_blocks * TOKENS * CONTENT * ITEM_BYTES
    assert all(found == every[0] for found in every)


@pytest.mark.parametrize(
    ("order", "page_bytes"),
    [("LBHNC", 3 * TOKENS * CONTENT * ITEM_BYTES), ("LBNHC", 3 * CONTENT * ITEM_BYTES)],
)
def test_a_page_is_the_heads_of_a_shard_for_all_tokens_or_for_one(order: str, page_bytes: int) -> None:
    memory = HeadMemory(heads=HEADS, ranks=2, rank=1, blocks=3, order=order)
    runs = layout_of(memory.config, memory.caches, shard=HeadShard(1, 2)).regions[0]
    assert {run.page_bytes for run in runs} == {page_bytes}
    assert min(run.offset for run in runs) == page_bytes
    memory.close()


def test_without_the_setting_a_rank_is_one_shard_with_the_pages_of_before() -> None:
    memory = HeadMemory(heads=HEADS, ranks=4, rank=1, blocks=3, order="LBNHC")
    page_bytes = 3 * TOKENS * CONTENT * ITEM_BYTES
    runs = layout_of(memory.config, memory.caches).regions[0]
    assert runs == [RegionRun(0, 0, LAYERS, 3 * page_bytes, page_bytes, page_bytes)]
    memory.close()


def test_ranks_of_pipeline_stages_are_numbered_on_and_staging_is_divided() -> None:
    memory = HeadMemory(heads=HEADS, ranks=2, rank=1, blocks=3, order="LBHNC")
    specs = head_shard_specs(
        spec_of(memory), [Group(TOKENS)], memory.config, memory.caches, here=3, ranks=2 * 2, rank=1 * 2 + 1, replicas=1
    )
    assert [(spec.groups[0].shards, spec.groups[0].shard) for spec in specs] == [(12, 9), (12, 10), (12, 11)]
    assert [spec.name for spec in specs] == ["kv.0", "kv.1", "kv.2"]
    assert {spec.staging_bytes for spec in specs} == {5 * 16 << 20}
    memory.close()


def test_a_tensor_whose_heads_are_elsewhere_is_refused() -> None:
    memory = HeadMemory(heads=HEADS, ranks=1, rank=0, blocks=3, order="LBNHC")
    memory.config.kv_cache_groups[0].kv_cache_spec.num_kv_heads = HEADS // 2
    with pytest.raises(RequestError, match=r"layer 0 has shapes \[\(3, 12, 5, 7\)\]; expected one of \(blocks, 6"):
        layout_of(memory.config, memory.caches, shard=HeadShard(0, 2))
    memory.close()


class MLAAttentionSpec(FullAttentionSpec): ...


class SlidingWindowMLASpec(SimpleNamespace): ...


class MambaSpec(SimpleNamespace): ...


LATENT = MLAAttentionSpec(num_kv_heads=1, num_head_slots=None), SlidingWindowMLASpec(num_kv_heads=1)


def checked(wanted: int, *specs: Any, **other: Any) -> HeadShards:
    ranks = other.pop("ranks", 2)
    heads = other.pop("heads", 8)
    given = specs or (FullAttentionSpec(num_kv_heads=max(1, heads // ranks), num_head_slots=None),)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in given])
    usual = {"contexts": 1, "has_drafts": False, "is_portable": False, "is_shuffled": False}
    usual |= {"replicas": max(1, ranks // (heads or 1))}
    return check_head_shards(wanted, config, ranks=ranks, heads=heads, **{**usual, **other})


def test_the_setting_says_how_many_shards_a_rank_holds() -> None:
    assert [checked(wanted) for wanted in (2, 4, 8)] == [(2, 1), (4, 2), (8, 4)]
    assert checked(8, ranks=1) == (8, 8)


def test_ranks_beyond_the_heads_hold_one_shard_with_others() -> None:
    assert [checked(8, ranks=ranks) for ranks in (8, 16, 32)] == [(8, 1)] * 3


@pytest.mark.parametrize("other", [{}, {"has_drafts": True}, {"is_portable": True}, {"is_shuffled": True}])
def test_latent_attention_has_one_shard_whatever_is_set(other: dict[str, Any]) -> None:
    """Its memory is one cache. So what several caches exclude is allowed, and so is a draft model of the same kind."""
    said = [checked(wanted, *LATENT, heads=0, ranks=ranks, **other) for wanted in (1, 4, 300) for ranks in (1, 2, 4, 8)]
    assert said == [(1, 0)] * 12


@pytest.mark.parametrize(
    ("wanted", "other", "named"),
    [
        (3, {}, "head_shards=3 must divide the model's 8 KV heads"),
        (16, {}, "head_shards=16 must divide the model's 8 KV heads"),
        (1, {}, "head_shards=1 must be a multiple of tensor_parallel_size=2"),
        (4, {"ranks": 8}, "head_shards=4 must be a multiple of tensor_parallel_size=8"),
        (32, {"heads": 64, "ranks": 1}, f"gives each of 1 ranks 32; expected at most {SHARDS_HERE_MAX}"),
        (4, {"ranks": 8, "heads": 4, "replicas": 1}, "1 of 8 ranks hold the same KV; expected 2"),
        (2, {"ranks": 4, "heads": 4, "replicas": 4}, "4 of 4 ranks hold the same KV; expected 1"),
        (2, {"ranks": 8, "heads": 4}, "head_shards=2 must be a multiple of tensor_parallel_size=8"),
        (2, {"contexts": 2}, "decode_context_parallel_size=2"),
        (1, {"contexts": 2, "heads": 0}, "decode_context_parallel_size=2"),
        (1, {"ranks": 4, "heads": 0, "replicas": 2}, "2 of 4 ranks hold the same KV; expected 4"),
        (2, {"has_drafts": True}, "draft model"),
        (2, {"is_portable": True}, "portable"),
        (2, {"is_shuffled": True}, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_by_name(wanted: int, other: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        checked(wanted, **other)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (MambaSpec(), "KV heads of MambaSpec cannot be told apart"),
        (MLAAttentionSpec(num_kv_heads=1, num_head_slots=None), "KV heads of MLAAttentionSpec"),
        (FullAttentionSpec(num_kv_heads=4, num_head_slots=2), "KV heads of FullAttentionSpec"),
        (FullAttentionSpec(num_kv_heads=4), "KV heads of FullAttentionSpec"),
        (
            FullAttentionSpec(num_kv_heads=8, num_head_slots=None),
            "each of 2 ranks holds 8 KV heads of a layer; expected 4",
        ),
        (
            FullAttentionSpec(num_kv_heads=1, num_head_slots=None),
            "each of 2 ranks holds 1 KV heads of a layer; expected 4",
        ),
    ],
)
def test_kv_that_cannot_be_divided_by_heads_is_refused(spec: Any, named: str) -> None:
    good = FullAttentionSpec(num_kv_heads=4, num_head_slots=None)
    with pytest.raises(RequestError, match=named):
        checked(4, good, spec)


@pytest.mark.parametrize("spec", [MambaSpec(), FullAttentionSpec(num_kv_heads=1, num_head_slots=None)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_kv_beside_latent_attention_that_ranks_do_not_share_is_refused(spec: Any, ranks: int) -> None:
    """Also with one rank, whose chunks an engine of two could not use."""
    named = f"{type(spec).__name__} beside latent attention"
    with pytest.raises(RequestError, match=named):
        checked(1, *LATENT, spec, heads=0, ranks=ranks)
