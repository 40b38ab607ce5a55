"""Driver behaviours that are easily overlooked, especially AMD's: one test per trap, which fails without its handling.

The simulator enforces them (tests/simdriver). It refuses open flags other than 1 in every test.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvserver.config.config import Config
from kvserver.errors import ConfigError
from tests.device.conftest import VENDORS, DeviceServer, seen_by_children
from tests.device.engine_process import STAGING_BYTES, DeviceWorker
from tests.device.simulated import CODE, Machine, Vendor
from tests.process.harness import until

CHUNKS = 5


@contextmanager
def scene(
    vendor: Vendor, cache_dir: Path, settings: dict[str, Any] | None = None, **environment: str
) -> Iterator[tuple[Machine, DeviceServer]]:
    """A machine and its own server. `environment`: for the server, and for all other processes unless overridden."""
    with pytest.MonkeyPatch().context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with (
            Machine(vendor) as machine,
            seen_by_children(machine),
            DeviceServer(machine, cache_dir, **(settings or {})) as server,
        ):
            yield machine, server


@pytest.fixture(scope="module", params=VENDORS)
def shared(request: pytest.FixtureRequest, cache_dir: Path) -> Iterator[tuple[Machine, DeviceServer]]:
    """Shared by tests that leave nothing behind."""
    with scene(request.param, cache_dir) as made:
        yield made


def test_registered_slabs_have_unrelated_device_addresses(vendor: Vendor, cache_dir: Path) -> None:
    """The prompts fill more than three slabs of the arena."""
    with (
        scene(vendor, cache_dir, {"arena_reach": "register"}) as (machine, server),
        DeviceWorker(server.path, machine, shape="large_pages") as worker,
    ):
        worker.call("ready")
        for seed in range(6):
            assert worker.call("store", seed, 2)["chunks"] == 2
        assert server.status().arena.used_bytes > 3 * (4 << 20)
        for seed in range(6):
            assert worker.call("retrieve", seed, 2) == 2
        assert {mover.facts["arena-reach"] for mover in server.status().movers} == {"register"}


def test_batch_copies_work_with_the_attributes_that_the_vendor_wants(vendor: Vendor, cache_dir: Path) -> None:
    """AMD's driver accepts no attributes, NVIDIA's requires one; more than 8,192 copies in a call fail on AMD."""
    with (
        scene(vendor, cache_dir, {"arena_reach": "register"}) as (machine, server),
        DeviceWorker(server.path, machine, shape="many_pages", mode="direct") as worker,
    ):
        worker.call("ready")
        calls = batch_calls(machine)
        assert worker.call("store", 1, 200)["chunks"] == 200
        assert worker.call("retrieve", 1, 200) == 200
        used = batch_calls(machine) - calls
        copies = 11 * 15 * 200
        assert 2 * -(-copies // 8192) <= used < copies / 100, "few calls for many copies"
        assert {mover.facts["batch"] for mover in server.status().movers} == {"yes"}


def test_batch_copies_that_are_refused_are_made_one_by_one(vendor: Vendor, cache_dir: Path) -> None:
    with Machine(vendor) as machine, seen_by_children(machine):
        with (
            machine.rule(batch_symbol(vendor), CODE, code=801),
            DeviceServer(machine, cache_dir, arena_reach="register") as server,
            DeviceWorker(server.path, machine, shape="kv_first", mode="direct") as worker,
        ):
            worker.call("ready")
            assert worker.call("store", 1, CHUNKS)["chunks"] == CHUNKS
            assert worker.call("retrieve", 1, CHUNKS) == CHUNKS
            assert {mover.facts["batch"] for mover in server.status().movers} == {"one by one"}
        assert batch_calls(machine) <= 2


def batch_symbol(vendor: Vendor) -> str:
    return {"cuda": "copy_batch8", "rocm": "copy_batch9"}[vendor]


def batch_calls(machine: Machine) -> int:
    return machine.calls(batch_symbol(machine.vendor))


def test_equal_process_numbers_are_explained(cache_dir: Path) -> None:
    """Two containers whose processes both have pid 1."""
    with (
        scene("rocm", cache_dir, KVSIM_PID="1") as (machine, server),
        DeviceWorker(server.path, machine, shape="kv_first") as worker,
    ):
        code, text = worker.call("problem")
        assert code == "handle-pid"
        assert "--pid=host" in text


@pytest.mark.parametrize("mode", ["staged", "server-gather", "direct"])
def test_a_handle_opens_at_the_begin_of_its_allocation(shared: tuple[Machine, DeviceServer], mode: str) -> None:
    """The cache begins somewhere inside."""
    machine, server = shared
    with DeviceWorker(server.path, machine, shape="kv_first", mode=mode, inset=65_536 + 3 * 4096 + 48) as worker:
        worker.call("ready")
        assert worker.call("store", 1, CHUNKS)["chunks"] == CHUNKS
        assert worker.call("retrieve", 1, CHUNKS) == CHUNKS


@pytest.mark.parametrize(
    "name",
    [
        "IpcGetEventHandle",  # events of another process leak, stall or hang
        "IpcOpenEventHandle",
        "Memcpy2D",  # one operation of the copy engine for each row
        "LaunchHostFunc",  # runs in a thread of the driver, where nothing may block
        "GetDeviceProperties",  # a struct whose layout changed between releases
        "hipDeviceGetAttribute",  # its attribute numbers changed
    ],
)
def test_calls_that_are_broken_somewhere_are_not_known(name: str) -> None:
    found = importlib.util.find_spec("kvserver._native")
    assert found is not None
    assert found.origin is not None
    module = Path(found.origin).read_bytes()
    assert b"hipIpcOpenMemHandle" in module, "this would find it"
    assert name.encode() not in module


def test_no_more_than_a_gibibyte_is_registered_at_once() -> None:
    """A slab is registered as a whole. Both vendors' drivers have failed at hundreds of GiB."""
    assert Config(arena_bytes=8 << 30, slab_bytes=1 << 30).slab_bytes == 1 << 30
    with pytest.raises(ConfigError, match="slab_bytes"):
        Config(arena_bytes=8 << 30, slab_bytes=(1 << 30) + 4096)


