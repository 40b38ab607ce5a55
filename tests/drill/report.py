"""Tries bugs one after the other, prints a line for each, and counts those that nobody noticed."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from tests.drill.bugs import Stale


class Named(Protocol):
    """Any kind of bug that a drill knows how to try."""

    @property
    def name(self) -> str: ...
    @property
    def promise(self) -> str: ...


Kind = TypeVar("Kind", bound=Named)


def try_all(bugs: Sequence[Kind], notice: Callable[[Kind], str], *, jobs: int = 1) -> int:
    """Returns the exit status: 1 when a bug survived, or is stale.

    notice: breaks the code and returns who noticed, or "" for nobody. It raises Stale for a bug that no longer fits."""
    survivors, stale, began_s = [], [], time.monotonic()
    with ThreadPoolExecutor(jobs) as threads:
        for bug, (by, problem, took_s) in zip(bugs, threads.map(lambda bug: _tried(bug, notice), bugs), strict=True):
            if problem:
                stale.append(problem)
            elif not by:
                survivors.append(bug.name)
            said = "STALE" if problem else by[:150] or "NOBODY"
            print(f"{bug.promise} {bug.name:<66}{took_s:>6.0f} s  {said}", flush=True)
    tried = len(bugs) - len(stale)
    print(f"{tried} bugs tried, {len(survivors)} survived, {len(stale)} stale, {time.monotonic() - began_s:.0f} s")
    print("\n".join([*(f"SURVIVED {name}" for name in survivors), *(f"STALE {problem}" for problem in stale)]))
    return 1 if survivors or stale else 0


def _tried(bug: Kind, notice: Callable[[Kind], str]) -> tuple[str, str, float]:
    """Who noticed, why it is stale, and the seconds."""
    began_s = time.monotonic()
    try:
        return notice(bug), "", time.monotonic() - began_s
    except Stale as error:
        return "", str(error), time.monotonic() - began_s
