"""Messages with descriptors over SOCK_SEQPACKET sockets.

One message is one frame; descriptors travel beside it (SCM_RIGHTS) and arrive close-on-exec, owned by the receiver.
"""

import os
import select
import socket
import struct
from array import array
from collections.abc import Iterable, Sequence

SEND_BUFFER_BYTES = 4 << 20
"""Size that we ask for. Without privilege the kernel grants 2 x wmem_max, into which orders.ORDER_BYTES_MAX fits."""
DESCRIPTORS_MAX = 64
"""Descriptors beside one message: the buffers of a host cache. The kernel takes 253."""
SO_SNDBUFFORCE = 32
SO_PEERPIDFD = 77


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected SEQPACKET sockets with room for whole orders. Raises OSError."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        for end in ends:
            widen(end)
    except OSError:
        for end in ends:
            end.close()
        raise
    return ends


def widen(end: socket.socket) -> None:
    try:
        end.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SEND_BUFFER_BYTES)
    except PermissionError:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def send(end: socket.socket, frame: bytes, descriptors: Sequence[int] = ()) -> None:
    """Sends one frame; raises BlockingIOError on a full non-blocking socket. The sender keeps its descriptors."""
    if descriptors:
        end.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))])
    else:
        end.send(frame)


class Receiver:
    """Receives frames into one buffer. A frame is only valid until the next call."""

    def __init__(self, frame_bytes_max: int, descriptors_max: int = DESCRIPTORS_MAX) -> None:
        self._buffer = bytearray(frame_bytes_max)
        self._view = memoryview(self._buffer)
        self._room = socket.CMSG_SPACE(descriptors_max * 4)

    def receive_plain(self, end: socket.socket) -> tuple[memoryview, bool]:
        """Receives (frame, cut) without descriptors, which the kernel drops if a peer sends some.

        Frames and `cut` as for receive()."""
        count = end.recv_into(self._buffer, 0, socket.MSG_TRUNC)
        return self._view[:count], count > len(self._buffer)

    def receive(self, end: socket.socket) -> tuple[memoryview, list[int], bool]:
        """Receives (frame, descriptors, cut). An empty frame is the end of the connection.

        cut: the frame or the list of descriptors was longer than our buffers. Raises BlockingIOError, OSError."""
        try:
            count, ancillary, flags, _ = self._receive(end)
        except ConnectionResetError:  # reported once if the other end died with unread frames
            count, ancillary, flags, _ = self._receive(end)
        descriptors: list[int] = []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.extend(array("i", content[: len(content) // 4 * 4]))
        return self._view[:count], descriptors, bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))

    def _receive(self, end: socket.socket) -> "tuple[int, list[tuple[int, int, bytes]], int, object]":
        return end.recvmsg_into([self._buffer], self._room, socket.MSG_CMSG_CLOEXEC)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def peer_pidfd(end: socket.socket) -> int | None:
    """A pidfd of the process at the other end; None when it lives in a process namespace that we cannot see.

    Raises ProcessLookupError when it is gone already."""
    try:
        return int(struct.unpack("i", end.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0])
    except ProcessLookupError:
        raise
    except OSError:  # before Linux 6.5: by number, which cannot be another process yet while the connection is new
        pid = peer_pid(end)
        return os.pidfd_open(pid) if pid else None


def peer_pid(end: socket.socket) -> int:
    """Number of the process that made the connection; 0 when it lives in a process namespace that we cannot see."""
    pid, _, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def broken(ends: Iterable[socket.socket]) -> list[socket.socket]:
    """The sockets whose other end has gone without reading everything that was sent to it.

    To be called now and then: libuv stops watching a socket in error after one more callback. If that callback reads
    data from before the end, nothing else would report the end."""
    poll = select.poll()
    by_descriptor = {end.fileno(): end for end in ends}
    for descriptor in by_descriptor:
        poll.register(descriptor, 0)
    return [by_descriptor[descriptor] for descriptor, what in poll.poll(0) if what & select.POLLERR]


def client_of(end: socket.socket) -> int:
    """The number of the client at the other end, for fair turns: its process number.

    For a process that we cannot see it is a negative number of the connection's own."""
    return peer_pid(end) or -1 - end.fileno()
