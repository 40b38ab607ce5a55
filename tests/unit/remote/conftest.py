"""Stores for the tests of the contract: a directory, a Valkey, and a Valkey cluster of three masters."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvserver.remote.directory import DirectoryStore
from kvserver.remote.store import Store
from kvserver.remote.valkey import Settings, ValkeyStore
from tests.rigs.valkey_server import ValkeyCluster, ValkeyServer

PATIENT = {"probe_s": 10.0, "bulk_s": 20.0, "note_s": 10.0, "connect_s": 10.0}
"""Deadlines that no busy machine passes."""
Opener = Callable[[], Store]


@pytest.fixture(scope="package")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="package")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as servers:
        yield servers


@pytest.fixture(params=["directory", "valkey", "cluster"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same empty store again and again, as several servers do."""
    opened: list[Store] = []

    def opens() -> Store:
        opened.append(_open(request, tmp_path))
        return opened[-1]

    yield opens
    for store in opened:
        store.close()


@pytest.fixture
def store(opener: Opener) -> Store:
    return opener()


def _open(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return DirectoryStore(str(tmp_path), probe_s=10, bulk_s=20)
    is_cluster = request.param == "cluster"
    if is_cluster:
        addresses = tuple(("127.0.0.1", server.port) for server in request.getfixturevalue("cluster").servers)
    else:
        addresses = (("127.0.0.1", request.getfixturevalue("valkey").port),)
    return ValkeyStore(Settings(addresses, is_cluster=is_cluster, prefix=tmp_path.name, **PATIENT))
