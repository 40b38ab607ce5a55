"""The output of every benchmark: machine and commit, and one row per case, as text or as JSON lines.

Each line of JSON is a complete row, and says where it was measured. A row is {bench, case, value, unit, ceiling,
ratio}; value is the median of all runs, min and max are the extremes. A ceiling is the same machine's speed without
us, measured next to each run in the same unit; ratio is the median over the runs of run / ceiling.
"""

import argparse
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvserver import __version__


class Rows:
    """Prints rows as they come."""

    def __init__(self, bench: str, *, as_json: bool, config: str) -> None:
        self._bench = bench
        self._as_json = as_json
        self._facts = {"machine": _machine(), "version": __version__, "commit": _commit(), "config": config}
        if not as_json:
            for name, fact in self._facts.items():
                print(f"# {name}: {fact}")
            print(
                f"{'case':<38} {'median':>10} {'unit':<8} {'min':>10} {'max':>10} {'ceiling':>9} {'ratio':>6}",
                flush=True,
            )

    def add(self, case: str, runs: Sequence[float], unit: str, *, ceilings: Sequence[float] = ()) -> float:
        """Prints one row; returns the median. `ceilings`: one for each run, measured next to it."""
        value = statistics.median(runs)
        ceiling = statistics.median(ceilings) if ceilings else None
        ratio = statistics.median(map(operator.truediv, runs, ceilings)) if ceilings else None
        if self._as_json:
            row = {"bench": self._bench, "case": case, "value": value, "unit": unit, "ceiling": ceiling, "ratio": ratio}
            row |= {"runs": len(runs), "min": min(runs), "max": max(runs), **self._facts}
            print(json.dumps(row), flush=True)
        else:
            limit = f"{ceiling:9.2f} {ratio:6.1%}" if ceiling and ratio else ""
            print(f"{case:<38} {value:10.2f} {unit:<8} {min(runs):10.2f} {max(runs):10.2f} {limit}", flush=True)
        return value


def option_parser(description: str | None, *, smoke: str = "") -> argparse.ArgumentParser:
    """A parser with the options of every benchmark. smoke: what --smoke means there; empty: there is no such option."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    if smoke:
        parser.add_argument("--smoke", action="store_true", help=f"{smoke}: shows that it runs, measures nothing")
    return parser


def say(text: str) -> None:
    """Prints progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def _machine() -> str:
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{len(os.sched_getaffinity(0))} x {models[0] if models else platform.machine()}, Linux {platform.release()}"


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
