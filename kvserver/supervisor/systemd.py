"""The interface to systemd: readiness, signs of life, and the store for memory that outlives a restart.

The arena and the ledger are descriptors, and systemd's store keeps descriptors while a service restarts
(FileDescriptorStoreMax, sd_notify(3)). So DRAM survives `systemctl restart`, an upgrade, and a crash of the supervisor,
just as it survives a crash of the brain: the ledger says what is sealed. Without systemd nothing here has an effect.
"""

import os
import socket
from array import array
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

FIRST_DESCRIPTOR = 3
"""Number of the first passed descriptor, see sd_listen_fds(3)."""
STORE_S = 5.0
"""Longest wait for systemd's queue with messages about the store: these are not repeated."""
HIERARCHIES = {"": ("", "unified"), "name=systemd": ("systemd",)}
"""Controllers in /proc/self/cgroup -> possible mount directories of systemd's control groups."""


class Manager:
    """systemd as our service manager; without effect if the environment does not say that it started us."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Removes the variables for this process from the environment, so that no child uses them."""
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
        """Name -> kept descriptor. The caller owns the descriptors."""
        kept, self._kept = self._kept, {}
        return kept

    def keep(self, name: str, descriptor: int) -> bool:
        """Asks systemd to pass a descriptor to the next start. Whether the message was sent."""
        return self._say(f"FDSTORE=1\nFDNAME={name}", (descriptor,), wait_s=STORE_S)

    def forget(self, name: str) -> bool:
        """Asks systemd to close every descriptor of that name. Whether the message was sent."""
        return self._say(f"FDSTOREREMOVE=1\nFDNAME={name}", wait_s=STORE_S)

    def alive(self) -> None:
        """Reports readiness once, and a sign of life. To be called at each sign of life of the brain."""
        if not self._said_ready:
            self._said_ready = self._say("READY=1")
        if self._watched:
            self._say("WATCHDOG=1")

    def stopping(self) -> None:
        self._say("STOPPING=1")

    def left_behind(self, root: Path = Path("/")) -> list[int] | None:
        """Processes of an earlier start that have not ended, and may still write to the kept memory.

        None: unknown, because our control group is not mounted at a known place."""
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
        """Sends a message. False if it could not be sent within that time; True also without systemd."""
        if not self._address:
            return True
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.settimeout(wait_s)
                end.connect(self._address)
                end.sendmsg([message.encode()], beside)
        except OSError:  # systemd restarts, or its queue is full: readiness and signs of life are repeated
            return False
        return True


def _listed(environment: MutableMapping[str, str]) -> dict[str, int]:
    """Name -> descriptor that LISTEN_FDS passes to this process. Of two with the same name, the first is closed."""
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
