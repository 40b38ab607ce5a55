"""On PYTHONPATH of a server: of every PHASE lookups in a row its brain counts and logs all, of the next PHASE none, and
so on. For benchmarks/bench_counting.py alone.

Python imports a module of this name at every start; in all processes but brains it does nothing.
"""

import sys
from itertools import count

PHASE = 250

if "kvserver.server" in sys.orig_argv:
    from kvserver.service.asked import Asked
    from kvserver.service.request_lines import RequestLines

    _note, _level, _number = Asked.note, RequestLines.level, count()
    _counted = True

    def _note_or_not(*given: object) -> None:
        global _counted  # noqa: PLW0603 - the two functions share it, and nothing else runs here
        _counted = next(_number) // PHASE % 2 == 0
        if _counted:
            _note(*given)  # type: ignore[arg-type]

    def _level_or_none(*given: object) -> int:
        return _level(*given) if _counted else 0  # type: ignore[arg-type]

    Asked.note, RequestLines.level = _note_or_not, _level_or_none  # type: ignore[method-assign, assignment]
