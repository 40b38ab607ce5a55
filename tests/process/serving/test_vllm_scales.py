"""FP8 under ATOM's plug-in of vLLM, on layers like ATOM's: a block comes back with its own scales."""

import mmap
import os
import random
from array import array

import pytest

from kvclient import Blocks, Cache, CacheSpec, Client, HostBuffer, chunk_keys
from kvclient.offload.settings import chosen_chunk_tokens
from kvclient.vllm.layout import group_specs, groups_of, layout_of
from kvserver._native import create_memfd
from tests.process.engine import PATIENT
from tests.process.harness import WAIT_S, Server
from tests.rigs.vllm_namespace import namespace
from tests.rigs.vllm_side_tensors import BLOCKS, HEADS, SIZE, TOKENS, bound, config, known
from tests.rigs.vllm_tensors import AtomLayer, Tensor

PROMPT = array("I", random.Random(5).randbytes(4 * 512))
NAMES = ("a", "b")


class Engine:
    """One rank with ATOM's layers. Their tensors' content is in host memory, at other addresses than they report."""

    def __init__(self, server: Server, cache_dtype: str) -> None:
        layers = {name: AtomLayer(cache_dtype) for name in NAMES}
        beside, caches = bound(**layers)
        for layer in layers.values():
            layer.forward()
        described = config(*NAMES)
        found = layout_of(described, caches, known(beside, caches))
        groups = groups_of(described)
        self.chunk_tokens = chosen_chunk_tokens(groups, 0)
        self.namespace = namespace(beside=found.side_tensors)
        self.memory = {each.address: create_memfd("pool", each.bytes) for each in found.allocations}
        self.tensors = [(caches[name], layer.kv_scale) for name, layer in layers.items()]
        self.client = Client(server.path, engine=cache_dtype, timeouts=PATIENT)
        self.cache: Cache = self.client.register_cache(
            CacheSpec(
                name="kv",
                namespace=self.namespace,
                chunk_tokens=self.chunk_tokens,
                buffers=[HostBuffer(self.memory[each.address], each.bytes) for each in found.allocations],
                groups=group_specs(groups, found, blocks=BLOCKS, ranks=1, rank=0, replicas=1),
            )
        )
        assert self.client.wait_connected(WAIT_S)
        assert self.cache.wait_registered(WAIT_S)

    def close(self) -> None:
        self.client.close()
        for descriptor in self.memory.values():
            os.close(descriptor)

    def compute(self, seed: int) -> None:
        """Writes new bytes into all blocks of every tensor."""
        for descriptor in self.memory.values():
            bytes_ = os.fstat(descriptor).st_size
            os.pwrite(descriptor, random.Random(f"{seed} {descriptor}").randbytes(bytes_), 0)

    def scales_of(self, blocks: list[int]) -> list[bytes]:
        """Scales of K and V of each layer, block by block."""
        return [part for _, scales in self.tensors for part in self._parts(scales, blocks, 4 * HEADS * TOKENS)]

    def pages_of(self, blocks: list[int]) -> list[bytes]:
        return [part for cache, _ in self.tensors for part in self._parts(cache, blocks, TOKENS * HEADS * SIZE)]

    def _parts(self, tensor: Tensor, blocks: list[int], page: int) -> list[bytes]:
        with mmap.mmap(self.memory[tensor.data_ptr()], 0) as bytes_:
            return [
                bytes_[at : at + page]
                for half in range(2)
                for block in blocks
                for at in [(half * BLOCKS + block) * page]
            ]


@pytest.fixture
def prefix() -> bytes:
    return chunk_keys(PROMPT, chosen_chunk_tokens(groups_of(config(*NAMES)), 0))


def test_a_block_that_comes_back_has_the_scales_that_it_was_stored_with(server: Server, prefix: bytes) -> None:
    engine = Engine(server, "fp8")
    try:
        blocks = random.Random(7).sample(range(1, BLOCKS), len(PROMPT) // TOKENS)
        engine.compute(1)
        scales, pages = engine.scales_of(blocks), engine.pages_of(blocks)
        stored = engine.client.store(engine.cache, 0, b"", prefix, [Blocks(0, 0, blocks)]).result(WAIT_S)
        assert stored.chunks == len(PROMPT) // engine.chunk_tokens
        engine.compute(2)
        places = random.Random(8).sample(range(1, BLOCKS), len(blocks))
        untouched = [block for block in range(BLOCKS) if block not in places]
        others = engine.scales_of(untouched)
        found = engine.client.lookup(engine.namespace, prefix)
        assert found.lease is not None
        assert engine.client.retrieve(engine.cache, found.lease, [Blocks(0, 0, places)]).result(WAIT_S).ok
        assert engine.pages_of(places) == pages
        assert engine.scales_of(places) == scales
        assert engine.scales_of(untouched) == others
    finally:
        engine.close()


def test_an_engine_without_scales_finds_nothing_of_one_that_has_them(server: Server, prefix: bytes) -> None:
    with_scales, without = Engine(server, "fp8"), Engine(server, "auto")
    try:
        assert with_scales.namespace != without.namespace
        blocks = list(range(1, 1 + len(PROMPT) // TOKENS))
        for engine in (with_scales, without):
            assert engine.client.lookup(engine.namespace, prefix).chunks == 0
            assert engine.client.store(engine.cache, 0, b"", prefix, [Blocks(0, 0, blocks)]).result(WAIT_S).chunks
    finally:
        with_scales.close()
        without.close()
