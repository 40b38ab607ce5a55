"""Runner for the long campaigns that a person starts: one line per scenario, and a failure does not end the run.

A scenario whose server cannot be had here (the rigs skip a test then) is named as left out."""

import time
import traceback
from collections.abc import Callable, Mapping

import pytest


def run_campaign(title: str, scenarios: Mapping[str, Callable[[], object]], *, only: str) -> int:
    """Runs the scenarios whose name contains `only`. Each returns its report. The exit status is 1 when one failed."""
    failed = []
    left_out = []
    for name, scenario in scenarios.items():
        if only not in name:
            continue
        began_s = time.monotonic()
        try:
            told = f"ok, {scenario()}"
        except pytest.skip.Exception as missing:
            left_out.append(name)
            told = f"LEFT OUT, {missing}"
        except Exception:  # one failure must not hide the others
            failed.append(name)
            traceback.print_exc()
            told = "FAILED"
        print(f"{name}: {told} ({time.monotonic() - began_s:.0f} s)", flush=True)
    told = [f"{word}: {', '.join(names)}" for word, names in (("FAILED", failed), ("LEFT OUT", left_out)) if names]
    print(f"{title}: {'; '.join(told) or 'ok'}")
    return 1 if failed else 0


def counted(seen: Mapping[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(seen.items()))
