"""Requests that were aborted while they waited for loads, and that ATOM never gets to.

ATOM first takes requests whose load has ended, because they hold blocks that others may wait for. An aborted request
holds blocks too, but ATOM (ffdf3bb) leaves it in its place. If nothing else makes progress, the request ahead of it
waits forever, and so does a running request that needs another block.

No connector hook reaches that queue. So this file writes a field that only ATOM should write: the request's status. The
request waits for its load again until ATOM has taken it, and is aborted again before its first step has run. The price
is one wasted step; then ATOM ends it after a prefill like any other running request.

The status is written only if ATOM makes no progress, and only for a request whose load was reported and not yet taken.
ATOM then sees the same as if the abort had come one step later. Unknown statuses are left alone.
"""

import logging
from dataclasses import dataclass
from typing import Any

from kvclient.atom.jobs import AtomJobs
from kvclient.atom.steps import Seq

log = logging.getLogger("atom.kvserver")

PASSED_STEPS = 64
"""Consecutive steps without progress before a status is written. ATOM drops an aborted request at no cost when it gets
to it by itself, so it gets the time to."""
STATUSES = ("WAITING_FOR_REMOTE_KVS", "ABORTED")
"""Names in ATOM's SequenceStatus."""


@dataclass
class _Parked:
    seq: Seq
    """Reference that keeps its id() from being reused."""
    passed_steps: int = 0
    is_revived: bool = False


class Aborts:
    """One engine's sequences that wait for their loads. Changes `status` only of aborted sequences."""

    def __init__(self, jobs: AtomJobs) -> None:
        self._jobs = jobs
        self._parked: dict[int, _Parked] = {}
        """id() of a sequence -> its entry."""
        self._has_said = False

    def parked(self, seq: Seq) -> None:
        """The sequence is going to wait for its load."""
        if self._are_known(type(seq.status)):
            self._parked[id(seq)] = _Parked(seq)

    def look(self, *, runs: bool) -> None:
        """Check the sequences once per step, after ATOM has chosen what runs. runs: other sequences made progress."""
        for key in [key for key, parked in self._parked.items() if not self._waits(parked, runs=runs)]:
            del self._parked[key]

    def _are_known(self, states: Any) -> bool:
        missing = [name for name in STATUSES if not hasattr(states, name)]
        if missing and not self._has_said:
            self._has_said = True
            log.warning("statuses not known missing=%s: nothing is done about aborted loads", missing)
        return not missing

    def _waits(self, parked: _Parked, *, runs: bool) -> bool:
        seq = parked.seq
        if seq.is_finished:
            return False
        states: Any = type(seq.status)
        if seq.status is states.WAITING_FOR_REMOTE_KVS:
            return True
        is_taken = seq.offload_loaded or seq.offload_load_failed
        if seq.status is states.ABORTED and not is_taken:
            parked.passed_steps = 0 if runs or self._jobs.holds(seq) else parked.passed_steps + 1
            if parked.passed_steps >= PASSED_STEPS:
                seq.status, parked.is_revived = states.WAITING_FOR_REMOTE_KVS, True
            return True
        if parked.is_revived:
            seq.status = states.ABORTED
        return False
