"""Quotas through real processes: they hold for real stores, and the next brain charges chunks that it takes over."""

import time
from pathlib import Path

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


def on_disk(server: Server) -> dict[str, int]:
    return {row.tenant: row.disk_held_bytes for row in server.status().tenants}


def wait_for_rest(server: Server) -> None:
    """Waits until the disk has written nothing for a second."""

    def rests() -> bool:
        before = server.status().tenants
        time.sleep(1)
        return server.status().tenants == before and not any(row.disk_reserved_bytes for row in before)

    until("the disk to have nothing to do", rests)


def with_disk(directory: Path, chat_most: str) -> Server:
    return Server(
        arena_bytes=4 << 20,
        disk_paths=str(directory),
        disk_bytes=4 << 20,
        disk_segment_bytes=128 << 10,
        disk_write_policy="through",
        disk_tenants=f"agents=1MiB.., chat=..{chat_most}",
    )


def test_a_tenant_stays_within_its_maximum_on_disk_and_a_lowered_one_is_reached_after_a_kill(tmp_path: Path) -> None:
    kept = prompt(1, chunks=CHUNKS)
    with (
        with_disk(tmp_path, "64KiB") as server,
        Engine(server.path, namespace=AGENTS, name="agents", tenant="agents") as agents,
        Engine(server.path, namespace=CHAT, name="chat", tenant="chat") as chat,
    ):
        until("the disk", lambda: server.status().disk_state == "ready")
        agents.ready().store(kept)
        until("what agents store is on disk", lambda: server.status().chunks_on_disk == CHUNKS)
        before = on_disk(server)["agents"]
        chunk = before // CHUNKS
        chat.ready()
        for seed in range(2, 30):
            chat.store(prompt(seed, chunks=CHUNKS))
        wait_for_rest(server)  # each write replaces an older chunk; a kill in between leaves neither
        assert 64 * 1024 - chunk < on_disk(server)["chat"] <= 64 * 1024
        assert on_disk(server)["agents"] == before
        server.kill()
    with (
        with_disk(tmp_path, f"{2 * chunk}") as server,
        Engine(server.path, namespace=AGENTS, name="agents", tenant="agents") as agents,
    ):
        until("what chat has beyond its maximum to go", lambda: on_disk(server)["chat"] == 2 * chunk)
        assert on_disk(server)["agents"] == before
        assert agents.ready().retrieve(kept) == CHUNKS
