"""A directory that is being taken out of use: the mark that says so, and its end.

The mark outlives every process, so that neither a restart of the server nor one of the mover writes to a device that is
to be taken away. Removing it, while no server runs, gives the directory back.
"""

import os
from contextlib import suppress
from pathlib import Path

from kvserver import disk_notes

MARK = "kvserver.drained"
STORE_FILES = ("kvserver.store", "kvserver.headers")
"""Whatever the native store keeps in a directory, whole or in the making."""
TEXT = """\
`kvserver disk drain` has been asked to empty this directory, or has done so: then no other file of kvserver is here.
To have it used again, stop the server and remove this file.
"""


def is_marked(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, MARK))


def is_empty(directory: str) -> bool:
    """Nothing is left in it that the server would have to read."""
    return not os.path.exists(os.path.join(directory, STORE_FILES[0]))


def mark(directory: str) -> None:
    """Durable when it returns. Raises OSError."""
    if is_marked(directory):
        return
    path = Path(directory) / MARK
    with path.open("w") as file:
        file.write(TEXT)
        file.flush()
        os.fsync(file.fileno())
    _make_durable(directory)


def erase(directory: str) -> None:
    """Removes all files of ours but the mark. Their bytes are given back at once, although the mover has them open.
    Raises OSError."""
    for name in STORE_FILES:
        path = os.path.join(directory, name)
        with suppress(FileNotFoundError):
            os.truncate(path, 0)
            os.unlink(path)
    disk_notes.erase(directory)
    _make_durable(directory)


def _make_durable(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
