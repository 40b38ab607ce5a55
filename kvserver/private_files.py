"""Checks that files and directories are ours alone, and safe ways to create and replace a file.

Another user who may write to a directory can exchange its files: engines would get that user's bytes, or a link would
have us overwrite another file. So a directory of ours belongs to us, and nobody else may write to it.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_READ = 0o077
"""All permissions of group and others."""


def shown_user(user: int) -> str:
    """A user's number, for a message. The kernel shows the same number for all users unknown to this namespace."""
    with suppress(OSError, ValueError):
        if user == int(Path("/proc/sys/kernel/overflowuid").read_text()):
            return f"{user} (nobody, or a user that this container does not know)"
    return str(user)


def directory_problem(path: str, found: os.stat_result) -> str:
    """Why a directory is not ours alone; empty when it is."""
    if found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE:
        return ""
    return (
        f"{path} belongs to user {shown_user(found.st_uid)} and has mode {stat.S_IMODE(found.st_mode):04o}; expected "
        f"user {os.geteuid()} and nobody else to write to it (a directory of its own, which the server makes with 0700)"
    )


def file_problem(path: str, found: os.stat_result, *, forbidden: int = OTHERS_READ) -> str:
    """Why a file is not ours alone; empty when it is.

    found: from lstat(), so a link is refused. forbidden: permissions that group and others must not have."""
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is no plain file; move it away"
    return owner_problem(path, found, forbidden=forbidden)


def owner_problem(path: str, found: os.stat_result, *, forbidden: int = OTHERS_READ) -> str:
    """Why somebody else may use a file or a device; empty when nobody may."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid() and not mode & forbidden:
        return ""
    return (
        f"{path} belongs to user {shown_user(found.st_uid)} and has mode {mode:04o}; expected a file of user "
        f"{os.geteuid()} with mode 0600"
    )


def secret_problem(found: os.stat_result) -> str:
    """Why a file with a secret is not used; empty when it is. A group may read it, and root may own it."""
    if not stat.S_ISREG(found.st_mode):
        return "is no file"
    if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP):
        return f"has mode {stat.S_IMODE(found.st_mode):04o}; expected 0600, or 0640 for a group's"
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}; expected this one ({os.geteuid()}) or root"
    return ""


def write_whole(path: Path, content: bytes, *, durable: bool) -> None:
    """Replaces `path` by a new file, whole or not at all. Raises OSError.

    An existing file with the temporary name is removed first and never opened."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.unlink(missing_ok=True)
    with create(unfinished) as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    unfinished.replace(path)


def create(path: Path) -> BinaryIO:
    """Creates a file for writing, with mode 0600. Raises OSError; FileExistsError also for a dangling link."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb")
