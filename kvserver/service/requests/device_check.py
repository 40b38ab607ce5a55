"""Checks the device part of a registration: memory by descriptor on the host, by IPC handle on a GPU, and the mode.

Only the device's mover can tell whether a handle can be opened and fits.
"""

import re
from collections import Counter

from kvserver.errors import RequestError
from kvserver.service.state.sessions import Session
from kvserver.wire.messages import (
    HANDLE_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    Register,
    Staging,
)

DEVICE_ID = re.compile(r"[0-9a-f]{32}@[0-9a-f:.]{1,32}")
IPC_MODES = {"cuda": ("",), "rocm": ("legacy", "dmabuf")}
HOST_MODES = ("direct", "engine-driven")
STAGING_COUNT = {"staged": 1, "direct": 0, "server-gather": 0}


def check(request: Register) -> None:
    """Raises RequestError for device fields that do not fit the device kind."""
    if request.device == "host":
        _check_host(request)
    else:
        _check_gpu(request)


def descriptors(session: Session, request: Register) -> tuple[int, ...]:
    """The offered descriptors that the mover gets: the buffers of a host cache, or the ring of a staged one."""
    host = request.device == "host"
    items = [buffer.descriptor for buffer in request.buffers] if host else [item.ring for item in request.staging]
    numbers = tuple(items)
    for number in numbers:
        if number not in session.offered:
            raise RequestError(
                "descriptor-unknown", f"descriptor {number} was not offered by this session, or is used up"
            )
    if len(set(numbers)) != len(numbers):
        raise RequestError("descriptor-unknown", f"descriptors {list(numbers)} must differ from each other")
    return numbers


def _check_host(request: Register) -> None:
    if request.mode not in HOST_MODES:
        raise RequestError(
            "mode", f"mode {request.mode!r} is not one of device kind host; expected {', '.join(HOST_MODES)}"
        )
    if request.device_id or request.ipc_mode:
        raise RequestError(
            "device", f"device_id={request.device_id!r}, ipc_mode={request.ipc_mode!r}; device kind host has neither"
        )
    if any(buffer.handle for buffer in request.buffers):
        raise RequestError("handle", "a buffer came with an IPC handle; on device kind host handles are empty")
    if request.staging:
        raise RequestError("staging", "device kind host needs no staging")


def _check_gpu(request: Register) -> None:
    if DEVICE_ID.fullmatch(request.device_id) is None:
        raise RequestError(
            "device", f"device_id={request.device_id[:80]!r} must be 32 hexadecimal digits, '@' and a PCI bus id"
        )
    if request.ipc_mode not in IPC_MODES[request.device]:
        expected = " or ".join(repr(mode) for mode in IPC_MODES[request.device])
        raise RequestError("ipc-mode", f"ipc_mode={request.ipc_mode[:80]!r} must be {expected} on {request.device}")
    for index, buffer in enumerate(request.buffers):
        _check_handle(f"buffers[{index}]", buffer.handle)
        if buffer.descriptor != -1:
            raise RequestError(
                "descriptor-unknown", f"buffers[{index}].descriptor={buffer.descriptor} must be -1 on {request.device}"
            )
    for times in Counter(buffer.handle for buffer in request.buffers).values():
        if times > 1:
            raise RequestError("layout", f"{times} buffers have the same handle; an allocation is named once")
    count = STAGING_COUNT.get(request.mode)
    if count is None:
        raise RequestError(
            "mode", f"mode {request.mode!r} is not one of {request.device}; expected {', '.join(STAGING_COUNT)}"
        )
    if len(request.staging) != count:
        raise RequestError("staging", f"mode {request.mode!r} needs {count} staging, {len(request.staging)} came")
    for staging in request.staging:
        _check_staging(staging)


def _check_staging(staging: Staging) -> None:
    _check_handle("staging", staging.handle)
    least, most = SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX
    if not least <= staging.segment_bytes <= most or staging.segment_bytes % least:
        raise RequestError(
            "staging", f"segment_bytes={staging.segment_bytes} must be a multiple of {least} in [{least}, {most}]"
        )


def _check_handle(where: str, handle: bytes) -> None:
    if len(handle) != HANDLE_BYTES:
        raise RequestError("handle", f"{where}.handle has {len(handle)} bytes, an IPC handle has {HANDLE_BYTES}")
