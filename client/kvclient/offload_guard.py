"""A connector's edge to its engine: no exception of ours gets through while the engine serves.

The first unexpected exception of a half is logged with its trace and counted; from then on the half does nothing more.
What is refused when the engine starts (settings, layouts, ranks that disagree) is none of this, and does get through.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from kvclient.offload_ends import Ended, Ends
from kvclient.offload_values import RetrieveOrder, StoreOrder
from kvclient.offload_worker import Worker
from kvclient.values import CacheSpec
from kvserver.errors import RequestError

WHY = "connector-bug"


def refusal(problem: Exception) -> Exception | None:
    """What is refused says itself what is wrong."""
    return problem if isinstance(problem, RequestError) else None


class Guard:
    """`with guard as serves:` says whether the half still serves, and swallows an unexpected exception. Then on_bug is
    called before what follows the block."""

    def __init__(
        self,
        on_bug: Callable[[], None],
        log: logging.Logger,
        *,
        explain: Callable[[Exception], Exception | None] = refusal,
    ) -> None:
        """explain: says of an exception what else it is than a bug of ours, if anything."""
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
            return False  # nothing, or what is meant to end the process
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
        """Since the last call: 0 or 1."""
        taken, self._untold = self._untold, 0
        return taken


class GuardedWorker:
    """Worker for the engine's calls, or InertWorker."""

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
        """Something of the connector's that may end the cache, as a bug does."""
        with self._guard as serves:
            if serves:
                call()

    def unregister(self) -> None:
        """Also after a bug: memory that the engine gives back must not stay with the server."""
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
    """Takes the place of Worker, whose jobs go on to their ends in the client's thread."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def begin(self, retrieves: Iterable[RetrieveOrder], stores: Iterable[StoreOrder]) -> None:
        """They will be reported as failed, but for those that run already."""
        self._ends.note((*retrieves, *stores))

    def take_ended(self) -> Ended:
        self._ends.end_unbegun(WHY)
        return self._ends.take()
