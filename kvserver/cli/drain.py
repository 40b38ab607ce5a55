"""`kvserver disk drain`: asks a server to empty a device, and shows the progress until it can be removed."""

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvserver.errors import ConfigError, DeviceError

POLL_S = 0.5


class Server(Protocol):
    """The part of kvclient.Client that is used here."""

    def drain(self, device: int) -> None: ...
    def status(self) -> dict[str, Any]: ...


def drain(
    server: Server,
    device: str,
    show: Callable[[int, int, str], None],
    *,
    sleep_s: Callable[[float], None] = time.sleep,
) -> str:
    """Drains a device and returns a sentence about its chunks when it is empty. device: number or directory.

    Raises KvError. The server then continues the drain by itself, unless it has refused it."""
    before = server.status()
    number = _number_of(before, device)
    total = _disk(before, number)["used_bytes"]
    brain = None
    while True:
        status = server.status()
        disk = _disk(status, number)
        if disk["drain"] == "drained":
            return _said(before, status, disk)
        if status["incarnation"] != brain:  # also after a restart: the new brain may not know of the drain
            brain = status["incarnation"]
            server.drain(number)
        left = disk["used_bytes"]
        total = max(total, left)
        waits = f", waits for {disk['drain_waits']}" if disk["drain_waits"] else ""
        show(total - left, total, f"{left:,} of {total:,} bytes left{waits}")
        sleep_s(POLL_S)


def _number_of(status: dict[str, Any], device: str) -> int:
    directories = {disk["directory"]: disk["device"] for disk in status["disks"]}
    if os.path.normpath(device) in directories:
        return int(directories[os.path.normpath(device)])
    if device.isdecimal() and int(device) in directories.values():
        return int(device)
    there = ", ".join(f"{number} ({directory})" for directory, number in directories.items()) or "none"
    raise ConfigError("disk-device", f"{device!r} is no device of this server; it has {there}")


def _disk(status: dict[str, Any], number: int) -> dict[str, Any]:
    for disk in status["disks"]:
        if disk["device"] == number:
            return dict(disk)
    raise DeviceError("disk-device", f"the server has no device {number} any more")


def _said(before: dict[str, Any], after: dict[str, Any], disk: dict[str, Any]) -> str:
    counted = dict(after["counters"]["disk_drained"])
    if after["incarnation"] == before["incarnation"]:
        for end, chunks in before["counters"]["disk_drained"].items():
            counted[end] -= chunks
    ends = ", ".join(f"{chunks:,} {end}" for end, chunks in counted.items())
    return f"device {disk['device']} ({disk['directory']}) is empty and can be taken out of disk_paths. Chunks: {ends}"
