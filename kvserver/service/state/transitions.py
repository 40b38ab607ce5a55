"""The state machines of the service, as tables.

Rule: every change of a state goes through `moved()`. A transition that is not in its table is a bug of ours, and stops
the process; the supervisor starts another brain.
"""

from collections.abc import Set as AbstractSet
from typing import Literal, TypeVar

State = TypeVar("State", bound=str)

MoverState = Literal["starting", "ready", "killed"]
MOVER: AbstractSet[tuple[MoverState, MoverState]] = {
    ("starting", "ready"),
    ("starting", "killed"),
    ("ready", "killed"),  # its process may still exist, until MoverGone
}

CacheState = Literal["mapping", "mapped", "unmapping"]
CACHE: AbstractSet[tuple[CacheState, CacheState]] = {
    ("mapping", "mapped"),
    ("mapping", "unmapping"),  # its session ended before the mover had mapped it
    ("mapped", "unmapping"),
}

JobState = Literal["begun", "awaiting", "held", "ordered", "cancelled", "ended"]
JOB: AbstractSet[tuple[JobState, JobState]] = {
    ("begun", "awaiting"),  # a retrieve: some of its chunks are still to be stored
    ("awaiting", "held"),
    ("awaiting", "ordered"),
    ("awaiting", "ended"),  # they do not come
    ("begun", "held"),  # a retrieve: some of its chunks are still to be read
    ("begun", "ordered"),
    ("held", "ordered"),
    ("held", "ended"),  # the mover was never told of it
    ("ordered", "cancelled"),  # the mover was told to give it up
    ("ordered", "ended"),
    ("cancelled", "ended"),
}

DeviceState = Literal["open", "listed", "closed", "away"]
"""open: usable as far as anybody knows, and its records are not known yet. listed: its records are known. closed: it
could not be opened when the records were listed, or never. away: its records are known, and it is not open now."""
DEVICE: AbstractSet[tuple[DeviceState, DeviceState]] = {
    ("open", "listed"),
    ("open", "closed"),
    ("closed", "open"),
    ("listed", "away"),
    ("away", "listed"),
    ("away", "closed"),  # another mover listed the records of the others
}

DrainState = Literal["", "draining", "drained"]
DEVICE_DRAIN: AbstractSet[tuple[DrainState, DrainState]] = {("draining", "drained")}
SERVER_DRAIN: AbstractSet[tuple[DrainState, DrainState]] = {
    ("", "draining"),
    ("draining", "drained"),
    ("draining", ""),
    ("drained", ""),
}

RecoveryState = Literal["waiting", "listing", "telling", "complete"]
"""The knowledge of records on disk: nothing; some namespaces; all namespaces, and some records; everything."""
RECOVERY: AbstractSet[tuple[RecoveryState, RecoveryState]] = {
    ("waiting", "listing"),
    ("listing", "telling"),
    ("telling", "complete"),
    ("listing", "waiting"),  # the mover ended; the next one begins anew
    ("telling", "waiting"),
}


def moved(table: AbstractSet[tuple[State, State]], before: State, after: State) -> State:
    """The new state. Raises AssertionError for a transition that is not in the table."""
    assert (before, after) in table, f"no transition from {before!r} to {after!r}"
    return after
