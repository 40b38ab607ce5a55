"""The start of a GPU's mover: it passes its self-test or ends with the reason, and its measurements are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvserver._native import RingOwner
from kvserver.wire import messages as wire
from tests.device.client_process import MIB
from tests.device.conftest import DeviceServer, measurement_path, seen_by_children
from tests.device.engine_process import DeviceWorker
from tests.device.registrant import Registrant
from tests.device.simulated import CORRUPT, Machine, Vendor
from tests.process.bad_input.abuse import refusal

CHUNKS = 3
KEPT = (7.25, 3 * MIB, 5 * MIB, 9.75, 11 * MIB, 13 * MIB)
"""An invented measurement: GB/s, and lengths from which copies go direct with and without staging.

First for stores, then for retrieves.
"""
SHOWN = {
    "link-store-gbps": f"{KEPT[0]:.1f}",
    "direct-from-store": "3 MiB",
    "bare-direct-from-store": "5 MiB",
    "link-retrieve-gbps": f"{KEPT[3]:.1f}",
    "direct-from-retrieve": "11 MiB",
    "bare-direct-from-retrieve": "13 MiB",
}


def test_a_device_that_returns_wrong_bytes_gets_no_mover(server: DeviceServer, machine: Machine) -> None:
    """Its mover ends with the reason, and nothing replaces it: no other device, no slower path."""
    registrant = Registrant(server, machine)
    owner = RingOwner(MIB)
    try:
        with machine.rule("run:copy", CORRUPT):
            refusal(registrant.registers(owner.fd), "device", "mover-lost", "exit 3")
            (line,) = [line for line in server.log().splitlines() if "mover ends" in line]
            assert "ERROR" in line
            assert "bytes came back wrong" in line
            assert "self-test" in line
            assert server.status().caches == 0
            assert all(mover.device != "host" for mover in server.status().movers)
        assert isinstance(registrant.registers(owner.fd), wire.Registered), "a device that is well again is used"
    finally:
        registrant.close()


@contextmanager
def started(machine: Machine, folder: Path, kept: bytes) -> Iterator[dict[str, str]]:
    """The facts in /status of a mover that found `kept` as its device's measurement; none if that is empty."""
    server = DeviceServer(machine, folder)
    path = measurement_of(machine, folder)
    path.unlink()
    if kept:
        path.write_bytes(kept)
    with server, DeviceWorker(server.path, machine, shape="kv_first", mode="server-gather") as worker:
        worker.call("ready")
        assert worker.call("store", 1, CHUNKS)["chunks"] == CHUNKS
        assert worker.call("retrieve", 1, CHUNKS) == CHUNKS
        (mover,) = server.status().movers
        yield dict(mover.facts)


def measurement_of(machine: Machine, folder: Path) -> Path:
    return measurement_path(machine.vendor, str(machine.library), machine.device_id(0), str(folder))


@pytest.mark.parametrize(
    "damage", [b"", b"[1.0, 2", b'{"gbps": 1}', msgspec.json.encode(KEPT[:5]), b"[1.0, -1, 2, 1.0, 1, 2]"]
)
def test_a_device_that_nobody_has_measured_is_measured_and_that_is_kept(
    vendor: Vendor, tmp_path: Path, damage: bytes
) -> None:
    with Machine(vendor) as machine, seen_by_children(machine):
        with started(machine, tmp_path, damage) as facts:
            kept = msgspec.json.decode(measurement_of(machine, tmp_path).read_bytes())
            assert [facts["link-store-gbps"], facts["link-retrieve-gbps"]] == [f"{kept[at]:.1f}" for at in (0, 3)]
            assert kept[0] > 0 < kept[3]
        assert [path.name for path in tmp_path.glob("crossover-*")] == [measurement_of(machine, tmp_path).name]


def test_what_was_measured_is_used_by_the_next_mover_and_shown(vendor: Vendor, tmp_path: Path) -> None:
    kept = msgspec.json.encode(KEPT)
    with Machine(vendor) as machine, seen_by_children(machine), started(machine, tmp_path, kept) as facts:
        assert {name: facts[name] for name in SHOWN} == SHOWN
        assert measurement_of(machine, tmp_path).read_bytes() == kept
