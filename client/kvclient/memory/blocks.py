"""Block ids in the protocol's form, and jobs cut into requests that the server accepts.

The server checks what needs its knowledge (ids in range, duplicates, leases). This file checks only what packing and
cutting rely on.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvclient.values import CHOSEN_MODES, BlockIds, Blocks, CacheSpec
from kvserver.errors import RequestError
from kvserver.wire.messages import CHUNKS_MAX, KEY_BYTES, PLACES_MAX, GroupBlocks, Limits

BLOCK_ID_BYTES = 4
PART_BYTES = 256 << 20
"""Most bytes in a part of a store. Large, because blocks within a part are read in the order of memory: with parts of
32 MiB, pages of 2 KiB were stored at two thirds of the speed. Small compared with a long prompt."""
HALVED_BYTES = 16 << 20
"""Smallest store of GPU memory that is cut in two although it fits in one part. While the first half is copied, the
server decides over the second; while that is copied, it seals the first."""
PART_CHUNKS_MAX = 128
"""Most chunks in a part. The server decides over so many in about 3 ms, and answers lookups before the next part."""
PART_FRAME_BYTES = 60 << 10
"""Most bytes of keys and block ids in a part. Such a request is short enough for the local connection, on which the
parts of a store arrive in order."""
STREAMED_BYTES = 32 << 20
"""Most bytes in a part of a retrieve from disk. Small, because the last part is copied when the disks have finished."""


class StorePart(NamedTuple):
    """A store, or the part of a store in one request."""

    first_chunk: int
    parent: bytes
    keys: bytes
    groups: list[GroupBlocks]

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES


def pack_groups(spec: CacheSpec, groups: Sequence[Blocks | GroupBlocks]) -> list[GroupBlocks]:
    """Pack the block ids, and check the shape of the blocks against the cache."""
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
    """Ids packed as little-endian int32. Bytes are taken as packed already."""
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


def cut_retrieve(
    spec: CacheSpec,
    groups: list[GroupBlocks],
    limits: Limits,
    *,
    from_disk: bool,
    chunks_here: int = CHUNKS_MAX,
    part_chunks_max: int = CHUNKS_MAX,
) -> list[list[GroupBlocks]]:
    """The requests of a retrieve with packed groups, in chain order. One, if the server takes it whole.

    from_disk: some chunks must still be read. Then it is cut even if the server would take it whole. Each part is
    copied once its chunks are read, while disks read the next part. chunks_here: those after them are still computed,
    and each is a part by itself. part_chunks_max: most chunks that the client can take.
    """
    per_chunk = _blocks_per_chunk(spec, groups)
    per_chunk_all = sum(per_chunk)
    step = min(limits.blocks_max // per_chunk_all, PLACES_MAX // (per_chunk_all + 2 * len(per_chunk)))
    ranges = [_chunk_range(item, blocks) for item, blocks in zip(groups, per_chunk, strict=True)]
    first, end = min(first for first, _ in ranges), max(end for _, end in ranges)
    if not step:
        raise RequestError(
            "too-large", f"one chunk has {per_chunk_all} blocks, the server accepts {limits.blocks_max} in a request"
        )
    if from_disk:
        step = min(step, max(1, STREAMED_BYTES // max(1, _chunk_bytes(spec, groups, per_chunk))))
    step = min(step, part_chunks_max)
    middle = min(max(first, chunks_here), end)
    starts = [*range(first, middle, step), *range(middle, end)]
    parts = (_within(groups, per_chunk, *pair) for pair in pairwise([*starts, end]))
    return [part for part in parts if part]


def cut_store(
    spec: CacheSpec, store: StorePart, limits: Limits, *, part_chunks_max: int = PART_CHUNKS_MAX
) -> list[StorePart]:
    """The requests of a store with packed groups, in chain order. One, if it is small.

    A large store is cut even if the server would take it whole. While the mover copies one part, the server decides
    over the next, and no single request keeps it from answering lookups. GPU memory is copied fast, so there every
    store that is not small has at least two parts.
    """
    _check_chain(store)
    per_chunk = _blocks_per_chunk(spec, store.groups)
    _check_whole_chunks(store, per_chunk)
    places = sum(per_chunk) + 2 * len(per_chunk)
    step = min(limits.chunks_max, limits.blocks_max // sum(per_chunk), PLACES_MAX // places)
    if step:
        chunk_bytes = max(1, _chunk_bytes(spec, store.groups, per_chunk))
        by_bytes = PART_BYTES // chunk_bytes
        by_frame = PART_FRAME_BYTES // (KEY_BYTES + BLOCK_ID_BYTES * sum(per_chunk))
        step = min(step, part_chunks_max, PART_CHUNKS_MAX, max(1, by_bytes), max(1, by_frame))
        is_gpu = spec.device not in CHOSEN_MODES
        if is_gpu and store.chunks <= step and store.chunks * chunk_bytes >= HALVED_BYTES:
            step = -(-store.chunks // 2)
    else:
        raise RequestError(
            "too-large", f"one chunk has {sum(per_chunk)} blocks, the server accepts {limits.blocks_max} in a request"
        )
    return [_part(store, per_chunk, start, min(start + step, store.chunks)) for start in range(0, store.chunks, step)]


def _blocks_per_chunk(spec: CacheSpec, groups: list[GroupBlocks]) -> list[int]:
    return [spec.chunk_tokens // spec.groups[item.group].block_tokens for item in groups]


def _chunk_range(item: GroupBlocks, blocks_per_chunk: int) -> tuple[int, int]:
    """[first, end) of the chunks that the blocks touch."""
    last_block = item.first_block + len(item.block_ids) // BLOCK_ID_BYTES
    return item.first_block // blocks_per_chunk, -(-last_block // blocks_per_chunk)


def _chunk_bytes(spec: CacheSpec, groups: list[GroupBlocks], per_chunk: list[int]) -> int:
    """Bytes of one chunk in these groups."""
    return sum(
        blocks * sum(run.regions * run.page_bytes for run in spec.groups[item.group].regions)
        for item, blocks in zip(groups, per_chunk, strict=True)
    )


def check_keys(keys: bytes) -> int:
    """Number of keys. RequestError if they are no whole keys, or none."""
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
    """The request for chunks [start, end) of the keys, without groups that have no blocks there."""
    groups = _within(whole.groups, per_chunk, whole.first_chunk + start, whole.first_chunk + end)
    parent = whole.keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else whole.parent
    return StorePart(whole.first_chunk + start, parent, whole.keys[start * KEY_BYTES : end * KEY_BYTES], groups)


def _within(groups: list[GroupBlocks], per_chunk: list[int], start: int, end: int) -> list[GroupBlocks]:
    """The blocks in chunks [start, end) of the prefix."""
    found = []
    for item, blocks_per_chunk in zip(groups, per_chunk, strict=True):
        first = max(start * blocks_per_chunk, item.first_block)
        begin = (first - item.first_block) * BLOCK_ID_BYTES
        stop = (end * blocks_per_chunk - item.first_block) * BLOCK_ID_BYTES
        if begin < min(stop, len(item.block_ids)):
            found.append(GroupBlocks(item.group, first, item.block_ids[begin:stop]))
    return found
