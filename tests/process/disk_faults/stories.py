"""The prompts of the disk fault scenarios: a fixed set with shared heads.

They are more than the disk holds, and far more than the arena does."""

import functools
import random
from array import array

from kvclient import chunk_keys
from tests.process.engine import Engine, Group, Prompt, Shape

SHAPE = Shape(
    chunk_tokens=12,
    groups=(
        Group(block_tokens=4, blocks=47, regions=3, page_bytes=3001),
        Group(block_tokens=6, blocks=31, regions=2, page_bytes=1777),
    ),
)
"""Two records per chunk, of 28 KiB and 8 KiB. They lie in different segments, and a kill may come between them."""
ALL_GROUPS = 3
"""Bits of both groups."""
STORIES = 96
FAMILIES = 7
HEAD_CHUNKS = 2


@functools.cache
def story(number: int) -> Prompt:
    """A prompt whose first chunks are those of its family."""
    own = 1 + number % 5
    head = random.Random(number % FAMILIES).randbytes(4 * HEAD_CHUNKS * SHAPE.chunk_tokens)
    tail = random.Random(1000 + number).randbytes(4 * own * SHAPE.chunk_tokens)
    return Prompt(chunk_keys(array("I", head + tail), SHAPE.chunk_tokens))


def bring(engine: Engine, wanted: Prompt, within_s: float) -> int | None:
    """Looks up, retrieves what is found and compares every byte of the pool.

    Returns the chunks that came, or None when the retrieve failed, which is a miss. Raises AssertionError for wrong
    bytes anywhere."""
    found = engine.lookup(wanted)
    if found.lease is None:
        return 0
    held = wanted.head(found.chunks)
    where = engine.place(held)
    engine.pool.spoil(where)
    result = engine.begin_retrieve(found.lease, where, within_s).result(within_s + 20)
    if result.ok:
        engine.pool.expect(held, where)
    else:
        engine.pool.spoil(where)  # anything that arrives from now on is late and shows as wrong bytes
    wrong = engine.pool.wrong()
    assert not wrong, f"{wrong} wrong bytes after a retrieve of {found.chunks} chunks ({result})"
    return found.chunks if result.ok else None


def keep(engine: Engine, whole: Prompt, within_s: float) -> int:
    """Stores the prompt; returns how many chunks the server says it holds."""
    where = engine.place(whole)
    engine.pool.compute(whole, where)
    return engine.begin_store(whole, where, timeout_s=within_s).result(within_s + 20).chunks
