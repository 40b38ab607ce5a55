"""Waits until nothing is under way any more of what a disk mover asked for that has ended.

A process that io_uring serves is reaped at once when it is killed, whatever its devices still do: a read of a device
that was slow arrives in the arena seconds later, in a slot that holds another chunk by then. Threads that read have no
such end, since they sleep in the kernel until their device has answered. So the supervisor takes a disk mover for
reaped when this program has ended as well: `python -m kvserver.movers.disk_io_barrier LEVEL FORM DIRECTORY...`.

How it knows: Linux waits for the direct I/O of a file before it allocates in it. What is asked for here is allocated
already, so nothing changes. Seen on ext4. Of XFS it is what the source says, of btrfs and ZFS it is not known: see
docs/disk.md. Where a file cannot be opened for that, time must do.
"""

import ctypes
import logging
import os
import sys
import time

from kvserver import logs

FILE = "kvserver.store"
"""Only payloads go between device and arena."""
BLOCK_BYTES = 4096
FALLOC_FL_KEEP_SIZE = 1
PATIENCE_S = 60.0
"""Where nothing can be known: twice what Linux gives a device to answer a request, before it resets the device."""


def wait(directory: str) -> None:
    """Returns when no direct I/O is under way at the directory's store. Raises OSError when that cannot be known."""
    try:
        descriptor = os.open(os.path.join(directory, FILE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return  # it was drained or never made, and Linux waits before it gives blocks of a file back
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
