"""Fixtures of the device tests: a simulated machine of either vendor, and servers that run on it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.device.simulated import Machine, Vendor
from tests.process.harness import Server

VENDORS: tuple[Vendor, ...] = ("cuda", "rocm")


@pytest.fixture(params=VENDORS)
def vendor(request: pytest.FixtureRequest) -> Vendor:
    chosen: Vendor = request.param
    return chosen


@pytest.fixture
def machine(vendor: Vendor) -> Iterator[Machine]:
    """One device of 4 GiB, visible to all processes that the test starts."""
    with Machine(vendor) as made, seen_by_children(made):
        yield made


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels and measurements: made once for all tests, as on a real machine."""
    return tmp_path_factory.mktemp("cache")


@cache
def measurement_path(vendor: Vendor, library: str, device_id: str, cache_dir: str) -> Path:
    """Asks another process: a library loaded here would be found by tests that expect none."""
    script = (
        "import sys; from kvserver.config.config import Config; from kvserver.transfer.device import measurement_path;"
        "vendor, library, device_id, cache_dir = sys.argv[1:];"
        "print(measurement_path(vendor, device_id, Config(device_library=library, cache_dir=cache_dir)))"
    )
    command = [sys.executable, "-c", script, vendor, library, device_id, cache_dir]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


class DeviceServer(Server):
    """A server for the devices of a machine.

    direct_from_bytes: pretends to be the measured length from which copies need no packing; a simulated link has no
    meaningful crossover.
    """

    def __init__(self, machine: Machine, cache_dir: Path, *, direct_from_bytes: int = 1 << 40, **settings: Any) -> None:
        self.machine = machine
        for device in range(machine.devices):
            path = measurement_path(machine.vendor, str(machine.library), machine.device_id(device), str(cache_dir))
            path.write_bytes(msgspec.json.encode((1.0, direct_from_bytes, direct_from_bytes) * 2))
        super().__init__(
            **{
                "arena_bytes": 32 << 20,
                "slab_bytes": 4 << 20,
                "device_library": machine.library,
                "cache_dir": cache_dir,
                "mover_grace_ms": 20_000,
                **settings,
            }
        )


@pytest.fixture
def server(machine: Machine, cache_dir: Path) -> Iterator[DeviceServer]:
    with DeviceServer(machine, cache_dir) as running:
        yield running


@contextmanager
def seen_by_children(machine: Machine) -> Iterator[Machine]:
    """Makes processes started in the block see the machine: for fixtures that outlive a test."""
    with pytest.MonkeyPatch().context() as environment:
        for name, value in machine.environment.items():
            environment.setenv(name, value)
        yield machine
