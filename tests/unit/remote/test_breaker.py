"""When a node of a store is asked, left alone, and asked again."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvserver.remote.breaker import FAILURES_MAX, RAMP, WINDOW, WINDOW_FAILURES_MAX, Breaker

CALL_S = 0.25
"""A call to a dead node ends after so long."""
RECOVERS_S = 5.0


def breaker(seed: int = 1) -> Breaker:
    return Breaker(random.Random(seed).random)


def opened(now_s: float = 0.0, seed: int = 1) -> Breaker:
    node = breaker(seed)
    for _ in range(FAILURES_MAX):
        assert node.lets_through(0)
        node.failed(now_s)
    return node


def test_failures_in_a_row_open_it_and_single_ones_do_not() -> None:
    node = breaker()
    for _ in range(3 * FAILURES_MAX):
        for _ in range(FAILURES_MAX - 1):
            node.failed(0.0)
        for _ in range(WINDOW):
            node.succeeded(0.0)
    assert node.state == "closed"
    assert opened().state == "open"
    assert not opened().lets_through(0)


def test_a_dead_node_is_left_alone_all_the_time_and_not_anew_after_each_try() -> None:
    node, now_s = opened(), 0.0
    for _ in range(7):
        assert node.next_try_s is not None
        now_s = node.next_try_s
        assert node.wants_try(now_s)
        assert node.leaves_alone
        node.try_failed(now_s + CALL_S)
        assert node.leaves_alone


def test_half_of_the_last_calls_open_it_also_when_others_succeed_between_them() -> None:
    node = breaker()
    calls = 0
    while node.state == "closed":
        node.failed(0.0)
        node.succeeded(0.0)
        calls += 1
    assert calls == WINDOW_FAILURES_MAX


@given(some.floats(0.0, 100.0), some.integers(0, 1000))
def test_a_node_that_recovers_is_asked_by_as_many_as_ever_within_5_s(dead_s: float, seed: int) -> None:
    node = opened(seed=seed)
    now_s = 0.0
    served_s = None
    while served_s is None:
        now_s += 0.01
        if node.wants_try(now_s):
            is_alive = now_s >= dead_s
            now_s += 0.001 if is_alive else CALL_S
            if is_alive:
                node.try_succeeded(now_s)
            else:
                node.try_failed(now_s)
        if node.lets_through(0):
            node.succeeded(now_s)
        if node.state == "closed":
            served_s = now_s
    assert served_s - dead_s <= RECOVERS_S


def test_it_asks_a_dead_node_less_and_less_and_never_by_two_at_once() -> None:
    node = opened()
    times = []
    now_s = 0.0
    while now_s < 60:
        now_s += 0.01
        if node.wants_try(now_s):
            assert not node.wants_try(now_s + 100)
            times.append(now_s)
            node.try_failed(now_s)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert 0.5 <= times[0] <= 0.64
    assert all(2.0 <= pause <= 2.52 for pause in pauses[2:])


def test_one_failure_while_it_recovers_opens_it_again() -> None:
    node = opened()
    recover(node)
    assert node.state == "ramping"
    node.failed(10.0)
    assert node.state == "open"


def recover(node: Breaker) -> None:
    now_s = node.next_try_s
    assert now_s is not None
    while node.state != "ramping":
        now_s += 0.2
        assert node.wants_try(now_s)
        node.try_succeeded(now_s)


def test_calls_that_began_before_it_opened_do_not_close_or_prolong_it() -> None:
    node = opened(1.0)
    next_try_s = node.next_try_s
    node.succeeded(1.2)
    node.failed(1.3)
    assert node.state == "open"
    assert node.next_try_s == next_try_s


class Traffic(RuleBasedStateMachine):
    """Any order of calls, ends and tries."""

    def __init__(self) -> None:
        super().__init__()
        self.node = breaker()
        self.now_s = 0.0
        self.in_flight = 0
        self.is_trying = False

    @rule(pause_s=some.floats(0.0, 3.0))
    def time_passes(self, pause_s: float) -> None:
        self.now_s += pause_s

    @rule()
    def a_call_begins_if_it_may(self) -> None:
        if self.node.lets_through(self.in_flight):
            self.in_flight += 1
            assert self.node.state == "closed" or (self.node.state == "ramping" and self.in_flight <= RAMP[-1])

    @precondition(lambda self: self.in_flight > 0)
    @rule(succeeds=some.booleans())
    def a_call_ends(self, succeeds: bool) -> None:
        self.in_flight -= 1
        (self.node.succeeded if succeeds else self.node.failed)(self.now_s)

    @rule()
    def a_try_begins_if_it_is_wanted(self) -> None:
        if self.node.wants_try(self.now_s):
            assert not self.is_trying
            self.is_trying = True

    @precondition(lambda self: self.is_trying)
    @rule(succeeds=some.booleans())
    def a_try_ends(self, succeeds: bool) -> None:
        self.is_trying = False
        (self.node.try_succeeded if succeeds else self.node.try_failed)(self.now_s)

    @invariant()
    def a_node_that_is_left_alone_is_asked_soon(self) -> None:
        if self.node.state == "open":
            assert self.node.next_try_s is not None
            assert self.node.next_try_s <= self.now_s + 2.5
        else:
            assert self.node.next_try_s is None


test_any_traffic = Traffic.TestCase
