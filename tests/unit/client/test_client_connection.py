"""Connecting, registering and recovering: the client's own actions while servers and movers come and go."""

import errno
import faulthandler
import gc
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from kvclient import Cache, Client, Found, RequestError, ResourceError, Timeouts
from kvclient.base.loop import Lost, Waiter
from kvclient.transport.gate import Backoff
from kvserver._native import create_memfd
from kvserver.wire import messages as wire
from tests.rigs.client_rig import NAMESPACE, POOL_BYTES, QUICK, chunks, keys_of, rig, spec
from tests.rigs.fake_server import WAIT_S, FakeServer, descriptors_open, until


def client_of(fake: FakeServer, **timeouts: float) -> Client:
    return Client(fake.path, timeouts=Timeouts(**{**QUICK, **timeouts}))


# ---------------------------------------------------------------- handshake


def test_client_says_who_it_is(tmp_path: Path) -> None:
    with (
        FakeServer(tmp_path / "s") as fake,
        Client(fake.path, engine="e", epoch=7, ranks=3, rank=2, timeouts=Timeouts(**QUICK)) as client,
    ):
        assert client.wait_connected(WAIT_S)
        hello = fake.wait_for(wire.Hello)
        assert (hello.protocol, hello.engine, hello.epoch, hello.ranks, hello.rank) == (wire.PROTOCOL, "e", 7, 3, 2)
        assert hello.software.startswith("kvclient ")


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("tcp://node:5555", {}, "'tcp://node:5555' must be the path of a Unix socket"),
        ("x" * 102, {}, "has 108 bytes; a Unix socket has at most 107"),
        ("s", {"ranks": 2, "rank": 2, "engine": "e", "epoch": 1}, r"rank=2 of ranks=2; expected -1 <= rank < ranks"),
        ("s", {"ranks": 2, "rank": 1}, "an engine of ranks=2 must name itself: give engine and epoch"),
    ],
)
def test_client_that_cannot_work_is_refused_when_it_is_made(path: str, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Client(path, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("lookup_s", 0.0, "lookup_s=0.0 must be in"), ("backoff_first_s", 2.0, "must not exceed backoff_max_s=1.0")],
)
def test_timeouts_that_make_no_sense_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Timeouts(**{name: value})


def test_server_of_another_protocol_is_named_and_tried_again(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "s") as fake:
        fake.refuse[wire.Hello] = ("request", "protocol")
        with client_of(fake) as client:
            with pytest.raises(RequestError, match="protocol: as the test wants it"):
                client.wait_connected(WAIT_S)
            assert client.problem is not None
            assert client.lookup(NAMESPACE, keys_of(1)) == Found(0, None, "not-connected")
            fake.wait_for(wire.Hello, 3)
            fake.refuse.clear()
            until("the upgrade", lambda: client.connected)
            assert client.problem is None


def test_server_that_speaks_something_else_is_named(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "s") as fake:
        fake.raw[wire.Hello] = b"HTTP/1.1 400 Bad Request"
        with (
            client_of(fake) as client,
            pytest.raises(RequestError, match=f"frame: not a reply of protocol {wire.PROTOCOL}"),
        ):
            client.wait_connected(WAIT_S)


def test_who_begins_to_wait_on_a_session_that_is_lost_is_told_at_once(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        connection = at.client._connection
        session, waiter = connection.session, Waiter()
        assert session is not None
        at.fake.close_attached()
        until("the loss", lambda: session.lost)
        connection.loop.post(lambda: session.tie(waiter))
        until("the waiter to be told", lambda: waiter.settled)
        assert isinstance(waiter.error, Lost)


@pytest.mark.parametrize("lived", ["long", "short"])
def test_pauses_begin_anew_behind_a_session_that_lived_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lived: str
) -> None:
    first_s, max_s = (0.0001, 0.001) if lived == "long" else (0.0001, 86_400.0)
    pauses: list[float] = []

    class Noting(Backoff):
        def next_s(self) -> float:
            pauses.append(self._next_s)
            return min(0.001, super().next_s())

    monkeypatch.setattr("kvclient.transport.connection.Backoff", Noting)
    with FakeServer(tmp_path / "s") as fake, client_of(fake, backoff_first_s=first_s, backoff_max_s=max_s) as client:
        for sessions in range(1, 4):
            until("the session", lambda n=sessions: client.counters.connects == n and client.connected)
            opened_s = time.monotonic()
            until("some life", lambda opened_s=opened_s: time.monotonic() > opened_s + 0.005)
            fake.close_attached()
        until("the last session", lambda: client.counters.connects == 4)
    assert pauses == ([first_s] * 3 if lived == "long" else [first_s, 2 * first_s, 4 * first_s])


