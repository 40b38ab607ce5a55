"""Taking a directory out of use: its mark, and the removal of its files.

The mark outlives every process, so that a restarted server or mover does not write to a device that is to be removed.
To use the directory again, remove the mark while no server runs.
"""

import os
from contextlib import suppress
from pathlib import Path

from kvserver.movers import disk_hits, disk_notes
from kvserver.private_files import write_whole

MARK = "kvserver.drained"
STORE_FILES = ("kvserver.headers", "kvserver.store")
"""The native store's files in a directory."""
UNFINISHED = ".new"
"""Suffix of a file that the store is making, or was making when it died."""
TEXT = """\
`kvserver disk drain` has been asked to empty this directory, or has done so: then no other file of kvserver is here.
To have it used again, stop the server and remove this file.
"""


SECRET_FILES = tuple(name + end for name in STORE_FILES for end in ("", UNFINISHED))
"""Files with engines' data. Nobody else may read them."""
OPEN_FILES = tuple(name + end for name in (MARK, disk_hits.FILE) for end in ("", UNFINISHED))
"""Files without engines' data. Earlier versions made them with the mode of the umask."""
NOTES = disk_notes.FOLDER


def is_marked(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, MARK))


def is_drained(directory: str) -> bool:
    """Whether a directory is marked, and its payloads are gone."""
    return is_marked(directory) and not os.path.exists(os.path.join(directory, STORE_FILES[-1]))


def mark(directory: str) -> None:
    """Marks a directory durably. Raises OSError."""
    if is_marked(directory):
        return
    write_whole(Path(directory) / MARK, TEXT.encode(), durable=True)
    disk_notes.make_durable(directory)


def erase(directory: str) -> None:
    """Removes our files except the mark. Payloads go last: a directory without them is drained. Raises OSError.

    The files are truncated first, which frees their bytes although the mover has them open."""
    disk_notes.erase(directory)
    disk_hits.erase(directory)
    for name in STORE_FILES:
        for path in (os.path.join(directory, name + UNFINISHED), os.path.join(directory, name)):
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    os.truncate(descriptor, 0)
                finally:
                    os.close(descriptor)
                os.unlink(path)
    disk_notes.make_durable(directory)
