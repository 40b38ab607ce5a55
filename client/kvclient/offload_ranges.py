"""Which blocks of a sequence are to be written by a retrieve, or read by a store. Arithmetic and nothing else.

A full group needs every block of a prefix, a window group those of its last tokens, a state group one block: that of
the chunk which ends where the engine goes on.
"""

import math
from collections.abc import Sequence

from kvclient.offload_values import Group, Options, Tables
from kvclient.values import Blocks
from kvserver.wire.messages import CHUNKS_MAX


def usable_tokens(options: Options, tokens: int) -> int:
    """The most of a sequence that is of use when it is retrieved: something is left to compute for its logits."""
    if not options.is_plain:
        return (tokens - 1) // options.chunk_tokens * options.chunk_tokens
    return tokens if options.engine_steps_back else tokens - 1


def chunks_to_look_up(options: Options, tokens: int) -> int:
    """Whole chunks that could serve usable_tokens(); where they reach behind it, the last is used in part."""
    whole = (tokens if options.is_plain else tokens - 1) // options.chunk_tokens
    return min(whole, CHUNKS_MAX)


def is_aligned(options: Options, hbm_tokens: int) -> bool:
    """Whether the engine's own prefix ends between blocks: one that is in part its own must not be written."""
    return all(hbm_tokens % group.block_tokens == 0 for group in options.groups if group.kind != "state")


def next_aligned(options: Options, tokens: int) -> int:
    """Where blocks of all groups begin, at `tokens` or behind it."""
    unit = math.lcm(*(group.block_tokens for group in options.groups if group.kind != "state"))
    return -(-tokens // unit) * unit


def retrieve_blocks(
    options: Options, tables: Tables, *, hbm_tokens: int, end_tokens: int
) -> tuple[tuple[Blocks, ...], str]:
    """The blocks of tokens [hbm_tokens, end_tokens) that each group needs at end_tokens, and why they cannot be had.

    hbm_tokens is aligned. A window's first blocks may be absent: engines differ by one in what a window is."""
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
    """Where a store of chunks [first_chunk, end_chunk) has to end for want of blocks of full groups, and its blocks.

    Of window and state groups comes what the engine still has: whole chunks up to the end."""
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


def _first_needed_token(group: Group, hbm_tokens: int, end_tokens: int) -> int:
    match group.kind:
        case "full":
            return hbm_tokens
        case "window":
            return max(hbm_tokens, end_tokens - group.window_tokens)
        case "state":
            return end_tokens - group.block_tokens


def _chunks_held(options: Options, index: int, tables: Tables, first_chunk: int, end_chunk: int) -> int:
    """The first chunk in [first_chunk, end_chunk) of which the engine does not hold all blocks, or end_chunk."""
    per_chunk = options.chunk_tokens // options.groups[index].block_tokens
    ids = tables[index][first_chunk * per_chunk : end_chunk * per_chunk]
    held = ids.index(options.null_block) if _has_null(ids, options.null_block) else len(ids)
    return first_chunk + held // per_chunk


def _has_null(ids: Sequence[int], null_block: int | None) -> bool:
    """Of a long prompt's thousands of blocks, in the scheduler's step: all() is more than twice as fast as in."""
    return null_block is not None and (not all(ids) if null_block == 0 else null_block in ids)


def _leading_nulls(ids: Sequence[int], null_block: int | None) -> int:
    return next((at for at, block in enumerate(ids) if block != null_block), len(ids))


def _trailing_chunks(ids: Sequence[int], per_chunk: int, null_block: int | None) -> int:
    """Whole chunks behind the last block that the engine does not hold."""
    if not _has_null(ids, null_block):
        return len(ids) // per_chunk
    behind = next(at for at, block in enumerate(reversed(ids)) if block == null_block)
    return behind // per_chunk
