"""The device of vLLM's KV: how its memory reaches the server, its name, and events of its stream.

platform: vLLM's current_platform, which plug-ins replace for devices of their own.
"""

from collections.abc import Callable
from typing import Any

from kvclient.memory.torch_device import event_recorder
from kvserver.errors import RequestError

PORTABLE = "portable"


def device_kind(platform: Any, wanted: str) -> str:
    """The CacheSpec's device. `wanted`: the user's setting, without which no device is portable.

    RequestError for a platform whose memory the server cannot reach.
    """
    if wanted == PORTABLE:
        return PORTABLE
    if platform.is_cpu():
        return "host"
    if platform.is_rocm():
        return "rocm"
    if platform.is_cuda():
        return "cuda"
    raise RequestError(
        "unsupported",
        f"platform {platform.device_name!r} shares no memory with the server; expected CUDA, ROCm or CPU. With "
        f'"device": "{PORTABLE}" in kv_connector_extra_config all bytes go through torch and the host, which is slow',
    )


def device_name(platform: Any) -> str:
    """Kind and name of the device, a fact of the namespace: kernels choose the order within a page by it.

    On CUDA and ROCm the name alone, so that all ways to reach a GPU share.
    """
    try:
        name = str(platform.get_device_name())
    except NotImplementedError:
        name = ""
    if not name:
        raise RequestError(
            "unsupported", f"platform {platform.device_name!r} does not name its device, which decides who may share"
        )
    return name if platform.is_cuda_alike() else f"{platform.device_type} {name}"


def stream_events(platform: Any, kind: str) -> Callable[[], object]:
    """A function that records the current point of the engine's stream. It returns None on a CPU, which has none.

    RequestError("device") if torch has no events for the device.
    """
    if platform.is_cpu():
        return _no_event
    return event_recorder(platform.device_type) if kind == PORTABLE else _recorded_event


def _recorded_event() -> object:
    """torch.Event does not tell the driver's handle, which the staging's threads wait for."""
    import torch  # noqa: PLC0415

    event = torch.cuda.Event()
    event.record()
    return event


def _no_event() -> None:
    return None
