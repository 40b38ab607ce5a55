"""The worker half of an engine's connector: registers the KV cache and carries out orders through the client's thread.

Retrieves are begun after the forward of a step was launched, stores behind it; none of them is waited for. What has
ended is collected once a step.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from functools import partial

from kvclient.caches import Cache
from kvclient.client import Client
from kvclient.offload_ends import Ended, Ends
from kvclient.offload_values import RetrieveOrder, StoreOrder
from kvclient.values import CacheSpec, RetrieveResult, StoreResult
from kvserver.errors import KvError

CONNECT_S = 1.0
REGISTER_S = 10.0
"""Bounds of a wait at the start of an engine, which takes longer than that by itself."""


class Worker:
    """One rank. Belongs to the worker's main thread, but for what the client's thread calls."""

    def __init__(self, client: Client, *, rank: int, event: Callable[[], object], log: logging.Logger) -> None:
        """event: records where the engine's stream is now; None where there are no streams. log: the engine's."""
        self.ends = Ends(rank)
        self._client = client
        self._rank = rank
        self._event = event
        self._log = log
        self._cache: Cache | None = None
        self._namespace: Future[bytes] | None = None
        self._has_told = False
        self._stores: Sequence[StoreOrder] = ()
        self._said: set[str] = set()

    def register(self, spec: CacheSpec, namespace: "Future[bytes]") -> None:
        """Waits a moment for a namespace and a server, so that the first requests hit; every job is a miss until both
        are there. The spec's own namespace is of no account. A cache that was registered before is let go first: its
        memory is not the engine's any more."""
        self.unregister()
        self._namespace, self._has_told = namespace, False
        self._cache = self._client.register_cache(spec, namespace=namespace)
        try:
            is_connected = self._client.wait_connected(CONNECT_S)
            if wait([namespace], CONNECT_S).done and is_connected:
                self._cache.wait_registered(REGISTER_S)
        except KvError:
            self._say_problems()

    @property
    def namespace(self) -> bytes:
        """Empty as long as there is none."""
        future = self._namespace
        return future.result() if future is not None and future.done() and future.exception() is None else b""

    def take_namespace(self) -> bytes:
        """Once for each register(): when the cache is registered under it, or no server is there that could do so.
        Otherwise empty. Before that, what the scheduler looks up could not be retrieved."""
        is_ready = self._cache is not None and (self._cache.registered or not self._client.connected)
        if self._has_told or not is_ready or not self.namespace:
            return b""
        self._has_told = True
        return self.namespace

    def unregister(self) -> None:
        """The engine gives its memory back: waits until nobody writes it any more and the server has let it go, or
        longer than that should take. Jobs fail until there is another register()."""
        cache, self._cache = self._cache, None
        if cache is not None:
            with suppress(TimeoutError, CancelledError):  # a server that does not say so lets it go when it can
                self._client.unregister(cache).result(REGISTER_S)

    # ---------------------------------------------------------------- each step

    def begin(self, retrieves: Sequence[RetrieveOrder], stores: Sequence[StoreOrder]) -> None:
        """Before the stores' blocks are computed. Retrieved blocks may be written from now on: the engine gives blocks
        to a retrieve only when no step that it has launched still reads or writes them."""
        self.computed()  # of a step whose end nobody has told: it is over now
        self.ends.note((*retrieves, *stores))
        self._say_problems()
        self._stores = stores
        after = self._event() if retrieves else None
        for order in retrieves:
            self._retrieve(order, after)

    def computed(self) -> None:
        """What the orders of this step are to store is computed, or will be when the stream gets here; also by a draft
        model, which engines run behind take_ended()."""
        stores, self._stores = self._stores, ()
        after = self._event() if stores else None
        for order in stores:
            self._store(order, after)

    def take_ended(self) -> Ended:
        return self.ends.take()

    def close(self) -> None:
        self._client.close()

    # ---------------------------------------------------------------- helpers

    def _retrieve(self, order: RetrieveOrder, after: object) -> None:
        self.ends.begin(order.job)
        if order.refused or self._cache is None:
            self.ends.end(order.job, RetrieveResult(False, 0, order.refused or "not-registered"))
            return
        try:
            future = self._client.retrieve(self._cache, order.lease, order.blocks, after=after)
        except KvError as problem:
            self._log.error("retrieve refused request=%s %s", order.request, problem)
            self.ends.end(order.job, RetrieveResult(False, 0, problem.code))
            return
        self.ends.begun(order.job)
        future.add_done_callback(partial(self._ended, order.job, RetrieveResult(False, 0, "client-bug")))

    def _store(self, order: StoreOrder, after: object) -> None:
        self.ends.begin(order.job)
        if self._cache is None:
            self.ends.end(order.job, StoreResult(0, 0, 0, "not-registered"))
            return
        try:
            future = self._client.store(
                self._cache, order.first_chunk, order.parent, order.keys, order.blocks, after=after
            )
        except KvError as problem:
            self._log.error("store refused request=%s %s", order.request, problem)
            self.ends.end(order.job, StoreResult(0, 0, 0, problem.code))
            return
        self.ends.begun(order.job)
        future.add_done_callback(partial(self._ended, order.job, StoreResult(0, 0, 0, "client-bug")))

    def _ended(
        self,
        job: int,
        otherwise: RetrieveResult | StoreResult,
        future: "Future[RetrieveResult] | Future[StoreResult]",
    ) -> None:
        """In the client's thread."""
        problem = future.exception()
        if problem is not None:
            self._log.error("job failed job=%d %s", job, problem)
            code = problem.code if isinstance(problem, KvError) else otherwise.why
            otherwise = otherwise._replace(why=code)
        self.ends.end(job, otherwise if problem is not None else future.result())

    def _say_problems(self) -> None:
        """A refusal is said once; the engine runs on without the cache."""
        for problem in (self._client.problem, self._cache.problem if self._cache is not None else None):
            if problem is not None and str(problem) not in self._said:
                self._said.add(str(problem))
                self._log.error("no cache rank=%d %s", self._rank, problem)
