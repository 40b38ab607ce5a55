"""On PYTHONPATH of a server: its brain counts no lookup and logs none. For benchmarks/bench_counting.py alone.

Python imports a module of this name at every start; in all processes but brains it does nothing.
"""

import sys

if "kvserver.server" in sys.orig_argv:
    from kvserver.service import leases

    def _nothing(*_: object, **__: object) -> None:
        pass

    leases._note = _nothing
