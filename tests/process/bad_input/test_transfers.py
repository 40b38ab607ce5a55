"""Wrong stores and retrieves, as far as the mover: one typed error each, and no byte moves."""

import mmap
import os
import random
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from kvserver._native import ABANDONED, DONE, FAILED, SUBMITTED
from kvserver.wire import messages as wire
from tests.process.bad_input.abuse import BLOCKS, POOL_BYTES, Abuser, Victim, pack, refusal
from tests.process.engine import prompt
from tests.process.harness import stopped

LEASE_TTL_MS = 2500
HELD, NEW = prompt(941, chunks=3), prompt(942, chunks=2)


@pytest.fixture(scope="module")
def running() -> Iterator[Victim]:
    with Victim(lease_ttl_ms=LEASE_TTL_MS, lease_extended_ms=LEASE_TTL_MS, mover_grace_ms=20_000) as victim:
        yield victim


@pytest.fixture
def victim(running: Victim) -> Iterator[Victim]:
    """A server that must come out of the test unharmed."""
    yield running
    running.unharmed()


@pytest.fixture
def abuser(victim: Victim) -> Iterator[Abuser]:
    """A registered session, with HELD stored from its blocks 0 to 8."""
    with Abuser(victim) as registered:
        registered.register()
        _fill(registered, b"\x5a")
        assert registered.ask(registered.storing(HELD.keys, range(9))).chunks == 3
        yield registered


def _fill(abuser: Abuser, byte: bytes) -> None:
    os.pwrite(abuser.pool, byte * POOL_BYTES, 0)


def _pool(abuser: Abuser) -> bytes:
    return os.pread(abuser.pool, POOL_BYTES, 0)


# ---------------------------------------------------------------- block ids


@pytest.mark.parametrize(
    ("blocks", "code", "says"),
    [
        ([0, 1, 2, 3, 4, BLOCKS], "block-range", f"{BLOCKS}"),
        ([0, 1, 2, 3, 4, (1 << 31) - 1], "block-range", f"{(1 << 31) - 1}"),
        ([0, 1, 2, 3, 4, -1], "block-range", "-1"),
        ([-(1 << 31), 1, 2, 3, 4, 5], "block-range", f"{-(1 << 31)}"),
        ([0, 1, 2, 3, 4, 0], "block-duplicate", "0"),
        ([7, 7, 2, 3, 4, 0], "block-duplicate", "7"),
    ],
)
def test_block_ids_that_are_wrong_move_no_byte(abuser: Abuser, blocks: Sequence[int], code: str, says: str) -> None:
    store = abuser.storing(NEW.keys, blocks)
    refusal(abuser.ask(store), "request", code, says)
    assert abuser.board.state(store.word) == (store.generation, FAILED)
    assert abuser.lookup(NEW.keys).chunks == 0
    _fill(abuser, b"\x11")
    found = abuser.lookup(HELD.keys)
    retrieve = abuser.retrieving(found.lease, blocks)
    refusal(abuser.ask(retrieve), "request", code, says)
    assert abuser.board.state(retrieve.word) == (retrieve.generation, FAILED)
    assert _pool(abuser) == b"\x11" * POOL_BYTES


def test_the_same_blocks_in_range_do_move(abuser: Abuser) -> None:
    """Counterpart of the refusals: with one id less, or another one, the transfer succeeds."""
    _fill(abuser, b"\x11")
    retrieve = abuser.retrieving(abuser.lookup(HELD.keys).lease, [0, 1, 2, 3, 4, BLOCKS - 1])
    assert abuser.ask(retrieve) == wire.Retrieved(retrieve.id, 6 * 2 * 129, wire.ALL_RIGHT)
    assert abuser.board.state(retrieve.word) == (retrieve.generation, DONE)
    assert _pool(abuser).count(b"\x5a") == 6 * 2 * 129


# ---------------------------------------------------------------- job words


def test_a_generation_that_is_not_live_moves_no_byte(abuser: Abuser) -> None:
    """Wrong, over, abandoned or never begun: to the mover the client has given the job up."""
    _fill(abuser, b"\x11")
    used, given_up = abuser.storing(NEW.keys, range(6)), abuser.storing(NEW.keys, range(6))
    assert abuser.board.abandon_store(given_up.word, given_up.generation) == ABANDONED
    refusal(abuser.ask(used, groups=[wire.GroupBlocks(0, 0, pack([0] * 6))]), "request", "block-duplicate")
    for word, generation in (
        (used.word, used.generation),
        (used.word, used.generation + 1),
        (given_up.word, given_up.generation),
        (4000, 0),
        (4000, 1),
    ):
        reply = abuser.ask(used, word=word, generation=generation, id=abuser.next_id())
        assert (reply.chunks, reply.chunks_written, reply.bytes, reply.why) == (0, 0, 0, "abandoned")
        lease = abuser.lookup(HELD.keys).lease
        retrieve = abuser.retrieving(lease, range(9))
        reply = abuser.ask(retrieve, word=word, generation=generation)
        refusal(reply, "device", "abandoned", "gave the job up")
    assert _pool(abuser) == b"\x11" * POOL_BYTES
    assert abuser.lookup(NEW.keys).chunks == 0


def test_a_word_that_two_jobs_share_serves_one_of_them(victim: Victim, abuser: Abuser) -> None:
    with stopped(victim.server.mover_pid()):
        store = abuser.storing(NEW.keys, range(6))
        twin = msgspec.structs.replace(store, id=abuser.next_id(), keys=prompt(943, chunks=2).keys)
        numbers = [abuser.send(store), abuser.send(twin)]
    replies = {reply.id: reply for reply in (abuser.raw.zmq.receive() for _ in numbers)}
    assert sorted(replies[number].why for number in numbers) == ["", "abandoned"]


def test_a_client_that_scribbles_over_its_board_hurts_only_itself(victim: Victim, abuser: Abuser) -> None:
    with mmap.mmap(abuser.raw.board, wire.BOARD_WORDS * 8) as board:
        for state in (0, SUBMITTED, DONE, 77, 255):
            store = abuser.storing(NEW.keys, range(6))
            board[:] = bytes([state]) * (wire.BOARD_WORDS * 8)
            reply = abuser.ask(store)
            assert (reply.chunks, reply.why) == (0, "abandoned")
            victim.serves()
            board[:] = bytes(wire.BOARD_WORDS * 8)


def test_a_board_that_is_scribbled_over_while_copies_run_hurts_only_its_own(victim: Victim, abuser: Abuser) -> None:
    """Each job ends once whatever the words hold, and a store whose word was overwritten is never served in part."""
    over = threading.Event()

    def scribble() -> None:
        chance = random.Random(1)
        with mmap.mmap(abuser.raw.board, wire.BOARD_WORDS * 8) as board:
            while not over.is_set():
                board[8 * chance.randrange(400)] = chance.choice((DONE, ABANDONED, FAILED, 77))

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    try:
        for round_number in range(70):
            store = abuser.storing(prompt(3000 + round_number, chunks=2).keys, range(6))
            assert abuser.ask(store).why in ("", "abandoned")
            reply = abuser.ask(abuser.retrieving(abuser.lookup(HELD.keys).lease, range(9)))
            assert isinstance(reply, wire.Retrieved) or reply.code == "abandoned"
    finally:
        over.set()
        scribbler.join()
