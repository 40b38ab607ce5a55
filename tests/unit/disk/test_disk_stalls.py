"""A device that takes nothing although writes wait for it is reported in the status document, metrics and the log."""

import logging

from kvserver.brain.http.metrics import render
from kvserver.service.base.effects import Log
from kvserver.tiers.placement import Placement
from kvserver.wire.status import DiskStatus
from tests.rigs.brain_rig import Client, chain
from tests.rigs.disk_rig import SEGMENT_BYTES, DiskRig

SECOND_NS = 1_000_000_000


def lines(rig: DiskRig) -> list[tuple[str, int]]:
    logs = [effect for effect in rig.effects if isinstance(effect, Log)]
    return [(log.event, log.level) for log in logs if log.event.startswith("disk takes")]


def disk(rig: DiskRig) -> DiskStatus:
    (shown,) = rig.service.status(rig.now_ns).disks
    return shown


def test_a_device_that_takes_nothing_for_ten_seconds_is_a_warning_until_it_takes_something() -> None:
    """Everything on the device is leased, so nothing may be evicted."""
    rig = DiskRig(disk_device_bytes=SEGMENT_BYTES, lease_ttl_ms=60_000)
    client, prompts = Client(rig).register(), [chain(seed, 2) for seed in (1, 2)]
    for keys in prompts:
        client.store(keys)
    leases = [client.lookup(keys) for keys in prompts]
    assert disk(rig).used_bytes == 4 * 4096
    for seed in range(10, 29):
        client.store(chain(seed, 1))
        rig.wait_ms(500)
    assert lines(rig) == []
    assert rig.service.status(rig.now_ns).warnings == []
    for seed in range(30, 33):
        client.store(chain(seed, 1))
        rig.wait_ms(500)
    status = rig.service.status(rig.now_ns)
    assert [line.split(" for ")[0] for line in status.warnings] == ["disk 0 has taken nothing"]
    assert 10 <= disk(rig).stalled_s < 12
    assert disk(rig).stalled_why == "room"
    text = render(status, rig.service.counters, 0.0).decode()
    assert f'kvserver_disk_stalled_seconds{{device="0"}} {disk(rig).stalled_s}' in text
    assert lines(rig) == [("disk takes nothing", logging.WARNING)]
    for lease in leases:
        client.release(lease)
    client.store(chain(50, 1))
    rig.wait_ms(500)
    assert rig.service.status(rig.now_ns).warnings == []
    assert lines(rig) == [("disk takes nothing", logging.WARNING), ("disk takes writes again", logging.INFO)]


def test_a_device_for_which_no_write_waits_any_more_is_not_stalled() -> None:
    placement = Placement(daily_bytes=0, queue_ms=7, now_ns=0)
    placement.heard("room", 3 * SECOND_NS)
    assert placement.stalled(4 * SECOND_NS) == (SECOND_NS, "room")
    assert placement.stalled(20 * SECOND_NS) == (0, ""), "it was refused long ago, and not asked again"
    assert placement.stalled(20 * SECOND_NS, waits=True) == (17 * SECOND_NS, "room")
    placement.heard("", 21 * SECOND_NS)
    assert placement.stalled(21 * SECOND_NS, waits=True) == (0, "")


def test_a_day_whose_bytes_are_spent_is_no_stall() -> None:
    placement = Placement(daily_bytes=24, queue_ms=7, now_ns=0)
    for second in range(30):
        placement.heard("budget", second * SECOND_NS)
    assert placement.stalled(30 * SECOND_NS) == (0, "")
