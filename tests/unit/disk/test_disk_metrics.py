"""The disk tier's figures in /metrics and /status move with its traffic, refusals, faults and drains."""

import re

import pytest

from kvserver.brain.http.metrics import render
from kvserver.cli.status_text import overview
from kvserver.tiers import placement
from kvserver.wire.messages import Drain, GroupBlocks
from tests.rigs.brain_rig import Client, chain, ids
from tests.rigs.disk_rig import CHUNKS, DiskRig, fill

PAGE = 4096


def metrics(rig: DiskRig) -> dict[str, float]:
    """Sample -> value, as a scrape gets them."""
    text = render(rig.service.status(rig.now_ns), rig.service.counters, 0.0).decode()
    samples = re.findall(r"^kvserver_([a-z_]+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in samples}


def read_back(client: Client, keys: bytes) -> None:
    found = client.lookup(keys)
    client.ask(client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * found.chunks)))))


def test_writes_and_reads_show_in_bytes_and_fill_of_their_device() -> None:
    rig = DiskRig(disk_directories=("/mnt/a",))
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    fill(client, prompts=30)
    read_back(client, keys)
    seen = metrics(rig)
    written = len(rig.written) * PAGE
    assert seen['disk_device_written_bytes_total{device="0"}'] == written == seen['disk_used_bytes{device="0"}']
    assert seen['moved_bytes_total{direction="demote",tier="disk"}'] == written
    assert seen['disk_device_read_bytes_total{device="0"}'] == CHUNKS * PAGE
    assert seen['lookup_chunks_total{result="disk"}'] == CHUNKS
    assert seen['disk_takes_writes{device="0"}'] == 1
    assert seen['disk_total_bytes{device="0"}'] == 200 * (20 << 10)
    assert 0 < seen["arena_clean_bytes"] <= seen['arena_bytes{state="used"}']
    assert any("/mnt/a" in line for line in overview(rig.service.status(rig.now_ns)))


def test_a_rate_shows_when_it_was_measured_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a guess is used. Shown, it would look like the rate of a device that may never have opened."""
    monkeypatch.setattr(placement, "RATE_BYTES_MIN", PAGE)
    rig = DiskRig()
    rig.disk_works = False
    Client(rig).register().store(chain(1, CHUNKS))
    assert metrics(rig)['disk_write_bytes_per_second{device="0"}'] == 0
    assert metrics(rig)['disk_read_bytes_per_second{device="0"}'] == 0
    rig.now_ns += 1_000_000
    rig.finish_disk()
    assert metrics(rig)['disk_write_bytes_per_second{device="0"}'] > 0
    assert metrics(rig)['disk_read_bytes_per_second{device="0"}'] == 0


def test_what_waits_to_be_written_shows_as_queued() -> None:
    rig = DiskRig()
    rig.disk_works = False
    Client(rig).register().store(chain(1, CHUNKS))
    assert metrics(rig)['disk_queued_bytes{device="0"}'] == CHUNKS * PAGE
    rig.finish_disk()
    assert metrics(rig)['disk_queued_bytes{device="0"}'] == 0


def test_the_budget_of_the_day_shows_as_it_goes_and_comes_back() -> None:
    rig = DiskRig(disk_daily_write_bytes=24 * 7 * PAGE)
    client = Client(rig).register()
    assert metrics(rig)['disk_budget_bytes{device="0"}'] == 7 * PAGE
    fill(client)
    spent = metrics(rig)
    assert spent['disk_budget_bytes{device="0"}'] < PAGE
    assert spent['disk_daily_write_bytes{device="0"}'] == 24 * 7 * PAGE
    assert spent['disk_refused_chunks_total{reason="budget"}'] > 0
    rig.now_ns += 3_600_000_000_000
    assert metrics(rig)['disk_budget_bytes{device="0"}'] > 6 * PAGE


def test_a_record_that_is_not_what_was_written_shows_as_fault_and_as_lost() -> None:
    rig = DiskRig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    fill(client)
    rig.fault = "checksum"
    client.lookup(keys)
    seen = metrics(rig)
    assert seen['disk_faults_total{fault="checksum"}'] >= 1
    assert seen['disk_device_faults_total{device="0"}'] >= 1
    assert seen['disk_chunk_events_total{event="lost"}'] >= 1


def test_a_device_that_fails_shows_that_it_takes_no_writes_and_why() -> None:
    rig = DiskRig(disk_jobs_max=1)
    rig.fault = "io"
    fill(Client(rig).register(), prompts=12)
    assert metrics(rig)['disk_takes_writes{device="0"}'] == 0
    assert "8 reads or writes in a row failed" in "\n".join(overview(rig.service.status(rig.now_ns)))


def test_keys_that_were_touched_are_counted_and_so_is_what_was_not() -> None:
    rig = DiskRig(disk_second_touch=True, disk_write_through=False, disk_clean_percent=90)
    client = Client(rig).register()
    fill(client)
    seen = metrics(rig)
    assert seen["keys_touched"] > 0
    assert seen['disk_refused_chunks_total{reason="second-touch"}'] > 0


def test_a_drain_shows_in_the_device_and_in_what_became_of_its_chunks() -> None:
    rig = DiskRig(disk_devices=2)
    client = Client(rig).register()
    fill(client)
    held = metrics(rig)['disk_used_bytes{device="1"}']
    client.ask(Drain(rig.number(), 1))
    rig.wait_ms(3_000)
    seen = metrics(rig)
    assert (seen['disk_draining{device="1"}'], seen['disk_draining{device="0"}']) == (1, 0)
    assert seen['disk_used_bytes{device="1"}'] == 0
    assert seen['disk_drained_chunks_total{end="moved"}'] == held / PAGE
    assert any(line.split() == ["drained"] for line in overview(rig.service.status(rig.now_ns)))


def test_without_a_disk_tier_no_device_is_shown() -> None:
    seen = metrics(DiskRig(disk_devices=0))
    assert not any("device=" in name and name.startswith("disk") for name in seen)
    assert seen["disk_chunks"] == 0
