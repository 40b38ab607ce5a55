"""A connector's edge to its engine: no exception of ours reaches the engine while it serves.

The first unexpected exception of a half is logged with its trace and counted. Our state is unknown then, so the half
looks up, retrieves and stores nothing more. Everything that the engine waits for or has lent still ends. Refusals at
engine start (settings, layouts, disagreeing ranks) are different: they do reach the engine.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from kvclient.offload.job_ends import Ended
from kvclient.offload.values import RetrieveOrder, StoreOrder
from kvclient.offload.worker import Worker
from kvclient.values import CacheSpec
from kvserver.errors import RequestError

WHY = "connector-bug"
LONG_FACTS = frozenset({"settings", "layers", "beside"})
"""Facts of a namespace that fill pages."""
P = ParamSpec("P")
T = TypeVar("T")


def refusal(problem: Exception) -> Exception | None:
    """Return the problem if it is a RequestError, which explains itself. Otherwise None."""
    return problem if isinstance(problem, RequestError) else None


class Guard:
    """Calls one half's methods, until one of them raises."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        on_bug: Callable[[], None] = lambda: None,
        explain: Callable[[Exception], Exception | None] = refusal,
        outcome: str = "no cache from now on",
    ) -> None:
        """on_bug: called once, before the failed call returns. outcome: for the log.

        explain: returns the exception that explains a problem if it is not a bug of ours, otherwise None.
        """
        self.tripped = False
        self._on_bug = on_bug
        self._explain = explain
        self._log = log
        self._outcome = outcome
        self._untold = 0

    def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """The result of the call. None if it raises. After that no call is made, and every result is None."""
        return None if self.tripped else self.run_always(call, *arguments, **named)

    def run_always(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """As run(), but the call is made after a bug too."""
        try:
            return call(*arguments, **named)
        except Exception as problem:  # no bug of ours may stop an engine
            if not self.tripped:
                why = self._explain(problem) or "a bug in the connector"
                self._log.error("%s: %s", self._outcome, why, exc_info=problem)
                self._untold = 1
                self.trip()
            return None

    def trip(self) -> None:
        if not self.tripped:
            self.tripped = True
            self._on_bug()

    def take_bugs(self) -> dict[str, int]:
        """The bugs since the last call, as a count for the statistics; empty if there was none."""
        taken, self._untold = self._untold, 0
        return {"bugs": taken} if taken else {}


class GuardedWorker:
    """Worker behind a guard. After a bug every new job fails, and running jobs end in the client's thread."""

    def __init__(self, half: Worker, log: logging.Logger) -> None:
        self._half = half
        self._log = log
        self._guard = Guard(log)

    @property
    def is_inert(self) -> bool:
        return self._guard.tripped

    def register(
        self,
        spec: CacheSpec,
        namespace: "Future[bytes]",
        facts: Mapping[str, object],
        beside: Sequence[CacheSpec] = (),
    ) -> None:
        """As Worker.register(). facts: what the namespace is made of, for the log."""
        self._half.register(spec, namespace, beside)
        self._log.info(
            "cache described namespace=%s chunk_tokens=%d groups=%s facts=%s",
            self.namespace.hex()[:16] or "later",
            spec.chunk_tokens,
            [group.kind for group in spec.groups],
            {name: value for name, value in facts.items() if name not in LONG_FACTS},
        )

    @property
    def namespace(self) -> bytes:
        return self._half.namespace

    def take_namespace(self) -> bytes:
        return self._guard.run(self._half.take_namespace) or b""

    def attempt(self, call: Callable[[], None]) -> None:
        """Run a call of the connector. If it fails, the cache ends, as after a bug."""
        self._guard.run(call)

    def unregister(self) -> None:
        """As Worker.unregister(). Works after a bug too: the server must not keep memory that the engine frees."""
        self._guard.run_always(self._half.unregister)

    def begin(self, retrieves: Sequence[RetrieveOrder], stores: Sequence[StoreOrder]) -> None:
        self._guard.run(self._half.begin, retrieves, stores)
        if self._guard.tripped:
            self._half.ends.note((*retrieves, *stores))

    def computed(self) -> None:
        self._guard.run(self._half.computed)

    def take_ended(self) -> Ended:
        ended = self._guard.run(self._half.take_ended)
        if ended is None:
            self._half.ends.end_unbegun(WHY)
            ended = self._half.ends.take()
        return ended

    def take_counts(self) -> dict[str, Any]:
        return dict(self._guard.take_bugs())

    def close(self) -> None:
        self._guard.run_always(self._half.close)
