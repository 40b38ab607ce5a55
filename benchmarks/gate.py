"""Is anything several times slower than it was? `python -m benchmarks.gate`: exits with 1 and names what is.

A machine with too much other work exits with SKIPPED: nothing was measured, so nothing has passed. The last line of
standard output says which of the three it was.

The goals are those of README.md's table, times SLACK: machines of a CI differ, have neighbours, and run tiny sizes. Of
each case the best round of up to ATTEMPTS runs counts, so what a neighbour does for a second fails nobody, and what a
change made of a walk that was logarithmic does.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.rows import say

ROOT = Path(__file__).resolve().parents[1]
SLACK = 4.0
ATTEMPTS = 3
RUN_S = 120.0
SKIPPED = 77
"""Exit status where nothing was measured, as automake and meson have it for a test that did not run."""
BENCHES = ("service", "start")
LEFT_OUT = {"brain_rss_growth_mib", "lookup_512_p99_us"}
"""The goal of the first is of a million chunks; the other is a tail, and tails are the machine's neighbours'."""
BUSY = 2.0
"""Processes that want to run, for each core: with more of them there is nothing to be measured."""
UNITS = {"µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0, "MB": 1e6, "MiB": float(1 << 20)}

_GOAL = re.compile(r"^\|[^|]*\| `(\w+)` \|.*\| [≤<] ([\d.]+) (\S+) \|$", re.MULTILINE)


def goals(readme: str) -> dict[str, float]:
    """Case -> goal, in seconds or bytes."""
    return {case: float(value) * UNITS[unit] for case, value, unit in _GOAL.findall(readme) if case not in LEFT_OUT}


def best(rows: Iterable[Mapping[str, object]], known: dict[str, float]) -> dict[str, float]:
    """Case -> the least that was ever measured, with `known` from earlier attempts."""
    found = dict(known)
    for row in rows:
        case, least = str(row["case"]), float(str(row["min"])) * UNITS[str(row["unit"])]
        found[case] = min(least, found.get(case, least))
    return found


def missed(wanted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """Cases that are beyond the slack, or were not measured at all."""
    return [case for case, goal in wanted.items() if not measured.get(case, float("inf")) <= goal * SLACK]


def main() -> None:
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
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
