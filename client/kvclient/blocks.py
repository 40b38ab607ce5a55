"""Block ids as the protocol wants them, and stores cut into requests that the server accepts.

What needs the server's knowledge (ids in range, duplicates, leases) is checked there; here only what packing and
cutting rely on.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvclient.values import BlockIds, Blocks, CacheSpec
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES, PLACES_MAX, GroupBlocks, Limits

BLOCK_ID_BYTES = 4
PART_BYTES = 256 << 20
"""Large: within a part blocks are read in the order of memory, without which small pages are slow (parts of 32 MiB
stored pages of 2 KiB at two thirds of the speed). Small against the whole of a long prompt."""
PART_CHUNKS_MAX = 128
"""The server decides over so many chunks in about 3 ms, and answers lookups before it takes the next part."""
PART_FRAME_BYTES = 60 << 10
"""Of keys and block ids: with these the request is short enough for the local connection, on which the parts of a store
arrive in their order."""


class StorePart(NamedTuple):
    """A store, or the part of it that travels in one request."""

    first_chunk: int
    parent: bytes
    keys: bytes
    groups: list[GroupBlocks]

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES


def pack_groups(spec: CacheSpec, groups: Sequence[Blocks | GroupBlocks]) -> list[GroupBlocks]:
    """Checks the shape of the blocks against the cache and packs their ids."""
    if not groups:
        raise RequestError("block-ids", "no group brings any blocks")
    packed = [GroupBlocks(item.group, item.first_block, pack_ids(item.block_ids)) for item in groups]
    for item in packed:
        if not 0 <= item.group < len(spec.groups):
            raise RequestError("group", f"group {item.group} must be in [0, {len(spec.groups)})")
        if item.first_block < 0 or not item.block_ids:
            raise RequestError(
                "block-range",
                f"group {item.group}: first_block={item.first_block} with {len(item.block_ids)} bytes of block ids; "
                "expected a block of the prefix and at least one id",
            )
    if len({item.group for item in packed}) != len(packed):
        raise RequestError("group", f"groups {[item.group for item in packed]} must differ from each other")
    return packed


def pack_ids(ids: BlockIds) -> bytes:
    """Packed little-endian int32. Bytes are taken as packed already."""
    view = _buffer(ids)
    if view is not None and view.itemsize == 1:
        if view.nbytes % BLOCK_ID_BYTES:
            raise RequestError(
                "block-ids", f"{view.nbytes} bytes of block ids; expected a multiple of {BLOCK_ID_BYTES}"
            )
        return view.tobytes()
    if view is not None and view.format == "i" and sys.byteorder == "little":
        return view.tobytes()
    try:
        packed = array("i", ids)
    except (OverflowError, TypeError, NotImplementedError) as problem:
        raise RequestError("block-ids", f"block ids must be integers that fit int32: {problem}") from problem
    assert packed.itemsize == BLOCK_ID_BYTES
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _buffer(ids: BlockIds) -> memoryview | None:
    try:
        return memoryview(ids)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_retrieve(groups: list[GroupBlocks], limits: Limits) -> None:
    """A retrieve cannot be cut: each rank may use its lease once."""
    blocks = _count(groups)
    if blocks > limits.blocks_max:
        raise RequestError(
            "too-large",
            f"a retrieve of {blocks} blocks, the server accepts {limits.blocks_max}; it cannot be cut in two, because "
            "each rank may use a lease once: look up fewer chunks, or use larger blocks",
        )


def cut_store(spec: CacheSpec, store: StorePart, limits: Limits) -> list[StorePart]:
    """The requests of a store whose groups are packed, in chain order; one when it is small.

    A large store is cut although the server would take it whole: while the mover copies one part, the server decides
    over the next, and no single request keeps it from answering lookups."""
    _check_chain(store)
    per_chunk = [spec.chunk_tokens // spec.groups[item.group].block_tokens for item in store.groups]
    _check_whole_chunks(store, per_chunk)
    places = sum(per_chunk) + 2 * len(per_chunk)
    step = min(limits.chunks_max, limits.blocks_max // sum(per_chunk), PLACES_MAX // places)
    if step:
        by_bytes = PART_BYTES // max(1, _chunk_bytes(spec, store.groups, per_chunk))
        by_frame = PART_FRAME_BYTES // (KEY_BYTES + BLOCK_ID_BYTES * sum(per_chunk))
        step = min(step, PART_CHUNKS_MAX, max(1, by_bytes), max(1, by_frame))
    else:
        raise RequestError(
            "too-large", f"one chunk has {sum(per_chunk)} blocks, the server accepts {limits.blocks_max} in a request"
        )
    return [_part(store, per_chunk, start, min(start + step, store.chunks)) for start in range(0, store.chunks, step)]


def _chunk_bytes(spec: CacheSpec, groups: list[GroupBlocks], per_chunk: list[int]) -> int:
    """Bytes of one chunk in the groups that a store brings."""
    return sum(
        blocks * sum(run.regions * run.page_bytes for run in spec.groups[item.group].regions)
        for item, blocks in zip(groups, per_chunk, strict=True)
    )


def check_keys(keys: bytes) -> int:
    """How many keys."""
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or count == 0:
        raise RequestError("keys", f"{len(keys)} bytes of keys; expected at least one key of {KEY_BYTES} bytes")
    return count


def _check_chain(store: StorePart) -> None:
    check_keys(store.keys)
    if store.first_chunk < 0 or len(store.parent) != (KEY_BYTES if store.first_chunk else 0):
        raise RequestError(
            "parent",
            f"first_chunk={store.first_chunk} with a parent of {len(store.parent)} bytes; expected {KEY_BYTES} bytes, "
            "or none for chunk 0",
        )


def _check_whole_chunks(store: StorePart, per_chunk: list[int]) -> None:
    end = store.first_chunk + store.chunks
    for item, blocks_per_chunk in zip(store.groups, per_chunk, strict=True):
        last = item.first_block + len(item.block_ids) // BLOCK_ID_BYTES
        whole = item.first_block % blocks_per_chunk == 0 and last % blocks_per_chunk == 0
        if not whole or item.first_block < store.first_chunk * blocks_per_chunk or last > end * blocks_per_chunk:
            raise RequestError(
                "block-range",
                f"group {item.group}: blocks [{item.first_block}, {last}) must be whole chunks of {blocks_per_chunk} "
                f"blocks inside chunks [{store.first_chunk}, {end})",
            )


def _part(whole: StorePart, per_chunk: list[int], start: int, end: int) -> StorePart:
    """The request for chunks [start, end) of the keys; groups that have nothing there stay away."""
    groups = []
    for item, blocks_per_chunk in zip(whole.groups, per_chunk, strict=True):
        first = max((whole.first_chunk + start) * blocks_per_chunk, item.first_block)
        begin = (first - item.first_block) * BLOCK_ID_BYTES
        stop = ((whole.first_chunk + end) * blocks_per_chunk - item.first_block) * BLOCK_ID_BYTES
        if begin < min(stop, len(item.block_ids)):
            groups.append(GroupBlocks(item.group, first, item.block_ids[begin:stop]))
    parent = whole.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else whole.parent
    return StorePart(whole.first_chunk + start, parent, whole.keys[start * KEY_BYTES : end * KEY_BYTES], groups)


def _count(groups: list[GroupBlocks]) -> int:
    return sum(len(item.block_ids) for item in groups) // BLOCK_ID_BYTES
