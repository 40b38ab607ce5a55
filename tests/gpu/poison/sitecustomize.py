"""On PYTHONPATH of a server under test: its movers load a kernel at SIGUSR1 and break their GPU context at SIGUSR2.

Python imports a module of this name at every start; in all processes but movers it does nothing.
"""

import os
import signal
import sys
from collections.abc import Callable

if "kvserver.movers.mover" in sys.orig_argv:
    _loaded: list[Callable[[], None]] = []

    def _load(*_: object) -> None:
        from tests.gpu import illegal  # noqa: PLC0415  (the start of a mover shall not notice)

        try:
            _loaded.append(illegal.load())
            os.write(2, b"poison: loaded\n")
        except OSError as problem:
            os.write(2, f"poison: {problem}\n".encode())

    def _break(*_: object) -> None:
        _loaded[0]()

    signal.signal(signal.SIGUSR1, _load)
    signal.signal(signal.SIGUSR2, _break)
