"""A copy engine proves itself before it is trusted: a store and a retrieve through a scratch arena, bytes compared."""

import os
import select

from kvserver.errors import DeviceError
from kvserver.transfer.native import DONE, SLOT_ALIGN, Board, CopyEngine, create_memfd, pack_block_ids, pack_slots

BLOCKS, PAGE_BYTES, REGIONS = 7, 333, 3
DEADLINE_MS = 10_000


def self_test() -> None:
    """Raises DeviceError("self-test") when a byte comes back wrong or nothing comes back at all."""
    pool_bytes = BLOCKS * PAGE_BYTES * REGIONS
    arena, pool, words = (create_memfd("kvserver-self-test", size) for size in (4 * SLOT_ALIGN, pool_bytes, SLOT_ALIGN))
    engine, board = CopyEngine(arena, 4 * SLOT_ALIGN, 1), Board(words, 8)
    try:
        pattern = os.urandom(pool_bytes)
        os.pwrite(pool, pattern, 0)
        engine.map_board(1, words, 8)
        run = (0, 0, REGIONS, BLOCKS * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
        engine.map_cache(1, 1, [pool], [pool_bytes], [(2, BLOCKS, [run])])
        slots = pack_slots([SLOT_ALIGN, 3 * SLOT_ALIGN])
        _run(engine, board, "store", [(0, 2, pack_block_ids([5, 0, 3, 6]), slots)])
        _run(engine, board, "retrieve", [(0, 3, pack_block_ids([1, 2]), slots)])
        expected = bytearray(pattern)
        for region in range(REGIONS):
            for source, target in ((0, 1), (3, 2)):
                begin = (region * BLOCKS + source) * PAGE_BYTES
                put = (region * BLOCKS + target) * PAGE_BYTES
                expected[put : put + PAGE_BYTES] = pattern[begin : begin + PAGE_BYTES]
        if os.pread(pool, pool_bytes, 0) != expected:
            raise DeviceError("self-test", f"{engine.backend}: bytes came back wrong")
    finally:
        engine.close()
        board.close()
        for descriptor in (arena, pool, words):
            os.close(descriptor)


def _run(engine: CopyEngine, board: Board, kind: str, groups: list[tuple[int, int, bytes, bytes]]) -> None:
    word = 3
    generation = board.begin(word)
    if kind == "store":
        engine.submit(1, "store", 1, word, generation, groups)
    else:
        engine.submit(1, "retrieve", 1, word, generation, groups)
    poll = select.poll()
    poll.register(engine.eventfd, select.POLLIN)
    if not poll.poll(DEADLINE_MS):
        raise DeviceError("self-test", f"{engine.backend}: a {kind} did not end within {DEADLINE_MS} ms")
    os.eventfd_read(engine.eventfd)
    completions = engine.completions(2)
    if [completion[1] for completion in completions] != ["done"] or board.state(word) != (generation, DONE):
        raise DeviceError("self-test", f"{engine.backend}: a {kind} ended as {completions}")
