"""Stores and retrieves: who owns the blocks, whatever the server, the mover and the clock do."""

import re
import time
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from kvclient import Blocks, Cache, RequestError, RetrieveResult, StoreResult
from kvclient.transport.jobs import SPARE_SHARE, Jobs
from kvclient.transport.transports import LocalTransport
from kvserver._native import ABANDONED, DONE, FAILED, LIVE, SUBMITTED
from kvserver.wire import messages as wire
from tests.rigs.client_rig import (
    BLOCK_BYTES,
    Rig,
    chunks,
    held_retrieve,
    held_store,
    keys_of,
    pass_deadline,
    rig,
    start_retrieve,
    start_store,
    turns,
)
from tests.rigs.fake_server import WAIT_S, until


def overdue_retrieve(at: Rig) -> "tuple[Future[RetrieveResult], wire.Retrieve]":
    """A retrieve that a mover has begun and whose deadline has passed."""
    future, request = held_retrieve(at)
    at.fake.set_word(request, SUBMITTED)
    pass_deadline(at, request)
    until("the deadline", lambda: at.client.counters.retrieves_overdue)
    return future, request


# ---------------------------------------------------------------- both


def test_short_requests_go_by_the_attached_connection(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        assert start_store(at).result(WAIT_S).chunks == 2
        assert start_retrieve(at).result(WAIT_S).ok
        assert (at.fake.count(wire.Store, "local"), at.fake.count(wire.Retrieve, "local")) == (1, 1)


def test_requests_that_are_long_go_by_zeromq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Unix socket may refuse a message that is longer than its buffer."""
    with rig(tmp_path) as at:
        monkeypatch.setattr("kvclient.transport.transports.LOCAL_FRAME_BYTES_MAX", 50)
        assert start_store(at).result(WAIT_S).chunks == 2
        assert (at.fake.count(wire.Store, "zmq"), at.fake.count(wire.Store, "local")) == (1, 0)


def test_a_store_does_not_overtake_the_one_that_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ is the slower path, so a request that follows one still on its way there is sent there as well."""
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Store)
        monkeypatch.setattr("kvclient.transport.transports.LOCAL_FRAME_BYTES_MAX", 50)
        long = at.client.store(at.cache, 0, b"", keys_of(1, 2), chunks(0, 2))
        first = at.fake.wait_for(wire.Store)
        monkeypatch.setattr("kvclient.transport.transports.LOCAL_FRAME_BYTES_MAX", 64 << 10)
        short = at.client.store(at.cache, 2, keys_of(2), keys_of(3), chunks(2, 1))
        second = at.fake.wait_for(wire.Store, 2)
        assert (at.fake.count(wire.Store, "zmq"), second.first_chunk) == (2, 2)
        at.fake.hold.clear()
        for request, future in ((first, long), (second, short)):
            at.fake.answer_as_usual(request)
            assert future.result(WAIT_S).why == ""
        assert at.client.store(at.cache, 3, keys_of(3), keys_of(4), chunks(3, 1)).result(WAIT_S).chunks == 1
        assert at.fake.count(wire.Store, "local") == 1


def test_requests_that_find_the_attached_connection_full_go_by_zeromq(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path) as at:
        lease = at.lease()

        def full(transport: LocalTransport, frame: bytes, descriptor: int) -> None:
            raise BlockingIOError

        monkeypatch.setattr(LocalTransport, "send", full)
        assert at.client.retrieve(at.cache, lease, [Blocks(0, 1, [9, 8])]).result(WAIT_S).ok
        assert (at.fake.count(wire.Retrieve, "zmq"), at.client.counters.retrieves_failed) == (1, 0)


# ---------------------------------------------------------------- store


