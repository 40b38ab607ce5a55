"""Runner for the long campaigns that a person starts: one line per scenario, and a failure does not end the run."""

import time
import traceback
from collections.abc import Callable, Mapping


def run_campaign(title: str, scenarios: Mapping[str, Callable[[], object]], *, only: str) -> int:
    """Runs the scenarios whose name contains `only`. Each returns its report. The exit status is 1 when one failed."""
    failed = []
    for name, scenario in scenarios.items():
        if only not in name:
            continue
        began_s = time.monotonic()
        try:
            told = f"ok, {scenario()}"
        except Exception:  # one failure must not hide the others
            failed.append(name)
            traceback.print_exc()
            told = "FAILED"
        print(f"{name}: {told} ({time.monotonic() - began_s:.0f} s)", flush=True)
    print(f"{title}: {'FAILED: ' + ', '.join(failed) if failed else 'ok'}")
    return 1 if failed else 0


def counted(seen: Mapping[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(seen.items()))
