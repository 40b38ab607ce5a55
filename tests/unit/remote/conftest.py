"""Stores for the tests of the contract: a directory, a Valkey, a cluster, object stores and a Mooncake Store."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from kvserver.remote.directory import DirectoryStore
from kvserver.remote.objects.clouds import CloudObjects, Place
from kvserver.remote.objects.store import ObjectStore
from kvserver.remote.store import Store
from kvserver.remote.valkey import Settings, ValkeyStore
from tests.rigs.azure_server import AzureServer
from tests.rigs.mooncake_server import MooncakeServer, open_mooncake
from tests.rigs.s3_server import UNHURRIED, S3Server, s3_store
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


@pytest.fixture(scope="package")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="package")
def azure() -> Iterator[AzureServer]:
    with AzureServer() as server:
        yield server


@pytest.fixture(scope="package")
def mooncake_server() -> Iterator[MooncakeServer]:
    with MooncakeServer() as server:
        yield server


@pytest.fixture
def mooncake(mooncake_server: MooncakeServer) -> MooncakeServer:
    """A store that is empty."""
    mooncake_server.empty()
    return mooncake_server


@pytest.fixture
def lists(request: pytest.FixtureRequest) -> None:
    """Leaves out a store that cannot list names (tests/unit/remote/test_mooncake.py)."""
    if "mooncake" in request.node.callspec.params.values():
        pytest.skip("its client cannot list names")


@pytest.fixture
def memory() -> object:
    """What all stores of a test have in common, and nothing outside of it: one of the library's own stores."""
    return MemoryStore()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a heavy server are left out of `make test`, as those with two of our servers are."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
        if {"s3", "mooncake", "own_mooncake"} & set(getattr(item, "fixturenames", ())) or {
            "s3",
            "azure",
            "opendal",
            "mooncake",
        } & {one for one in parameters if isinstance(one, str)}:
            item.add_marker(pytest.mark.stores)


@pytest.fixture(params=["directory", "valkey", "cluster", "s3", "azure", "memory", "mooncake"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same empty store again and again, as several servers do."""
    opened: list[Store] = []

    def opens() -> Store:
        opened.append(_open(request, tmp_path))
        return opened[-1]

    if request.param == "mooncake":
        request.getfixturevalue("mooncake")
    yield opens
    for store in opened:
        store.close()


@pytest.fixture
def store(opener: Opener) -> Store:
    return opener()


def _open(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return DirectoryStore(str(tmp_path), probe_s=10, bulk_s=20)
    if request.param == "memory":
        return ObjectStore(
            CloudObjects(Place("s3", "memory"), stand_in=request.getfixturevalue("memory")), node="", waits=UNHURRIED
        )
    if request.param == "azure":
        azure: AzureServer = request.getfixturevalue("azure")
        return azure.store(tmp_path.name)
    if request.param == "s3":
        return s3_store(request.getfixturevalue("s3"), tmp_path.name)
    if request.param == "mooncake":
        return open_mooncake(request.getfixturevalue("mooncake"))
    is_cluster = request.param == "cluster"
    if is_cluster:
        addresses = tuple(("127.0.0.1", server.port) for server in request.getfixturevalue("cluster").servers)
    else:
        addresses = (("127.0.0.1", request.getfixturevalue("valkey").port),)
    return ValkeyStore(Settings(addresses, is_cluster=is_cluster, prefix=tmp_path.name, **PATIENT))
