"""The disk mover with planned I/O faults, for tests only: python -m tests.process.disk_faults.mover ...

The next mover to start takes the Plan in FOLDER/plan.json. A lasting plan holds for all later movers too, from their
first request on, like a broken device. While the mover lives, FOLDER/requests.sock tells each peer that connects how
many requests there were and how many of them stall."""

import functools
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from kvserver._native import DiskFaults, DiskStore
from kvserver.movers import disk_mover
from kvserver.transfer import disk as door
from tests.process.disk_faults.program import FOLDER

PLAN, REQUESTS = "plan.json", "requests.sock"
POLL_S = 0.005

Kind = Literal["error", "short", "torn", "flip", "misdirect", "stall"]


class Plan(msgspec.Struct, frozen=True):
    """The nth request fails; with `lasting`, all later ones too."""

    nth: int
    kind: Kind
    errno: int
    lasting: bool
    stall_s: float
    """How long stalled requests are held."""


def leave(folder: Path, plan: Plan | None) -> None:
    """Saves the plan for movers that start later. None means no faults."""
    path = folder / PLAN
    if plan is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(msgspec.json.encode(plan))


def requests(folder: Path) -> tuple[int, int]:
    """(requests so far, requests that stall) of the running mover; (0, 0) when there is none."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(folder / REQUESTS))
            asked, stalled = json.loads(asking.recv(100) or b"[0, 0]")
        except (FileNotFoundError, ConnectionError):
            return 0, 0
    return int(asked), int(stalled)


def _take(folder: Path) -> Plan | None:
    path = folder / PLAN
    if not path.exists():
        return None
    plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    leave(folder, msgspec.structs.replace(plan, nth=1) if plan.lasting else None)
    return plan


def _tell(folder: Path, faults: DiskFaults) -> None:
    path = folder / REQUESTS
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as door_:
        door_.bind(str(path))
        door_.listen()
        while True:
            asking, _ = door_.accept()
            with asking, suppress(OSError):
                asking.send(json.dumps([faults.requests, faults.stalled]).encode())


def _release(faults: DiskFaults, stall_s: float) -> None:
    while not faults.stalled:
        time.sleep(POLL_S)
    time.sleep(stall_s)
    faults.release()


def main() -> None:
    folder = Path(os.environ[FOLDER])
    faults = DiskFaults()
    plan = _take(folder)
    if plan is not None:
        faults.plan(plan.nth, plan.kind, errno=plan.errno, lasting=plan.lasting)
        if plan.kind == "stall":
            threading.Thread(target=_release, args=(faults, plan.stall_s), daemon=True).start()
    threading.Thread(target=_tell, args=(folder, faults), daemon=True).start()
    door.DiskStore = functools.partial(DiskStore, faults=faults)  # type: ignore[assignment,misc]
    disk_mover.main()


if __name__ == "__main__":
    main()
