"""The tokens of a retrieve that the server had only on disk, as far as it says. Pure arithmetic.

A lease says how many of its chunks had to be read from disk, but not which. They are assumed to be its last chunks,
because chunks leave DRAM from the end of a prompt. This is wrong if later chunks were stored after chunks that were
only on disk, and while reads are under way, which end in any order. A chunk counts with all its tokens, whichever group
is read.

If asked again, the server may have read the chunks by then and report none. So its first report is kept while a request
waits. Chunks are bits here: chunk i is bit i.
"""

from kvclient.values import Lease


def chunks_from_disk(lease: Lease | None) -> int:
    """Bits of the chunks that had to be read from disk when the lease was granted."""
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
