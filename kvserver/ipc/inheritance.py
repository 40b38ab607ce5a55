"""The command line of the supervisor's child processes, and their end with their parent."""

import ctypes
import os
import signal

import msgspec

from kvserver.config.config import Config
from kvserver.wire.orders import MoverKind

CANNOT_START = 2
"""Exit status of a brain that cannot start with this configuration or machine, so that a retry would not help."""
PR_SET_PDEATHSIG = 1


class Inheritance(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of a child process: numbers of inherited descriptors, and the configuration."""

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
    config: Config


def die_with_parent(parent: int) -> None:
    """Arranges SIGKILL for this process when `parent` ends. Exits at once if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
