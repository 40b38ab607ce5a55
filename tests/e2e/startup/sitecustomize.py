"""Runs at the start of each Python process of an engine under test, which has this folder in PYTHONPATH.

An engine's processes wait for each other by calling sched_yield in a loop, also while all requests wait for a load.
With as many ranks as cores, Linux (seen: 6.18) then leaves everybody else without a core, for a minute and more: the
server that is to bring the load, and kernel threads too. Here they sleep instead, for less than a step takes.

And each of them imports torch and vLLM, one after the other, which takes a quarter less (9.8 s instead of 12.7) as long
as nobody looks for garbage among what is imported.
"""

import gc
import os
import threading
import time

PAUSE_S = 50e-6
IMPORTS_S = 15.0


def sched_yield() -> None:
    """os.sched_yield, which releases the core in any case."""
    time.sleep(PAUSE_S)


os.sched_yield = sched_yield
gc.disable()
later = threading.Timer(IMPORTS_S, gc.enable)
later.daemon = True
later.start()
