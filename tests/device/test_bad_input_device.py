"""Registrations of GPU memory that only the mover can refuse: each gets a code, and everybody else goes on."""

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvserver._native import RingOwner, create_memfd
from kvserver.wire import messages as wire
from tests.device.client_process import BLOCKS, INSET, MIB, PAGE, PER_CHUNK, POOL_BYTES, REGIONS, ClientHalf
from tests.device.conftest import DeviceServer
from tests.device.engine_process import DeviceWorker
from tests.device.simulated import Machine
from tests.process.abuse import refusal
from tests.process.raw import RawSession

RUN = wire.RegionRun(0, INSET, REGIONS, BLOCKS * PAGE + 40, PAGE, PAGE)
GROUP = wire.GroupSpec(2, BLOCKS, "full", 0, 1, 0, 1, 0, [RUN])


class Registrant:
    """A session that registers a process's memory, right or wrong."""

    def __init__(self, server: DeviceServer, machine: Machine) -> None:
        self.raw = RawSession(server.path, engine="registrant")
        self.memory = ClientHalf(machine)
        self.memory.call("make_staged")
        self._vendor = machine.vendor
        self.device_id, self._ipc_mode, self.pool, self.bytes, self.staging = self.memory.call("exported")

    def offer(self, descriptor: int) -> int:
        assert self.raw.local is not None
        reply = self.raw.local.ask(wire.Offer(self.raw.zmq.next_id()), [descriptor])
        assert isinstance(reply, wire.Offered), reply
        return reply.descriptor

    def good(self, ring: int) -> wire.Register:
        return wire.Register(
            self.raw.zmq.next_id(),
            "kv",
            b"n" * 32,
            2 * PER_CHUNK,
            self._vendor,
            self.device_id,
            self._ipc_mode,
            "staged",
            "",
            [wire.Buffer(-1, self.pool, self.bytes)],
            [GROUP],
            [wire.Staging(self.staging, MIB, self.offer(ring))],
            0,
        )

    def registers(self, ring: int, **changes: Any) -> Any:
        return self.raw.zmq.ask(msgspec.structs.replace(self.good(ring), **changes))

    def close(self) -> None:
        self.raw.close()
        self.memory.close()


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
    """Its mover starts, finds no such device and ends; the next registration of a real one works."""
    owner = RingOwner(MIB)
    ring = owner.fd
    reply = registrant.registers(ring, device_id="f" * 32 + "@0000:ff:00.0")
    refusal(reply, "device", "mover-lost", "exit 3")
    assert isinstance(registrant.registers(ring), wire.Registered)
