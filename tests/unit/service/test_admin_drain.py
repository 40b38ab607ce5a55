"""Draining the server, changing its log level and its bounds; and the audit line of each command."""

import logging

from kvserver.service.base.effects import Audit, ChangeLogLevel, Effect
from kvserver.service.base.events import Commanded
from kvserver.wire.admin import AnyCommand, Changed, ClearTenant, DrainServer, Pin, Reload, Resume, SetLogLevel, Unpin
from kvserver.wire.messages import Draining, GroupBlocks, GroupSpec, Stored
from tests.rigs.admin_rig import command, pinned
from tests.rigs.brain_rig import BLOCKS as BLOCKS_OF_POOL
from tests.rigs.brain_rig import FULL, NAMESPACE, Client, Rig, chain, ids, is_refusal
from tests.rigs.disk_rig import CHUNKS, DiskRig

BLOCKS = GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))


def drain_of(rig: Rig) -> tuple[str, str]:
    status = rig.service.status(rig.now_ns)
    return status.drain, status.drain_waits


def effects_of(rig: Rig, wanted: AnyCommand) -> list[Effect]:
    return rig.service.handle(Commanded(rig.number(), "token ops", wanted), rig.now_ns)


def test_a_drained_server_takes_no_stores_and_serves_what_it_has() -> None:
    rig = Rig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    rig.movers_copy = False
    under_way = client.storing(chain(2, CHUNKS), BLOCKS)
    client.ask(under_way)
    assert command(rig, DrainServer()) == Draining(1)
    assert is_refusal(client.ask(client.storing(chain(3, CHUNKS), BLOCKS)), "resource", "draining")
    rig.wait_ms(60)
    assert drain_of(rig) == ("draining", "stores")
    rig.finish()
    assert rig.answers[client.peer, under_way.id].chunks == CHUNKS
    rig.wait_ms(60)
    assert drain_of(rig) == ("drained", "")
    assert client.lookup(keys).chunks == CHUNKS
    assert command(rig, Resume()) == Draining(1)
    rig.movers_copy = True
    assert isinstance(client.ask(client.storing(chain(3, CHUNKS), BLOCKS)), Stored)


def test_a_chunk_that_another_rank_has_still_to_store_is_waited_for() -> None:
    rig = Rig(reserve_ttl_ms=3_000)
    clients = [Client(rig, ranks=2, rank=rank) for rank in range(2)]
    for rank, client in enumerate(clients):
        client.register((GroupSpec(2, BLOCKS_OF_POOL, "full", 0, 2, rank, 1, 0, FULL.regions),))
    clients[0].ask(clients[0].storing(chain(1, CHUNKS), BLOCKS))
    command(rig, DrainServer())
    rig.wait_ms(60)
    assert drain_of(rig) == ("draining", "stores")
    rig.wait_ms(3_000)
    assert drain_of(rig) == ("drained", ""), "it was given up at its deadline"


def test_draining_writes_what_dram_alone_holds() -> None:
    rig = DiskRig(disk_write_through=False, disk_clean_percent=1)
    client = Client(rig).register()
    prompts = [chain(seed, CHUNKS) for seed in (1, 2, 3)]
    for keys in prompts:
        client.store(keys)
    leased = client.lookup(prompts[0])
    pinned(rig, prompts[1])
    assert rig.written == []
    assert rig.service.status(rig.now_ns).dirty_bytes == 9 * 4096
    command(rig, DrainServer())
    assert rig.service.status(rig.now_ns).holds == [], "what is pinned would not be written"
    rig.wait_ms(200)
    assert drain_of(rig) == ("draining", "leases")
    client.release(leased)
    rig.wait_ms(200)
    assert drain_of(rig) == ("drained", "")
    assert sorted(rig.keys_written()) == sorted(keys[at : at + 32] for keys in prompts for at in (0, 32, 64))
    assert rig.service.status(rig.now_ns).dirty_bytes == 0


def test_draining_says_what_the_disk_does_not_take() -> None:
    rig = DiskRig(disk_write_through=False, disk_clean_percent=1, disk_daily_write_bytes=24 * 2 * 4096)
    client = Client(rig).register()
    client.store(chain(1, CHUNKS))
    command(rig, DrainServer())
    rig.wait_ms(300)
    assert drain_of(rig) == ("draining", "budget")


def test_the_level_of_logging_changes_lines_about_requests_too() -> None:
    rig = Rig(request_lines="none")
    effects = effects_of(rig, SetLogLevel(level="debug"))
    assert ChangeLogLevel("debug") in effects
    assert rig.core.lines.level("lookup", rig.now_ns) == logging.DEBUG


def test_reloading_changes_what_may_change_and_says_what_did() -> None:
    rig = Rig(disk_clean_percent=25)
    values: dict[str, int | str] = {"disk_clean_percent": 31, "disk_write_policy": "through", "lease_ttl_ms": 30_000}
    assert command(rig, Reload(values=values)) == Changed(1, ["disk_clean_percent", "disk_write_policy"])
    bounds = rig.core.bounds
    assert (bounds.disk_clean_percent, bounds.disk_write_through) == (31, True)
    assert command(rig, Reload(values=values)) == Changed(1, [])
    assert command(rig, Reload(values={"log_level": "error"})) == Changed(1, ["log_level"])
    refused = command(rig, Reload(values={"lease_ttl_ms": 7, "arena_bytes": 1}))
    assert is_refusal(refused, "request", "reload", "arena_bytes")
    assert rig.core.bounds.lease_ttl_ms == 30_000, "a refused command changes nothing"


def test_each_command_leaves_one_audit_line_that_says_who_did_what_and_how_it_ended() -> None:
    rig = Rig()
    (line,) = [effect for effect in effects_of(rig, Unpin(hold=77)) if isinstance(effect, Audit)]
    assert line.fields == (("who", "token ops"), ("did", "unpin"), ("hold", 77), ("outcome", "hold-unknown"))
    keys = chain(1, 2)
    wanted = Pin(namespace=NAMESPACE, keys=keys, ttl_ms=9)
    (line,) = [effect for effect in effects_of(rig, wanted) if isinstance(effect, Audit)]
    assert dict(line.fields)["keys"] == keys[32:].hex()
    assert dict(line.fields)["namespace"] == NAMESPACE.hex()
    (line,) = [effect for effect in effects_of(rig, ClearTenant(tenant="x" * 200_000)) if isinstance(effect, Audit)]
    assert len(str(line.fields)) < 2_000, "a line of the log is cut after 4096 bytes"
    assert dict(line.fields)["outcome"] == "name"
