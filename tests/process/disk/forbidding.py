"""Runs a program to which the kernel refuses one thing, as a container or a file system would:

    python -m tests.process.disk.forbidding io-uring|direct|preallocation -m kvserver serve ...

The remaining arguments are the interpreter's. The program itself is unchanged: a filter of system calls (seccomp)
refuses them, in it and in all processes that it starts."""

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import Final, NamedTuple

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
INSTRUCTION = struct.Struct("<HBBI")
"""A filter's instruction: operation, instructions to skip when true, when false, operand."""
LOAD, IS_EQUAL, HAS_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NUMBER_AT, THIRD_ARGUMENT_AT = 0, 32
"""Offsets in the filter's input: the system call's number, and the lower half of its third argument."""


class Forbidden(NamedTuple):
    calls: dict[str, int]
    """Number of the system call by machine."""
    errno: int
    flag: int = 0
    """Refuse only when the third argument has this bit; 0: always."""


FORBIDDEN: Final = {
    "io-uring": Forbidden({"x86_64": 425, "aarch64": 425}, errno.EPERM),
    "direct": Forbidden({"x86_64": 257, "aarch64": 56}, errno.EINVAL, os.O_DIRECT),
    "preallocation": Forbidden({"x86_64": 285, "aarch64": 47}, errno.EOPNOTSUPP),
}
"""Errors as containers return for io_uring_setup, and file systems without the feature for openat and fallocate."""


def can_forbid() -> bool:
    return platform.machine() in FORBIDDEN["direct"].calls


def filter_for(what: Forbidden) -> bytes:
    refuse = [(RETURN, 0, 0, REFUSE | what.errno), (RETURN, 0, 0, ALLOW)]
    if what.flag:
        refuse = [(LOAD, 0, 0, THIRD_ARGUMENT_AT), (HAS_BIT, 0, 1, what.flag), *refuse]
    call = what.calls[platform.machine()]
    steps = [(LOAD, 0, 0, NUMBER_AT), (IS_EQUAL, 0, len(refuse) - 1, call), *refuse]
    return b"".join(INSTRUCTION.pack(*step) for step in steps)


def forbid(what: Forbidden) -> None:
    """Installs the filter for this thread and for everything that it starts or executes."""
    steps = filter_for(what)
    held = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("<H6xQ", len(steps) // INSTRUCTION.size, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid(FORBIDDEN[sys.argv[1]])
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
