"""Startup hook on a server's PYTHONPATH: its brain neither counts nor logs lookups in the namespace UNCOUNTED.

Only for benchmarks/bench_counting.py. Python imports a module of this name at every start; outside brains it does
nothing.
"""

import sys

UNCOUNTED = bytes(31) + b"\x02"

if "kvserver.brain.process" in sys.orig_argv:
    from kvserver.service.telling.log_sampling import RequestLines
    from kvserver.service.telling.lookup_counts import LookupCounts, LookupResult

    _note, _level = LookupCounts.note, RequestLines.level
    _counted = True

    def _nothing(*_) -> int:  # type: ignore[no-untyped-def]
        return 0

    def _note_or_not(self: LookupCounts, result: LookupResult) -> None:
        global _counted  # noqa: PLW0603 - the two functions share it, and nothing else runs here
        _counted = result.space is None or result.space.digest != UNCOUNTED
        (_note if _counted else _nothing)(self, result)

    def _level_or_none(self: RequestLines, *given) -> int:  # type: ignore[no-untyped-def]
        return (_level if _counted else _nothing)(self, *given)

    LookupCounts.note, RequestLines.level = _note_or_not, _level_or_none  # type: ignore[method-assign]
