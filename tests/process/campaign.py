"""Scenarios one after the other, for the long runs that a person starts: a line for each, and on to the next."""

import time
import traceback
from collections.abc import Callable, Mapping


def run_campaign(title: str, scenarios: Mapping[str, Callable[[], object]], *, only: str) -> int:
    """Those whose name contains `only`, each of which returns what it has seen. The exit status: 1 when one failed."""
    failed = []
    for name, scenario in scenarios.items():
        if only not in name:
            continue
        began_s = time.monotonic()
        try:
            told = f"ok, {scenario()}"
        except Exception:  # one failure hides no other
            failed.append(name)
            traceback.print_exc()
            told = "FAILED"
        print(f"{name}: {told} ({time.monotonic() - began_s:.0f} s)", flush=True)
    print(f"{title}: {'FAILED: ' + ', '.join(failed) if failed else 'ok'}")
    return 1 if failed else 0


def counted(seen: Mapping[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(seen.items()))
