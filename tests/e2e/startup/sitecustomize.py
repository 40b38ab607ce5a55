"""Startup hook of each Python process of an engine under test, which has this folder in PYTHONPATH.

An engine's processes wait for each other by calling sched_yield in a loop, also while all requests wait for a load.
With as many ranks as cores, Linux (seen: 6.18) then starves all other processes for a minute and more: kernel
threads, and the server that has to bring the load. So here they sleep instead, for less time than a step takes.

Each process also imports torch and vLLM. With garbage collection off during the imports they take a quarter less
(9.8 s instead of 12.7).
"""

import gc
import os
import threading
import time

PAUSE_S = 50e-6
IMPORTS_S = 15.0


def sched_yield() -> None:
    """os.sched_yield, but it always releases the core."""
    time.sleep(PAUSE_S)


os.sched_yield = sched_yield
gc.disable()
later = threading.Timer(IMPORTS_S, gc.enable)
later.daemon = True
later.start()
