"""Namespaces come and go: the least recently used one makes room for another."""

import pytest

from kvserver.wire.messages import Clear
from tests.rigs.admin_rig import pinned
from tests.rigs.brain_rig import NAMESPACE, Client, Rig, chain, is_refusal

MINUTE_MS = 60_000
DIGESTS = [bytes([number]) * 32 for number in range(1, 4)]


def left_behind(rig: Rig, digest: bytes, seed: int) -> Client:
    """A worker stores a prompt in a namespace and leaves; returns a client that only looks up and stays."""
    worker = Client(rig, engine=f"worker {seed}").register(namespace=digest)
    worker.store(chain(seed, 3))
    rig.peer_gone(worker.local)
    return Client(rig, engine=f"scheduler {seed}", rank=-1)


@pytest.mark.parametrize("looked_up", [0, 1])
def test_a_namespace_in_which_chunks_are_found_is_kept(looked_up: int) -> None:
    rig = Rig(namespaces_max=2)
    clients = []
    for number in range(2):
        clients.append(left_behind(rig, DIGESTS[number], number))
        rig.wait_ms(MINUTE_MS)
    clients[looked_up].release(clients[looked_up].lookup(chain(looked_up, 3), DIGESTS[looked_up]))
    Client(rig, engine="newcomer").register(namespace=DIGESTS[2])
    for number in range(2):
        assert clients[number].lookup(chain(number, 3), DIGESTS[number]).chunks == (3 if number == looked_up else 0)


def test_a_namespace_that_was_registered_for_longer_is_kept() -> None:
    """Its last store is older, but its engine has just left."""
    rig = Rig(namespaces_max=2)
    long = Client(rig, engine="long").register(namespace=DIGESTS[0])
    long.store(chain(0, 3))
    rig.wait_ms(MINUTE_MS)
    left_behind(rig, DIGESTS[1], 1)
    rig.wait_ms(MINUTE_MS)
    rig.peer_gone(long.local)
    newcomer = Client(rig, engine="newcomer").register(namespace=DIGESTS[2])
    assert newcomer.lookup(chain(0, 3), DIGESTS[0]).chunks == 3
    assert newcomer.lookup(chain(1, 3), DIGESTS[1]).chunks == 0


def test_a_namespace_with_a_lease_is_kept_although_it_is_the_coldest() -> None:
    rig = Rig(namespaces_max=2)
    clients = [left_behind(rig, DIGESTS[number], number) for number in range(2)]
    lease = clients[0].lookup(chain(0, 3), DIGESTS[0])
    assert lease.lease
    rig.wait_ms(7)
    clients[1].release(clients[1].lookup(chain(1, 3), DIGESTS[1]))
    Client(rig, engine="newcomer").register(namespace=DIGESTS[2])
    assert clients[0].lookup(chain(0, 3), DIGESTS[0]).chunks == 3
    assert clients[1].lookup(chain(1, 3), DIGESTS[1]).chunks == 0


def test_a_namespace_with_a_pin_is_kept_although_it_is_the_coldest() -> None:
    rig = Rig(namespaces_max=2)
    clients = [left_behind(rig, digest, number) for number, digest in enumerate((NAMESPACE, DIGESTS[1]))]
    assert pinned(rig, chain(0, 3)).chunks == 3
    rig.wait_ms(7)
    clients[1].release(clients[1].lookup(chain(1, 3), DIGESTS[1]))
    Client(rig, engine="newcomer").register(namespace=DIGESTS[2])
    assert clients[0].lookup(chain(0, 3), NAMESPACE).chunks == 3
    assert clients[1].lookup(chain(1, 3), DIGESTS[1]).chunks == 0


def test_no_namespace_makes_room_when_all_have_a_lease() -> None:
    rig = Rig(namespaces_max=2)
    clients = [left_behind(rig, DIGESTS[number], number) for number in range(2)]
    leases = [clients[number].lookup(chain(number, 3), DIGESTS[number]) for number in range(2)]
    assert all(found.lease for found in leases)
    newcomer = Client(rig, engine="newcomer")
    assert is_refusal(newcomer.ask(newcomer.registration(namespace=DIGESTS[2])), "resource", "namespaces")
    clients[1].release(leases[1])
    newcomer.register(namespace=DIGESTS[2])
    assert clients[0].lookup(chain(0, 3), DIGESTS[0]).chunks == 3


def test_a_cleared_namespace_makes_room_for_itself_again() -> None:
    """Its caches stay registered, so chunks that they store afterwards must be evictable like all others."""
    rig = Rig()
    client = Client(rig).register()
    rig.ask(client.peer, Clear(rig.number(), NAMESPACE))
    for seed in range(200):  # 600 chunks, several times what the arena holds
        client.store(chain(seed, 3))
    assert rig.service.counters.evictions > 0
