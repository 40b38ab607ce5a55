"""Who may be the server: asked of each connection that carries descriptors, before anything is said.

Who listens at the socket gets the KV pool of the engine, to read and to write. A path is no proof of who that is: in a
directory such as /tmp anybody may sit there while the server is away. The kernel knows who listens (SO_PEERCRED).

Root, this user, and the owner of the socket's directory may be the server: the last one decides who listens there. In a
sticky directory such as /tmp anybody can make a directory, so the owner of one that lies there is nobody to trust.

In a user namespace the kernel shows one number, mostly 65534, for all users that it does not map. That number counts as
the directory's owner only where nobody else may write to the directory: then who listens there was let in by him.

What comes by ZeroMQ needs no look of its own. Attach presents, to the server that was looked at here, the session that
came by ZeroMQ, and no server attaches a session that it has not opened itself.
"""

import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

from kvserver.errors import RequestError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OVERFLOW_USER = 65534
"""Where /proc does not say."""
CREDENTIALS = struct.Struct("3i")


def check(connected: socket.socket, path: str) -> None:
    """Raises RequestError unless a user listens at `path` who may be the server; OSError where that is not to be had.

    path: of the socket that `connected` is connected to."""
    _, user, _ = CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    directory = os.path.dirname(path) or "."
    trusted = trusted_users(os.stat(directory), os.stat(os.path.join(directory, "..")), me=os.geteuid())
    if user in trusted:
        return
    unmapped = " (nobody, or a user that this container does not know)" if user == _overflow_user() else ""
    raise RequestError(
        "server-owner",
        f"user {user}{unmapped} listens at {path}; expected user {' or '.join(map(str, sorted(trusted)))}. A server of "
        "another user needs a directory of its own for the socket, which nobody else may write to, outside of /tmp",
    )


def trusted_users(directory: os.stat_result, above: os.stat_result, *, me: int) -> set[int]:
    """Of the directory of a socket, and the one in which that lies."""
    anybody_makes_them = above.st_mode & stat.S_ISVTX and above.st_mode & OTHERS_WRITE
    unknown_among_many = directory.st_uid == _overflow_user() and directory.st_mode & OTHERS_WRITE
    if anybody_makes_them or unknown_among_many:
        return {0, me}
    return {0, me, directory.st_uid}


def _overflow_user() -> int:
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return OVERFLOW_USER
