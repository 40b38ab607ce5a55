"""The worker half of a connector: registers the KV cache and carries out orders through the client's thread.

Stores begin once the step's forward pass has been launched. Nothing waits for a retrieve or a store. Ends are collected
once a step.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

from kvclient.client import Client
from kvclient.offload.job_ends import Ended, Ends
from kvclient.offload.values import RetrieveOrder, StoreOrder
from kvclient.transport.caches import Cache
from kvclient.values import CacheSpec, RetrieveResult, StoreResult
from kvserver.errors import KvError

CONNECT_S = 1.0
REGISTER_S = 10.0
"""Bounds on waits at engine start, which takes longer than this anyway."""


class Worker:
    """One rank's worker half. Belongs to the worker's main thread, except what the client's thread calls."""

    def __init__(self, client: Client, *, rank: int, event: Callable[[], object], log: logging.Logger) -> None:
        """event: records the current point of the engine's stream; returns None without streams. log: the engine's
        logger."""
        self.ends = Ends(rank)
        self._client = client
        self._rank = rank
        self._event = event
        self._log = log
        self._caches: list[Cache] = []
        self._namespace: Future[bytes] | None = None
        self._has_told = False
        self._stores: Sequence[StoreOrder] = ()
        self._said: set[str] = set()

    def register(self, spec: CacheSpec, namespace: "Future[bytes]", beside: Sequence[CacheSpec] = ()) -> None:
        """Register the cache, and wait a moment for namespace and server, so that the first requests hit.

        Every job is a miss until both are there. The spec's own namespace is ignored. A cache registered earlier is
        unregistered first, because its memory no longer belongs to the engine.

        beside: further specs of the same blocks, each of another shard. Every job is for all of them.
        """
        self.unregister()
        self._namespace, self._has_told = namespace, False
        for one in (spec, *beside):
            self._caches.append(self._client.register_cache(one, namespace=namespace))
        self.ends.begin_cache([spec.chunk_tokens // group.block_tokens for group in spec.groups])
        try:
            is_connected = self._client.wait_connected(CONNECT_S)
            if wait([namespace], CONNECT_S).done and is_connected:
                for cache in self._caches:
                    cache.wait_registered(REGISTER_S)
        except KvError:
            self._say_problems()

    @property
    def namespace(self) -> bytes:
        """The namespace; empty while unknown."""
        future = self._namespace
        return future.result() if future is not None and future.done() and future.exception() is None else b""

    def take_namespace(self) -> bytes:
        """Return the namespace once per register(), when the cache is registered, or when no server is there to
        register it.

        Otherwise empty. If the scheduler knew the namespace earlier, its lookups would find chunks that cannot be
        retrieved.
        """
        is_ready = all(cache.registered for cache in self._caches) or not self._client.connected
        if self._has_told or not (self._caches and is_ready and self.namespace):
            return b""
        self._has_told = True
        return self.namespace

    def unregister(self) -> None:
        """Unregister the cache before the engine gives its memory back.

        Waits until nobody writes the memory and the server has let it go, at most REGISTER_S. Jobs fail until the next
        register().
        """
        caches, self._caches = self._caches, []
        leaving = [self._client.unregister(cache) for cache in caches]
        for left in leaving:
            with suppress(TimeoutError, CancelledError):  # a server that does not answer lets the memory go when it can
                left.result(REGISTER_S)

    # ---------------------------------------------------------------- each step

    def begin(self, retrieves: Sequence[RetrieveOrder], stores: Sequence[StoreOrder]) -> None:
        """Begin the step's retrieves, and note its stores, before the stores' blocks are computed.

        Retrieved blocks may be written from now on. The engine gives blocks to a retrieve only if no launched step
        still reads or writes them.
        """
        self.computed()  # ends an earlier step whose end was not reported
        self.ends.note((*retrieves, *stores))
        self._say_problems()
        self._stores = stores
        after = self._event() if retrieves else None
        for order in retrieves:
            self._retrieve(order, after)

    def computed(self) -> None:
        """Begin the step's stores: their blocks are computed, or will be at this point of the stream.

        This includes a draft model's KV, which engines compute after take_ended().
        """
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
        why = order.refused or ("" if self._caches else "not-registered")
        self._begin(
            order,
            lambda cache, beside: self._client.retrieve(
                cache, order.lease, order.blocks, after=after, timeout_s=order.wait_s or None, beside=beside
            ),
            otherwise=RetrieveResult(False, 0, why),
        )

    def _store(self, order: StoreOrder, after: object) -> None:
        self._begin(
            order,
            lambda cache, beside: self._client.store(
                cache, order.first_chunk, order.parent, order.keys, order.blocks, after=after, beside=beside
            ),
            otherwise=StoreResult(0, 0, 0, "" if self._caches else "not-registered"),
        )

    def _begin(
        self,
        order: RetrieveOrder | StoreOrder,
        begin: Callable[[Cache, Sequence[Cache]], "Future[Any]"],
        *,
        otherwise: RetrieveResult | StoreResult,
    ) -> None:
        """Begin a job. otherwise: the result of a failure. If it has a reason already, the job does not begin."""
        self.ends.begin(order.job)
        if otherwise.why or not self._caches:
            self.ends.end(order.job, otherwise)
            return
        try:
            future = begin(self._caches[0], self._caches[1:])
        except KvError as problem:
            self._log.error("job refused request=%s %s", order.request, problem)
            self.ends.end(order.job, otherwise._replace(why=problem.code))
            return
        self.ends.begun(order.job)
        future.add_done_callback(partial(self._ended, order.job, otherwise._replace(why="client-bug")))

    def _ended(self, job: int, otherwise: RetrieveResult | StoreResult, future: "Future[Any]") -> None:
        """Called in the client's thread."""
        problem = future.exception()
        if problem is not None:
            self._log.error("job failed job=%d %s", job, problem)
            code = problem.code if isinstance(problem, KvError) else otherwise.why
            self.ends.end(job, otherwise._replace(why=code))
        else:
            self.ends.end(job, future.result())

    def _say_problems(self) -> None:
        """Log each refusal once. The engine runs on without the cache."""
        for problem in (self._client.problem, *(cache.problem for cache in self._caches)):
            if problem is not None and str(problem) not in self._said:
                self._said.add(str(problem))
                self._log.error("no cache rank=%d %s", self._rank, problem)
