"""Jobs that begin in the caller's thread: what leaves there, and what is left to the client's own thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest

from kvclient import Blocks
from kvclient.transport.transports import LocalTransport, ZmqTransport
from tests.rigs.client_rig import Rig, keys_of, rig, start_retrieve, start_store, turns
from tests.rigs.fake_server import WAIT_S, until

T = TypeVar("T")


def senders(monkeypatch: pytest.MonkeyPatch, transport: type) -> list[int]:
    """List of thread ids that grows with each request sent by this kind of transport."""
    threads: list[int] = []
    send = transport.send

    def note_and_send(self: LocalTransport | ZmqTransport, frame: bytes, descriptor: int) -> None:
        threads.append(threading.get_ident())
        send(self, frame, descriptor)

    monkeypatch.setattr(transport, "send", note_and_send)
    return threads


def as_guest(at: Rig, begin: Callable[[], "Future[T]"]) -> T:
    """The result of a job that begins while the client's thread sleeps."""
    loop = at.client._loop
    turns(at)
    until("the client's thread sleeps", lambda: not loop._turn.locked() and not loop._posts and not loop._ready)
    return begin().result(WAIT_S)


def test_a_request_leaves_in_the_thread_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(tmp_path) as at:
        threads = senders(monkeypatch, LocalTransport)
        assert as_guest(at, lambda: start_store(at)).chunks == 2
        assert as_guest(at, lambda: start_retrieve(at)).ok
        assert threads == [threading.get_ident()] * 2


def test_zeromq_is_used_by_the_clients_own_thread_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(tmp_path) as at:
        threads = senders(monkeypatch, ZmqTransport)
        monkeypatch.setattr("kvclient.transport.transports.LOCAL_FRAME_BYTES_MAX", 50)
        assert as_guest(at, lambda: start_store(at)).chunks == 2
        assert as_guest(at, lambda: start_retrieve(at)).ok
        assert as_guest(at, lambda: at.client.lookup_async(bytes(32), keys_of(1))).why == ""
        assert set(threads) == {at.client._loop._thread.ident}


def test_a_loss_that_a_guest_finds_ends_the_session_in_the_clients_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path) as at:
        lease = at.lease()

        def fail(transport: LocalTransport, frame: bytes, descriptor: int) -> None:
            raise ConnectionResetError

        with monkeypatch.context() as broken:
            broken.setattr(LocalTransport, "send", fail)
            stored = as_guest(at, lambda: start_store(at))
            assert (stored.chunks, stored.why) == (0, "connection-lost")
            retrieved = at.client.retrieve(at.cache, lease, [Blocks(0, 1, [9, 8])]).result(WAIT_S)
            assert not retrieved.ok
        at.connected_again(2)
        assert at.client.counters.bugs == 0
        assert as_guest(at, lambda: start_store(at)).chunks == 2
