"""A supervisor with small stand-ins for its children, in its own process: one of its calls fails, or many do.

Each line on standard output is a child's observation: `brain PID`, `mover PID of BRAIN`, `quiet`. The last line is
`calls N`. The test that runs this kills processes and reads the lines (test_supervisor_faults.py)."""

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvserver import logs
from kvserver.config.config import Config
from kvserver.supervisor import supervisor
from kvserver.supervisor.kept_memory import Held
from kvserver.supervisor.systemd import Manager
from kvserver.transfer.native import ArenaGrower, create_memfd
from kvserver.wire.orders import StartMover, encode

SHORTAGE_S = 0.4
ARENA_BYTES, SLAB_BYTES = 4 << 20, 2 << 20
MOVERS_MAX = 40

BRAIN = """
import array, os, sys
from _socket import socket  # the module above it takes longer to come than the interpreter
control = socket(fileno=int(sys.argv[1].split('"control":')[1].split(",")[0]))
wishes = [bytes.fromhex(text) for text in os.environ["WISHES"].split()]
def say(line): os.write(1, line.encode() + b"\\n")
say(f"brain {os.getpid()}")
control.send(wishes.pop(0))
while True:
    news, beside, _, _ = control.recvmsg(4096, 1024)
    if not news: break
    if beside:
        numbers = array.array("i", beside[0][2])
        pid = open(f"/proc/self/fdinfo/{numbers[1]}").read().split("Pid:")[1].split()[0]
        say(f"mover {pid} of {os.getpid()}")
    elif b"mover-reaped" in news and wishes:
        for number in numbers if (numbers := globals().get("numbers")) else (): os.close(number)
        numbers = None
        control.send(wishes.pop(0))
"""
MOVER = ["sh", "-c", "exec sleep infinity"]
QUIET = ["sh", "-c", "echo quiet"]
STAND_INS = {
    "kvserver.brain.process": [sys.executable, "-ISc", BRAIN],
    "kvserver.movers.mover": MOVER,
    "kvserver.movers.disk_mover": MOVER,
    supervisor.QUIET: QUIET,
}


class Faults:
    """Counts the calls that the kernel may refuse, and refuses some."""

    def __init__(self, first: int, last: int, number: int) -> None:
        self.first, self.last, self.number = first, last, number
        self.calls = 0
        self.until_s = 0.0

    def meet(self, what: str) -> None:
        """Counts a call; raises OSError when it is one to refuse."""
        self.calls += 1
        if self.calls == self.first:
            self.until_s = time.monotonic() + SHORTAGE_S
        by_time = self.last == 0 and self.first <= self.calls and time.monotonic() < self.until_s
        if by_time or self.first <= self.calls <= self.last:
            raise OSError(self.number, f"{os.strerror(self.number)} ({what}, call {self.calls})")

    def before(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def checked(*arguments: Any, **named: Any) -> Any:
            self.meet(what)
            return call(*arguments, **named)

        return checked

    def install(self) -> None:
        for owner, name in (
            (os, "pipe"),
            (os, "pidfd_open"),
            (socket, "socketpair"),
            (socket.socket, "setsockopt"),
            (socket.socket, "send"),
            (socket.socket, "sendmsg"),
            (socket.socket, "recvmsg_into"),
            (selectors.DefaultSelector, "register"),
            (subprocess, "_fork_exec"),
        ):
            setattr(owner, name, self.before(getattr(owner, name), name))


class StandIn(subprocess.Popen[bytes]):
    """A few lines in place of one of our modules, so that a start takes milliseconds."""

    def __init__(self, command: list[str], **named: Any) -> None:
        super().__init__([*STAND_INS[command[2]], *command[3:]], **named)


class Armed(supervisor.Supervisor):
    """A supervisor that arms the faults when its loop begins; a failure before that would only refuse the start."""

    faults: Faults

    def _start_brain_when_due(self) -> None:
        if not self.faults.calls:
            self.faults.calls = 1
            self.faults.install()
        super()._start_brain_when_due()


def run(device: str, first: int, last: int, number: int) -> None:
    """Makes calls first to last fail; with last 0, all calls fail from the first one on, for SHORTAGE_S."""
    Armed.faults = Faults(first + 1, last + 1 if last else 0, number)
    logs.start(level="info", form="text", process="supervisor")
    subprocess.Popen = StandIn  # type: ignore[misc]
    supervisor.BACKOFF_S = (0.0, 0.02, 0.05)  # type: ignore[assignment]
    supervisor.QUIET_AGAIN_S = 0.05
    wishes = (encode(StartMover(number, device, "")) for number in range(1, MOVERS_MAX))  # type: ignore[arg-type]
    os.environ["WISHES"] = " ".join(wish.hex() for wish in wishes)
    disks = "/nowhere" if device == "disk" else ""
    config = Config(arena_bytes=ARENA_BYTES, slab_bytes=SLAB_BYTES, disk_paths=disks)
    arena = create_memfd("arena", ARENA_BYTES, 0)
    grower = ArenaGrower(arena, ARENA_BYTES, SLAB_BYTES, 1)
    ledger = os.open(Path(__file__), os.O_RDONLY)
    Armed(config, Held(arena, ledger, found=False), grower, Manager({}), "anywhere").run()
    os.write(1, f"calls {Armed.faults.calls - 1}\n".encode())
