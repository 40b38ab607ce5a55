"""The self-test of a vLLM cache's layout with a real server: right layouts pass, wrong ones are refused.

The memory is shared with the server, and torch looks at it as an engine would. Needs torch: `make e2e-ci` installs it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from kvclient import CacheSpec, Client, HostBuffer, RequestError
from kvclient.offload.settings import chosen_chunk_tokens
from kvclient.offload.values import Group
from kvclient.vllm.head_shards import head_shard_specs
from kvclient.vllm.layout import block_tensors, group_specs, layout_of
from kvserver._native import create_memfd
from kvserver.wire.messages import RegionRun
from tests.process.engine import PATIENT
from tests.process.harness import Server, until

torch = pytest.importorskip("torch", reason="needs torch: make e2e-ci")

from kvclient.vllm.self_test import BlockTensor, self_test  # noqa: E402 (needs torch)

BLOCKS, TOKENS = 61, 16


class FullAttentionSpec(SimpleNamespace):
    prefix_cacheable = True


SHAPES = {
    "K and V first": [((2, BLOCKS, TOKENS, 3, 5), "bfloat16")],
    "blocks first": [((BLOCKS, 3, TOKENS, 10), "float32")],
    "fp8": [((BLOCKS, 3, TOKENS, 7), "float8_e4m3fn")],
    "latent, in kernel blocks": [((BLOCKS * 4, TOKENS // 4, 12), "bfloat16")],
    "states of two kinds": [((BLOCKS, 3, 7), "bfloat16"), ((BLOCKS, 2, 5, 3), "float32")],
}
"""Shapes and types of one layer's cache, which may have several parts."""


