"""Retrieves that find other bytes than were stored: what the engine hears, and what is still served."""

from typing import Any

from kvserver.wire.messages import GroupBlocks, Retrieved
from kvserver.wire.orders import Done
from tests.rigs.brain_rig import NAMESPACE, Client, Rig, chain, ids, key

BLOCKS = GroupBlocks(0, 0, ids(*range(9)))
"""Those of three chunks."""


def retrieves(rig: Rig, client: Client, keys: bytes, count: int) -> list[Any]:
    """Begins retrieves of one prefix, each under a lease of its own. Returns their requests."""
    rig.movers_copy = False
    leases = [client.lookup(keys).lease for _ in range(count)]
    requests = [client.retrieving(lease, BLOCKS) for lease in leases]
    assert [client.ask(request) for request in requests] == [None] * count
    return requests


def ends_wrong(rig: Rig, *wrong: int) -> None:
    """The oldest job under way ends, and these of its shards are wrong."""
    mover, order = rig.copies.pop(0)
    rig.report(mover, Done(order.job, "failed", 7, 1, "digest", "rig", order.mode, b"", wrong))


def mismatches(rig: Rig) -> int:
    return sum(rig.service.counters.digest_mismatches.values())


def test_the_first_wrong_chunk_is_named_and_leaves_with_all_below_it() -> None:
    rig = Rig()
    client, keys = Client(rig).register(), chain(1, 3)
    client.store(keys)
    (request,) = retrieves(rig, client, keys, 1)
    ends_wrong(rig, 2, 1)
    assert rig.answers[client.peer, request.id] == Retrieved(request.id, 0, 1)
    assert client.lookup(keys).chunks == 1
    assert mismatches(rig) == 2


def test_a_retrieve_that_was_cut_off_drops_a_wrong_chunk_above_the_cut() -> None:
    rig = Rig()
    client, keys = Client(rig).register(), chain(1, 3)
    client.store(keys)
    first, second, third = retrieves(rig, client, keys, 3)
    ends_wrong(rig, 2)
    assert client.lookup(keys).chunks == 2
    ends_wrong(rig, 2, 1)
    assert client.lookup(keys).chunks == 1
    ends_wrong(rig, 0)
    assert client.lookup(keys).chunks == 0
    ends = [rig.answers[client.peer, request.id].wrong_from for request in (first, second, third)]
    assert ends == [2, 1, 0]
    assert mismatches(rig) == 4
    assert rig.facts()["used_bytes"] == 0


def test_a_chunk_that_was_stored_again_stays_when_an_older_retrieve_finds_the_old_one_wrong() -> None:
    rig = Rig()
    client, keys = Client(rig).register(), chain(1, 3)
    client.store(keys)
    _, second = retrieves(rig, client, keys, 2)
    ends_wrong(rig, 0)
    under_way, rig.copies, rig.movers_copy = rig.copies, [], True
    client.store(keys)
    rig.copies = under_way
    ends_wrong(rig, 0)
    assert rig.answers[client.peer, second.id] == Retrieved(second.id, 0, 0)
    assert client.lookup(keys).chunks == 3
    assert mismatches(rig) == 2


def test_who_waits_for_chunks_below_a_wrong_one_has_no_lease_any_more() -> None:
    rig = Rig()
    client, keys = Client(rig).register(), chain(1, 3)
    client.store(keys)
    retrieves(rig, client, keys, 1)
    lease = client.lookup(keys).lease
    above = client.lookup(key(keys, 0), NAMESPACE).lease
    ends_wrong(rig, 1)
    reply = client.ask(client.retrieving(lease, BLOCKS))
    assert reply.code == "lease-unknown"
    assert client.ask(client.retrieving(above, GroupBlocks(0, 0, ids(0, 1, 2)))) is None
