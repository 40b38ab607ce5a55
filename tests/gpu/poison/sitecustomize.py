"""Startup hook on a tested server's PYTHONPATH: its movers load a kernel at SIGUSR1 and break their context at SIGUSR2.

Python imports a module of this name at every start; outside movers it does nothing.
"""

import os
import signal
import sys
from collections.abc import Callable

if "kvserver.movers.mover" in sys.orig_argv:
    _loaded: list[Callable[[], None]] = []

    def _load(*_: object) -> None:
        from tests.gpu import illegal  # noqa: PLC0415  (imported late, so that it does not affect a mover's start)

        try:
            _loaded.append(illegal.load())
            os.write(2, b"poison: loaded\n")
        except OSError as problem:
            os.write(2, f"poison: {problem}\n".encode())

    def _break(*_: object) -> None:
        _loaded[0]()

    signal.signal(signal.SIGUSR1, _load)
    signal.signal(signal.SIGUSR2, _break)
