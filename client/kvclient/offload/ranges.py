"""The blocks of a sequence that a retrieve writes or a store reads. Pure arithmetic.

A full group needs every block of a prefix, and a window group the blocks of its last tokens. A state group needs one
block: that of the chunk that ends where the engine goes on.
"""

import math
from collections.abc import Sequence

from kvclient.offload.values import Group, Options, Tables
from kvclient.values import Blocks, Lease
from kvserver.wire.messages import CHUNKS_MAX


def usable_tokens(options: Options, tokens: int) -> int:
    """Most tokens of a sequence that a retrieve can use. The engine needs one token left to compute logits."""
    if not options.is_plain:
        return (tokens - 1) // options.chunk_tokens * options.chunk_tokens
    return tokens if options.engine_steps_back else tokens - 1


def chunks_to_look_up(options: Options, tokens: int) -> int:
    """Whole chunks that can serve usable_tokens(). The last chunk may be used in part."""
    whole = (tokens if options.is_plain else tokens - 1) // options.chunk_tokens
    return min(whole, CHUNKS_MAX)


def is_aligned(options: Options, hbm_tokens: int) -> bool:
    """Whether the engine's own prefix ends at a block boundary. A block that is partly its own must not be written."""
    return all(hbm_tokens % group.block_tokens == 0 for group in options.groups if group.kind != "state")


def next_aligned(options: Options, tokens: int) -> int:
    """First token at or after `tokens` where blocks of all groups begin."""
    unit = math.lcm(*(group.block_tokens for group in options.groups if group.kind != "state"))
    return -(-tokens // unit) * unit


def retrieve_blocks(
    options: Options, tables: Tables, *, hbm_tokens: int, end_tokens: int
) -> tuple[tuple[Blocks, ...], str]:
    """Blocks of tokens [hbm_tokens, end_tokens) that each group needs at end_tokens. Else (), and the reason.

    hbm_tokens is aligned. A window's first blocks may be missing, because engines differ by one in the window's length.
    """
    brought = []
    for index, group in enumerate(options.groups):
        first = _first_needed_token(group, hbm_tokens, end_tokens) // group.block_tokens
        last = -(-end_tokens // group.block_tokens)
        ids = tables[index][first:last]
        if len(ids) != last - first:
            return (), "table-short"
        if group.kind == "window":
            absent = _leading_nulls(ids, options.null_block)
            first, ids = first + absent, ids[absent:]
        if _has_null(ids, options.null_block):
            return (), "null-block"
        if ids:
            brought.append(Blocks(index, first, ids))
    return (tuple(brought), "") if brought else ((), "no-blocks")


def store_blocks(
    options: Options, tables: Tables, *, first_chunk: int, end_chunk: int
) -> tuple[int, tuple[Blocks, ...]]:
    """Blocks for a store of chunks [first_chunk, end_chunk), and its end chunk, which is earlier if a full group lacks
    blocks.

    Window and state groups bring the blocks that the engine still has: whole chunks up to the end.
    """
    end = end_chunk
    for index, group in enumerate(options.groups):
        if group.kind == "full":
            end = _chunks_held(options, index, tables, first_chunk, end)
    brought = []
    for index, group in enumerate(options.groups):
        per_chunk = options.chunk_tokens // group.block_tokens
        ids = tables[index][first_chunk * per_chunk : end * per_chunk]
        if len(ids) < (end - first_chunk) * per_chunk:
            continue
        held = end - first_chunk if group.kind == "full" else _trailing_chunks(ids, per_chunk, options.null_block)
        if held:
            brought.append(Blocks(index, (end - held) * per_chunk, ids[len(ids) - held * per_chunk :]))
    return end, tuple(brought)


def chunks_from_disk(lease: Lease | None) -> int:
    """Bits of the chunks that had to be read from disk when the lease was granted: chunk i is bit i.

    The server says how many, not which. They are taken for the last ones, because chunks leave DRAM from the end of a
    prompt. This is wrong if later chunks were stored after chunks that were only on disk, and while reads are under
    way, which end in any order. A chunk counts with all its tokens, whichever group is read.

    If asked again, the server may have read the chunks by then and report none. So the bits are kept while a request
    waits.
    """
    if lease is None:
        return 0
    return (1 << lease.chunks) - (1 << max(0, lease.chunks - lease.chunks_on_disk))


def tokens_within(chunks: int, *, chunk_tokens: int, begin: int, end: int) -> int:
    """Number of tokens in [begin, end) that lie in the chunks of these bits."""
    if not chunks or begin >= end:
        return 0
    first, last = begin // chunk_tokens, (end - 1) // chunk_tokens
    touched = (chunks >> first) & ((1 << last + 1 - first) - 1)
    before = begin % chunk_tokens if chunks >> first & 1 else 0
    behind = -end % chunk_tokens if chunks >> last & 1 else 0
    return touched.bit_count() * chunk_tokens - before - behind


def _first_needed_token(group: Group, hbm_tokens: int, end_tokens: int) -> int:
    match group.kind:
        case "full":
            return hbm_tokens
        case "window":
            return max(hbm_tokens, end_tokens - group.window_tokens)
        case "state":
            return end_tokens - group.block_tokens


def _chunks_held(options: Options, index: int, tables: Tables, first_chunk: int, end_chunk: int) -> int:
    """The first chunk in [first_chunk, end_chunk) with a block missing in the engine, or end_chunk."""
    per_chunk = options.chunk_tokens // options.groups[index].block_tokens
    ids = tables[index][first_chunk * per_chunk : end_chunk * per_chunk]
    held = ids.index(options.null_block) if _has_null(ids, options.null_block) else len(ids)
    return first_chunk + held // per_chunk


def _has_null(ids: Sequence[int], null_block: int | None) -> bool:
    """Whether a null block is among the ids. A prompt has thousands; all() is more than twice as fast as `in`."""
    return null_block is not None and (not all(ids) if null_block == 0 else null_block in ids)


def _leading_nulls(ids: Sequence[int], null_block: int | None) -> int:
    return next((at for at, block in enumerate(ids) if block != null_block), len(ids))


def _trailing_chunks(ids: Sequence[int], per_chunk: int, null_block: int | None) -> int:
    """Number of whole chunks after the last missing block."""
    if not _has_null(ids, null_block):
        return len(ids) // per_chunk
    behind = next(at for at, block in enumerate(reversed(ids)) if block == null_block)
    return behind // per_chunk
