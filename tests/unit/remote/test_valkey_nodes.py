"""Which node of a cluster has which keys."""

import random

import pytest
from glide_sync import GlideClusterClient

from kvserver.remote.valkey import Settings, ValkeyStore
from kvserver.remote.valkey_answers import OutOfStepError
from kvserver.remote.valkey_nodes import SLOTS, NodeMap, node_map, slot_of
from tests.rigs.remote_chunks import name_of
from tests.rigs.valkey_server import ValkeyCluster
from tests.unit.remote.conftest import PATIENT


def test_slots_are_those_of_the_servers(cluster: ValkeyCluster) -> None:
    dice = random.Random(5)
    words = [bytes(dice.choices(b"abc{}", k=length)) for length in range(1, 30)]
    keys = [b"123456789", b"{}a", b"a{}", b"a{b}c", b"a{b}{c}", b"a{b", b"a}b{c}", b"{{b}}", *words]
    for key in keys:
        told = cluster.servers[0].ask("CLUSTER", "KEYSLOT", key.decode())
        assert slot_of(key) == int(told[1:]), key
    assert slot_of(b"123456789") == 0x31C3


def test_a_key_belongs_to_the_master_of_its_range() -> None:
    ranges = [[8000, 16383, [b"two", 2, b"id"], [b"replica", 9]], [0, 100, ["one", 1]], [101, 7999, [b"three", 3]]]
    nodes = node_map(ranges)
    for seed in range(50):
        key = b"%d" % seed
        slot = slot_of(key)
        assert nodes.node_of(key) == ("one:1" if slot <= 100 else "three:3" if slot < 8000 else "two:2")
    assert NodeMap().node_of(b"any") == ""
    assert nodes.names == {"one:1", "two:2", "three:3"}
    assert NodeMap().names == {""}
    assert node_map(ranges[:1]).names == {"", "two:2"}, "a slot before all that were told has no node"


class MoreThanSlots(list):
    """More ranges than there are slots, of a node each."""

    def __repr__(self) -> str:
        return "more ranges than slots"


ODD = [
    None,
    b"slots",
    {0: 1},
    [7],
    [[0, 5]],
    [[0, 5, []]],
    [[0, 5, [b"host"]]],
    [[0, 5, {b"host": b"one"}]],
    [[0, 5, 7]],
    [[None, 5, [b"one", 1]]],
    [[float("inf"), 5, [b"one", 1]]],
    [[0, 5, [b"one", 1]], [6, 7, []]],
    MoreThanSlots([at, at, [b"one", at]] for at in range(SLOTS + 1)),
]


@pytest.mark.parametrize("told", ODD, ids=repr)
def test_a_cluster_that_tells_its_slots_in_another_shape_is_a_single_node(
    cluster: ValkeyCluster, told: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutOfStepError, match="expected slots"):
        node_map(told)
    monkeypatch.setattr(GlideClusterClient, "custom_command", lambda *_: told)
    addresses = tuple(("127.0.0.1", server.port) for server in cluster.servers)
    store = ValkeyStore(Settings(addresses, is_cluster=True, **PATIENT))
    assert store.heads([name_of(1)], 1) == [None]
    assert store.node_of(name_of(1)) == ""
    store.close()


def test_a_store_knows_the_nodes_of_its_cluster_after_its_first_probe(cluster: ValkeyCluster) -> None:
    addresses = tuple(("127.0.0.1", server.port) for server in cluster.servers)
    store = ValkeyStore(Settings(addresses, is_cluster=True, **PATIENT))
    names = [name_of(seed) for seed in range(30)]
    assert {store.node_of(name) for name in names} == {""}
    store.heads(names, 1)
    assert {store.node_of(name) for name in names} == {f"127.0.0.1:{server.port}" for server in cluster.servers}
    assert store.nodes() == {store.node_of(name) for name in names}
    store.close()
