"""Leases in the simulator's books when their namespace leaves."""

from collections import Counter

import pytest

from .content import keys_of
from .deadline_promises import DeadlinePromises
from .ledger import Ledger
from .memory import Arena, Wrong
from .pledge_promises import PledgePromises
from .promises import EngineFacts, LeaseFacts, Promises
from .shapes import SHAPES
from .streams import OurWord

LEAVES, STAYS = b"\2" * 32, b"\3" * 32
EXPIRES_NS = 701


def books_at(now_ns: int, *, pledge: int = 0) -> Promises:
    """Books with one lease in each of two namespaces, of which the ledger holds nothing."""
    shapes = {LEAVES: SHAPES[0], STAYS: SHAPES[4]}
    pledges = PledgePromises(Counter(), ttl_ms=5, patience_ms=3, room=(2, 5, 7))
    deadlines = DeadlinePromises(Counter(), job_ttl_ms=13, grace_ms=17)
    ledger, word = Ledger(Arena(4096, 1)), OurWord(Counter())
    books = Promises(ledger, shapes, pledges, deadlines, word, lease_ttl_ms=7, lease_extended_ms=11)
    for number, digest in enumerate(shapes, 13):
        lease = LeaseFacts(EngineFacts(ranks=1), digest, keys_of((0, 2, 1)), EXPIRES_NS, pledge=pledge)
        books.leases[number] = lease
    books.now_ns = now_ns
    return books


def test_a_namespace_that_leaves_under_a_lease_on_its_chunks_is_noticed() -> None:
    with pytest.raises(Wrong, match="a namespace left, and a lease was on chunks of it"):
        books_at(EXPIRES_NS - 1).namespaces_are([STAYS])


def test_a_lease_whose_time_is_over_keeps_no_namespace() -> None:
    books = books_at(EXPIRES_NS)
    books.namespaces_are([STAYS])
    assert list(books.leases) == [14]


def test_a_lease_on_what_is_to_come_leaves_with_its_namespace() -> None:
    books = books_at(EXPIRES_NS - 1, pledge=17)
    books.namespaces_are([STAYS])
    assert list(books.leases) == [14]
