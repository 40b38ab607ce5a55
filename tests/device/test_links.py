"""The paths between device memory and the arena, on the simulated driver. The program is links.cpp.

Covers rings that wrap, copies that are cut, both directions at once, and a driver that fails at any call.
"""

import os
import subprocess
from collections.abc import Iterator
from itertools import count

import pytest

from tests.device.simulated import CODE, Machine, Vendor
from tests.gpu.table import ROOT, build_program

ROOMS = (
    *("gpu/driver/library", "gpu/driver/driver", "gpu/driver/probe", "gpu/driver/handles", "gpu/driver/facts"),
    *("gpu/engine/link", "gpu/engine/registered_link", "gpu/engine/bounce_link"),
    *("base/check", "base/threads", "base/prefault", "base/shared_memory", "base/sigbus", "copy/copy_kernels"),
    *("base/digest", "base/sha256", "base/words"),
)
SOURCES = [
    ROOT / "tests/device/links.cpp",
    *(ROOT / "csrc" / f"{room}.cpp" for room in ROOMS),
]
RIGHT, FAILED = 0, 3
PATHS = ("register", "bounce")
UNIT_BYTES, BUFFER_BYTES = 3 * 4096, 7_919
"""Both smaller than the longest copies, which are 20,011 bytes."""
SHARED = ("event_create", "event_record", "event_query", "stream_wait")
DATA_PATH = {
    "cuda": ("copy_to_host", "copy_to_device", "copy_batch8", *SHARED),
    "rocm": ("copy_of_kind", "copy_batch9", *SHARED),
}


def run(machine: Machine, path: str, seed: int = 1, buffer_bytes: int = BUFFER_BYTES) -> tuple[int, str]:
    """Exit status and output."""
    program = build_program("links", SOURCES)
    arguments = [machine.vendor, machine.library, path, UNIT_BYTES, buffer_bytes, seed]
    done = subprocess.run(
        [program, *map(str, arguments)],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("path", PATHS)
def test_bytes_are_right_in_both_directions_at_once(machine: Machine, path: str) -> None:
    for seed in (2, 3, 5):
        assert run(machine, path, seed) == (RIGHT, "")
    if path == "register":
        assert machine.calls("host_register") > 3 * 40, "in units"


@pytest.mark.parametrize("buffer_bytes", [1_021, 20_011, 1 << 20])
def test_bytes_are_right_whatever_a_buffer_holds(machine: Machine, buffer_bytes: int) -> None:
    assert run(machine, "bounce", 7, buffer_bytes) == (RIGHT, "")


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_used_before_the_device_is_done_with_it(machine: Machine, path: str) -> None:
    """Each operation of a stream begins late: code that does not wait for it copies missing data."""
    machine.delay_operations(200)
    assert run(machine, path, 11) == (RIGHT, "")


@pytest.mark.parametrize("path", PATHS)
def test_a_call_that_fails_ends_everything_and_no_byte_is_wrong(vendor: Vendor, path: str) -> None:
    """The first call of each kind fails, then the second, and so on until none fails any more."""
    met = set()
    with Machine(vendor) as machine:
        for field in DATA_PATH[vendor]:
            for skip in skips(field):
                with machine.rule(field, CODE, code=700, skip=skip, times=1) as rule:
                    status, said = run(machine, path)
                    assert status in (RIGHT, FAILED), (field, skip, said)
                    assert (status == FAILED) == bool(rule.met()), (field, skip, said)
                if not rule.met():
                    break
                assert "(700)" in said
                met.add(field)
    assert len(met) >= 4, met


def skips(field: str) -> Iterator[int]:
    """How many calls pass before one fails. Events are queried so often that steps must grow."""
    for number in count():
        yield number if field != "event_query" else number * number
