"""Which tokens of a retrieve the server had on disk alone, as far as it tells. Arithmetic and nothing else.

A lease says how many of its chunks had to be read from disk, not which. They are taken for its last ones: chunks leave
DRAM from the end of a prompt. It is otherwise where something was stored behind chunks that lay on disk alone, and
while reads are under way, which end in any order. A chunk counts with all its tokens, whichever of its groups is read.

Asked again, a server that has read them meanwhile speaks of no disk, so what it said is kept while a request waits.
Chunks are a bit each here: chunk i is bit i.
"""

from kvclient.values import Lease


def chunks_from_disk(lease: Lease | None) -> int:
    """Bits: what was to be read when the lease was granted."""
    if lease is None:
        return 0
    return (1 << lease.chunks) - (1 << max(0, lease.chunks - lease.chunks_on_disk))


def tokens_within(chunks: int, *, chunk_tokens: int, begin: int, end: int) -> int:
    """How many of the tokens [begin, end) lie in chunks of these bits."""
    if not chunks or begin >= end:
        return 0
    first, last = begin // chunk_tokens, (end - 1) // chunk_tokens
    touched = (chunks >> first) & ((1 << last + 1 - first) - 1)
    before = begin % chunk_tokens if chunks >> first & 1 else 0
    behind = -end % chunk_tokens if chunks >> last & 1 else 0
    return touched.bit_count() * chunk_tokens - before - behind
