"""Lookups: their results, and that they cost nothing while no server answers."""

import socket
import threading
import time
from pathlib import Path

import pytest

from kvclient import Client, Counters, Found, RequestError, ResourceError, Timeouts
from kvclient.transport.gate import Gate, Link
from kvclient.transport.lane import Lane
from kvserver.wire import messages as wire
from kvserver.wire.codec import encode
from tests.rigs.client_rig import NAMESPACE, QUICK, Rig, keys_of, rig
from tests.rigs.fake_server import LIMITS, WAIT_S, FakeServer, until


def hold_keys(fake: FakeServer, *numbers: int) -> None:
    fake.stored[NAMESPACE] = {keys_of(number) for number in numbers}


def test_hit_brings_the_leading_chunks_and_a_lease_on_them(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        hold_keys(at.fake, 1, 2, 4)
        found = at.client.lookup(NAMESPACE, keys_of(1, 2, 3, 4))
        assert (found.chunks, found.why) == (2, "")
        assert found.lease is not None
        assert (found.lease.chunks, found.lease.incarnation) == (2, 1)
        assert at.client.counters.chunks_found == 2


def test_lease_never_seems_to_live_longer_than_it_does(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        ttl_s = at.fake.limits.lease_ttl_ms / 1000
        began_s = time.monotonic()
        at.fake.before[wire.Lookup] = lambda request: granted.append(time.monotonic())
        granted: list[float] = []
        assert began_s + ttl_s <= at.lease().expires_monotonic_s <= granted[0] + ttl_s


def test_lease_is_asked_for_only_with_enough_chunks(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        hold_keys(at.fake, 1, 2)
        assert at.client.lookup(NAMESPACE, keys_of(1, 2, 3), chunks_wanted_min=3) == Found(2, None, "")


def test_what_may_still_come_is_said_with_what_is_there(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.coming = 3
        wanted = Found(0, None, coming=3)
        assert at.client.lookup(NAMESPACE, keys_of(1, 2, 3)) == wanted
        assert at.client.lookup_async(NAMESPACE, keys_of(1, 2, 3)).result(WAIT_S) == wanted


def test_lookup_and_release_take_the_lane(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.client.release(at.lease())
        assert [door for door, request in at.fake.requests if isinstance(request, wire.Lookup | wire.Release)] == [
            "local",
            "local",
        ]


def test_async_lookup_says_the_same(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        hold_keys(at.fake, 1, 2)
        found = at.client.lookup_async(NAMESPACE, keys_of(1, 2, 3)).result(WAIT_S)
        assert found.chunks == 2
        assert found.lease is not None
        assert at.fake.count(wire.Lookup, "zmq") == 1


def test_async_lookup_without_an_answer_trips_the_breaker(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold |= {wire.Lookup, wire.Status}
        assert at.client.lookup_async(NAMESPACE, keys_of(1), timeout_s=0.02).result(WAIT_S) == Found(0, None, "timeout")
        assert at.client.lookup(NAMESPACE, keys_of(1)) == Found(0, None, "timeout")
        at.fake.wait_for(wire.Lookup)
        assert at.fake.count(wire.Lookup) == 1
        assert at.client.counters.lookups_unserved == 2


def test_async_lookups_beyond_their_bound_are_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.client.ASYNC_LOOKUPS_MAX", 2)
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Lookup)
        running = [at.client.lookup_async(NAMESPACE, keys_of(1)) for _ in range(2)]
        assert at.client.lookup_async(NAMESPACE, keys_of(1)).result(0) == Found(0, None, "busy")
        held = [at.fake.wait_for(wire.Lookup, number) for number in (1, 2)]
        at.fake.hold.clear()
        for request in held:
            at.fake.answer_as_usual(request)
        assert [future.result(WAIT_S).why for future in running] == ["", ""]
        assert at.client.lookup_async(NAMESPACE, keys_of(1)).result(WAIT_S).why == ""


def test_more_keys_than_one_request_takes_are_left_out_at_the_end(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        limit = at.fake.limits.chunks_max
        hold_keys(at.fake, *range(limit + 7))
        assert at.client.lookup(NAMESPACE, keys_of(*range(limit + 7))).chunks == limit
        assert len(at.fake.wait_for(wire.Lookup).keys) == limit * 32


# ---------------------------------------------------------------- no server


def test_absent_server_is_a_miss_and_is_found_when_it_comes(tmp_path: Path) -> None:
    fake = FakeServer(tmp_path / "s")
    with Client(fake.path, timeouts=Timeouts(**QUICK)) as client:
        assert client.lookup(NAMESPACE, keys_of(1)) == Found(0, None, "not-connected")
        assert client.lookup_async(NAMESPACE, keys_of(1)).result(0) == Found(0, None, "not-connected")
        assert not client.connected
        assert not client.wait_connected(0)
        assert client.counters.lookups_unserved == 2
        with fake:
            assert client.wait_connected(WAIT_S)
            assert client.lookup(NAMESPACE, keys_of(1)) == Found(0, None, "")


def test_silent_server_is_asked_once_and_then_left_alone_until_it_answers_a_probe(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        hold_keys(at.fake, 1)
        at.fake.hold |= {wire.Lookup, wire.Status}
        assert at.client.lookup(NAMESPACE, keys_of(1), timeout_s=0.02) == Found(0, None, "timeout")
        assert not at.client.connected
        for _ in range(3):
            assert at.client.lookup(NAMESPACE, keys_of(1)).why == "timeout"
        at.fake.wait_for(wire.Lookup)
        assert at.fake.count(wire.Lookup) == 1
        assert at.client.counters.trips == 1

        probe = at.fake.wait_for(wire.Status)
        at.fake.hold.clear()
        at.fake.answer_as_usual(probe)
        assert at.client.wait_connected(WAIT_S)
        assert at.client.lookup(NAMESPACE, keys_of(1)).chunks == 1
        assert at.client.counters.connects == 1


def test_probe_is_repeated_when_nobody_answers_it(tmp_path: Path) -> None:
    with rig(tmp_path, probe_s=0.01) as at:
        at.fake.hold |= {wire.Lookup, wire.Status}
        at.client.lookup(NAMESPACE, keys_of(1), timeout_s=0.01)
        at.fake.wait_for(wire.Status, 3)
        assert not at.client.connected
        at.fake.hold.clear()
        assert at.client.wait_connected(WAIT_S)


def test_lane_that_closes_is_a_miss_and_is_opened_again(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        hold_keys(at.fake, 1)
        at.fake.close_lanes()
        assert at.client.lookup(NAMESPACE, keys_of(1)).why == "connection-lost"
        assert at.client.wait_connected(WAIT_S)
        assert at.client.lookup(NAMESPACE, keys_of(1)).chunks == 1
        assert at.fake.count(wire.Hello) == 1


def test_lane_that_a_forgotten_session_cannot_open_leads_to_a_new_session(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Lane] = ("request", "session-unknown")
        at.fake.close_lanes()
        assert at.client.lookup(NAMESPACE, keys_of(1)).why == "connection-lost"
        at.fake.wait_for(wire.Hello, 2)
        at.fake.refuse.clear()
        assert at.client.wait_connected(WAIT_S)


def test_lookup_that_waits_when_the_server_goes_ends_then_and_gives_its_lane_back(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Lookup)
        link = at.client._gate.link
        assert link is not None
        why: list[str] = []
        waiting = threading.Thread(target=lambda: why.append(at.client.lookup(NAMESPACE, keys_of(1)).why))
        waiting.start()
        at.fake.wait_for(wire.Lookup)
        at.fake.close_attached()
        waiting.join(WAIT_S)
        assert why == ["connection-lost"]
        assert link.lane._socket.fileno() == -1


def test_caller_that_is_late_to_notice_does_not_undo_a_reconnect() -> None:
    gate = Gate(Counters())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        old, new = (Link(Lane(end), LIMITS, number) for number, end in enumerate((ours, theirs)))
        gate.open(old)
        gate.open(new)
        assert not gate.shut("timeout", old)
        assert gate.link is new
        assert gate.shut("timeout", new)
        assert (gate.link, gate.why) == (None, "timeout")


def test_a_gate_that_is_opened_again_closes_the_lane_before() -> None:
    gate, ends = Gate(Counters()), [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    links = [Link(Lane(ours), LIMITS, 1) for ours, _ in ends]
    for link in links:
        gate.open(link)
    ends[0][1].settimeout(WAIT_S)
    assert ends[0][1].recv(1) == b"", "the end of the first"
    with pytest.raises(BlockingIOError):
        ends[1][1].recv(1, socket.MSG_DONTWAIT)
    gate.shut("over")
    for _, theirs in ends:
        theirs.close()


def test_reply_to_an_interrupted_request_is_skipped(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        hold_keys(at.fake, 1)
        at.fake.before[wire.Lookup] = lambda request: at.fake._send(
            at.fake._asked[request.id], encode(wire.Found(request.id - 1, 77, 5, 1000, 0, ""))
        )
        assert at.client.lookup(NAMESPACE, keys_of(1)).chunks == 1


def test_lease_of_an_interrupted_lookup_is_given_back(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        hold_keys(at.fake, 1)
        at.fake.before[wire.Lookup] = lambda request: at.fake._send(
            at.fake._asked[request.id], encode(wire.Found(1 << 40, 77, 5, 1000, 0, ""))
        )
        found = at.client.lookup(NAMESPACE, keys_of(1))
        assert at.fake.wait_for(wire.Release).lease == 5
        at.fake.before.clear()
        assert found.lease is not None
        at.client.release(found.lease)
        assert at.fake.wait_for(wire.Release, 2).lease == found.lease.number
        assert at.client.connected


def test_lease_that_comes_too_late_is_given_back(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Lookup)
        assert at.client.lookup_async(NAMESPACE, keys_of(1), timeout_s=0.02).result(WAIT_S).why == "timeout"
        request = at.fake.wait_for(wire.Lookup)
        at.fake.answer(request, wire.Found(request.id, 0, 0, 0, 0, ""))
        at.fake.answer(request, wire.Found(request.id, 1, 77, 1000, 0, ""))
        assert at.fake.wait_for(wire.Release).lease == 77
        assert at.client.wait_connected(WAIT_S)
        assert at.client.counters.replies_late == 2
        assert at.fake.count(wire.Release) == 1


def test_frame_that_is_no_reply_is_a_miss(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.raw[wire.Lookup] = b"\x93\xa5found"
        assert at.client.lookup(NAMESPACE, keys_of(1)).why == "connection-lost"
        at.fake.raw.clear()
        assert at.client.wait_connected(WAIT_S)


def test_reply_of_another_kind_is_a_miss(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.before[wire.Lookup] = lambda request: at.fake._send(
            at.fake._asked[request.id], encode(wire.Released(request.id))
        )
        assert at.client.lookup(NAMESPACE, keys_of(1)).why == "frame"


def test_threads_share_the_lane_and_get_their_own_answers(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        hold_keys(at.fake, *range(1, 8))
        wrong: list[tuple[int, int]] = []

        def look(count: int) -> None:
            for _ in range(30):
                found = at.client.lookup(NAMESPACE, keys_of(*range(1, count + 1)))
                if found.chunks != count:
                    wrong.append((count, found.chunks))

        threads = [threading.Thread(target=look, args=(count,)) for count in (1, 3, 4, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert wrong == []


def test_caller_that_gets_no_turn_on_the_lane_misses_without_tripping_the_breaker(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Lookup)
        first = threading.Thread(target=lambda: at.client.lookup(NAMESPACE, keys_of(1)))
        first.start()
        held = at.fake.wait_for(wire.Lookup)
        assert at.client.lookup(NAMESPACE, keys_of(1), timeout_s=0.01) == Found(0, None, "busy")
        assert at.client.connected
        at.fake.answer_as_usual(held)
        first.join(WAIT_S)


# ---------------------------------------------------------------- refusals


def test_full_server_is_a_miss_that_keeps_the_connection(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Lookup] = ("resource", "leases")
        assert at.client.lookup(NAMESPACE, keys_of(1)) == Found(0, None, "leases")
        assert at.client.connected


@pytest.mark.parametrize("way", ["lookup", "lookup_async"])
def test_mistake_of_the_caller_is_raised(tmp_path: Path, way: str) -> None:
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Lookup] = ("request", "keys")
        with pytest.raises(RequestError, match="keys: as the test wants it"):
            _look(at, way, NAMESPACE, keys_of(1))
        assert at.client.connected


@pytest.mark.parametrize("way", ["lookup", "lookup_async"])
@pytest.mark.parametrize(
    ("namespace", "keys", "message"),
    [
        (NAMESPACE[:31], keys_of(1), "31 bytes of namespace; expected a digest of 32 bytes"),
        (NAMESPACE, keys_of(1) + b"x", "33 bytes of keys; expected at least one key of 32 bytes"),
        (NAMESPACE[:31], b"", "31 bytes of namespace"),
    ],
)
def test_wrong_lengths_are_refused_before_anybody_is_asked(
    tmp_path: Path, way: str, namespace: bytes, keys: bytes, message: str
) -> None:
    with rig(tmp_path) as at:
        with pytest.raises(RequestError, match=message):
            _look(at, way, namespace, keys)
        assert at.fake.count(wire.Lookup) == 0


@pytest.mark.parametrize("way", ["lookup", "lookup_async"])
def test_a_prompt_without_a_whole_chunk_is_found_nowhere_and_nobody_is_asked(tmp_path: Path, way: str) -> None:
    with rig(tmp_path) as at:
        assert _look(at, way, NAMESPACE, b"") == Found(0, None, "")
        assert (at.fake.count(wire.Lookup), at.client.counters.lookups) == (0, 0)


# ---------------------------------------------------------------- the other small requests


def test_release_of_an_earlier_servers_lease_asks_nobody(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        lease = at.lease()
        at.client.release(lease._replace(incarnation=99))
        at.client.release(lease)
        assert at.fake.count(wire.Release) == 1


def test_clear_counts_and_status_is_a_document(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        hold_keys(at.fake, 1, 2, 3)
        assert at.client.clear(NAMESPACE) == 3
        assert at.client.status() == {"server": "fake"}


def test_clear_that_is_not_confirmed_is_an_error_and_not_zero(tmp_path: Path) -> None:
    with rig(tmp_path, request_s=0.02) as at:
        at.fake.hold |= {wire.Clear, wire.Status}
        with pytest.raises(ResourceError, match="unreachable: the server does not answer: timeout"):
            at.client.clear(NAMESPACE)
        assert not at.client.connected
        probe = at.fake.wait_for(wire.Status)
        at.fake.hold.clear()
        at.fake.answer_as_usual(probe)
        assert at.client.wait_connected(WAIT_S)
        at.fake.stop()
        until("the client to notice", lambda: not at.client.connected)
        with pytest.raises(ResourceError, match="unreachable: the server does not answer: connection-lost"):
            at.client.clear(NAMESPACE)


def _look(at: Rig, way: str, namespace: bytes, keys: bytes) -> object:
    if way == "lookup":
        return at.client.lookup(namespace, keys)
    return at.client.lookup_async(namespace, keys).result(WAIT_S)