def test_store_says_what_is_held(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        assert start_store(at).result(WAIT_S) == StoreResult(2, 2, 14, "")
        request = at.fake.wait_for(wire.Store)
        assert (request.first_chunk, request.parent, request.keys) == (0, b"", keys_of(1, 2))
        assert request.groups == [wire.GroupBlocks(0, 0, bytes(b for n in range(6) for b in (n, 0, 0, 0)))]
        assert 0 < request.deadline_ms <= WAIT_S * 1000
        assert at.client.counters.chunks_stored == 2


def test_store_of_nothing_is_done_and_nobody_is_asked(tmp_path: Path) -> None:
    """A prompt that is shorter than a chunk has no keys."""
    with rig(tmp_path) as at:
        assert at.client.store(at.cache, 0, b"", b"", [Blocks(0, 0, [])]).result(0) == StoreResult(0, 0, 0, "")
        with pytest.raises(RequestError, match="0 bytes of keys"):
            at.client.store(at.cache, 0, b"", b"", [Blocks(0, 0, [1, 2, 3])])
        assert (at.fake.count(wire.Store), at.client.counters.stores) == (0, 0)


def test_store_of_a_full_server_is_short(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.chunks_stored_max = 1
        assert start_store(at).result(WAIT_S) == StoreResult(1, 1, 7, "full")
        assert at.client.counters.stores_short == 1


def test_store_that_needs_no_copy_gives_its_word_back(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        future, request = held_store(at)
        assert at.fake.word(request) == (1, LIVE)
        at.fake.answer(request, wire.Stored(request.id, 2, 0, 0, ""))
        assert future.result(WAIT_S) == StoreResult(2, 0, 0, "")
        assert at.fake.word(request) == (1, ABANDONED)


@pytest.mark.parametrize("state", [LIVE, SUBMITTED])
def test_store_without_an_answer_is_abandoned_at_its_deadline(tmp_path: Path, state: int) -> None:
    with rig(tmp_path) as at:
        future, request = held_store(at)
        at.fake.set_word(request, state)
        pass_deadline(at, request)
        assert future.result(WAIT_S) == StoreResult(0, 0, 0, "timeout")
        assert at.fake.word(request) == (1, ABANDONED)


def test_store_whose_bytes_were_taken_in_time_claims_no_count(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        future, request = held_store(at)
        at.fake.set_word(request, DONE)
        pass_deadline(at, request)
        assert future.result(WAIT_S) == StoreResult(0, 0, 0, "late")
        assert at.fake.word(request) == (1, DONE)


def test_late_answer_is_dropped(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Store)
        future = start_store(at, timeout_s=0.02)
        request = at.fake.wait_for(wire.Store)
        assert future.result(WAIT_S).why == "timeout"
        at.fake.answer(request, wire.Stored(request.id, 2, 2, 14, ""))
        until("the late reply", lambda: at.client.counters.replies_late == 1)
        assert at.client.wait_connected(WAIT_S)
        at.fake.hold.clear()
        assert start_store(at).result(WAIT_S) == StoreResult(2, 2, 14, "")


def test_store_in_flight_is_abandoned_when_the_server_goes(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        future, request = held_store(at)
        at.fake.set_word(request, SUBMITTED)
        at.fake.restart()
        assert future.result(WAIT_S) == StoreResult(0, 0, 0, "connection-lost")
        assert at.fake.word(request) == (1, ABANDONED)


def test_large_store_is_cut_in_chain_order(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.limits = wire.Limits(100, 7, 5, 1000)
        at.restart()
        groups = [Blocks(0, 6, list(range(15)))]
        result = at.client.store(at.cache, 2, keys_of(9), keys_of(1, 2, 3, 4, 5), groups).result(WAIT_S)
        assert result == StoreResult(5, 5, 35, "")
        sent = [at.fake.wait_for(wire.Store, number) for number in (1, 2, 3)]
        assert [(part.first_chunk, part.parent, part.keys) for part in sent] == [
            (2, keys_of(9), keys_of(1, 2)),
            (4, keys_of(2), keys_of(3, 4)),
            (6, keys_of(4), keys_of(5)),
        ]
        assert [(part.groups[0].first_block, len(part.groups[0].block_ids) // 4) for part in sent] == [
            (6, 6),
            (12, 6),
            (18, 3),
        ]


def test_cut_store_stops_at_the_first_part_that_is_short(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.limits = wire.Limits(2, 100, 3, 1000)  # three jobs: none to spare for a second part
        at.fake.chunks_stored_max = 1
        at.restart()
        result = at.client.store(at.cache, 0, b"", keys_of(1, 2, 3, 4), chunks(0, 4)).result(WAIT_S)
        assert result == StoreResult(1, 1, 7, "full")
        turns(at)
        assert at.fake.count(wire.Store) == 1


# ---------------------------------------------------------------- retrieve


def test_retrieve_of_a_range_that_starts_and_ends_inside_chunks(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        assert start_retrieve(at).result(WAIT_S) == RetrieveResult(True, 5 * BLOCK_BYTES, "")
        request = at.fake.wait_for(wire.Retrieve)
        assert request.groups == [wire.GroupBlocks(0, 1, bytes(b for n in (9, 8, 7, 6, 5) for b in (n, 0, 0, 0)))]


def test_retrieve_that_nobody_began_ends_at_its_deadline(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Retrieve)
        future = start_retrieve(at, timeout_s=0.02)
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "timeout")
        assert at.fake.word(at.fake.wait_for(wire.Retrieve)) == (1, ABANDONED)
        assert at.client.counters.retrieves_overdue == 0


@pytest.mark.parametrize(
    ("state", "result"),
    [(DONE, RetrieveResult(True, 5 * BLOCK_BYTES, "")), (FAILED, RetrieveResult(False, 0, "timeout"))],
)
def test_begun_retrieve_stays_open_after_its_deadline_until_its_word_ends(
    tmp_path: Path, state: int, result: RetrieveResult
) -> None:
    with rig(tmp_path) as at:
        future, request = overdue_retrieve(at)
        at.client.wait_connected(WAIT_S)
        turns(at)
        assert not future.done()
        at.fake.set_word(request, state)
        assert future.result(WAIT_S) == result


def test_begun_retrieve_stays_open_after_its_deadline_until_its_mover_is_gone(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        future, _ = overdue_retrieve(at)
        at.client.wait_connected(WAIT_S)
        turns(at)
        assert not future.done()
        at.fake.kill_mover()
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "timeout")


@pytest.mark.parametrize("end", ["word", "mover"])
def test_begun_retrieve_stays_open_when_the_server_goes(tmp_path: Path, end: str) -> None:
    with rig(tmp_path) as at:
        future, request = held_retrieve(at)
        at.fake.set_word(request, SUBMITTED)
        at.restart()
        turns(at)
        assert not future.done()
        if end == "word":
            at.fake.set_word(request, DONE)
            assert future.result(WAIT_S) == RetrieveResult(True, 5 * BLOCK_BYTES, "")
        else:
            at.fake.kill_mover()
            assert future.result(WAIT_S) == RetrieveResult(False, 0, "connection-lost")


def test_begun_retrieve_outlives_close(tmp_path: Path) -> None:
    with rig(tmp_path, close_s=0.05) as at:
        at.fake.hold.add(wire.Retrieve)
        future = start_retrieve(at)
        at.fake.set_word(at.fake.wait_for(wire.Retrieve), SUBMITTED)
        at.client.close()
        assert not future.done()
        at.fake.kill_mover()
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "closed")
        assert at.client._loop.join(WAIT_S)


def test_servers_word_alone_does_not_hand_blocks_back(tmp_path: Path) -> None:
    """The server's reply says that the mover is lost; only the pidfd proves it."""
    with rig(tmp_path) as at:
        future, request = held_retrieve(at)
        at.fake.set_word(request, SUBMITTED)
        at.fake.answer(request, wire.Error(request.id, "device", "mover-lost", "signal 9"))
        until("the reply", lambda: at.client.counters.retrieves_overdue)
        turns(at)
        assert not future.done()
        at.fake.kill_mover()
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "mover-lost")


def test_retrieved_without_the_words_consent_is_doubted(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        future, request = held_retrieve(at)
        at.fake.answer(request, wire.Retrieved(request.id, 240, wire.ALL_RIGHT))
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "doubt")


def test_failed_job_is_a_value(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        future, request = held_retrieve(at)
        at.fake.set_word(request, FAILED)
        at.fake.answer(request, wire.Error(request.id, "device", "pool-shrunk", "truncated"))
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "pool-shrunk")
        assert at.client.connected


def test_mistake_of_the_caller_is_an_exception(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Retrieve] = ("request", "beyond-lease")
        at.fake.refuse[wire.Store] = ("request", "block-duplicate")
        with pytest.raises(RequestError, match="beyond-lease"):
            start_retrieve(at).result(WAIT_S)
        with pytest.raises(RequestError, match="block-duplicate"):
            start_store(at).result(WAIT_S)


ROW = r"^\| `([a-z-]+)` \| ([^|]*\b(?:Store|Retrieve)\b[^|]*) \|.*\| (?:treat as a miss|register again) \|$"
MISSES = re.findall(ROW, (Path(__file__).parents[3] / "docs" / "PROTOCOL.md").read_text(), re.MULTILINE)
"""(code, requests) of the refusals that clients treat as a miss."""


@pytest.mark.parametrize(("code", "on"), MISSES)
def test_a_refusal_that_the_protocol_calls_a_miss_is_a_value(tmp_path: Path, code: str, on: str) -> None:
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Retrieve] = at.fake.refuse[wire.Store] = ("request", code)
        assert start_retrieve(at).result(WAIT_S) == RetrieveResult(False, 0, code)
        if "Store" in on:
            assert start_store(at).result(WAIT_S) == StoreResult(0, 0, 0, code)


def test_the_protocol_calls_some_refusals_a_miss() -> None:
    assert {code for code, _ in MISSES} >= {"lease-unknown", "lease-used", "cache-unknown"}


def test_lease_of_an_earlier_server_is_lost_without_asking(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        lease = at.lease()._replace(incarnation=99)
        assert at.client.retrieve(at.cache, lease, chunks(0, 1)).result(0) == RetrieveResult(False, 0, "lease-lost")
        turns(at)
        assert at.fake.count(wire.Retrieve) == 0


def test_a_lease_is_not_used_in_a_later_life_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have restarted while the job waited for the event after which its blocks are free."""
    with rig(tmp_path) as at:
        lease = at.lease()

        async def happened(jobs: Jobs, cache: Cache, after: object, due_s: float) -> str:
            assert cache.registration is not None
            session = cache.registration.session
            later = msgspec.structs.replace(session.welcome, incarnation=lease.incarnation + 1)
            monkeypatch.setattr(session, "welcome", later)
            return ""

        monkeypatch.setattr(Jobs, "_happened", happened)
        future = at.client.retrieve(at.cache, lease, chunks(0, 1))
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "lease-lost")
        assert at.fake.count(wire.Retrieve) == 0


# ---------------------------------------------------------------- both


def jobs_in_flight_max(limit: int) -> int:
    """The client reserves a share of the server's limit for further parts of running stores."""
    return limit - limit // SPARE_SHARE


def test_jobs_beyond_the_servers_limit_are_busy_at_once(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Store)
        running = [start_store(at) for _ in range(jobs_in_flight_max(at.fake.limits.jobs_max))]
        assert start_store(at).result(0) == StoreResult(0, 0, 0, "busy")
        assert start_retrieve(at).result(0) == RetrieveResult(False, 0, "busy")
        for number in range(1, len(running) + 1):
            at.fake.answer_as_usual(at.fake.wait_for(wire.Store, number))
        assert [future.result(WAIT_S).chunks for future in running] == [2] * len(running)
        at.fake.hold.clear()
        assert start_store(at).result(WAIT_S).chunks == 2


def test_callback_of_a_job_may_start_the_next(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Store)
        running = [start_store(at) for _ in range(jobs_in_flight_max(at.fake.limits.jobs_max))]
        chained: list[Future[StoreResult]] = []
        running[0].add_done_callback(lambda _: chained.append(start_store(at)))
        first = at.fake.wait_for(wire.Store)
        at.fake.hold.clear()
        at.fake.answer_as_usual(first)
        running[0].result(WAIT_S)
        assert until("the callback", lambda: chained)[0].result(WAIT_S).chunks == 2


def test_word_of_a_running_job_is_never_used_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.transport.session.BOARD_WORDS", 2)
    with rig(tmp_path) as at:
        future, overdue = overdue_retrieve(at)
        at.client.wait_connected(WAIT_S)
        for _ in range(3):
            assert start_store(at).result(WAIT_S).chunks == 2
        words = [at.fake.wait_for(wire.Store, number) for number in (1, 2, 3)]
        assert {request.word for request in words} == {1 - overdue.word}
        assert [request.generation for request in words] == [1, 2, 3]

        at.fake.hold.add(wire.Store)
        begun = start_store(at)
        at.fake.wait_for(wire.Store, 4)
        assert start_store(at).result(WAIT_S) == StoreResult(0, 0, 0, "busy")
        at.fake.set_word(overdue, FAILED)
        future.result(WAIT_S)
        at.fake.hold.clear()
        assert start_store(at).result(WAIT_S).chunks == 2
        assert at.fake.wait_for(wire.Store, 5).word == overdue.word
        at.fake.answer_as_usual(at.fake.wait_for(wire.Store, 4))
        assert begun.result(WAIT_S).chunks == 2


def test_word_of_a_retrieve_whose_mover_died_can_be_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.transport.session.BOARD_WORDS", 1)
    with rig(tmp_path) as at:
        future, _ = overdue_retrieve(at)
        at.fake.kill_mover()
        assert not future.result(WAIT_S).ok
        until("the registration", lambda: at.client.counters.registrations == 2 and at.cache.registered)
        assert at.client.wait_connected(WAIT_S)
        assert start_store(at).result(WAIT_S).chunks == 2
        assert at.fake.wait_for(wire.Store).generation == 2


def test_job_cannot_be_cancelled_while_its_blocks_are_busy(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Store)
        future = start_store(at)
        assert not future.cancel()
        at.fake.answer_as_usual(at.fake.wait_for(wire.Store))
        assert future.result(WAIT_S).chunks == 2


def test_deadline_of_a_job_does_not_trip_the_breaker_while_the_server_talks(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        future, request = held_retrieve(at)
        turns(at)
        pass_deadline(at, request)
        assert future.result(WAIT_S).why == "timeout"
        assert at.client.connected
        assert (at.client.counters.timeouts, at.client.counters.trips) == (1, 0)


def test_what_the_server_said_long_before_the_deadline_does_not_count(tmp_path: Path) -> None:
    with rig(tmp_path, probe_s=0.01) as at:
        future, request = held_retrieve(at)
        turns(at)
        until("that to be long ago", lambda: time.monotonic() > at.session.heard_s + 0.01)
        pass_deadline(at, request)
        assert future.result(WAIT_S).why == "timeout"
        assert at.client.counters.trips == 1


def test_deadline_of_a_job_trips_the_breaker(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold |= {wire.Store, wire.Status}
        assert start_store(at, timeout_s=0.02).result(WAIT_S).why == "timeout"
        assert at.client.lookup(bytes(32), keys_of(1)).why == "timeout"
        assert start_store(at).result(0).why == "timeout"
        at.fake.wait_for(wire.Store)
        assert at.fake.count(wire.Store) == 1
        at.fake.hold.clear()
        at.fake.answer_as_usual(at.fake.wait_for(wire.Status))
        assert at.client.wait_connected(WAIT_S)


@pytest.mark.parametrize(
    ("chain", "blocks", "message"),
    [
        ((0, keys_of(9), keys_of(1)), [Blocks(0, 0, [1, 2, 3])], "first_chunk=0 with a parent of 32 bytes"),
        ((1, b"", keys_of(1)), [Blocks(0, 3, [1, 2, 3])], "first_chunk=1 with a parent of 0 bytes; expected 32"),
        ((0, b"", keys_of(1)[:9]), [Blocks(0, 0, [1, 2, 3])], "9 bytes of keys"),
        ((0, b"", keys_of(1)), [Blocks(0, 0, [1, 2])], r"blocks \[0, 2\) must be whole chunks of 3 blocks"),
        ((0, b"", keys_of(1)), [Blocks(0, 3, [1, 2, 3])], r"blocks \[3, 6\) must be whole chunks .* chunks \[0, 1\)"),
        ((0, b"", keys_of(1)), [Blocks(1, 0, [1, 2, 3])], r"group 1 must be in \[0, 1\)"),
        ((0, b"", keys_of(1)), [Blocks(0, 0, [1, 2, 3])] * 2, r"groups \[0, 0\] must differ"),
        ((0, b"", keys_of(1)), [], "no group brings any blocks"),
        ((0, b"", keys_of(1)), [Blocks(0, 0, [])], "0 bytes of block ids"),
        ((0, b"", keys_of(1)), [Blocks(0, 0, [1, 2, 2**31])], "must be integers that fit int32"),
    ],
)
def test_store_that_makes_no_sense_is_refused_before_anybody_is_asked(
    tmp_path: Path, chain: tuple[int, bytes, bytes], blocks: list[Blocks], message: str
) -> None:
    with rig(tmp_path) as at:
        with pytest.raises(RequestError, match=message):
            at.client.store(at.cache, *chain, blocks)
        assert at.fake.count(wire.Store) == 0
        assert start_store(at).result(WAIT_S).chunks == 2


def test_unexpected_error_in_the_clients_thread_is_a_miss_and_a_new_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path, bugs=2) as at:
        with monkeypatch.context() as patch:
            patch.setattr("kvclient.transport.jobs._patience_ms", lambda due_s: 1 // 0)
            assert start_store(at).result(WAIT_S) == StoreResult(0, 0, 0, "client-bug")
            at.fake.wait_for(wire.Hello, 2)
            assert at.cache.wait_registered(WAIT_S)
            at.connected_again(2)
            assert start_retrieve(at).result(WAIT_S) == RetrieveResult(False, 0, "client-bug")
        at.fake.wait_for(wire.Hello, 3)
        at.connected_again(3)
        assert start_store(at).result(WAIT_S).chunks == 2


def test_a_retrieve_with_wrong_bytes_tells_how_many_chunks_are_right(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        future, request = held_retrieve(at)
        at.fake.set_word(request, FAILED)
        at.fake.answer(request, wire.Retrieved(request.id, 0, 1))
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "digest", 1)


def test_the_first_part_that_failed_tells_how_many_chunks_are_right(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.limits = wire.Limits(100, 3, 16, 1000)  # one chunk a part, and three parts at a time
        at.restart()
        at.fake.hold.add(wire.Retrieve)
        future = at.client.retrieve(at.cache, at.lease(3), chunks(0, 3))
        first, second, third = [at.fake.wait_for(wire.Retrieve, number) for number in (1, 2, 3)]
        for request, wrong_from in ((third, 2), (second, 1)):
            at.fake.set_word(request, FAILED)
            at.fake.answer(request, wire.Retrieved(request.id, 0, wrong_from))
        at.fake.set_word(first, DONE)
        at.fake.answer(first, wire.Retrieved(first.id, 11, wire.ALL_RIGHT))
        assert future.result(WAIT_S) == RetrieveResult(False, 3 * BLOCK_BYTES, "digest", 1)
