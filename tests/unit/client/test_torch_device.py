"""In whose stream events are recorded, and the memory on the host that a device copies to and from."""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvclient.memory.torch_device import TorchDevice, event_recorder
from kvserver.errors import RequestError


class Torch(ModuleType):
    """A torch with several devices of one kind, whose current one is number 0 as in every new thread."""

    __version__ = "9.9"

    def __init__(self) -> None:
        super().__init__("torch")
        self.accelerator = SimpleNamespace(current_stream=lambda number: f"stream of {number}")

        class Event:
            def __init__(self, device: str) -> None:
                self.device, self.recorded = device, ""

            def record(self, stream: str = "stream of 0") -> None:
                self.recorded = stream

        self.Event = Event


@pytest.mark.parametrize(
    ("device", "stream"), [("xpu:3", "stream of 3"), ("xpu:0", "stream of 0"), ("xpu", "stream of 0")]
)
def test_an_event_is_recorded_on_the_device_that_is_named(
    device: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch())
    event: Any = event_recorder(device)()
    assert event.recorded == stream
    assert TorchDevice(device).mark().recorded == stream


def test_a_device_without_events_is_refused() -> None:
    pytest.importorskip("torch", reason="needs torch: make e2e-ci")
    with pytest.raises(RequestError, match="no events on device 'meta'") as refusal:
        TorchDevice("meta")
    assert refusal.value.code == "device"


def test_memory_that_cannot_be_pinned_is_taken_all_the_same_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: make e2e-ci")
    if torch.accelerator.is_available():
        pytest.skip("this machine can pin memory")
    device = TorchDevice("cpu")
    with caplog.at_level(logging.WARNING):
        made = device.host_memory(7)
    assert (made.numel(), device.pins) == (7, False)
    assert "torch pins no memory for device=cpu" in caplog.text


def test_memory_taken_in_an_engines_inference_mode_is_written_outside_of_it() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: make e2e-ci")
    with torch.inference_mode():
        made = TorchDevice("cpu").host_memory(7)
    made.copy_(torch.arange(7))
    assert made.tolist() == list(range(7))
