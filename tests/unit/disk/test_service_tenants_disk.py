"""Quotas and the disk: a tenant without room in DRAM does not keep others from their chunks on disk."""

from kvserver.service.holdings.accounts import Quota
from kvserver.wire.messages import GroupBlocks, Retrieve, Retrieved
from tests.rigs.brain_rig import Client, chain, ids, key
from tests.rigs.disk_rig import CHUNKS, EXTENT_BYTES, LAST_OF_FILL, DiskRig, fill

AGENTS, CHAT = (bytes([number]) * 32 for number in (3, 5))


def clients() -> tuple[DiskRig, Client, Client]:
    """Clients of two tenants.

    Agents may hold one prompt in DRAM and have two more on disk; chat has one on disk alone."""
    rig = DiskRig(tenants=(Quota("agents", 0, CHUNKS * EXTENT_BYTES),))
    agents = Client(rig, engine="agents").register(namespace=AGENTS, tenant="agents")
    chat = Client(rig, engine="chat").register(namespace=CHAT, tenant="chat")
    chat.store(chain(1, CHUNKS))
    fill(chat)
    for seed in (2, 3, 4):
        rig.now_ns += 1_000_000
        agents.store(chain(seed, CHUNKS))
    return rig, agents, chat


def whole(client: Client, lease: int) -> Retrieve:
    return client.retrieving(lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))


def test_reads_of_a_tenant_at_its_maximum_hold_up_no_other() -> None:
    rig, agents, chat = clients()
    agents.lookup(chain(4, CHUNKS), AGENTS)
    assert agents.lookup(chain(3, CHUNKS), AGENTS).chunks_on_disk == CHUNKS
    reads = len(rig.read)
    keys = chain(1, CHUNKS)
    found = chat.lookup(keys, CHAT)
    assert found.chunks_on_disk == CHUNKS
    assert [records[0].key for records in rig.read[reads:]] == [key(keys, chunk) for chunk in range(CHUNKS)]
    assert isinstance(chat.ask(whole(chat, found.lease)), Retrieved)


def test_retrieves_of_a_tenant_that_wait_for_each_others_slots_hold_up_no_other_tenant() -> None:
    """Two prompts of agents wait for the slots of each other; chat came after them and only waits for its disk."""
    rig, agents, chat = clients()
    held = agents.lookup(chain(4, CHUNKS), AGENTS)
    found = [agents.lookup(chain(seed, CHUNKS), AGENTS) for seed in (2, 3)]
    asked = [whole(agents, each.lease) for each in found]
    assert [agents.ask(request) for request in asked] == [None, None]
    rig.disk_works = False
    of_chat = whole(chat, chat.lookup(chain(1, CHUNKS), CHAT).lease)
    assert chat.ask(of_chat) is None
    rig.wait_ms(50)
    rig.disk_works = True
    rig.finish_disk()
    assert isinstance(rig.answers[chat.peer, of_chat.id], Retrieved)
    agents.release(held)
    rig.wait_ms(600)
    assert all(isinstance(rig.answers[agents.peer, request.id], Retrieved) for request in asked)


def test_a_tenant_that_lacks_slots_for_reads_takes_them_from_its_own_leases_alone() -> None:
    rig, agents, chat = clients()
    own, others = chain(4, CHUNKS), chain(LAST_OF_FILL, CHUNKS)
    assert agents.lookup(own, AGENTS).chunks_on_disk == 0
    wanted = whole(agents, agents.lookup(chain(3, CHUNKS), AGENTS).lease)
    assert chat.lookup(others, CHAT).chunks_on_disk == 0
    assert agents.ask(wanted) is None
    rig.wait_ms(300)
    assert isinstance(rig.answers[agents.peer, wanted.id], Retrieved)
    assert chat.lookup(others, CHAT).chunks_on_disk == 0
    assert agents.lookup(own, AGENTS).chunks_on_disk == CHUNKS
