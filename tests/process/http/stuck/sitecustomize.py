"""Start-up hook for a server's processes: every Python imports this when the folder is in PYTHONPATH.

The thread of a brain that decides hangs when the brain gets SIGUSR1. Its other threads go on."""

import signal
import sys
import time

if "kvserver.brain.process" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))
