"""A self-test of a cache's layout: a few blocks go to the server, come back into other blocks, and torch compares them.

torch sees a block as the engine does: as one index of a tensor. The server sees the offsets and strides that layout.py
found. A difference between the two would give requests another block's bytes, so the engine must not start with it.

The content of all blocks used here is saved and put back. The chunks lie in a namespace of their own, which is cleared.
Every rank tests its own memory alone, with a client of its own, so ranks do not wait for each other.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace as changed

from kvclient.client import Client
from kvclient.keys import namespace_digest
from kvclient.transport.caches import Cache
from kvclient.values import Blocks, CacheSpec
from kvserver.errors import KvError, RequestError
from kvserver.wire.messages import KEY_BYTES

CHUNKS = 2
CONNECT_S = 1.0
WAIT_S = 30.0
"""Bound of each wait. A server's first registration starts a process."""
SEED = 7
WORDS: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as the tensor's elements. They are copied bit by bit; floating-point numbers may not be."""


class BlockTensor(NamedTuple):
    """A tensor with the bytes of all blocks of a layer, or a part of them."""

    layer: str
    tensor: Any
    dim: int
    """The dimension that counts blocks, or equal parts of blocks."""

    def block(self, blocks: int, block: int) -> Any:
        """One block as the engine sees it, as integers. A view."""
        part = self.tensor.shape[self.dim] // blocks
        return self.tensor.narrow(self.dim, block * part, part).view(WORDS[self.tensor.element_size()])


def self_test(
    client: Client,
    spec: CacheSpec,
    tensors: Sequence[Sequence[BlockTensor]],
    *,
    event: Callable[[], object],
    beside: Sequence[CacheSpec] = (),
) -> str:
    """Test the layout of a cache that is not registered yet. Returns why there was no test; empty if it passed.

    client: of this test alone, for an engine of one rank. tensors: by group. event, beside: as for Worker.

    RequestError("self-test") if bytes come back wrong, or do not come back.
    """
    try:
        if not client.wait_connected(CONNECT_S):
            return "no server"
    except KvError as problem:
        return str(problem)
    places = _places(spec)
    if places is None:
        return f"{spec.groups[0].blocks} blocks are too few"
    namespace = namespace_digest({"self_test": os.urandom(16).hex()})
    specs = [spec, *beside]
    caches = [
        client.register_cache(_alone(one, namespace, shard=number, shards=len(specs)))
        for number, one in enumerate(specs)
    ]
    try:
        if not all(cache.wait_registered(WAIT_S) for cache in caches):
            return "the server does not register the cache in time"
        with _kept(spec, tensors, places):
            _there_and_back(client, caches, tensors, places, event)
    except RequestError as problem:
        if problem.code == "self-test":
            raise
        if all(cache.registered for cache in caches):
            raise _refusal(str(problem)) from problem
        return str(problem)  # the server refuses the cache itself, and will say so again
    except (KvError, RuntimeError, TimeoutError) as problem:
        raise _refusal(f"{type(problem).__name__}: {problem}") from problem
    finally:
        with suppress(KvError):  # a server that has died in the meantime keeps nothing of an unfinished test in DRAM
            client.clear(namespace)
        leaving = [client.unregister(cache) for cache in caches]
        for left in leaving:
            with suppress(TimeoutError):
                left.result(WAIT_S)
    return ""


class _Places(NamedTuple):
    """Blocks that a test uses, by group, in the order of a prefix."""

    sources: list[list[int]]
    targets: list[list[int]]


