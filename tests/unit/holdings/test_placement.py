"""Placement: which chunks may be written to disk, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserver.tiers.placement import DAY_NS, LOADS_KEPT, RATE_HOLDS_NS, Budget, LoadRate, Placement, Rate, Touched

SECOND_NS = 1_000_000_000


@given(st.lists(st.tuples(st.integers(0, DAY_NS // 3), st.integers(1, 400)), max_size=80))
def test_no_24_hours_have_more_than_the_days_bytes(steps: list[tuple[int, int]]) -> None:
    budget, now_ns = Budget(1000, 0), 0
    written: list[tuple[int, int]] = []
    for wait_ns, count in steps:
        now_ns += wait_ns
        if budget.allows(count, now_ns):
            budget.charge(count, now_ns)
            written.append((now_ns, count))
    for since, _ in written:
        assert sum(count for at_ns, count in written if since <= at_ns < since + DAY_NS) <= 1000


def test_an_idle_device_has_its_burst_and_then_its_rate() -> None:
    budget = Budget(24_000, 0)
    assert budget.allows(1000, 0)
    assert not budget.allows(1001, 0)
    budget.charge(1000, 0)
    assert not budget.allows(1, 0)
    assert budget.allows(950, DAY_NS // 24)


def test_without_a_budget_everything_is_allowed() -> None:
    budget = Budget(0, 0)
    budget.charge(1 << 60, 0)
    assert budget.allows(1 << 60, 0)


def test_the_queue_is_as_long_as_the_device_is_fast() -> None:
    placement = Placement(daily_bytes=0, queue_ms=1000, now_ns=0)
    for second in range(1, 60):
        placement.ordered(10 << 20, second * SECOND_NS)
        placement.ended(10 << 20, second * SECOND_NS + SECOND_NS // 2)
    assert abs(placement.writes.bytes_per_s - (20 << 20)) < 1 << 20
    now_ns = 100 * SECOND_NS
    assert placement.refusal(1 << 40, now_ns) == "", "an idle device takes one of any size"
    placement.ordered(15 << 20, now_ns)
    assert placement.refusal(4 << 20, now_ns) == ""
    assert placement.refusal(6 << 20, now_ns) == "queue"


def test_a_rate_is_not_measured_from_nothing() -> None:
    rate = Rate()
    before = rate.bytes_per_s
    rate.began(0)
    rate.ended(0, 50 * SECOND_NS)
    assert rate.bytes_per_s == before


def test_a_rate_grows_old_until_it_is_measured_again() -> None:
    rate, now_ns = Rate(), 3 * RATE_HOLDS_NS
    rate.tick(now_ns)
    assert not rate.is_old, "a guess is as good as before"
    for _ in range(2):
        rate.began(now_ns)
        rate.ended(5 << 20, now_ns + SECOND_NS)
        rate.tick(now_ns + SECOND_NS + RATE_HOLDS_NS)
        assert not rate.is_old
        now_ns += SECOND_NS + RATE_HOLDS_NS + 1
        rate.tick(now_ns)
        assert rate.is_old


def test_an_old_rate_counts_for_nothing_when_it_is_measured_again() -> None:
    rate = Rate()
    rate.began(0)
    rate.ended(4 << 20, 5 * SECOND_NS)
    now_ns = 6 * SECOND_NS + RATE_HOLDS_NS
    rate.tick(now_ns)
    assert rate.is_old
    rate.began(now_ns)
    rate.ended(1 << 30, now_ns + SECOND_NS // 5)
    assert rate.bytes_per_s == pytest.approx(5 << 30)


def test_a_load_that_waited_does_not_count_beside_one_that_did_not() -> None:
    rate = LoadRate()
    assert rate.seconds_for(7 << 20) == 0
    rate.ended(1000, SECOND_NS)  # too few bytes to tell
    assert rate.seconds_for(7 << 20) == 0
    rate.ended(1 << 30, 30 * SECOND_NS)
    assert rate.seconds_for(1 << 30) == pytest.approx(30)
    rate.ended(1 << 30, SECOND_NS // 50)
    rate.ended(1 << 30, 20 * SECOND_NS)
    assert rate.seconds_for(1 << 29) == pytest.approx(0.01)
    for _ in range(LOADS_KEPT):  # a slower device from now on
        rate.ended(1 << 30, SECOND_NS)
    assert rate.seconds_for(1 << 30) == pytest.approx(1)


def test_a_rate_is_the_same_whether_ends_are_told_one_by_one_or_in_bursts() -> None:
    """1 GB/s in both, measured over many ends."""
    steady, in_bursts = Rate(), Rate()
    for rate, at_a_time in ((steady, 1), (in_bursts, 8)):
        for _ in range(960):
            rate.began(0)
        for end in range(960):
            told_ns = (end // at_a_time + 1) * at_a_time * 4_000_000 + end % at_a_time * 1000
            rate.ended(4_000_000, told_ns)
    assert steady.bytes_per_s == pytest.approx(1e9, rel=0.02)
    assert in_bursts.bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_the_oldest_key_is_forgotten_first() -> None:
    touched = Touched(2)
    for key in (b"a", b"b", b"a", b"c"):
        touched.add(key)
    assert b"a" in touched
    assert b"c" in touched
    assert b"b" not in touched
