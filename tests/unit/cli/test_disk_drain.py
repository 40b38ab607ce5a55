"""`kvserver disk drain` against a scripted server."""

from typing import Any

import pytest

from kvserver.cli.drain import drain
from kvserver.errors import ConfigError


class Script:
    """A server with two devices; each status is the next of a list."""

    def __init__(self, *steps: dict[str, Any]) -> None:
        self._steps = [{"incarnation": 1, "left": 0, "drain": "", "waits": "", "moved": 0, **step} for step in steps]
        self.asked: list[int] = []

    def drain(self, device: int) -> None:
        self.asked.append(device)

    def status(self) -> dict[str, Any]:
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        devices = [
            {"device": 0, "directory": "/a", "used_bytes": 5, "drain": "", "drain_waits": ""},
            {
                "device": 1,
                "directory": "/b",
                "used_bytes": step["left"],
                "drain": step["drain"],
                "drain_waits": step["waits"],
            },
        ]
        counted = {"disk_drained": {"moved": step["moved"], "kept": 0, "given-up": 2}}
        return {"incarnation": step["incarnation"], "disks": devices, "counters": counted}


def drained(script: Script, device: str) -> tuple[str, list[tuple[int, int, str]]]:
    shown: list[tuple[int, int, str]] = []
    said = drain(script, device, lambda done, total, line: shown.append((done, total, line)), sleep_s=lambda _: None)
    return said, shown


@pytest.mark.parametrize("device", ["1", "/b"])
def test_it_asks_once_shows_what_is_left_and_says_what_became_of_it(device: str) -> None:
    script = Script(
        {"left": 70, "moved": 4},
        {"left": 70, "moved": 4},
        {"left": 30, "moved": 6, "waits": "budget"},
        {"drain": "drained", "moved": 11},
    )
    said, shown = drained(script, device)
    assert script.asked == [1]
    assert [(done, total) for done, total, _ in shown] == [(0, 70), (40, 70)]
    assert shown[1][2] == "30 of 70 bytes left, waits for budget"
    assert said == "device 1 (/b) is empty and can be taken out of disk_paths. Chunks: 7 moved, 0 kept, 0 given-up"


def test_another_brain_is_asked_again() -> None:
    script = Script({"left": 9}, {"left": 9}, {"left": 9, "incarnation": 2}, {"drain": "drained", "incarnation": 2})
    drained(script, "1")
    assert script.asked == [1, 1]


def test_what_is_drained_already_is_not_asked_for() -> None:
    script = Script({"drain": "drained"})
    assert "is empty" in drained(script, "1")[0]
    assert script.asked == []


@pytest.mark.parametrize("device", ["2", "-1", "/c", "", "one"])
def test_what_is_no_device_is_refused_with_those_that_there_are(device: str) -> None:
    with pytest.raises(ConfigError, match=r"it has 0 \(/a\), 1 \(/b\)"):
        drained(Script({}), device)
