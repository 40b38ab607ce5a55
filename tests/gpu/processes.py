"""Checks that run in their own process, because they need torch or another environment; their output is passed on."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from kvserver.cli.doctor import device
from tests.device.simulated import Machine
from tests.gpu.report import Report
from tests.gpu.scene import MIB, Gpus, GpuServer

ROOT = Path(__file__).resolve().parents[2]
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name and the newer one."""
CHILD_S = 240


def doctor(report: Report, machine: Gpus | Machine) -> None:
    """The operator's view of this machine."""
    shown = _run("-m", "kvserver", "doctor", "--http-port", "0", "--device-library", str(machine.library))
    report.say(shown.stdout + shown.stderr)
    report.check(shown.returncode == 0, f"exit status {shown.returncode}")
    asked = _run("-m", "kvserver", "doctor", "--json", "--http-port", "0", "--device-library", str(machine.library))
    found = {finding["check"]: finding for finding in json.loads(asked.stdout)}
    for name, _ in device.CHECKS:
        report.check(found[name]["verdict"] != "fail", f"{name}: {found[name]['verdict']}: {found[name]['text']}")
    report.check("GB/s" in found["gpu copies"]["text"], "the link was measured")


def refused(report: Report, machine: Gpus | Machine) -> None:
    """torch memory that no other process can map is refused, naming the setting to change; other memory is taken."""
    if isinstance(machine, Machine) or not find_spec("torch"):
        report.skip("needs a GPU and torch")
        return
    for setting in ("expandable_segments:False", "expandable_segments:True", "backend:cudaMallocAsync"):
        done = _run("-m", "tests.gpu.refusal", variables=dict.fromkeys(ALLOCATOR, setting))
        said = (done.stdout.strip().splitlines() or [done.stderr[-500:]])[-1]
        if setting == "expandable_segments:False":
            report.check(said == "taken", f"{setting}: {said}")
        else:
            told = said.startswith("not-exportable: ") and "expandable_segments:False" in said
            report.check(told and done.returncode == 0, f"{setting}: {said}")


def captured(report: Report, machine: Gpus | Machine) -> None:
    """Stores and retrieves while torch captures and replays graphs, allocates and frees."""
    if isinstance(machine, Machine) or not find_spec("torch"):
        report.skip("needs a GPU and torch")
        return
    with GpuServer(machine, arena_bytes=1024 * MIB, slab_bytes=64 * MIB) as server:
        _pass_on(report, _run("-m", "tests.gpu.capture", str(server.path)))


def atom_blocks(report: Report, machine: Gpus | Machine) -> None:
    """Blocks that the ATOM connector lets go are poisoned at once, and their stored bytes are right."""
    if isinstance(machine, Machine):
        first = os.pathsep.join([str(machine.library.parent), os.environ.get("LD_LIBRARY_PATH", "")])
        _pass_on(report, _run("-m", "tests.gpu.atom_process", "--simulated", variables={"LD_LIBRARY_PATH": first}))
    elif not find_spec("torch"):
        report.skip("needs torch")
    else:
        _pass_on(report, _run("-m", "tests.gpu.atom_process"))


def _pass_on(report: Report, done: "subprocess.CompletedProcess[str]") -> None:
    for line in done.stdout.splitlines():
        verdict, _, text = line.partition(": ")
        if verdict in ("ok", "FAILED"):
            report.check(verdict == "ok", text)
        else:
            report.say(line)
    report.check(
        done.returncode == 0 and "Traceback" not in done.stderr, f"exit {done.returncode} {done.stderr[-1500:]}"
    )


def _run(*arguments: str, variables: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Runs Python with this environment in the repository's root. TimeoutExpired kills it."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )
