"""Which platforms of vLLM are served how, what they are called, and which events their streams get."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvclient.vllm.devices import device_kind, device_name, stream_events
from kvclient.vllm.settings import parse
from kvserver.errors import RequestError


class Platform:
    """What is read of vLLM's Platform."""

    def __init__(self, kind: str, name: str | None = "Card 7") -> None:
        self.device_type = self.device_name = kind
        self._name = name

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_rocm(self) -> bool:
        return self.device_type == "rocm"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda() or self.is_rocm()

    def get_device_name(self, device_id: int = 0) -> str:
        if self._name is None:
            raise NotImplementedError
        return self._name


ELSEWHERE = ("xpu", "musa", "npu", "hpu")


@pytest.mark.parametrize(("platform", "kind"), [("cpu", "host"), ("cuda", "cuda"), ("rocm", "rocm")])
def test_without_the_option_no_device_is_portable(platform: str, kind: str) -> None:
    assert device_kind(Platform(platform), parse({"socket": "/s"}).device) == kind


@pytest.mark.parametrize("platform", ELSEWHERE)
def test_a_device_that_shares_nothing_is_refused_with_the_name_of_the_option(platform: str) -> None:
    with pytest.raises(RequestError, match=f'\'{platform}\'.*"device": "portable"') as refusal:
        device_kind(Platform(platform), "")
    assert refusal.value.code == "unsupported"


@pytest.mark.parametrize("platform", [*ELSEWHERE, "cpu", "cuda", "rocm"])
def test_with_the_option_each_is_portable(platform: str) -> None:
    assert device_kind(Platform(platform), parse({"socket": "/s", "device": "portable"}).device) == "portable"


@pytest.mark.parametrize("wrong", ["host", "cuda", "Portable"])
def test_no_other_way_can_be_asked_for(wrong: str) -> None:
    with pytest.raises(RequestError, match=f"device='{wrong}' must be 'portable'"):
        parse({"socket": "/s", "device": wrong})


def test_kind_and_name_of_a_device_tell_it_from_others() -> None:
    named = {device_name(Platform(kind, name)) for kind in ELSEWHERE for name in ("Card 7", "Card 8")}
    assert len(named) == 2 * len(ELSEWHERE)
    assert device_name(Platform("cuda", "NVIDIA H200")) == "NVIDIA H200"


@pytest.mark.parametrize("name", [None, ""])
def test_a_device_without_a_name_is_refused(name: str | None) -> None:
    with pytest.raises(RequestError, match="does not name its device"):
        device_name(Platform("npu", name))


class Torch(ModuleType):
    """A torch whose events say where they were recorded."""

    __version__ = "9.9"

    def __init__(self, devices: tuple[str, ...]) -> None:
        super().__init__("torch")
        self.at = 0
        recorded_at = self

        class Event:
            def __init__(self, device: str = "cuda:own") -> None:
                if device not in devices:
                    raise RuntimeError(f"{device} backend doesn't support events.")
                self.device, self.point = device, -1

            def record(self) -> None:
                self.point = recorded_at.at

        self.Event = Event
        self.cuda = SimpleNamespace(Event=Event)


@pytest.mark.parametrize("platform", ELSEWHERE)
def test_each_call_records_the_point_of_the_devices_stream_at_that_time(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = Torch((platform,))
    monkeypatch.setitem(sys.modules, "torch", torch)
    record = stream_events(Platform(platform), "portable")
    points: list[Any] = []
    for torch.at in (3, 5):
        points.append(record())
    assert [(event.device, event.point) for event in points] == [(platform, 3), (platform, 5)]


def test_a_device_without_events_stops_the_engine_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(()))
    with pytest.raises(RequestError, match="no events on device 'hpu'"):
        stream_events(Platform("hpu"), "portable")


def test_staging_gets_the_drivers_own_events_and_a_cpu_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(("cuda:own",)))
    event: Any = stream_events(Platform("cuda"), "cuda")()
    assert (event.device, event.point) == ("cuda:own", 0)
    assert stream_events(Platform("cpu"), "host")() is None
    assert stream_events(Platform("cpu"), "portable")() is None
