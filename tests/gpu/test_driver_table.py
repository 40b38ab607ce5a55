"""The driver table and the kernels on this machine's GPU; skipped where there is none. -s shows the rates."""

import subprocess

import pytest

from kvserver._native import probe_driver
from tests.gpu.table import build


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_every_byte_on_a_real_device(vendor: str) -> None:
    problem = probe_driver(vendor)[-1]  # type: ignore[arg-type]
    if problem:
        pytest.skip(problem)
    done = subprocess.run([build(), vendor, "--rates"], capture_output=True, text=True, timeout=110, check=False)
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
