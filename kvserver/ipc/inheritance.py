"""What a child process of the supervisor is told on its command line, and how it ends with its parent."""

import ctypes
import os
import signal
from typing import Literal

import msgspec

from kvserver.config.config import Config
from kvserver.wire.orders import MoverKind

CANNOT_START = 2
"""Exit status of a brain that the configuration or the machine does not let start; trying again would not help."""
PR_SET_PDEATHSIG = 1

Sums = Literal["put", "compare"]
"""What is done with the sums of the arena's bytes (arena_sums.py)."""


class Inheritance(msgspec.Struct, frozen=True, kw_only=True):
    """What a child gets on its command line: numbers of inherited descriptors, and the configuration."""

    parent: int
    control: int = -1
    """Brain: the socket to the supervisor. Mover: the socket to the brain."""
    arena: int = -1
    ledger: int = -1
    mover: int = 0
    device: MoverKind = "host"
    device_id: str = ""
    """Mover: the device that it serves, as in orders.StartMover."""
    incarnation: int = 0
    sums: Sums | None = None
    config: Config


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when `parent` ends; at once if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
