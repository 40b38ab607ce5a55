"""A sizing as a table."""

from collections.abc import Iterator

from kvserver.sizing.run import Sizing

GB = 1e9
WIDTHS = (10, 8, 8, 9, 8, 14, 16, 10, 10)


def render(sizing: Sizing) -> str:
    return "\n".join(_lines(sizing))


def _lines(sizing: Sizing) -> Iterator[str]:
    total = sizing.prompt_tokens
    pools = f"{sizing.workers} workers, {sizing.pool_tokens:,} tokens of HBM each" if sizing.pool_tokens else "no HBM"
    yield (
        f"{sizing.trace}: {sizing.requests:,} requests, {total:,} tokens of {sizing.token_bytes:,} bytes, {pools}, "
        f"chunks of {sizing.chunk_tokens} tokens, {sizing.policy}"
    )
    has_store = sizing.remote_write != "none"
    if sizing.machines > 1 or has_store:
        yield f"{sizing.machines} machines, each with an arena; {_store(sizing) if has_store else 'no store'}"
    yield ""
    head = ["arena, GB", "hit rate", "from HBM", "from DRAM", "computed", "chunks evicted", "stores cut short"]
    head += ["from store", "to it, GB"] if has_store else []
    yield "  ".join(word.rjust(width) for word, width in zip(head, WIDTHS, strict=False))
    for size in sizing.sizes:
        cells = [
            f"{size.arena_bytes / GB:.3f}",
            _percent(size.hbm_tokens + size.server_tokens, total),
            _percent(size.hbm_tokens, total),
            _percent(size.server_tokens, total),
            _percent(size.computed_tokens, total),
            f"{size.evicted_chunks:,}",
            _percent(size.stores_short, size.stores),
        ]
        cells += [_percent(size.remote_tokens, total), f"{size.remote_written_bytes / GB:.3f}"] if has_store else []
        yield "  ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=False))
    yield ""
    if has_store:
        yield "from store: tokens that were read from it into DRAM, where they may be hit more than once."
    if any(size.stores_short for size in sizing.sizes):
        yield (
            "Where stores are cut short, the arena does not hold what is under way at once: it keeps the beginnings of "
            "prompts, and more room need not hit more there."
        )
    yield (
        f"A cache that forgets nothing hits {_percent(sizing.infinite_tokens, total)}; everything that was asked for "
        f"fills {sizing.unique_bytes / GB:.3f} GB."
    )
    yield (
        f"If that is KV in 16 bits: in FP8 a token takes {sizing.token_bytes // 2:,} bytes, so half of each size hits "
        f"the same, and everything fills {sizing.unique_bytes / 2 / GB:.3f} GB."
    )


def _store(sizing: Sizing) -> str:
    size = f"{sizing.remote_bytes / GB:.3f} GB" if sizing.remote_bytes else "without end"
    return f"a store {size}, written as {sizing.remote_write}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