def test_transfers_do_not_spoil_a_stream_capture(shared: tuple[Machine, DeviceServer]) -> None:
    """While the engine captures, our threads allocate nothing, and query events only in relaxed mode."""
    machine, server = shared
    with DeviceWorker(server.path, machine, shape="kv_first", name="captures") as worker:
        worker.call("ready")
        worker.call("begin_capture")
        assert worker.call("store", 11, CHUNKS)["chunks"] == CHUNKS
        assert worker.call("retrieve", 11, CHUNKS) == CHUNKS
        assert worker.call("end_capture") == 0


@pytest.mark.parametrize(("ours", "theirs"), [("", "1"), ("1", "")])
def test_different_modes_of_handles_are_explained(cache_dir: Path, ours: str, theirs: str) -> None:
    """The same bytes have another meaning in each mode, and each side has its own default."""
    name = "HSA_ENABLE_IPC_MODE_LEGACY"
    with (
        scene("rocm", cache_dir, **{name: ours}) as (machine, server),
        DeviceWorker(server.path, machine, shape="kv_first", environment={name: theirs}) as worker,
    ):
        code, text = worker.call("problem")
        assert code == "ipc-mode"
        assert all(word in text for word in (name, "legacy", "dmabuf"))


def test_memory_that_cannot_be_exported_is_refused_with_the_setting(shared: tuple[Machine, DeviceServer]) -> None:
    machine, server = shared
    with DeviceWorker(server.path, machine) as worker:
        with pytest.raises(AssertionError, match="expandable_segments:False") as refusal:
            worker.call("open", "kv_first", "staged", 0, STAGING_BYTES, True)
        assert "not-exportable" in str(refusal.value) or "not exportable" in str(refusal.value)


def test_devices_are_known_by_name_where_they_are_numbered_otherwise(vendor: Vendor, cache_dir: Path) -> None:
    """An engine that sees only the second device calls it the first."""
    with (
        Machine(vendor, devices=2) as machine,
        seen_by_children(machine),
        DeviceServer(machine, cache_dir) as server,
        DeviceWorker(server.path, machine, environment={"KVSIM_VISIBLE": "1"}, shape="kv_first", name="1") as one,
        DeviceWorker(server.path, machine, environment={"KVSIM_VISIBLE": "1,0"}, name="10", ordinal=1) as both,
    ):
        both.call("open", "kv_first")
        for worker in (one, both):
            worker.call("ready")
        assert one.call("store", 1, CHUNKS)["chunks"] == CHUNKS
        assert both.call("retrieve", 1, CHUNKS) == CHUNKS
        ids = {mover.facts["device-id"] for mover in server.status().movers}
        assert ids == {machine.device_id(device) for device in (0, 1)}


def test_one_allocation_is_opened_once(shared: tuple[Machine, DeviceServer]) -> None:
    """AMD's driver refuses a second open. Two caches use it, and the second goes on when the first is gone."""
    machine, server = shared
    with DeviceWorker(server.path, machine, shape="kv_first", mode="server-gather", name="twins") as worker:
        worker.call("ready")
        mine = [pid for pid in machine.importers() if pid == server.mover_pid()]
        assert worker.call("store", 21, CHUNKS)["chunks"] == CHUNKS
        worker.call("move_to_twin")
        assert [pid for pid in machine.importers() if pid == server.mover_pid()] == mine
        assert worker.call("retrieve", 21, CHUNKS) == CHUNKS
    until("its import to be closed", lambda: len(machine.importers()) == len(mine) - 1 or None)
