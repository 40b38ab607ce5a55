"""Requests that were aborted while they waited for their loads, and that ATOM never comes to.

A request whose load has ended ATOM takes before those that wait for blocks, because it has blocks that they may be
waiting for. One that was aborted has them too, but ATOM (ffdf3bb) leaves it where it is: if nothing else gets on, the
one ahead of it waits forever, and so does a running one that needs another block. No hook of a connector reaches the
queue, so this writes what only ATOM should: the status of such a request. It waits for its load once more until ATOM
has taken it, and is aborted again before its first step has run. What that step computes is the price; ATOM ends it
behind a prefill as it does any other that runs.

It is written only where ATOM stands still, and of a request whose load ATOM has been told of and has not taken yet:
ATOM then finds what it would have found had the abort come a step later. Statuses of other names are left alone.
"""

import logging
from dataclasses import dataclass
from typing import Any

from kvclient.atom_jobs import AtomJobs
from kvclient.atom_steps import Seq

log = logging.getLogger("atom.kvserver")

PASSED_STEPS = 64
"""In a row, in which nobody got on: ATOM drops an aborted one for nothing when it comes to it by itself, so it gets the
time to."""
STATUSES = ("WAITING_FOR_REMOTE_KVS", "ABORTED")
"""By these names in ATOM's SequenceStatus."""


@dataclass
class _Parked:
    seq: Seq
    """Held, so that its id() belongs to nobody else meanwhile."""
    passed_steps: int = 0
    is_revived: bool = False


class Aborts:
    """Of one engine's sequences that wait for their loads. Changes `status` of those alone that were aborted."""

    def __init__(self, jobs: AtomJobs) -> None:
        self._jobs = jobs
        self._parked: dict[int, _Parked] = {}
        """By id() of their sequences."""
        self._has_said = False

    def parked(self, seq: Seq) -> None:
        """ATOM will have it wait for its load."""
        if self._are_known(type(seq.status)):
            self._parked[id(seq)] = _Parked(seq)

    def look(self, *, runs: bool) -> None:
        """Once a step, when ATOM has chosen whom to run. runs: others got on before."""
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
