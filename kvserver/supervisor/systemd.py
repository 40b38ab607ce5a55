"""What systemd is told, and what it keeps for us: readiness, signs of life, and the memory that outlives a restart.

The arena and the ledger are descriptors, and systemd's store holds on to descriptors while a service restarts
(FileDescriptorStoreMax, sd_notify(3)). So DRAM survives `systemctl restart`, an upgrade, and a crash of the
supervisor, as it survives a crash of the brain: the ledger says what is sealed. Without systemd nothing here does
anything.
"""

import os
import socket
from array import array
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

FIRST_DESCRIPTOR = 3
"""Descriptors are passed from this number on, sd_listen_fds(3)."""
STORE_S = 5.0
"""How long what concerns the store waits for systemd to have room for it: nobody says it again."""
HIERARCHIES = {"": ("", "unified"), "name=systemd": ("systemd",)}
"""Where control groups that systemd made are mounted, by what /proc/self/cgroup says of them."""


class Manager:
    """systemd, as far as the environment says that it started us."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes what is meant for this process alone out of the environment, so that no child believes it."""
        address = environment.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watched = environment.pop("WATCHDOG_USEC", "") != ""
        environment.pop("WATCHDOG_PID", None)
        self._unit = "INVOCATION_ID" in environment
        self._kept = _listed(environment)
        self._said_ready = False

    @property
    def there(self) -> bool:
        return self._address != ""

    def take(self) -> dict[str, int]:
        """The descriptors that were kept, by name; the caller's from now on."""
        kept, self._kept = self._kept, {}
        return kept

    def keep(self, name: str, descriptor: int) -> bool:
        """Has a descriptor passed to the next start of the service. Whether systemd was told."""
        return self._say(f"FDSTORE=1\nFDNAME={name}", (descriptor,), wait_s=STORE_S)

    def forget(self, name: str) -> bool:
        """Has every descriptor of that name closed. Whether systemd was told."""
        return self._say(f"FDSTOREREMOVE=1\nFDNAME={name}", wait_s=STORE_S)

    def alive(self) -> None:
        """The brain decides: to be called whenever it says so."""
        if not self._said_ready:
            self._said_ready = self._say("READY=1")
        if self._watched:
            self._say("WATCHDOG=1")

    def stopping(self) -> None:
        self._say("STOPPING=1")

    def left_behind(self, root: Path = Path("/")) -> list[int] | None:
        """Processes of an earlier start that have not ended, and may still write to the memory that was kept. None:
        where our control group is mounted is not known, so neither are they."""
        if not self._unit:
            return []
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for mounted in HIERARCHIES.get(controllers, ()):
                members = root / "sys/fs/cgroup" / mounted / path.lstrip("/") / "cgroup.procs"
                with suppress(FileNotFoundError):
                    return [int(pid) for pid in members.read_text().split() if int(pid) != os.getpid()]
        return None

    def _say(self, message: str, descriptors: tuple[int, ...] = (), *, wait_s: float = 0.0) -> bool:
        """False when it could not be said within that time."""
        if not self._address:
            return True
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.settimeout(wait_s)
                end.connect(self._address)
                end.sendmsg([message.encode()], beside)
        except OSError:  # systemd restarts, or its queue is full: readiness and signs of life are said again
            return False
        return True


def _listed(environment: MutableMapping[str, str]) -> dict[str, int]:
    """What LISTEN_FDS passes to this process. Of two with one name the later counts."""
    process, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    if process != str(os.getpid()) or not count.isdecimal():
        return {}
    kept: dict[str, int] = {}
    for descriptor, name in zip(range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)), names, strict=False):
        os.set_inheritable(descriptor, False)
        if name in kept:
            os.close(kept[name])
        kept[name] = descriptor
    return kept
