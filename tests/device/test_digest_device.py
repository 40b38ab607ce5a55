"""The digest kernel on simulated devices: what a CPU sums and copies, for every size of page, and planted errors.

Crews run one after the other there. That the last one waits for what others add, only a GPU can show.
"""

import json
import os
import subprocess
from functools import cache
from typing import Any

import pytest

from tests.device.simulated import CODE, Machine, Vendor
from tests.gpu import digest

VENDORS: tuple[Vendor, ...] = ("cuda", "rocm")
ILLEGAL_ADDRESS = 700


def run(machine: Machine, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [digest.build(), machine.vendor, "--library", machine.library, *arguments],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


RATES: dict[Vendor, tuple[str, ...]] = {"cuda": ("--rates", "1", "--rounds", "1"), "rocm": ()}
"""A run takes seconds also where rates are asked for, so one run of a vendor serves all tests."""


@cache
def told(vendor: Vendor) -> list[dict[str, Any]]:
    with Machine(vendor) as machine:
        done = run(machine, *RATES[vendor])
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_device_sums_what_a_cpu_sums(vendor: Vendor) -> None:
    device, *others = told(vendor)
    kernels = [line for line in others if "rate" not in line]
    assert device["arch"] == {"cuda": "sm_90", "rocm": "gfx942"}[vendor]
    assert [line["sums"] for line in kernels] == ["equal", "equal"], "of the run-time compiler, and built in"
    assert all(line["scenes"] >= 300 and line["planted"] >= 72 for line in kernels)


def test_rates_can_be_measured() -> None:
    rates = [line for line in told("cuda") if "rate" in line]
    assert {line["rate"] for line in rates} == {"gather", "gather and sum", "scatter", "scatter and sum", "sum"}
    assert all(line["us"] > 0 for line in rates)


def test_a_kernel_that_fails_is_no_sum() -> None:
    with Machine("cuda") as machine, machine.rule("run:kernel", CODE, code=ILLEGAL_ADDRESS):
        done = run(machine)
    assert done.returncode == 1
    assert "CUDA_ERROR" in done.stderr or str(ILLEGAL_ADDRESS) in done.stderr
