"""On PYTHONPATH of a server under test: its movers break their own GPU context when they get SIGUSR2.

Python imports a module of this name at every start; in all processes but movers it does nothing.
"""

import os
import signal
import sys

if "kvserver.mover" in sys.orig_argv:

    def _break(*_: object) -> None:
        from tests.gpu.illegal import write_nowhere  # noqa: PLC0415  (the start of a mover shall not notice)

        try:
            write_nowhere()
            os.write(2, b"poisoned: a kernel writes nowhere\n")
        except OSError as problem:
            os.write(2, f"not poisoned: {problem}\n".encode())

    signal.signal(signal.SIGUSR2, _break)
