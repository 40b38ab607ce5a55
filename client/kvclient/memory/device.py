"""The engine's GPU memory as the server's mover can reach it: allocations, handles, and the staging's native threads.

The only place in kvclient that uses the GPU part of the data plane. No GPU library is linked or imported. The driver is
the one that this process has loaded already, or the one that CacheSpec.library names.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec.structs import replace

from kvclient.memory.layouts import check_runs
from kvclient.values import Buffered, CacheSpec, DeviceBuffer
from kvserver._native import (
    DriverAbsent,
    DriverError,
    EventWatch,
    StagedCopier,
    export_memory,
    ipc_mode,
)
from kvserver.errors import RequestError
from kvserver.wire.messages import STAGING_SEGMENTS, Buffer, GroupSpec

RTC_WHEELS = ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
"""Paths of NVIDIA's run-time compiler in PyPI's packages, relative to a directory of sys.path."""

OTHERWISE = 'Otherwise vLLM\'s connector has "device": "portable", which goes through torch and the host, slowly'

__all__ = ["EventWatch", "Export", "StagedCopier", "event_watch", "export", "staged_copier"]


class Export(NamedTuple):
    """A cache's buffers as other processes see them. Offsets in the groups count from the allocations' bases."""

    device_id: str
    ordinal: int
    """The device's number in this process, meaningless elsewhere."""
    ipc_mode: str
    buffers: list[Buffer]
    """One buffer per allocation, however many tensors lie in it."""
    bases: list[int]
    """Addresses of the allocations in this process."""
    groups: list[GroupSpec]


class _Allocation(NamedTuple):
    device_id: str
    ordinal: int
    base: int
    handle: bytes
    bytes: int


def export(spec: CacheSpec) -> Export:
    """Find and export the allocations of the buffers. RequestError("not-exportable") says what to change in the
    engine."""
    vendor = _vendor(spec)
    buffers = [_device_buffer(spec, index, buffer) for index, buffer in enumerate(spec.buffers)]
    if not buffers:
        raise RequestError("layout", f"cache {spec.name!r} has no buffers")
    check_runs(spec.groups, [buffer.bytes for buffer in buffers])
    found = [_allocation_of(spec, buffer) for buffer in buffers]
    devices = sorted({allocation.device_id for allocation in found})
    if len(devices) != 1:
        raise RequestError("device", f"the buffers of cache {spec.name!r} lie on {devices}; a cache is on one device")
    allocations = {allocation.base: allocation for allocation in found}
    index_of = {base: index for index, base in enumerate(allocations)}
    moved = [
        (index_of[allocation.base], buffer.address - allocation.base)
        for buffer, allocation in zip(buffers, found, strict=True)
    ]
    return Export(
        device_id=devices[0],
        ordinal=found[0].ordinal,
        ipc_mode=ipc_mode(vendor),
        buffers=[Buffer(-1, allocation.handle, allocation.bytes) for allocation in allocations.values()],
        bases=list(allocations),
        groups=[_moved_group(group, moved) for group in spec.groups],
    )


def staged_copier(spec: CacheSpec, memory: Export) -> StagedCopier:
    """Take the staging memory and load the kernels, in the caller's thread. RequestError says what is missing."""
    try:
        return StagedCopier(
            spec.device,
            spec.library,
            memory.ordinal,
            spec.staging_bytes // STAGING_SEGMENTS,
            max((_shard_bytes(spec, group) for group in spec.groups), default=0),
            _rtc_library() if spec.device == "cuda" and not spec.library else "",
            _cache_dir(),
        )
    except (ValueError, DriverError) as problem:
        raise _refusal(problem) from problem


def event_watch(spec: CacheSpec, memory: Export) -> EventWatch:
    return EventWatch(spec.device, spec.library, memory.ordinal)


def _vendor(spec: CacheSpec) -> Literal["cuda", "rocm"]:
    match spec.device:
        case "cuda" | "rocm" as vendor:
            return vendor
        case _:
            raise RequestError(
                "device", f"device={spec.device!r} of cache {spec.name!r} must be host, cuda, rocm or portable"
            )


def _device_buffer(spec: CacheSpec, index: int, buffer: Buffered) -> DeviceBuffer:
    if isinstance(buffer, DeviceBuffer):
        return buffer
    raise RequestError("device", f"buffers[{index}] of cache {spec.name!r} on {spec.device} must be a DeviceBuffer")


def _allocation_of(spec: CacheSpec, buffer: DeviceBuffer) -> _Allocation:
    try:
        found = export_memory(spec.device, spec.library, buffer.address, buffer.bytes)
    except (ValueError, DriverError, DriverAbsent) as problem:
        raise _refusal(problem) from problem
    device_id, ordinal, base, size, handle = found
    return _Allocation(device_id, ordinal, base, handle, size)


def _moved_group(group: GroupSpec, moved: Sequence[tuple[int, int]]) -> GroupSpec:
    """The group with offsets counted from the allocations. moved[i]: (allocation, offset of buffer i in it)."""
    regions = [
        replace(run, buffer=allocation, offset=start + run.offset)
        for run in group.regions
        for allocation, start in [moved[run.buffer]]
    ]
    return replace(group, regions=regions)


def _refusal(problem: Exception) -> RequestError:
    """The RequestError for a problem. Refusals of the data plane begin with a code; a driver's errors do not."""
    code, colon, message = str(problem).partition(": ")
    if isinstance(problem, ValueError) and colon:
        return RequestError(code, f"{message}. {OTHERWISE}" if code == "not-exportable" else message)
    return RequestError("driver", str(problem))


def _shard_bytes(spec: CacheSpec, group: GroupSpec) -> int:
    block_bytes = sum(run.regions * run.page_bytes for run in group.regions)
    return spec.chunk_tokens // group.block_tokens * block_bytes


def _rtc_library() -> str:
    """The run-time compiler installed with pip. Empty if there is none; then the system's is searched."""
    candidates = (Path(directory) / name for directory in sys.path for name in RTC_WHEELS)
    return next((str(path) for path in candidates if path.is_file()), "")


def _cache_dir() -> str:
    """Directory of compiled kernels. Losing it costs a second at the next start."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return str(Path(caches if caches.startswith("/") else Path.home() / ".cache") / "kvserver")
