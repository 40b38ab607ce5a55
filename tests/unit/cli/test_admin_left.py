"""`kvserver admin drain` reports what could not be drained, and why, and ends with status 1."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from kvserver.cli import admin
from kvserver.wire.admin import DrainServer, Resume
from tests.rigs.admin_rig import command
from tests.rigs.brain_rig import Client, chain
from tests.rigs.disk_rig import CHUNKS, SEGMENT_BYTES, DiskRig


class Server:
    """Answers as a server that is drained."""

    def __init__(self, statuses: Iterator[dict[str, Any]]) -> None:
        self._statuses = statuses

    def command(self, verb: str, fields: dict[str, object]) -> dict[str, Any]:
        assert (verb, fields) == ("drain", {})
        return {}

    def get(self, _: str) -> dict[str, Any]:
        return next(self._statuses)


def drained(left: dict[str, int]) -> dict[str, Any]:
    return {"drain": "drained", "drain_waits": "", "dirty_bytes": sum(left.values()), "drain_left": left}


@pytest.mark.parametrize(
    ("left", "status", "says"),
    [
        ({}, 0, ["nothing is in DRAM alone"]),
        ({"room": 5_120, "shape": 77}, 1, ["5,120 bytes: all that may go", "77 bytes: its namespaces fit no disk"]),
        ({"no-disk": 4_096}, 0, ["4,096 bytes: there is no disk tier"]),
    ],
)
def test_the_command_ends_with_status_1_when_the_disks_did_not_take_everything(
    monkeypatch: pytest.MonkeyPatch, left: dict[str, int], status: int, says: list[str]
) -> None:
    monkeypatch.setattr(admin, "_client", lambda *_: Server(iter([drained(left)])))
    done = CliRunner().invoke(admin.app, ["drain"])
    assert done.exit_code == status, done.output
    assert all(text in done.output for text in says), done.output


def drain(rig: DiskRig) -> tuple[str, dict[str, int]]:
    command(rig, DrainServer())
    rig.wait_ms(500)
    status = rig.service.status(rig.now_ns)
    assert status.dirty_bytes == sum(status.drain_left.values())
    return status.drain, status.drain_left


def test_a_drained_server_says_what_the_disks_did_not_take() -> None:
    """One segment of four extents, full of the most recently used chunks."""
    rig = DiskRig(disk_device_bytes=SEGMENT_BYTES, disk_write_through=False, disk_clean_percent=1)
    client = Client(rig).register()
    prompts = [chain(seed, CHUNKS) for seed in range(3)]
    for keys in prompts:
        rig.now_ns += 1_000_000
        client.store(keys)
    state, left = drain(rig)
    on_disk = rig.service.status(rig.now_ns).disks[0].used_bytes
    assert (state, left) == ("drained", {"room": 9 * 4096 - on_disk})
    assert on_disk > 0
    command(rig, Resume())
    assert rig.service.status(rig.now_ns).drain_left == {}


def test_a_server_that_was_drained_of_everything_has_nothing_left() -> None:
    rig = DiskRig(disk_write_through=False, disk_clean_percent=1)
    Client(rig).register().store(chain(1, CHUNKS))
    assert drain(rig) == ("drained", {})
