"""A copy engine proves itself before it is trusted: a store and a retrieve through a scratch arena.

Every byte is compared. Then a bit of the arena is flipped, and the next retrieve must find that out.
"""

import os
import select

from kvserver.errors import DeviceError
from kvserver.transfer.native import (
    DONE,
    FAILED,
    SLOT_ALIGN,
    Board,
    Completion,
    CopyEngine,
    CopyGroup,
    Group,
    Run,
    completions,
    create_memfd,
    pack_block_ids,
    pack_slots,
)
from kvserver.wire.orders import JobKind

BLOCKS, PAGE_BYTES, REGIONS = 7, 333, 3
SLOTS = [SLOT_ALIGN, 3 * SLOT_ALIGN]
DEADLINE_MS = 10_000


def self_test() -> None:
    """Raises DeviceError("self-test") when a byte comes back wrong, nothing comes back at all, or a flipped bit goes
    unnoticed."""
    pool_bytes = BLOCKS * PAGE_BYTES * REGIONS
    arena, pool, words = (create_memfd("kvserver-self-test", size) for size in (4 * SLOT_ALIGN, pool_bytes, SLOT_ALIGN))
    engine, board = CopyEngine(arena, 4 * SLOT_ALIGN, 1), Board(words, 8)
    try:
        pattern = os.urandom(pool_bytes)
        os.pwrite(pool, pattern, 0)
        engine.map_board(1, words, 8)
        run = Run(
            buffer=0,
            offset=0,
            regions=REGIONS,
            region_stride=BLOCKS * PAGE_BYTES,
            block_stride=PAGE_BYTES,
            page_bytes=PAGE_BYTES,
        )
        engine.map_cache(1, 1, [pool], [pool_bytes], [Group(blocks_per_chunk=2, blocks=BLOCKS, runs=[run])])
        sums = _run(engine, board, "store", first_block=2, block_ids=[5, 0, 3, 6]).sums
        _run(engine, board, "retrieve", first_block=3, block_ids=[1, 2], sums=sums)
        expected = bytearray(pattern)
        for region in range(REGIONS):
            for source, target in ((0, 1), (3, 2)):
                begin = (region * BLOCKS + source) * PAGE_BYTES
                put = (region * BLOCKS + target) * PAGE_BYTES
                expected[put : put + PAGE_BYTES] = pattern[begin : begin + PAGE_BYTES]
        if os.pread(pool, pool_bytes, 0) != expected:
            raise DeviceError("self-test", f"{engine.backend}: bytes came back wrong")
        _flip_a_bit(arena, SLOTS[1] + PAGE_BYTES // 2)
        _run(engine, board, "retrieve", first_block=3, block_ids=[1, 2], sums=sums, expected=("failed", "digest", [1]))
    finally:
        engine.close()
        board.close()
        for descriptor in (arena, pool, words):
            os.close(descriptor)


def _run(
    engine: CopyEngine,
    board: Board,
    kind: JobKind,
    *,
    first_block: int,
    block_ids: list[int],
    sums: bytes = b"",
    expected: tuple[str, str, list[int]] = ("done", "", []),
) -> Completion:
    """Runs a job with digests. expected: its status, code and wrong shards."""
    word = 3
    generation = board.begin(word)
    ids, slots = pack_block_ids(block_ids), pack_slots(SLOTS)
    copy = CopyGroup(group=0, first_block=first_block, block_ids=ids, slots=slots, sums=sums)
    engine.submit(1, kind, 1, word, generation, [copy], digests=True)
    poll = select.poll()
    poll.register(engine.eventfd, select.POLLIN)
    if not poll.poll(DEADLINE_MS):
        raise DeviceError("self-test", f"{engine.backend}: a {kind} did not end within {DEADLINE_MS} ms")
    os.eventfd_read(engine.eventfd)
    ends = completions(engine, 2)
    state = DONE if expected[0] == "done" else FAILED
    if [(end.status, end.code, end.wrong) for end in ends] != [expected] or board.state(word) != (generation, state):
        raise DeviceError("self-test", f"{engine.backend}: a {kind} ended as {ends}, expected {expected}")
    return ends[0]


def _flip_a_bit(memory: int, at: int) -> None:
    (byte,) = os.pread(memory, 1, at)
    os.pwrite(memory, bytes([byte ^ 4]), at)
