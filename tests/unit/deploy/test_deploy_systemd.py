"""The unit in deploy/systemd fits the server's behaviour."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvserver.config.config import Config
from kvserver.ipc.inheritance import CANNOT_START
from kvserver.supervisor.arena_files import ARENA, LEDGER
from kvserver.supervisor.supervisor import BACKOFF_S, REAP_S, STOP_S

DIRECTORY = Path(__file__).resolve().parents[3] / "deploy" / "systemd"
RESTORE_S = 26e-6
"""Restore time per chunk of the ledger, on two slow and shared cores."""
UNIT = (DIRECTORY / "kvserver.service").read_text()


def setting(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def test_the_unit_keeps_what_the_server_wants_kept_and_believes_what_it_says() -> None:
    assert int(setting("FileDescriptorStoreMax")) == len({ARENA, LEDGER})
    assert setting("Type") == "notify"
    assert setting("RestartPreventExitStatus") == str(CANNOT_START)
    assert float(setting("TimeoutStopSec")) > STOP_S + REAP_S
    assert float(setting("WatchdogSec")) > 10 * max(BACKOFF_S)


def test_a_brain_that_takes_in_a_full_index_is_not_taken_for_one_that_is_stuck() -> None:
    full_s = Config().chunks_max * RESTORE_S
    assert float(setting("WatchdogSec")) > 1.5 * full_s
    assert float(setting("TimeoutStartSec")) > 1.5 * full_s
    for name in ("daemonset.yaml", "sidecar.yaml"):
        _, liveness = (DIRECTORY.parent / "kubernetes" / name).read_text().split("livenessProbe:")
        (period_s,) = re.findall(r"periodSeconds: (\d+)", liveness)
        (failures,) = re.findall(r"failureThreshold: (\d+)", liveness)
        assert int(period_s) * int(failures) > 1.5 * full_s


def test_the_unit_hides_no_device() -> None:
    """A setting that names a device forbids all others; so does ProtectClock, before systemd 253."""
    given = set(re.findall(r"^(\w+)=", UNIT, re.MULTILINE))
    assert given & {"DeviceAllow", "DevicePolicy", "PrivateDevices", "ProtectClock"} == set()


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "kvserver.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