def test_a_process_without_descriptors_tries_again_and_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(context: object, kind: int) -> object:
        raise zmq.ZMQError(errno.EMFILE)

    with FakeServer(tmp_path / "s") as fake, client_of(fake) as client:
        assert client.wait_connected(WAIT_S)
        before = len(descriptors_open())
        with monkeypatch.context() as patch:
            patch.setattr("zmq.Context.socket", none_left)
            fake.close_attached()
            until("some attempts", lambda: client.counters.connects_failed > 5)
            until("their descriptors to be closed", lambda: len(descriptors_open()) <= before)
            assert client.problem is None
        assert client.wait_connected(WAIT_S)
        assert client.counters.bugs == 0


def test_server_that_never_answers_hello_is_asked_again_later(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "s") as fake:
        fake.hold.add(wire.Hello)
        with client_of(fake, connect_s=0.02) as client:
            fake.wait_for(wire.Hello, 2)
            assert not client.connected
            fake.hold.clear()
            assert client.wait_connected(WAIT_S)


def test_server_that_goes_in_the_middle_of_the_handshake_is_found_again(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "s") as fake:
        fake.hold.add(wire.Attach)
        with client_of(fake, connect_s=WAIT_S) as client:
            fake.wait_for(wire.Attach)
            fake.hold.clear()
            fake.restart()
            assert client.wait_connected(WAIT_S)


# ---------------------------------------------------------------- recovery


def test_restarted_server_gets_the_caches_again_with_their_memory(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        os.write(at.pool, b"the engine's pool")
        other = at.client.register_cache(spec(at.pool, "other"))
        assert other.wait_registered(WAIT_S)
        lease = at.lease()
        at.restart()
        until("the other cache", lambda: other.registered)
        again = [at.fake.wait_for(wire.Register, number) for number in (3, 4)]
        assert {request.name for request in again} == {"kv", "other"}
        memory = at.fake.descriptors[again[0].buffers[0].descriptor]
        assert os.pread(memory, 17, 0) == b"the engine's pool"
        assert at.client.counters.connects == 2
        assert at.client.store(at.cache, 0, b"", keys_of(1), chunks(0, 1)).result(WAIT_S).chunks == 1
        assert at.client.retrieve(at.cache, lease, chunks(0, 1)).result(0).why == "lease-lost"


@pytest.mark.parametrize("door", ["attached", "zmq", "lane"])
def test_session_that_the_server_forgot_is_opened_again(tmp_path: Path, door: str) -> None:
    with rig(tmp_path) as at:
        lost = wire.Error(0, "request", "session-unknown", "restarted")
        if door == "attached":
            at.fake.close_attached()
        elif door == "zmq":
            at.fake.refuse[wire.Store] = ("request", lost.code)
            result = at.client.store(at.cache, 0, b"", keys_of(1), chunks(0, 1)).result(WAIT_S)
            assert result.why == "session-unknown"
        else:
            at.fake.refuse[wire.Lookup] = at.fake.refuse[wire.Status] = ("request", lost.code)
            assert at.client.lookup(NAMESPACE, keys_of(1)) == Found(0, None, "session-unknown")
        at.fake.wait_for(wire.Register, 2)
        at.fake.refuse.clear()
        at.connected_again(2)
        assert at.client.store(at.cache, 0, b"", keys_of(1), chunks(0, 1)).result(WAIT_S).chunks == 1


def test_calls_between_two_servers_miss_at_once(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        lease = at.lease()
        at.fake.stop()
        until("the client to notice", lambda: not at.client.connected)
        assert at.client.lookup(NAMESPACE, keys_of(1)) == Found(0, None, "connection-lost")
        assert at.client.store(at.cache, 0, b"", keys_of(1), chunks(0, 1)).result(0).why == "connection-lost"
        assert at.client.retrieve(at.cache, lease, chunks(0, 1)).result(0).why == "connection-lost"
        at.client.release(lease)
        with pytest.raises(ResourceError, match="unreachable"):
            at.client.status()
        at.fake.start()
        assert at.client.wait_connected(WAIT_S)


@pytest.mark.parametrize("family", ["device", "resource"])
def test_what_a_server_cannot_do_is_said_in_its_own_words(tmp_path: Path, family: str) -> None:
    """The client's message quotes the server, and does not say that the server fails to answer."""
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Clear] = (family, "disk-clear")
        with pytest.raises(ResourceError, match="disk-clear: as the test wants it"):
            at.client.clear(NAMESPACE)


# ---------------------------------------------------------------- caches


def test_register_carries_the_whole_spec(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        request = at.fake.wait_for(wire.Register)
        wanted = spec(at.pool)
        assert (request.name, request.namespace, request.chunk_tokens) == ("kv", NAMESPACE, 12)
        assert (request.device, request.device_id, request.mode, request.tenant) == ("host", "", "direct", "")
        assert request.buffers == [wire.Buffer(0, b"", POOL_BYTES)]
        assert request.groups == wanted.groups
        assert os.fstat(at.fake.descriptors[0]).st_ino == os.fstat(at.pool).st_ino


def test_cache_may_be_registered_before_there_is_a_server_and_its_descriptor_closed(tmp_path: Path) -> None:
    pool = create_memfd("pool", POOL_BYTES)
    fake = FakeServer(tmp_path / "s")
    with client_of(fake) as client:
        cache = client.register_cache(spec(pool))
        os.close(pool)
        assert not cache.wait_registered(0)
        with fake:
            assert cache.wait_registered(WAIT_S)


def test_longest_prompt_of_the_engine_is_told(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.client.register_cache(replace(spec(at.pool, "long"), tokens_max=131_072)).wait_registered(WAIT_S)
        assert [at.fake.wait_for(wire.Register, number).tokens_max for number in (1, 2)] == [0, 131_072]


@pytest.mark.parametrize("code", ["slot-size", "prompt-size", "namespace-size", "tenant-size"])
def test_server_that_can_never_hold_the_cache_is_told_and_not_asked_again(tmp_path: Path, code: str) -> None:
    """Otherwise an engine would run for weeks without a hit, and only its log would show why."""
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Register] = ("resource", code)
        other = at.client.register_cache(spec(at.pool, "other"))
        with pytest.raises(RequestError, match=code):
            other.wait_registered(WAIT_S)
        assert at.fake.count(wire.Register) == 2
        assert at.client.store(other, 0, b"", keys_of(1), chunks(0, 1)).result(0).why == "not-registered"


def test_refused_cache_raises_what_the_server_said_and_is_not_tried_again_there(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Register] = ("request", "geometry")
        cache = at.client.register_cache(spec(at.pool, "odd"))
        with pytest.raises(RequestError, match="geometry"):
            cache.wait_registered(WAIT_S)
        assert cache.problem is not None
        assert not cache.registered
        assert at.client.store(cache, 0, b"", keys_of(1), chunks(0, 1)).result(0).why == "not-registered"
        at.client.status()
        at.client.status()
        assert at.fake.count(wire.Register) == 2

        at.fake.refuse.clear()
        at.fake.restart()
        until("a server that takes it", lambda: cache.registered)
        assert cache.problem is None


@pytest.mark.parametrize("refusal", [("resource", "caches"), ("device", "mover-lost")])
def test_cache_that_cannot_be_taken_now_is_tried_again(tmp_path: Path, refusal: tuple[str, str]) -> None:
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Register] = refusal
        cache = at.client.register_cache(spec(at.pool, "later"))
        at.fake.wait_for(wire.Register, 4)
        offers = at.fake.count(wire.Offer)
        assert offers == 2 if refusal[0] == "resource" else offers >= 4
        at.fake.refuse.clear()
        assert cache.wait_registered(WAIT_S)


def test_cache_whose_mover_died_is_registered_again(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.kill_mover()
        until("the registration", lambda: at.client.counters.registrations == 2 and at.cache.registered)
        assert at.fake.count(wire.Hello) == 1
        result = at.client.store(at.cache, 0, b"", keys_of(1), chunks(0, 1)).result(WAIT_S)
        assert (result.chunks, at.fake.wait_for(wire.Store).cache) == (1, max(at.fake.caches))


def test_client_that_sees_the_movers_end_before_the_server_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Register] = ("request", "registered-twice")
        at.fake.kill_mover()
        at.fake.wait_for(wire.Register, 4)
        assert at.cache.problem is None
        at.fake.refuse.clear()
        until("the registration", lambda: at.cache.registered)
    assert [line.message for line in caplog.records if line.levelno >= logging.WARNING] == []


def test_registration_that_is_never_answered_costs_the_session(tmp_path: Path) -> None:
    with rig(tmp_path, register_s=0.05) as at:
        at.fake.hold.add(wire.Register)
        cache = at.client.register_cache(spec(at.pool, "slow"))
        at.fake.wait_for(wire.Hello, 2)
        at.fake.hold.clear()
        assert cache.wait_registered(WAIT_S)


def test_unregister_says_when_the_memory_is_let_go(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        number = max(at.fake.caches)
        at.fake.hold.add(wire.Unregister)
        gone = at.client.unregister(at.cache)
        request = at.fake.wait_for(wire.Unregister)
        assert request.cache == number
        assert not gone.done()
        assert not at.cache.registered
        at.fake.answer_as_usual(request)
        assert gone.result(WAIT_S) is True
        with pytest.raises(RequestError, match=r"Cache\('kv', registered=False\) is not registered with this client"):
            at.client.store(at.cache, 0, b"", keys_of(1), chunks(0, 1))
        assert at.client.register_cache(spec(at.pool)).wait_registered(WAIT_S)


def test_unregister_in_the_middle_of_a_registration_undoes_it(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Register)
        cache = at.client.register_cache(spec(at.pool, "brief"))
        request = at.fake.wait_for(wire.Register, 2)
        gone = at.client.unregister(cache)
        at.fake.answer_as_usual(request)
        assert gone.result(WAIT_S) is True
        assert at.fake.count(wire.Unregister) == 1


def test_unregister_while_the_server_is_away_does_not_claim_anything(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.stop()
        until("the client to notice", lambda: not at.client.connected)
        assert at.client.unregister(at.cache).result(WAIT_S) is False
        at.fake.start()
        assert at.client.wait_connected(WAIT_S)
        at.client.status()
        assert at.fake.count(wire.Register) == 1


def test_cache_that_makes_no_sense_is_refused_at_once(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        with pytest.raises(RequestError, match="registered-twice: this client has a cache named 'kv' already"):
            at.client.register_cache(spec(at.pool))
        closed = os.dup(at.pool)
        os.close(closed)
        with pytest.raises(RequestError, match="descriptor: buffers of cache 'bad'"):
            at.client.register_cache(spec(closed, "bad"))


# ---------------------------------------------------------------- the end


def test_close_gives_every_descriptor_back_and_ends_every_call(tmp_path: Path) -> None:
    gc.collect()
    before = descriptors_open()
    fake = FakeServer(tmp_path / "s")
    pool = create_memfd("pool", POOL_BYTES)
    with fake:
        client = client_of(fake)
        cache = client.register_cache(spec(pool))
        assert cache.wait_registered(WAIT_S)
        assert client.wait_connected(WAIT_S)
        fake.restart()
        until("the next session", lambda: client.counters.connects == 2 and client.connected and cache.registered)
        fake.hold.add(wire.Store)
        running = client.store(cache, 0, b"", keys_of(1), chunks(0, 1))
        fake.wait_for(wire.Store)
        client.close()
        client.close()
        assert running.result(0).why == "closed"
        assert client.lookup(NAMESPACE, keys_of(1)) == Found(0, None, "closed")
        assert client.store(cache, 0, b"", keys_of(1), chunks(0, 1)).result(0).why == "closed"
        with pytest.raises(RequestError, match="closed"):
            client.register_cache(spec(pool, "late"))
    os.close(pool)
    gc.collect()
    assert descriptors_open() == before


def test_client_that_is_forgotten_ends_its_session(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "s") as fake:
        client = client_of(fake)
        assert client.wait_connected(WAIT_S)
        assert len(fake._locals) == 2
        loop = client._loop
        del client
        gc.collect()
        assert loop.join(WAIT_S)
        until("the connections to end", lambda: not fake._locals)


def test_waiting_in_a_callback_is_refused_instead_of_hanging(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        seen: list[str] = []
        called = threading.Event()

        def callback(_: object) -> None:
            for call in (at.client.status, at.client.close, lambda: at.client.wait_connected(WAIT_S)):
                try:
                    call()
                except RequestError as error:
                    seen.append(error.code)
            called.set()

        at.fake.hold.add(wire.Lookup)
        at.client.lookup_async(NAMESPACE, keys_of(1)).add_done_callback(callback)
        at.fake.answer_as_usual(at.fake.wait_for(wire.Lookup))
        assert called.wait(WAIT_S)
        assert seen == ["callback"] * 3


def test_forked_child_holds_nothing_open_and_is_told_so(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        session, link, registration = at.client._connection.session, at.client._gate.link, at.cache.registration
        assert session is not None
        assert link is not None
        assert registration is not None
        numbers = (session.local._transport.source, link.lane._socket.fileno(), registration.pidfd)
        ours = {str(number) for number in (*numbers, *at.cache.descriptors)}
        assert len(ours) == 4
        said = said_by_a_child(lambda: _in_the_child(at.client, at.cache, ours, at.fake.path))
        assert said == "forked forked forked True open=[]"
        assert at.client.store(at.cache, 0, b"", keys_of(1), chunks(0, 1)).result(WAIT_S).chunks == 1
        assert at.client.counters.connects == 1


@pytest.mark.parametrize("end", ["mover", "client"])
def test_a_child_forked_while_a_descriptor_is_closed_does_not_close_its_number_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A close lets other threads run. One may open something that gets the number, and fork."""
    close = os.close
    said: list[str] = []
    with rig(tmp_path) as at:
        loop, registration = at.client._loop, at.cache.registration
        assert registration is not None
        awaited = [registration.pidfd if end == "mover" else loop._wake]

        def closes(descriptor: int) -> None:
            close(descriptor)
            if [descriptor] == awaited and threading.current_thread() is loop._thread:
                awaited.clear()
                os.dup2(at.pool, descriptor)
                said.append(said_by_a_child(lambda: os.readlink(f"/proc/self/fd/{descriptor}")))
                close(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "close", closes)
            at.fake.kill_mover() if end == "mover" else at.client.close()
            until("the child", lambda: said)
    assert said == ["/memfd:pool (deleted)"]


def said_by_a_child(say: Callable[[], str]) -> str:
    """What a forked child says: its stacks when it says nothing in time. No test goes on in the child."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stacks:
        child = os.fork()
        if child == 0:
            try:
                faulthandler.dump_traceback_later(2 * WAIT_S, exit=True, file=stacks)
                os.write(writing, say().encode())
            except BaseException:
                os.write(writing, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            said = answer.read()
        os.waitpid(child, 0)
        stacks.seek(0)
        return said or stacks.read().decode()


def _in_the_child(client: Client, cache: Cache, descriptors: set[str], socket: Path) -> str:
    said: list[str] = []
    for call in (
        lambda: client.lookup(NAMESPACE, keys_of(1)),
        lambda: client.store(cache, 0, b"", keys_of(1), chunks(0, 1)),
        client.status,
    ):
        try:
            call()
        except RequestError as error:
            said.append(error.code)
    client.close()
    still = [entry for entry in descriptors_open() if entry.split()[0] in descriptors]
    with Client(socket, timeouts=Timeouts(**QUICK)) as own:
        said.append(str(own.wait_connected(WAIT_S)))
    return f"{' '.join(said)} open={still}"


def test_importing_the_client_imports_no_framework() -> None:
    code = (
        "import sys, kvclient; print([name for name in ('numpy', 'torch', 'asyncio', 'uvloop') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
