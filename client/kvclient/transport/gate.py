"""The circuit breaker: whether the server may be asked at all. While it is shut, a call costs one attribute read.

It is shut until the first connection, after a timeout during which the server was silent, and after the connection is
lost. Only the background thread opens it, when the server has answered a probe.
"""

import random
import threading
from typing import NamedTuple

from kvclient.counters import Counters
from kvclient.transport.lane import Lane
from kvserver.errors import KvError
from kvserver.wire.messages import Limits


class Link(NamedTuple):
    """Everything that a caller's thread needs to ask the server."""

    lane: Lane
    limits: Limits
    incarnation: int


class Gate:
    """The breaker. `link` is None while it is shut, and `why` is then the reason that results carry."""

    def __init__(self, counters: Counters) -> None:
        self.link: Link | None = None
        self.why = "not-connected"
        self.problem: KvError | None = None
        """The server's refusal of this client, such as another protocol version. None if there is none."""
        self._counters = counters
        self._changed = threading.Condition()

    def open(self, link: Link) -> None:
        with self._changed:
            before = self.link
            self.link, self.why, self.problem = link, "", None
            self._changed.notify_all()
        if before is not None:
            before.lane.shut()

    def shut(self, why: str, link: Link | None = None) -> bool:
        """Shut the gate and its lane. Returns whether this call shut it.

        With `link`, only if that link is still the open one: a caller that noticed late must not undo a reconnect.
        """
        with self._changed:
            shut = self.link
            if shut is None or (link is not None and shut is not link):
                return False
            self.link, self.why = None, why
        shut.lane.shut()
        self._counters.add("trips")
        return True

    def refuse(self, problem: KvError) -> None:
        """Note the server's refusal of this client. Waiting does not help."""
        with self._changed:
            self.problem = problem
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until open; False after the timeout. Raises the server's refusal if there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self.link is not None or self.problem is not None, timeout_s)
            if self.link is None and self.problem is not None:
                raise self.problem
            return self.link is not None


class Backoff:
    """Growing pauses between attempts, with jitter so that the workers of one engine do not retry in step."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def next_s(self) -> float:
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._max_s)
        return pause_s

    def reset(self) -> None:
        self._next_s = self._first_s


class Slots:
    """A bound on work in flight: a caller faster than the server is told so instead of queued.

    Callers' threads take slots; the loop's thread gives them back.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, most: int, count: int = 1) -> bool:
        with self._lock:
            if self._taken + count > most:
                return False
            self._taken += count
            return True

    def give(self, count: int = 1) -> None:
        with self._lock:
            assert self._taken >= count
            self._taken -= count
