"""Runs at the start of each Python process of an engine under test, which has this folder in PYTHONPATH.

An engine's processes wait for each other by calling sched_yield in a loop, also while all requests wait for a load.
With as many ranks as cores, Linux (seen: 6.18) then leaves everybody else without a core, for a minute and more: the
server that is to bring the load, and kernel threads too. Here they sleep instead, for less than a step takes.
"""

import os
import time

PAUSE_S = 50e-6


def sched_yield() -> None:
    """os.sched_yield, which releases the core in any case."""
    time.sleep(PAUSE_S)


os.sched_yield = sched_yield
