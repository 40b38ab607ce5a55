"""The functions of torch by which the portable path uses a device: host memory, copies, and points of the stream.

A device needs tensors that share a storage, index_select, index_copy_, copies to and from the host, and torch.Event.
docs/gpu.md lists them for users.
"""

import logging
from collections.abc import Callable
from typing import Any

from kvserver.errors import RequestError

log = logging.getLogger(__name__)


class TorchDevice:
    """One device as torch sees it, such as "xpu:0". Copies are queued in the calling thread's stream."""

    def __init__(self, name: str) -> None:
        """RequestError("device") if torch has no events there: then nobody can tell when a copy has ended."""
        self.name = name
        self.is_host = name.split(":", maxsplit=1)[0] == "cpu"
        self.pins = False
        """Whether host_memory() is pinned, so that copies run by themselves."""
        if not self.is_host:
            self.mark = event_recorder(name)
            self.mark()

    def host_memory(self, bytes_: int) -> Any:
        """A tensor of bytes on the host, pinned if torch can pin for this device."""
        torch = _torch()
        with torch.inference_mode(False):  # other threads will write it, outside of the engine's inference mode
            try:
                made = torch.empty(bytes_, dtype=torch.uint8, pin_memory=True)
                self.pins = bool(made.is_pinned())
            except (RuntimeError, NotImplementedError) as problem:
                made, self.pins = torch.empty(bytes_, dtype=torch.uint8), False
                why = str(problem).split("\n", maxsplit=1)[0]
                log.warning("torch pins no memory for device=%s: %s", self.name, why)
        return made

    def gather(self, half: Any, pages: Any, blocks: Any) -> None:
        """Queue a copy of blocks of the device's pages into host memory. Over when a later mark is reached."""
        half.copy_(pages.index_select(1, blocks), non_blocking=self.pins)

    def scatter(self, half: Any, pages: Any, blocks: Any) -> None:
        """Queue the copy in the other direction."""
        pages.index_copy_(1, blocks, half.to(self.name, non_blocking=self.pins))

    def wait(self, mark: Any) -> None:
        """Wait for a point of the stream. Other threads run meanwhile."""
        mark.synchronize()


def event_recorder(device: str) -> Callable[[], Any]:
    """A function that records the current point of the device's stream in the calling thread as a torch.Event.

    device: with its number, such as "xpu:3", or the current one of the calling thread. A new thread's is number 0.
    RequestError("device") if torch has no events there.
    """
    torch = _torch()
    number = int(device.partition(":")[2] or -1)

    def record() -> Any:
        event = torch.Event(device=device)
        event.record(*([torch.accelerator.current_stream(number)] if number >= 0 else []))
        return event

    try:
        record()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as problem:
        raise RequestError(
            "device", f"torch {torch.__version__} has no events on device {device!r}: {problem}"
        ) from problem
    return record


def flat(storage: Any) -> Any:
    """All bytes of a tensor's storage, as a tensor."""
    torch = _torch()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _torch() -> Any:
    """The torch module. Imported here because engines without torch import this package too."""
    import torch  # noqa: PLC0415

    return torch