class Engine:
    """One rank with two groups of two layers in shared memory, and the description of all that."""

    def __init__(self, shape: str, *, groups: int = 2, blocks: int = BLOCKS) -> None:
        counted = [
            (tuple(size // BLOCKS * blocks if size % BLOCKS == 0 else size for size in dimensions), kind)
            for dimensions, kind in SHAPES[shape]
        ]
        self.names = [[f"{group}.{layer}" for layer in "ab"] for group in range(groups)]
        self.caches: dict[str, Any] = {}
        self.buffers: dict[int, HostBuffer] = {}
        for name in (name for names in self.names for name in names):
            made = [self._made(dimensions, getattr(torch, kind)) for dimensions, kind in counted]
            self.caches[name] = made if len(made) > 1 else made[0]
        page = sum(torch.Size(dimensions).numel() * getattr(torch, kind).itemsize for dimensions, kind in counted)
        spec = FullAttentionSpec(block_size=TOKENS, page_size_bytes=page // blocks)
        self.config = SimpleNamespace(
            num_blocks=blocks,
            kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names in self.names],
            kv_cache_tensors=[SimpleNamespace(shared_by=[name]) for name in self.caches],
        )
        self.layout = layout_of(self.config, self.caches)
        kinds = [Group(TOKENS), Group(TOKENS, "window", 31)][:groups]
        self.spec = CacheSpec(
            name="kv",
            namespace=b"",
            chunk_tokens=chosen_chunk_tokens([Group(TOKENS)], 48),
            buffers=[self.buffers[found.address] for found in self.layout.allocations],
            groups=group_specs(kinds, self.layout, blocks=blocks, ranks=6, rank=5, replicas=2),
            tokens_max=900,
        )

    def _made(self, dimensions: tuple[int, ...], kind: Any) -> Any:
        bytes_ = torch.Size(dimensions).numel() * kind.itemsize
        descriptor = create_memfd("pool", bytes_)
        flat = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=bytes_, dtype=torch.uint8)
        flat.copy_(torch.randint(0, 256, (bytes_,), dtype=torch.uint8))
        self.buffers[flat.data_ptr()] = HostBuffer(descriptor, bytes_)
        return flat.view(kind).view(dimensions)

    def content(self) -> list[bytes]:
        return [os.pread(buffer.descriptor, buffer.bytes, 0) for buffer in self.buffers.values()]

    def in_shards(self, shards: int) -> list[CacheSpec]:
        """The specs of a rank that holds so many head shards."""
        for group in self.config.kv_cache_groups:
            group.kv_cache_spec.num_kv_heads = shards
        kinds = [Group(TOKENS)] * len(self.names)
        return head_shard_specs(self.spec, kinds, self.config, self.caches, here=shards, ranks=2, rank=1, replicas=1)

    def test(self, path: Path, spec: CacheSpec | None = None, beside: Sequence[CacheSpec] = ()) -> str:
        tensors = [[BlockTensor(*part) for part in group] for group in block_tensors(self.config, self.caches)]
        with Client(path, engine="self-test", timeouts=PATIENT) as client:
            return self_test(client, spec or self.spec, tensors, event=lambda: None, beside=beside)

    def close(self) -> None:
        for buffer in self.buffers.values():
            os.close(buffer.descriptor)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def one(*arguments: Any, **named: Any) -> Engine:
        made.append(Engine(*arguments, **named))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


def nothing_is_left(server: Server) -> bool:
    status = server.status()
    left = status.caches, status.chunks, status.stores, status.retrieves, status.leases, status.arena.used_bytes
    return not any(left)


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_come_back_and_the_engine_and_the_server_are_as_before(
    server: Server, make: Callable[..., Engine], shape: str
) -> None:
    engine = make(shape)
    before = engine.content()
    assert engine.test(server.path) == ""
    assert engine.content() == before
    until("the server to forget the test", lambda: nothing_is_left(server))


def test_all_head_shards_of_a_rank_are_tested_together(server: Server, make: Callable[..., Engine]) -> None:
    engine = make("blocks first")
    before = engine.content()
    first, second, third = engine.in_shards(3)
    assert engine.test(server.path, first, [second, third]) == ""
    assert engine.content() == before
    until("the server to forget the test", lambda: nothing_is_left(server))
    with pytest.raises(RequestError, match=r"self-test: layer 0\.a of group 0: block \d+ does not hold the bytes"):
        engine.test(server.path, first, [replace(first, name="twice"), third])
    assert engine.content() == before


def wrong(spec: CacheSpec, change: Callable[[RegionRun], RegionRun]) -> CacheSpec:
    """The same with a planted mistake in the second group's last region."""
    first, second = spec.groups
    *others, last = second.regions
    return replace(spec, groups=[first, changed(second, regions=[*others, change(last)])])


MISTAKES: dict[str, Callable[[RegionRun], RegionRun]] = {
    "stride": lambda run: changed(run, block_stride=run.block_stride - 4, page_bytes=run.page_bytes - 4),
    "offset": lambda run: changed(run, offset=run.offset + 4, page_bytes=run.page_bytes - 4),
    "short page": lambda run: changed(run, page_bytes=run.page_bytes - 4),
    "another group's layer": lambda run: changed(run, buffer=run.buffer - 2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_layout_is_refused_with_layer_and_block(
    server: Server, make: Callable[..., Engine], mistake: str
) -> None:
    engine = make("blocks first")
    before = engine.content()
    with pytest.raises(RequestError, match=r"self-test: layer 1\.[ab] of group 1: block \d+ does not hold the bytes"):
        engine.test(server.path, wrong(engine.spec, MISTAKES[mistake]))
    if mistake in ("short page", "another group's layer"):  # the others also write where nothing was saved
        assert engine.content() == before
    until("the server to forget the test", lambda: nothing_is_left(server))


def test_without_a_server_there_is_no_test(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make("fp8", groups=1)
    before = engine.content()
    assert engine.test(tmp_path / "nobody.sock") == "no server"
    assert engine.content() == before


def test_a_pool_with_few_blocks_is_tested_with_one_chunk_or_not_at_all(
    server: Server, make: Callable[..., Engine]
) -> None:
    assert make("blocks first", groups=1, blocks=7).test(server.path) == ""
    assert make("blocks first", groups=1, blocks=6).test(server.path) == "6 blocks are too few"
