"""The check whether a file may have been replaced since this process began, and so after the process had loaded it.

A connector is created after the weights are loaded, and nobody tells it what was loaded. Files that have not changed
since the process began are what it loaded. A changed file is believed only if its name tells its content. The Hugging
Face hub keeps files as blobs/<digest> and writes each once, so a model that an engine has just downloaded qualifies.
"""

import hashlib
import os
import re
import stat as stats
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CLOCK_NS = 2_000_000_000
"""How far a file system's time may lag. Some count in steps of a second or two."""
LINKS_MAX = 40
_SHA256, _GIT_SHA1 = 64, 40
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(rf"[0-9a-f]{{{_SHA256}}}|[0-9a-f]{{{_GIT_SHA1}}}")


class Doubt(NamedTuple):
    """A file, link or folder on the path to a file is younger than the process."""

    path: Path
    blob: str = ""
    """Name of the blob that the file must match, from a hub's cache. Empty if nothing tells its content."""


def doubt(path: Path, *, since_ns: int) -> Doubt | None:
    """The first part of a file's path, links and folders included, that may have been replaced since then."""
    path = Path(os.path.abspath(path))
    repository, blob = _hub(path)
    inside = None
    for part, stat in _way(path):
        if stat.st_ctime_ns > since_ns - CLOCK_NS and not _only_entries_changed(stat):
            if repository is None or repository not in part.parents:
                return Doubt(part)
            inside = Doubt(part, blob)
    return inside


def is_blob(path: Path, name: str, sha256: str) -> bool:
    """Whether a file matches its name in a hub's cache. sha256: the hash of its content.

    Git's SHA-1 names are for small files, which are read here.
    """
    if len(name) == _SHA256:
        return sha256 == name
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == name


def _only_entries_changed(stat: os.stat_result) -> bool:
    """Whether only entries of a folder changed. Adding a file sets both of its times; replacing the folder sets one."""
    return stats.S_ISDIR(stat.st_mode) and stat.st_ctime_ns == stat.st_mtime_ns


def _hub(path: Path) -> tuple[Path | None, str]:
    """The repository in a hub's cache, and the blob's name, for a link <repository>/snapshots/<commit>/file."""
    blob = Path(os.path.realpath(path))
    repository = blob.parent.parent
    names = path.parts[len(repository.parts) :] if repository in path.parents else ()
    is_link = len(names) > 2 and names[0] == "snapshots" and _SNAPSHOT.fullmatch(names[1]) is not None
    if is_link and blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name):
        return repository, blob.name
    return None, ""


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every part of the path from the root to the file, with links followed. OSError if one is missing."""
    left, here, links = list(reversed(path.parts[1:])), Path("/"), 0
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        here = here / name
        stat = here.lstat()
        yield here, stat
        if stats.S_ISLNK(stat.st_mode):
            links += 1
            if links > LINKS_MAX:
                raise OSError(f"{path} has more than {LINKS_MAX} links")
            target = Path(os.readlink(here))
            left.extend(reversed([part for part in target.parts if part != "/"]))
            here = Path("/") if target.is_absolute() else here.parent
