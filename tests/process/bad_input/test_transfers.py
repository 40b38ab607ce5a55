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
from tests.process.bad_input.abuse import BLOCKS, NAMESPACE, POOL_BYTES, STORY, Abuser, Victim, pack, refusal
from tests.process.engine import NAMESPACE as KEEPERS_NAMESPACE
from tests.process.engine import prompt
from tests.process.harness import stopped, until

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
    assert abuser.ask(retrieve) == wire.Retrieved(retrieve.id, 6 * 2 * 129)
    assert abuser.board.state(retrieve.word) == (retrieve.generation, DONE)
    assert _pool(abuser).count(b"\x5a") == 6 * 2 * 129


@pytest.mark.parametrize(
    ("ids", "first_block", "code"),
    [
        (pack([0, 1])[:7], 0, "block-ids"),
        (b"", 0, "block-ids"),
        (pack([0]), -1, "block-range"),
        (pack([0]), 9, "beyond-lease"),
    ],
)
def test_ranges_that_are_wrong_leave_the_lease_usable(abuser: Abuser, ids: bytes, first_block: int, code: str) -> None:
    _fill(abuser, b"\x11")
    lease = abuser.lookup(HELD.keys).lease
    retrieve = abuser.retrieving(lease, [0])
    refusal(abuser.ask(retrieve, groups=[wire.GroupBlocks(0, first_block, ids)]), "request", code)
    assert _pool(abuser) == b"\x11" * POOL_BYTES
    good = abuser.retrieving(lease, range(9))
    assert abuser.ask(good) == wire.Retrieved(good.id, 9 * 2 * 129)


def test_lengths_that_disagree_store_nothing(abuser: Abuser) -> None:
    store = abuser.storing(NEW.keys, range(6))
    for blocks in (range(5), range(3), range(9), [0]):
        groups = [wire.GroupBlocks(0, 0, pack(blocks))]
        refusal(abuser.ask(store, groups=groups, id=abuser.next_id()), "request", "block-range", "chunks [0, 2)")
    refusal(abuser.ask(store, keys=NEW.keys[:-1], id=abuser.next_id()), "request", "keys", "63 bytes of keys")
    assert abuser.lookup(NEW.keys).chunks == 0


# ---------------------------------------------------------------- leases


def test_a_lease_works_once_for_its_own_engine(victim: Victim, abuser: Abuser) -> None:
    found = victim.keeper.lookup(STORY)
    assert found.lease is not None
    stolen = abuser.retrieving(found.lease.number, [0])
    refusal(abuser.ask(stolen), "request", "lease-foreign", "belongs to engine 'keeper'", "not to 'abuser' epoch 1")
    refusal(abuser.ask(wire.Release(abuser.next_id(), found.lease.number)), "request", "lease-foreign")
    victim.keeper.client.release(found.lease)
    lease = abuser.lookup(HELD.keys).lease
    assert isinstance(abuser.ask(abuser.retrieving(lease, [0])), wire.Retrieved)
    refusal(abuser.ask(abuser.retrieving(lease, [0])), "request", "lease-unknown", f"lease {lease} is not held")


def test_two_ranks_use_one_lease_once_each(victim: Victim, abuser: Abuser) -> None:
    with Abuser(victim, engine="pair", ranks=2, rank=0) as one, Abuser(victim, engine="pair", ranks=2, rank=1) as two:
        one.register(), two.register()
        lease = one.lookup(HELD.keys).lease
        assert isinstance(one.ask(one.retrieving(lease, [0])), wire.Retrieved)
        refusal(one.ask(one.retrieving(lease, [0])), "request", "lease-used", "rank 0 has had its last retrieve")
        assert isinstance(two.ask(two.retrieving(lease, [0])), wire.Retrieved)


def test_an_expired_lease_is_refused(victim: Victim, abuser: Abuser) -> None:
    _fill(abuser, b"\x11")
    lease = abuser.lookup(HELD.keys).lease
    until("the lease to expire", lambda: victim.server.status().leases == 0)
    refusal(abuser.ask(abuser.retrieving(lease, range(9))), "request", "lease-unknown", f"lease {lease} is not held")
    assert _pool(abuser) == b"\x11" * POOL_BYTES


def test_keys_that_are_no_chain_are_refused_before_a_byte_moves(abuser: Abuser) -> None:
    assert abuser.ask(abuser.storing(NEW.keys, range(6))).chunks == 2
    _fill(abuser, b"\x11")
    found = abuser.lookup(NEW.key(0) + HELD.key(1))
    assert found.chunks == 2, "bisection does not look at the first key"
    refusal(abuser.ask(abuser.retrieving(found.lease, range(6))), "request", "keys-chain", "are not one chain")
    assert _pool(abuser) == b"\x11" * POOL_BYTES
    abuser.ask(wire.Release(abuser.next_id(), found.lease))


def test_a_lease_is_of_no_use_in_another_namespace(abuser: Abuser) -> None:
    found = abuser.lookup(STORY.keys, KEEPERS_NAMESPACE)
    assert found.chunks == STORY.chunks
    refusal(
        abuser.ask(abuser.retrieving(found.lease, [0])), "request", "lease-namespace", f"cache on {NAMESPACE[:6].hex()}"
    )
    abuser.ask(wire.Release(abuser.next_id(), found.lease))


# ---------------------------------------------------------------- job words


def test_a_word_out_of_range_is_refused(abuser: Abuser) -> None:
    store = abuser.storing(NEW.keys, range(6))
    for word in (-1, wire.BOARD_WORDS, 1 << 40):
        reply = abuser.ask(store, word=word, id=abuser.next_id())
        refusal(reply, "request", "word", f"word={word} must be in [0, {wire.BOARD_WORDS})")


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


# ---------------------------------------------------------------- registrations


def test_registering_twice_is_refused_and_the_first_stays(abuser: Abuser) -> None:
    refusal(abuser.ask(abuser.registration(abuser.pool)), "request", "registered-twice", "'kv'")
    good = abuser.retrieving(abuser.lookup(HELD.keys).lease, range(9))
    assert isinstance(abuser.ask(good), wire.Retrieved)


def test_unregistering_during_a_transfer_ends_the_transfer_first(victim: Victim, abuser: Abuser) -> None:
    with stopped(victim.server.mover_pid()):
        store = abuser.storing(NEW.keys, range(6))
        abuser.send(store)
        unregister = abuser.next_id()
        abuser.send(wire.Unregister(unregister, abuser.cache))
        late = abuser.storing(prompt(944, chunks=2).keys, range(6))
        refusal(abuser.ask(late), "request", "cache-not-mapped", f"cache {abuser.cache} is unmapping")
        again = wire.Unregister(abuser.next_id(), abuser.cache)
        refusal(abuser.ask(again), "request", "unregistered-twice", f"cache {abuser.cache} is being unregistered")
    assert abuser.raw.zmq.receive() == wire.Stored(store.id, 2, 2, 6 * 2 * 129, "")
    assert abuser.raw.zmq.receive() == wire.Unregistered(unregister)
    refusal(abuser.ask(late, id=abuser.next_id()), "request", "cache-unknown", f"has no cache {abuser.cache}")


def test_the_cache_of_another_session_cannot_be_used(victim: Victim, abuser: Abuser) -> None:
    with Abuser(victim, engine="other") as other:
        other.cache = abuser.cache
        for request in (
            other.storing(NEW.keys, range(6)),
            other.retrieving(1, [0]),
            wire.Unregister(other.next_id(), abuser.cache),
        ):
            refusal(other.ask(request), "request", "cache-unknown", f"this session has no cache {abuser.cache}")
