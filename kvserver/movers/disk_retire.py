"""A directory that is being taken out of use: the mark that says so, and its end.

The mark outlives every process, so that neither a restart of the server nor one of the mover writes to a device that is
to be taken away. Removing it, while no server runs, gives the directory back.
"""

import os
from contextlib import suppress
from pathlib import Path

from kvserver.movers import disk_hits, disk_notes
from kvserver.private_files import write_whole

MARK = "kvserver.drained"
STORE_FILES = ("kvserver.headers", "kvserver.store")
"""What the native store keeps in a directory."""
UNFINISHED = ".new"
"""Behind the name of a file that the store is making, or was when it died."""
TEXT = """\
`kvserver disk drain` has been asked to empty this directory, or has done so: then no other file of kvserver is here.
To have it used again, stop the server and remove this file.
"""


SECRET_FILES = tuple(name + end for name in STORE_FILES for end in ("", UNFINISHED))
"""With what engines have stored. Nobody else may read them."""
OPEN_FILES = tuple(name + end for name in (MARK, disk_hits.FILE) for end in ("", UNFINISHED))
"""With counts. Earlier versions made them as the umask had it."""
NOTES = disk_notes.FOLDER


def is_marked(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, MARK))


def is_drained(directory: str) -> bool:
    """It is marked, and nothing is left in it that the server would have to read."""
    return is_marked(directory) and not os.path.exists(os.path.join(directory, STORE_FILES[-1]))


def mark(directory: str) -> None:
    """Durable when it returns. Raises OSError."""
    if is_marked(directory):
        return
    write_whole(Path(directory) / MARK, TEXT.encode(), durable=True)
    disk_notes.make_durable(directory)


def erase(directory: str) -> None:
    """Removes all files of ours but the mark, the payloads last: a directory without them is drained. Their bytes are
    given back at once, although the mover has them open. Raises OSError."""
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
