"""Registrations of GPU memory that only the mover can refuse: each gets a code, and everybody else goes on."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvserver._native import RingOwner, create_memfd
from kvserver.wire import messages as wire
from tests.device.client_process import INSET, MIB, POOL_BYTES, ClientHalf
from tests.device.conftest import DeviceServer, seen_by_children
from tests.device.engine_process import DeviceWorker
from tests.device.registrant import Registrant
from tests.device.simulated import CODE, DELAY, HANG, Machine, Vendor
from tests.process.bad_input.abuse import refusal
from tests.process.harness import until

SLABS, SELF_TEST_UNITS = 8, 2
"""Slabs of the arena; units that the mover registers for its self-test before the slabs."""


@pytest.fixture
def registrant(server: DeviceServer, machine: Machine) -> Iterator[Registrant]:
    made = Registrant(server, machine)
    yield made
    made.close()


def test_bad_handles_are_refused_with_a_code_and_hurt_nobody(
    registrant: Registrant, server: DeviceServer, machine: Machine
) -> None:
    assert registrant.bytes == INSET + POOL_BYTES
    owner = RingOwner(MIB)
    ring = owner.fd
    with DeviceWorker(server.path, machine, name="bystander") as bystander:
        bystander.call("open", "kv_first")
        bystander.call("ready")
        bystander.call("store", 1, 3)
        pool, staging = registrant.pool, registrant.staging
        for code, changes in (
            ("handle", {"buffers": [wire.Buffer(-1, bytes(64), registrant.bytes)]}),
            ("handle", {"buffers": [wire.Buffer(-1, os.urandom(64), registrant.bytes)]}),
            ("handle-size", {"buffers": [wire.Buffer(-1, pool, registrant.bytes + 4096)]}),
            ("handle", {"staging": [wire.Staging(b"s" * 64, MIB, registrant.offer(ring))]}),
            ("handle-size", {"staging": [wire.Staging(pool, MIB, registrant.offer(ring))]}),
            ("staging", {"staging": [wire.Staging(staging, 2 * MIB, registrant.offer(ring))]}),
        ):
            refusal(registrant.registers(ring, **changes), "request", code)
        assert bystander.call("retrieve", 1, 3) == 3
        assert isinstance(registrant.registers(ring), wire.Registered)
        (mover,) = server.status().movers
        assert mover.caches == 2


def test_handles_of_memory_that_is_gone_are_refused(
    registrant: Registrant, server: DeviceServer, machine: Machine
) -> None:
    """The memory was freed by its owner, or because its owner died."""
    owner = RingOwner(MIB)
    with ClientHalf(machine) as other:
        other.call("make_staged")
        foreign = other.call("exported")[2]
    registrant.memory.call("free_pool")
    for handle in (registrant.pool, foreign):
        reply = registrant.registers(owner.fd, buffers=[wire.Buffer(-1, handle, registrant.bytes)])
        refusal(reply, "request", "handle", "freed")
    assert server.status().movers[0].caches == 0


def test_memory_of_another_device_is_refused(vendor: Vendor, cache_dir: Path) -> None:
    with (
        Machine(vendor, devices=2) as machine,
        seen_by_children(machine),
        DeviceServer(machine, cache_dir) as server,
        ExitStack() as stack,
    ):
        registrant = Registrant(server, machine)
        stack.callback(registrant.close)
        owner = RingOwner(MIB)
        reply = registrant.registers(owner.fd, device_id=machine.device_id(1))
        refusal(reply, "request", "handle-device", "another device")
        assert isinstance(registrant.registers(owner.fd), wire.Registered)


@pytest.mark.parametrize("what", ["small", "unsealed", "pipe"])
def test_a_descriptor_that_is_no_ring_is_refused(registrant: Registrant, what: str) -> None:
    if what == "pipe":
        descriptor, other = os.pipe()
        os.close(other)
    else:
        descriptor = create_memfd("test", 4096 if what == "small" else 16 * MIB, sealed=what == "small")
    refusal(registrant.registers(descriptor), "request", "staging")
    os.close(descriptor)


def test_a_device_that_nobody_has_is_refused(registrant: Registrant, server: DeviceServer) -> None:
    """Its mover starts, finds no such device and ends; the next registration of a real device works."""
    owner = RingOwner(MIB)
    ring = owner.fd
    reply = registrant.registers(ring, device_id="f" * 32 + "@0000:ff:00.0")
    refusal(reply, "device", "mover-lost", "exit 3")
    assert isinstance(registrant.registers(ring), wire.Registered)


def test_registering_while_the_arena_grows_waits_only_for_the_slabs_it_needs(vendor: Vendor, cache_dir: Path) -> None:
    """The driver is slow for each slab, and never returns for the last one: the ready slabs are used."""
    with (
        Machine(vendor) as machine,
        seen_by_children(machine),
        machine.rule("host_register", DELAY, delay_us=30_000, times=SLABS),
        machine.rule("host_register", HANG, skip=SELF_TEST_UNITS - 1) as held,
        DeviceServer(machine, cache_dir, arena_reach="register") as server,
        DeviceWorker(server.path, machine, shape="kv_first", mode="server-gather") as worker,
    ):
        worker.call("ready")
        assert worker.call("store", 1, 3)["chunks"] == 3
        assert worker.call("retrieve", 1, 3) == 3
        until("a slab to take for ever", held.met)
        assert worker.call("retrieve", 1, 3) == 3


def test_kernels_that_could_not_be_compiled_are_spoken_of(vendor: Vendor, tmp_path: Path) -> None:
    """The built-in kernels are right too; log and status document say why they are used."""
    with (
        Machine(vendor) as machine,
        seen_by_children(machine),
        machine.rule("rtc_compile", CODE, code=6),
        DeviceServer(machine, tmp_path) as server,
        DeviceWorker(server.path, machine, shape="kv_first", mode="server-gather") as worker,
    ):
        worker.call("ready")
        assert worker.call("store", 1, 3)["chunks"] == 3
        assert worker.call("retrieve", 1, 3) == 3
        (mover,) = server.status().movers
        assert mover.facts["kernels"].startswith("built-in")
        assert "COMPILATION_ERROR" in mover.facts["kernels-note"]
        assert re.search(r"WARNING .*kernels built in.* COMPILATION_ERROR", server.log())


def test_a_device_without_room_for_the_movers_own_staging_fails_jobs_and_says_so(
    vendor: Vendor, cache_dir: Path
) -> None:
    with (
        Machine(vendor, device_bytes=24 * MIB) as machine,
        seen_by_children(machine),
        DeviceServer(machine, cache_dir) as server,
        DeviceWorker(server.path, machine, shape="kv_first", mode="server-gather") as worker,
    ):
        worker.call("ready")
        outcome = worker.call("store", 1, 3)
        assert (outcome["chunks"], outcome["why"]) == (0, "device-memory")
        assert server.status().chunks == 0
