"""Is anything several times slower than it was? `python -m benchmarks.gate`: exits with 1 and names the slow cases.

On a machine with too much other work it exits with SKIPPED: nothing was measured, so nothing has passed. The last
line of standard output says which of the three it was.

The goals are those of README.md's table, times SLACK: CI machines differ, have neighbours, and run tiny sizes. For
each case the best round of up to ATTEMPTS runs counts. So a neighbour's one busy second fails nobody, but a change
that makes a logarithmic walk linear does.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.rows import say

ROOT = Path(__file__).resolve().parents[1]
SLACK = 4.0
ATTEMPTS = 3
RUN_S = 120.0
SKIPPED = 77
"""Exit status if nothing was measured; automake and meson use it for a test that did not run."""
BENCHES = ("service", "start")
LEFT_OUT = {"brain_rss_growth_mib", "lookup_512_p99_us"}
"""The first goal is for a million chunks; the second is a tail, and tails depend on the machine's neighbours."""
BUSY = 2.0
"""Runnable processes per core. With more, nothing can be measured."""
LOOKS = 20
"""Samples of their number, taken within a second."""
STAT = Path("/proc/stat")
UNITS = {"µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0, "MB": 1e6, "MiB": float(1 << 20)}

_GOAL = re.compile(r"^\|[^|]*\| `(\w+)` \|.*\| [≤<] ([\d.]+) (\S+) \|$", re.MULTILINE)


def goals(readme: str) -> dict[str, float]:
    """Case -> goal, in seconds or bytes."""
    return {case: float(value) * UNITS[unit] for case, value, unit in _GOAL.findall(readme) if case not in LEFT_OUT}


def best(rows: Iterable[Mapping[str, object]], known: dict[str, float]) -> dict[str, float]:
    """Case -> the smallest value measured, including `known` from earlier attempts."""
    found = dict(known)
    for row in rows:
        case, least = str(row["case"]), float(str(row["min"])) * UNITS[str(row["unit"])]
        found[case] = min(least, found.get(case, least))
    return found


def missed(wanted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """Cases beyond the slack, or not measured at all."""
    return [case for case, goal in wanted.items() if not measured.get(case, float("inf")) <= goal * SLACK]


def runnable() -> float:
    """Processes of the machine that want to run now, but for this one: the median over a second.

    The load average still counts what ended a minute ago: the tests, in CI."""
    seen = []
    for _ in range(LOOKS):
        (now,) = re.findall(r"^procs_running (\d+)$", STAT.read_text(), re.MULTILINE)
        seen.append(int(now) - 1)
        time.sleep(1 / LOOKS)
    return statistics.median(seen)


def main() -> None:
    load = runnable() / len(os.sched_getaffinity(0))
    if load > BUSY:
        print(f"SKIPPED: the performance gate. {load:.1f} processes for each core want to run, more than {BUSY:g}.")
        sys.exit(SKIPPED)
    wanted = goals((ROOT / "README.md").read_text())
    measured: dict[str, float] = {}
    for attempt in range(1, ATTEMPTS + 1):
        measured = best([row for bench in BENCHES for row in _run(bench) if row["case"] in wanted], measured)
        slow = missed(wanted, measured)
        for case, goal in wanted.items():
            verdict = "slow" if case in slow else "ok"
            say(
                f"{verdict:4}  {case:<26} {measured.get(case, float('nan')) / goal:6.2f} of its goal, at most {SLACK:g}"
            )
        if not slow:
            print(f"performance gate: passed, {len(wanted)} cases within {SLACK:g} times their goals")
            return
        say(f"attempt {attempt} of {ATTEMPTS}: {', '.join(slow)}")
    print(f"performance gate: failed, more than {SLACK:g} times the goal in {', '.join(slow)}")
    sys.exit(1)


def _run(bench: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", f"benchmarks.bench_{bench}", "--smoke", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_S)
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main()
