"""A connector's edge to its engine: no exception of ours reaches the engine while it serves.

The first unexpected exception of a half is logged with its trace and counted. After that the half does nothing more.
Refusals at engine start (settings, layouts, disagreeing ranks) are different: they do reach the engine.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from kvclient.offload.ends import Ended, Ends
from kvclient.offload.values import RetrieveOrder, StoreOrder
from kvclient.offload.worker import Worker
from kvclient.values import CacheSpec
from kvserver.errors import RequestError

WHY = "connector-bug"


def refusal(problem: Exception) -> Exception | None:
    """Return the problem if it is a RequestError, which explains itself. Otherwise None."""
    return problem if isinstance(problem, RequestError) else None


class Guard:
    """Context manager: `with guard as serves:` tells whether the half still serves, and swallows an unexpected
    exception.

    on_bug is called before the code after the block.
    """

    def __init__(
        self,
        on_bug: Callable[[], None],
        log: logging.Logger,
        *,
        explain: Callable[[Exception], Exception | None] = refusal,
    ) -> None:
        """explain: returns the exception that explains a problem if it is not a bug of ours, otherwise None."""
        self.tripped = False
        self._on_bug = on_bug
        self._explain = explain
        self._log = log
        self._untold = 0

    def __enter__(self) -> bool:
        return not self.tripped

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False  # no error, or one that is meant to end the process
        if not self.tripped:
            why = self._explain(error) or "a bug in the connector"
            self._log.error("no cache from now on: %s", why, exc_info=error)
            self._untold = 1
            self.trip()
        return True

    def trip(self) -> None:
        if not self.tripped:
            self.tripped = True
            self._on_bug()

    def take_bugs(self) -> int:
        """Bugs since the last call: 0 or 1."""
        taken, self._untold = self._untold, 0
        return taken


class GuardedWorker:
    """Worker behind a guard; InertWorker after the first unexpected exception."""

    def __init__(self, half: Worker, log: logging.Logger) -> None:
        self._half = half
        self._inert: InertWorker | None = None
        self._guard = Guard(self._give_up, log)

    def _give_up(self) -> None:
        self._inert = InertWorker(self._half.ends)

    @property
    def is_inert(self) -> bool:
        return self._inert is not None

    def register(self, spec: CacheSpec, namespace: "Future[bytes]") -> None:
        self._half.register(spec, namespace)

    @property
    def namespace(self) -> bytes:
        return self._half.namespace

    def take_namespace(self) -> bytes:
        with self._guard as serves:
            if serves:
                return self._half.take_namespace()
        return b""

    def attempt(self, call: Callable[[], None]) -> None:
        """Run a call of the connector. If it fails, the cache ends, as after a bug."""
        with self._guard as serves:
            if serves:
                call()

    def unregister(self) -> None:
        """As Worker.unregister(). Works after a bug too: the server must not keep memory that the engine frees."""
        with self._guard:
            self._half.unregister()

    def begin(self, retrieves: Sequence[RetrieveOrder], stores: Sequence[StoreOrder]) -> None:
        with self._guard as serves:
            if serves:
                self._half.begin(retrieves, stores)
        if self._inert is not None:
            self._inert.begin(retrieves, stores)

    def computed(self) -> None:
        with self._guard as serves:
            if serves:
                self._half.computed()

    def take_ended(self) -> Ended:
        with self._guard as serves:
            if serves:
                return self._half.take_ended()
        assert self._inert is not None
        return self._inert.take_ended()

    def take_counts(self) -> dict[str, Any]:
        bugs = self._guard.take_bugs()
        return {"bugs": bugs} if bugs else {}

    def close(self) -> None:
        with self._guard:
            self._half.close()


class InertWorker:
    """The replacement of Worker after a bug. Jobs already running end in the client's thread."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def begin(self, retrieves: Iterable[RetrieveOrder], stores: Iterable[StoreOrder]) -> None:
        """Note the jobs, which take_ended() reports as failed, except those already running."""
        self._ends.note((*retrieves, *stores))

    def take_ended(self) -> Ended:
        self._ends.end_unbegun(WHY)
        return self._ends.take()
