"""Connections of the command line to a running server, by its socket."""
# ruff: noqa: PLC0415

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvserver.config.paths import check_socket
from kvserver.errors import ResourceError

if TYPE_CHECKING:
    from kvclient.client import Client

STATUS_S = 5.0


def ask_status(socket: str) -> dict[str, Any]:
    """The status document of the server at that socket. Raises ResourceError when none answers."""
    with connected(socket) as client:
        return client.status()


@contextmanager
def connected(socket: str) -> Iterator["Client"]:
    """A connection to the server at that socket. Raises ResourceError at once when no process listens there, and after
    STATUS_S when one listens and does not answer."""
    from kvclient.client import Client

    listener = _listener(socket)
    with Client(socket, engine="kvserver-cli", epoch=os.getpid(), rank=-1) as client:
        if not client.wait_connected(STATUS_S):
            text = f"{listener} listens at {socket} and does not answer within {STATUS_S:g} s"
            raise ResourceError("server-silent", f"{text}: it is still starting, stopped, or hangs")
        yield client


def _listener(path: str) -> str:
    """The process that listens at a socket, in words. Raises ResourceError when there is none."""
    import socket

    from kvserver.ipc.fd_sockets import peer_pid

    check_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(STATUS_S)
        try:
            probe.connect(path)
            pid = peer_pid(probe)
        except (FileNotFoundError, ConnectionRefusedError):
            raise ResourceError("server-absent", f"no server listens at {path}") from None
        except OSError as error:
            raise ResourceError("server-absent", f"{path}: {error.strerror or error}") from None
    return f"process {pid}" if pid else "a process of another container"
