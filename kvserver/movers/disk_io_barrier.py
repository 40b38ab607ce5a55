"""Waits until the I/O of a disk mover that has ended is over.

A killed process that uses io_uring is reaped at once, even while its devices still work on its requests. A read from a
slow device can then arrive in the arena seconds later, in a slot that holds another chunk by then. Threads that read do
not have this problem, since they sleep in the kernel until their device has answered. So the supervisor counts a disk
mover as reaped only when this program has ended too: `python -m kvserver.movers.disk_io_barrier LEVEL FORM
DIRECTORY...`.

The method: before Linux allocates blocks in a file, it waits for the file's direct I/O. The block that is asked for
here is allocated already, so nothing changes. This was observed on ext4. For XFS it follows from the source; for btrfs
and ZFS it is not known, see docs/disk.md. If a file cannot be opened, the program sleeps for PATIENCE_S instead.
"""

import ctypes
import logging
import os
import sys
import time

from kvserver import logs

FILE = "kvserver.store"
"""The file with the payloads; nothing else is copied between device and arena."""
BLOCK_BYTES = 4096
FALLOC_FL_KEEP_SIZE = 1
PATIENCE_S = 60.0
"""Time to wait when the state is unknown: twice the time after which Linux resets a device that does not answer."""


def wait(directory: str) -> None:
    """Returns when no direct I/O is under way at the directory's store. Raises OSError when that cannot be known."""
    try:
        descriptor = os.open(os.path.join(directory, FILE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return  # drained or never made; when a file is deleted, Linux waits for its I/O before it frees the blocks
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
        if fallocate(descriptor, FALLOC_FL_KEEP_SIZE, 0, BLOCK_BYTES) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)


def main(level: str, form: str, *directories: str) -> None:
    logs.start(level=level, form=form, process="disk quiet")
    unknown = False
    for directory in directories:
        try:
            wait(directory)
        except OSError as problem:
            unknown = True
            facts = ("directory", directory), ("why", problem.strerror), ("wait_s", PATIENCE_S)
            logs.event(logging.WARNING, "disk may be at work", *facts)
    if unknown:
        time.sleep(PATIENCE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
