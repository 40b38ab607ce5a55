"""The check of which user runs the server, made on each connection that carries descriptors, before the first message.

The listener gets the engine's KV pool to read and write, and a path does not prove its identity. In a directory such as
/tmp anyone may listen there while the server is away. The kernel knows the listener's user (SO_PEERCRED).

Root, this user, and the owner of the socket's directory may be the server; the owner decides who listens there. In a
sticky directory such as /tmp anyone can create a directory, so the owner of a directory in it is not trusted.

In a user namespace the kernel shows one number, mostly 65534, for all unmapped users. That number counts as the
directory's owner only if nobody else may write to the directory, so that its owner admitted the listener.

ZeroMQ connections need no check. Attach shows the checked server the session that came by ZeroMQ, and a server attaches
only sessions that it opened itself.
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
"""Used if /proc does not say."""
CREDENTIALS = struct.Struct("3i")


def check(connected: socket.socket, path: str) -> None:
    """Raise RequestError if the listener at `path` may not be the server; OSError if its user cannot be found out.

    path: the socket that `connected` is connected to.
    """
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
    """Users who may run the server. directory: the socket's directory. above: that directory's parent."""
    anybody_makes_them = above.st_mode & stat.S_ISVTX and above.st_mode & OTHERS_WRITE
    unknown_among_many = directory.st_uid == _overflow_user() and directory.st_mode & OTHERS_WRITE
    if anybody_makes_them or unknown_among_many:
        return {0, me}
    return {0, me, directory.st_uid}


def _overflow_user() -> int:
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return OVERFLOW_USER
