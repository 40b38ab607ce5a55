"""Lookup answers that deny, or do not deny, that there are more chunks on disk."""

import pytest

from kvserver.wire.messages import Found

from .ledger import Ledger
from .memory import Arena, Wrong
from .recovery_answers import RecoveryAnswers

NAMESPACE = b"n" * 32
KEYS = [bytes([number]) * 32 for number in (3, 5, 7)]


def told(*, found: int, held: int) -> RecoveryAnswers:
    """The doubts after a lookup that found `found` of three chunks, without a doubt, while `held` were known."""
    doubts = RecoveryAnswers(Ledger(Arena(1 << 16, 1)))
    answer = Found(11, found, 0, 0, 0, "")
    doubts.told(answer, NAMESPACE, KEYS, held=held, recovered=False, hidden=False)
    return doubts


def on_disk(position: int) -> set[tuple[bytes, bytes, int, int]]:
    return {(NAMESPACE, KEYS[position], 0, 0)}


def test_a_chunk_that_was_declined_may_be_lost_and_found_again() -> None:
    told(found=1, held=3).now_known(on_disk(1), earlier=set())


def test_the_chunk_behind_those_that_are_held_was_denied() -> None:
    with pytest.raises(Wrong, match="not told to doubt"):
        told(found=0, held=2).now_known(on_disk(2), earlier=set())


def test_the_first_chunk_that_is_not_held_was_denied() -> None:
    with pytest.raises(Wrong, match="not told to doubt"):
        told(found=1, held=1).now_known(on_disk(1), earlier=set())
