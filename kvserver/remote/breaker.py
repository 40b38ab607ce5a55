"""Whether a node of a store is asked now: one breaker for each node. Pure; time and chance are arguments.

A node that fails again and again is left alone. Its breaker asks it by itself, at most two and a half seconds after the
last try, and lets calls through again step by step. So a node that has recovered serves within 5 s, without a restart
and without anybody's call waiting for a dead one. A full store is not a failing one: it answers.
"""

from collections import deque
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "testing", "ramping"]
TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        ("closed", "open"),  # too many failures
        ("open", "testing"),  # the time of the next try has come
        ("testing", "open"),  # it failed
        ("testing", "ramping"),  # so many tries in a row succeeded
        ("ramping", "open"),  # one failure is enough while it recovers
        ("ramping", "closed"),  # as many calls are let through as ever
    }
)
FAILURES_MAX = 5
"""Failures in a row that open it."""
WINDOW = 20
WINDOW_FAILURES_MAX = 10
"""Failures among the last WINDOW calls that open it."""
FIRST_WAIT_S, WAIT_S_MAX = 0.5, 2.0
"""Time to the first try, and the longest; it doubles. Chance adds up to a quarter: servers do not try at once."""
TESTS = 2
"""Tries in a row that must succeed."""
BETWEEN_TESTS_S = 0.1
RAMP = (1, 4, 16)
"""Calls that are let through at a time while it recovers; the next step comes after as many successes."""


class Breaker:
    """State of one node. Whoever asks the node reports each call's end."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """chance: a random number from 0 to 1, such as random.Random(seed).random."""
        self._chance = chance
        self._state: State = "closed"
        self._window: deque[bool] = deque(maxlen=WINDOW)
        """True for each failure of the last calls."""
        self._in_a_row = 0
        self._wait_s = FIRST_WAIT_S
        self._next_try_s = 0.0
        self._is_trying = False
        self._successes = 0
        self._step = 0

    @property
    def state(self) -> State:
        return self._state

    @property
    def next_try_s(self) -> float | None:
        """When it asks the node again; None unless it leaves the node alone and no try is under way."""
        return self._next_try_s if self._state == "open" else None

    @property
    def leaves_alone(self) -> bool:
        """No call goes to the node. It may be tried."""
        return self._state in ("open", "testing")

    def lets_through(self, in_flight: int) -> bool:
        """Whether a call may begin, with so many of them under way."""
        match self._state:
            case "closed":
                return True
            case "ramping":
                return in_flight < RAMP[self._step]
            case _:
                return False

    def wants_try(self, now_s: float) -> bool:
        """Whether the caller should ask the node for a small thing now, and report the end as that of a try."""
        if self._is_trying or self._state not in ("open", "testing") or now_s < self._next_try_s:
            return False
        if self._state == "open":
            self._go("testing")
            self._successes = 0
        self._is_trying = True
        return True

    def succeeded(self, now_s: float) -> None:
        """A call has ended well, or the node has refused it for a reason of its own."""
        self._in_a_row = 0
        self._window.append(False)
        if self._state == "ramping":
            self._successes += 1
            if self._successes >= RAMP[self._step]:
                self._successes = 0
                self._step += 1
                if self._step == len(RAMP):
                    self._go("closed")
                    self._wait_s = FIRST_WAIT_S

    def failed(self, now_s: float) -> None:
        """A call's deadline has passed, or the node cannot be reached, or it refuses us."""
        self._in_a_row += 1
        self._window.append(True)
        is_enough = self._in_a_row >= FAILURES_MAX or sum(self._window) >= WINDOW_FAILURES_MAX
        if self._state == "ramping" or (self._state == "closed" and is_enough):
            self._open(now_s)

    def try_succeeded(self, now_s: float) -> None:
        self._is_trying = False
        if self._state != "testing":
            return
        self._successes += 1
        self._next_try_s = now_s + BETWEEN_TESTS_S
        if self._successes == TESTS:
            self._go("ramping")
            self._successes = self._step = self._in_a_row = 0
            self._window.clear()

    def try_failed(self, now_s: float) -> None:
        self._is_trying = False
        if self._state == "testing":
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._go("open")
        self._next_try_s = now_s + self._wait_s * (1 + self._chance() / 4)
        self._wait_s = min(2 * self._wait_s, WAIT_S_MAX)

    def _go(self, after: State) -> None:
        assert (self._state, after) in TRANSITIONS, f"no transition from {self._state!r} to {after!r}"
        self._state = after
