"""A cache whose namespace comes later: no server sees the cache before, and afterwards it is like any other."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvclient import Cache, Client, RequestError, Timeouts
from kvserver._native import create_memfd
from kvserver.wire import messages as wire
from tests.rigs.client_rig import NAMESPACE, POOL_BYTES, QUICK, chunks, keys_of, spec
from tests.rigs.fake_server import WAIT_S, FakeServer, descriptors_open, until


@contextmanager
def unnamed(path: Path) -> Iterator[tuple[FakeServer, Client, Cache, "Future[bytes]"]]:
    """A connected client with a cache that has no namespace yet."""
    pool = create_memfd("pool", POOL_BYTES)
    namespace: Future[bytes] = Future()
    with FakeServer(path / "s") as fake, Client(fake.path, timeouts=Timeouts(**QUICK)) as client:
        cache = client.register_cache(replace(spec(pool), namespace=b""), namespace=namespace)
        os.close(pool)
        assert client.wait_connected(WAIT_S)
        yield fake, client, cache, namespace
        fake.kill_mover()
    assert client.counters.bugs == 0


def test_it_is_registered_when_its_namespace_is_there(tmp_path: Path) -> None:
    with unnamed(tmp_path) as (fake, client, cache, namespace):
        assert client.store(cache, 0, b"", keys_of(1), chunks(0, 1)).result(WAIT_S).why == "not-registered"
        assert fake.count(wire.Register) == 0
        namespace.set_result(NAMESPACE)
        assert cache.wait_registered(WAIT_S)
        assert fake.wait_for(wire.Register).namespace == NAMESPACE
        assert client.store(cache, 0, b"", keys_of(1), chunks(0, 1)).result(WAIT_S).why == ""


def test_a_server_that_comes_again_hears_of_it_then(tmp_path: Path) -> None:
    with unnamed(tmp_path) as (fake, client, cache, namespace):
        connects = client.counters.connects
        fake.restart()
        until("the next session", lambda: client.counters.connects > connects and client.connected)
        namespace.set_result(NAMESPACE)
        assert cache.wait_registered(WAIT_S)
        fake.restart()
        until("it to be registered again", lambda: fake.count(wire.Register) == 2 and cache.registered)


def test_a_cache_that_is_unregistered_before_its_namespace_comes_is_never_registered(tmp_path: Path) -> None:
    with unnamed(tmp_path) as (fake, client, cache, namespace):
        assert client.unregister(cache).result(WAIT_S)
        namespace.set_result(NAMESPACE)
        pool = create_memfd("pool", POOL_BYTES)
        assert client.register_cache(spec(pool, "other")).wait_registered(WAIT_S)
        os.close(pool)
        assert [item.name for _, item in fake.requests if isinstance(item, wire.Register)] == ["other"]


def test_a_client_that_is_closed_before_keeps_no_descriptor(tmp_path: Path) -> None:
    before = descriptors_open()
    with unnamed(tmp_path) as (_, client, _, namespace):
        client.close()
        namespace.set_result(NAMESPACE)
    assert descriptors_open() <= before


def test_without_a_namespace_the_cache_says_why(tmp_path: Path) -> None:
    with unnamed(tmp_path) as (fake, _, cache, namespace):
        namespace.set_exception(ZeroDivisionError("no digest"))
        with pytest.raises(RequestError, match="no digest"):
            cache.wait_registered(WAIT_S)
        assert fake.count(wire.Register) == 0
