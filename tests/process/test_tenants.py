"""Quotas through real processes: they hold for real stores, and what is held is charged again by the next brain."""

from kvclient import namespace_digest
from tests.process.engine import Engine, prompt
from tests.process.harness import Server, kill, until

CHUNKS = 4
AGENTS, CHAT = (namespace_digest({"tests": "tenants", "tenant": tenant}) for tenant in ("agents", "chat"))


def held(server: Server) -> dict[str, int]:
    return {row.tenant: row.held_bytes for row in server.status().tenants}


def test_a_tenant_stays_within_its_maximum_and_keeps_what_it_holds_over_a_crash() -> None:
    with (
        Server(arena_bytes=16 << 20, tenants="agents=1MiB.., chat=..64KiB") as server,
        Engine(server.path, namespace=AGENTS, name="agents", tenant="agents") as agents,
        Engine(server.path, namespace=CHAT, name="chat", tenant="chat") as chat,
    ):
        kept = prompt(1, chunks=CHUNKS)
        agents.ready().store(kept)
        chunk = held(server)["agents"] // CHUNKS
        chat.ready()
        for seed in range(2, 60):
            chat.store(prompt(seed, chunks=CHUNKS))
        assert 64 * 1024 - chunk < held(server)["chat"] <= 64 * 1024
        assert agents.retrieve(kept) == CHUNKS
        assert chat.lookup(prompt(59, chunks=CHUNKS)).chunks == CHUNKS
        assert chat.client.lookup(AGENTS, kept.keys).chunks == 0, "it is another tenant's"
        before, incarnation = held(server), server.status().incarnation
        kill(server.brain_pid())
        until("another brain", lambda: server.status().incarnation != incarnation)
        assert held(server) == before
        until("the caches are registered again", lambda: server.status().caches == 2)
        assert agents.ready().retrieve(kept) == CHUNKS