def _places(spec: CacheSpec) -> _Places | None:
    """Different blocks for all groups, which may share their memory: the first ones, the last ones, and some between.

    Block 0 is left alone. None if there are too few blocks.
    """
    per_chunk = [spec.chunk_tokens // group.block_tokens for group in spec.groups]
    blocks = min(group.blocks for group in spec.groups)
    for chunks in range(CHUNKS, 0, -1):
        wanted = 2 * chunks * sum(per_chunk)
        if wanted > blocks - 1:
            continue
        ids = [1 + (place * (blocks - 2)) // max(1, wanted - 1) for place in range(wanted)]
        Random(SEED).shuffle(ids)
        rest = iter(ids)
        sources, targets = ([[next(rest) for _ in range(chunks * count)] for count in per_chunk] for _ in range(2))
        return _Places(sources, targets)
    return None


def _alone(spec: CacheSpec, namespace: bytes, *, shard: int, shards: int) -> CacheSpec:
    """The same memory as a shard of an engine of one rank, of which every block is stored and loaded."""
    groups = [
        changed(group, kind="full", window_tokens=0, shards=shards, shard=shard, writers=1, writer=0)
        for group in spec.groups
    ]
    return replace(spec, name=f"self-test {shard}", namespace=namespace, groups=groups, tokens_max=0)


@contextmanager
def _kept(spec: CacheSpec, tensors: Sequence[Sequence[BlockTensor]], places: _Places) -> Iterator[None]:
    """Puts the content of all used blocks back at the end, in the tensors of every group."""
    blocks = min(group.blocks for group in spec.groups)
    views = [
        part.block(blocks, block)
        for group in tensors
        for part in group
        for ids in (*places.sources, *places.targets)
        for block in ids
    ]
    before = [view.cpu().clone() for view in views]
    try:
        yield
    finally:
        for view, was in zip(views, before, strict=True):
            view.copy_(was)


def _there_and_back(
    client: Client,
    caches: Sequence[Cache],
    tensors: Sequence[Sequence[BlockTensor]],
    places: _Places,
    event: Callable[[], object],
) -> None:
    (cache, *beside), spec = caches, caches[0].spec
    blocks = min(group.blocks for group in spec.groups)
    chunks = len(places.sources[0]) * spec.groups[0].block_tokens // spec.chunk_tokens
    random = torch.Generator().manual_seed(SEED)
    wanted = [
        [[_fill(part.block(blocks, block), random) for part in group] for block in ids]
        for group, ids in zip(tensors, places.sources, strict=True)
    ]
    for group, ids in zip(tensors, places.targets, strict=True):
        for block in ids:
            for part in group:
                _fill(part.block(blocks, block), random)
    keys = os.urandom(chunks * KEY_BYTES)
    sources, targets = _blocks(places.sources), _blocks(places.targets)
    stored = client.store(cache, 0, b"", keys, sources, after=event(), beside=beside).result(WAIT_S)
    if stored.chunks != chunks:
        raise _refusal(f"{stored.chunks} of {chunks} chunks were stored ({stored.why})")
    found = client.lookup(spec.namespace, keys, timeout_s=WAIT_S)
    if found.lease is None or found.chunks != chunks:
        raise _refusal(f"{found.chunks} of {chunks} chunks were found ({found.why})")
    loaded = client.retrieve(cache, found.lease, targets, after=event(), beside=beside).result(WAIT_S)
    if not loaded.ok:
        client.release(found.lease)
        raise _refusal(f"the chunks were not loaded ({loaded.why})")
    for number, (group, ids) in enumerate(zip(tensors, places.targets, strict=True)):
        for block, source, patterns in zip(ids, places.sources[number], wanted[number], strict=True):
            for part, pattern in zip(group, patterns, strict=True):
                if not torch.equal(part.block(blocks, block).cpu(), pattern):
                    raise _refusal(
                        f"layer {part.layer} of group {number}: block {block} does not hold the bytes of block {source}"
                    )


def _fill(block: Any, random: Any) -> Any:
    """Fill a block with random bits, and return them."""
    shape = (*block.shape, block.element_size())
    pattern = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random).view(block.dtype).squeeze(-1)
    block.copy_(pattern)
    return pattern


def _blocks(ids: Sequence[Sequence[int]]) -> list[Blocks]:
    return [Blocks(group, 0, blocks) for group, blocks in enumerate(ids)]


def _refusal(what: str) -> RequestError:
    return RequestError(
        "self-test",
        f"{what}; the connector and this engine do not mean the same bytes by a block, or the server cannot reach "
        "them. Start vLLM without this connector",
    )
