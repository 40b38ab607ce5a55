"""The connector's edge to its engine: no exception of ours gets through while the engine serves.

Both halves have their guarded form here, with the same verbs. The first unexpected exception of a half is logged with
its trace and counted; from then on vllm_inert.py has its place. What is refused when the engine starts (settings,
layouts, ranks that disagree) is none of this, and does get through.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from kvclient.offload_values import Group, RetrieveOrder, StoreOrder, Tables
from kvclient.values import CacheSpec
from kvclient.vllm_ends import Ended, Report
from kvclient.vllm_inert import InertScheduler, InertWorker
from kvclient.vllm_keys import Request
from kvclient.vllm_pins import Pool
from kvclient.vllm_scheduler import Scheduled, Scheduler
from kvclient.vllm_worker import Worker

log = logging.getLogger("vllm.kvserver")


class Guard:
    """`with guard as serves:` says whether the half still serves, and swallows an unexpected exception. Then on_bug is
    called before what follows the block."""

    def __init__(self, on_bug: Callable[[], None]) -> None:
        self.tripped = False
        self._on_bug = on_bug
        self._untold = 0

    def __enter__(self) -> bool:
        return not self.tripped

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False  # nothing, or what is meant to end the process
        if not self.tripped:
            log.error("no cache from now on: a bug in the connector", exc_info=error)
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


class GuardedScheduler:
    """Scheduler for the engine's calls, or InertScheduler."""

    def __init__(self, half: Scheduler, groups: Sequence[Group]) -> None:
        self._half = half
        self._groups = groups
        self._inert: InertScheduler | None = None
        self._guard = Guard(self._give_up)
        self._promised: dict[str, int] = {}
        """Requests of which match() has said that something can be retrieved, and their tokens in HBM."""

    def _give_up(self) -> None:
        self._inert = InertScheduler(self._groups, self._half.pins, self._half.untold)

    def use_pool(self, pool: Pool) -> None:
        self._half.use_pool(pool)

    def use_namespace(self, namespaces: set[bytes]) -> None:
        self._half.use_namespace(namespaces)

    def new(self, request: Request) -> None:
        with self._guard as serves:
            if serves:
                self._half.new(request)

    def match(self, request: Request, hbm_tokens: int) -> tuple[int | None, bool]:
        with self._guard as serves:
            if serves:
                tokens, between_steps = self._half.match(request, hbm_tokens)
                if tokens:
                    self._promised[request.request_id] = hbm_tokens
                return tokens, between_steps
        return 0, False

    def allocated(self, request: Request, tables: Tables, external_tokens: int) -> None:
        """tables: needed only when something is retrieved."""
        hbm_tokens = self._promised.pop(request.request_id, 0)
        with self._guard as serves:
            if serves:
                self._half.allocated(request, tables, external_tokens)
                return
        if external_tokens:
            assert self._inert is not None
            name = request.request_id
            self._inert.owe(name, tables, hbm_tokens=hbm_tokens, external_tokens=external_tokens)

    def step(
        self, read: Callable[[], tuple[Iterable[Scheduled], Callable[[str], Tables]]]
    ) -> tuple[tuple[RetrieveOrder, ...], tuple[StoreOrder, ...]]:
        """read: what the engine computes in this step, and the tables of its requests."""
        with self._guard as serves:
            if serves:
                return self._half.step(*read())
        assert self._inert is not None
        return self._inert.step(), ()

    def ended(self, reports: Sequence[Report], *, namespaces: set[bytes], is_inert: bool) -> None:
        """What the workers say. is_inert: of a rank, which fails every job."""
        if is_inert and not self._guard.tripped:
            log.error("no cache from now on: a rank has said so, its log says why")
            self._guard.trip()
        with self._guard as serves:
            if serves:
                if namespaces:
                    self._half.use_namespace(namespaces)
                self._half.ended(reports)
                return
        assert self._inert is not None
        self._inert.ended(reports)

    def finished(self, name: str, tables: Sequence[Sequence[int]]) -> None:
        self._promised.pop(name, None)
        with self._guard as serves:
            if serves:
                self._half.finished(name, tables)

    def busy(self) -> bool:
        with self._guard as serves:
            if serves:
                return self._half.busy()
        assert self._inert is not None
        return self._inert.busy()

    def take_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        with self._guard as serves:
            if serves:
                counts = self._half.take_counts()
        bugs = self._guard.take_bugs()
        return {**counts, "bugs": bugs} if bugs else counts

    def reset(self) -> None:
        """Also kept when it fails: nothing is found any more then."""
        with self._guard as serves:
            if serves:
                self._half.reset()

    def close(self) -> None:
        with self._guard:
            self._half.close()


class GuardedWorker:
    """Worker for the engine's calls, or InertWorker."""

    def __init__(self, half: Worker) -> None:
        self._half = half
        self._inert: InertWorker | None = None
        self._guard = Guard(self._give_up)

    def _give_up(self) -> None:
        self._inert = InertWorker(self._half.ends)

    @property
    def is_inert(self) -> bool:
        return self._inert is not None

    def register(self, spec: CacheSpec) -> None:
        self._half.register(spec)

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
