"""The digest kernel alone on a GPU: `python -m tests.gpu.digest [--vendor rocm]`; needs g++, no installation.

Compares its sums with a CPU's, and every byte that it copies. Plants errors, and prints rates: copies without and with
sums, and sums alone. The program is tests/gpu/digest_kernel.cpp.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from tests.device.simulated import Machine, Vendor
from tests.gpu.report import Report
from tests.gpu.table import PARTS, ROOT, build_program

WITHIN_S = 250


class Devices(Protocol):
    """scene.Gpus, or a simulated Machine."""

    vendor: Vendor
    library: Any


def build() -> Path:
    return build_program("digest_kernel", [ROOT / "tests/gpu/digest_kernel.cpp", *PARTS])


def lines(vendor: Vendor, library: str, *, rates_mib: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The lines that the program prints. Raises AssertionError with its message if a check fails."""
    rates = "--rates", str(rates_mib), "--rounds", str(rounds)
    command = [build(), vendor, "--library", library, *rates]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    yield from map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0, done.stderr


def digest(report: Report, machine: Devices) -> None:
    """With kernels of the run-time compiler, and with the built-in ones."""
    rates_mib, rounds = (1, 1) if isinstance(machine, Machine) else (64, 7)
    for line in lines(machine.vendor, str(machine.library), rates_mib=rates_mib, rounds=rounds):
        if "kernels" in line:
            text = f"{line['kernels']}: {line['scenes']} scenes, {line['planted']} planted errors. {line['note']}"
            report.check(line["sums"] == "equal", text)
        else:
            report.say(json.dumps(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vendor", choices=("cuda", "rocm"), default="cuda")
    for line in lines(parser.parse_args().vendor, "", rates_mib=64, rounds=7):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
