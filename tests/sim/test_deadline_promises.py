"""The simulator's books of deadlines notice a transfer that stays without its answer."""

from collections import Counter

import pytest

from kvserver.wire.messages import Retrieve

from .deadline_promises import MS, DeadlinePromises, Unanswered
from .memory import Wrong

CACHE, MOVER = 5, 3


def after(*ticks_ms: int, deadline_ms: int = 40, killed: bool = False) -> None:
    """Ticks while a retrieve that was asked for at 10 ms has no answer. Bounds: 100 ms at most, and 20 ms of grace."""
    books = DeadlinePromises(Counter(), job_ttl_ms=100, grace_ms=20)
    books.mover_of[CACHE] = MOVER
    if killed:
        books.killed.add(MOVER)
    transfer = Unanswered(Retrieve(1, CACHE, 7, 0, 1, deadline_ms, [], False), 10 * MS)
    for tick_ms in ticks_ms:
        books.check([transfer], tick_ms * MS)


def test_a_transfer_has_its_deadline_and_the_grace_from_the_tick_that_cancels_it() -> None:
    after(49, 60, 79)
    with pytest.raises(Wrong, match="no answer after 70 ms"):
        after(49, 60, 80)


def test_no_deadline_is_longer_than_the_server_lets_it_be() -> None:
    after(110, 129, deadline_ms=60_000)
    with pytest.raises(Wrong, match="no answer after 120 ms"):
        after(110, 130, deadline_ms=60_000)


def test_a_transfer_whose_mover_is_killed_waits_for_its_end() -> None:
    after(50, 70, 10_000, killed=True)
