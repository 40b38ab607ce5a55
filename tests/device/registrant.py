"""An engine that registers whatever a test wants."""

from typing import Any

import msgspec

from kvserver.wire import messages as wire
from tests.device.client_process import BLOCKS, INSET, MIB, PAGE, PER_CHUNK, REGIONS, ClientHalf
from tests.device.conftest import DeviceServer
from tests.device.simulated import Machine
from tests.process.raw import RawSession

RUN = wire.RegionRun(0, INSET, REGIONS, BLOCKS * PAGE + 40, PAGE, PAGE)
GROUP = wire.GroupSpec(2, BLOCKS, "full", 0, 1, 0, 1, 0, [RUN])


class Registrant:
    """A session that registers a process's memory, rightly or wrongly."""

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
            "",
        )

    def registers(self, ring: int, **changes: Any) -> Any:
        return self.raw.zmq.ask(msgspec.structs.replace(self.good(ring), **changes))

    def close(self) -> None:
        self.raw.close()
        self.memory.close()
