"""Problems for a person on call: each possible one is shown, and none while all is well."""

import msgspec
import pytest

from kvserver.cli.status_text import overview
from kvserver.service.base.events import ArenaGrew, MoverGone
from kvserver.service.report.problems import disk_problem, troubles, warnings
from kvserver.service.telling.counters import Counters
from kvserver.wire.admin import DrainServer, Resume
from kvserver.wire.orders import DrainState
from kvserver.wire.status import ArenaStatus, DiskStatus, MoverStatus, TenantStatus
from tests.rigs.admin_rig import command
from tests.rigs.brain_rig import Client, Rig, chain
from tests.rigs.disk_rig import CHUNKS, DiskRig
from tests.rigs.status_document import a_status

ARENA, MOVERS = a_status().arena, a_status().movers
DISK = DiskStatus(
    device=1,
    total_bytes=7,
    used_bytes=3,
    takes_writes=True,
    problem="",
    queued_bytes=0,
    write_bytes_per_s=5.0,
    read_bytes_per_s=11.0,
)


def said(
    arena: ArenaStatus = ARENA,
    movers: list[MoverStatus] = MOVERS,
    disks: tuple[DiskStatus, ...] = (DISK,),
    disk_state: str = "ready",
    *,
    clears_owed: int = 0,
    digests: bool = True,
    drain: DrainState = "",
    drain_waits: str = "",
) -> list[str]:
    return warnings(
        arena,
        movers=movers,
        disks=disks,
        disk_problem=disk_problem(disks, disk_state),
        clears_owed=clears_owed,
        digests=digests,
        drain=drain,
        drain_waits=drain_waits,
    )


def test_nothing_is_said_while_all_is_well() -> None:
    assert said() == []
    assert said(disks=(), disk_state="", movers=[]) == []
    assert said(disk_state="recovering") == []
    (owed,) = said(clears_owed=3)
    assert owed.startswith("3 clears are not durable yet")
    assert troubles(Counters(), []) == {}
    (off,) = said(digests=False)
    assert off.startswith("digests are off")


def test_what_a_mover_warns_of_is_said_with_its_device() -> None:
    facts = {"device 3 file": "/mnt/a/kvserver.store", "device 3 warning": "it lies on tmpfs"}
    assert said(movers=[msgspec.structs.replace(MOVERS[0], facts=facts)]) == ["device 3 of mover 1: it lies on tmpfs"]


def test_each_thing_that_is_wrong_is_said_worst_first() -> None:
    killed = msgspec.structs.replace(MOVERS[0], state="killed")
    failing = msgspec.structs.replace(DISK, takes_writes=False, problem="5 writes in a row failed")
    stopped = msgspec.structs.replace(ARENA, problem="out of memory")
    lines = said(stopped, [killed], (DISK, failing), "away")
    assert [line.split(":")[0] for line in lines] == [
        "mover 1 of host was killed and has not ended yet",
        "no disk can be used",
        "disk 1 takes no writes",
        "the arena stopped growing at slab 3 of 5",
    ]
    assert lines[2].endswith(": 5 writes in a row failed")
    assert lines[3].endswith(": out of memory")


def test_disks_that_were_all_refused_are_no_tier_and_one_that_was_is_named() -> None:
    refused = msgspec.structs.replace(DISK, usable=False, takes_writes=False, problem="segments of 7 bytes")
    assert said(disks=(refused, refused))[0] == "no disk can be used: none of 2 could be opened"
    assert said(disks=(DISK, refused)) == ["disk 1 cannot be used: segments of 7 bytes"]
    drained = msgspec.structs.replace(refused, problem="", drain="drained")
    assert said(disks=(drained,)) == [], "an operator wanted it so"
    assert said(disks=(drained, refused))[0] == "no disk can be used: none of 1 could be opened"


def test_a_disk_that_is_drained_on_purpose_is_not_wrong_and_one_that_fails_meanwhile_is() -> None:
    draining = msgspec.structs.replace(DISK, takes_writes=False, drain="draining")
    assert said(disks=(draining,)) == []
    assert len(said(disks=(msgspec.structs.replace(draining, problem="io"),))) == 1


def test_a_server_that_takes_no_stores_says_so_until_it_takes_them_again() -> None:
    rig = DiskRig()
    client = Client(rig).register()
    rig.disk_works = False
    client.store(chain(1, CHUNKS))
    command(rig, DrainServer())
    rig.wait_ms(50)
    assert rig.service.status(rig.now_ns).warnings == [
        "no store is taken: the server is being drained, waits for writes"
    ]
    rig.disk_works = True
    rig.finish_disk()
    rig.wait_ms(100)
    assert rig.service.status(rig.now_ns).warnings == ["no store is taken: the server is drained"]
    command(rig, Resume())
    assert rig.service.status(rig.now_ns).warnings == []


def test_what_a_tenant_did_not_get_is_a_trouble_of_its_own() -> None:
    red = TenantStatus(
        tenant="red",
        held_bytes=5,
        reserved_bytes=7,
        guaranteed_bytes=11,
        max_bytes=13,
        evicted_chunks=17,
        refused_slots=0,
    )
    tenants = [red, msgspec.structs.replace(red, tenant="blue", refused_slots=3)]
    assert troubles(Counters(), tenants) == {"slots that tenant blue wanted and did not get": 3}


def test_an_arena_without_a_slab_is_said_until_the_first_is_ready() -> None:
    service = Rig().new_service()
    assert service.status(1).warnings == ["no slab of the arena is ready yet: nothing can be stored"]
    service.handle(ArenaGrew(1, ""), 2)
    assert service.status(3).warnings == []


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("disk_faults", "checksum"),
        ("errors", "device"),
        ("errors", "request"),
        ("discarded", "failed"),
        ("discarded", "died"),
        ("short_stores", "full"),
        ("short_stores", "ranks-missing"),
        ("disk_refused", "late"),
        ("disk_refused", "budget"),
    ],
)
def test_a_trouble_is_counted_from_its_own_counter(table: str, key: str) -> None:
    counters = Counters()
    getattr(counters, table)[key] = 7
    assert list(troubles(counters, []).values()) == [7]


def test_what_is_nobodys_fault_is_no_trouble() -> None:
    counters = Counters()
    counters.disk_faults["cancelled"] = counters.discarded["cleared"] = counters.discarded["abandoned"] = 3
    counters.leases_expired = counters.short_stores["parent-absent"] = 3
    assert troubles(counters, []) == {}


def test_a_mover_that_died_is_in_the_document_and_in_its_overview() -> None:
    rig = Rig()
    Client(rig, engine="one").register()
    rig.handle(MoverGone(1, "signal 9"))
    status = rig.service.status(rig.now_ns)
    assert status.troubles["movers ended"] == 1
    assert "trouble   1 movers ended" in overview(status)
    warned = msgspec.structs.replace(status, warnings=["seven is wrong"])
    assert "WARNING   seven is wrong" in overview(warned)
