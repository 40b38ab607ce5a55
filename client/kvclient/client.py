"""The client: the calls of an engine process. Its conversations are in jobs.py, calls.py and connection.py.

Rule 1: no call raises because of the server, or waits for it beyond its deadline. A server that is away costs one
attribute read (gate.py). RequestError means that the caller is wrong.

Rule 2: a job's future completes when its blocks belong to the caller again, and not before (jobs.py).

Rule 3: after fork() the child cannot use an inherited client. It creates its own.
"""

import json
import os
import socket as sockets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any, TypeVar

from kvclient.base.loop import Conversation, Loop, Lost, Overdue, Trouble
from kvclient.counters import Counters
from kvclient.memory.blocks import StorePart, check_keys, cut_retrieve, cut_store, pack_groups
from kvclient.transport.caches import Cache, check_event, prepare
from kvclient.transport.calls import Calls, Question, found_from
from kvclient.transport.connection import Connection
from kvclient.transport.gate import Gate, Link, Slots
from kvclient.transport.inquiries import Inquiries
from kvclient.transport.jobs import SPARE_SHARE, Jobs
from kvclient.transport.session import Identity, local_path
from kvclient.transport.transports import R
from kvclient.values import Blocks, CacheSpec, Found, Lease, PledgeResult, RetrieveResult, StoreResult, Timeouts
from kvserver import __version__
from kvserver.errors import KvError, RequestError, ResourceError
from kvserver.wire import messages as wire
from kvserver.wire.explanation import Explanation, decode_explanations

UNIX_PATH_BYTES_MAX = 107
ASYNC_LOOKUPS_MAX = 256
DAY_S = 86_400.0
ASSUMED_LIMITS = wire.Limits(wire.CHUNKS_MAX, wire.BLOCKS_MAX, jobs_max=0, lease_ttl_ms=0)
"""Limits for checking requests before a server has told its own. No job begins then."""

T = TypeVar("T")


class Client:
    """One process's connection to the server on this machine. Thread-safe; owns one background thread.

    engine, epoch: identify the engine and its life, the same in all its processes. An engine with several ranks must
    give both. rank: -1 for a process that only looks up.

    The constructor does not wait for the server and works without one. The client connects when there is one.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str],
        *,
        engine: str | None = None,
        epoch: int | None = None,
        ranks: int = 1,
        rank: int = 0,
        timeouts: Timeouts | None = None,
    ) -> None:
        path = _checked_path(socket)
        if ranks > 1 and (engine is None or epoch is None):
            raise RequestError("engine", f"an engine of ranks={ranks} must name itself: give engine and epoch")
        if ranks < 1 or not -1 <= rank < ranks:
            raise RequestError("rank", f"rank={rank} of ranks={ranks}; expected -1 <= rank < ranks")
        identity = Identity(
            engine=engine if engine is not None else f"{sockets.gethostname()}-{os.getpid()}",
            epoch=epoch if epoch is not None else time.time_ns(),
            ranks=ranks,
            rank=rank,
            software=f"kvclient {__version__}",
        )
        self.timeouts = timeouts if timeouts is not None else Timeouts()
        self.counters = Counters()
        self._gate = Gate(self.counters)
        self._loop = Loop(self.counters)
        self._connection = Connection(
            path, identity, loop=self._loop, gate=self._gate, counters=self.counters, timeouts=self.timeouts
        )
        self._job_slots, self._lookup_slots = Slots(), Slots()
        self._jobs = Jobs(self._connection, self.counters, self._job_slots)
        self._calls = Calls(self._connection, self.counters, self._lookup_slots)
        self._caches: dict[str, Cache] = {}
        self._caches_lock = threading.Lock()
        self._closed = False
        self._forked = False
        self._loop.start_thread()
        self._loop.post(self._connection.start)
        self._finalizer = weakref.finalize(self, self._loop.post, self._connection.close)
        _clients.add(self)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- the connection

    @property
    def connected(self) -> bool:
        """Whether the server answers, as far as known."""
        return self._gate.link is not None

    @property
    def problem(self) -> KvError | None:
        """The server's refusal of this client, such as another protocol version. None if there is none."""
        return self._gate.problem

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until connected; False after the timeout. Raises the server's refusal, which waiting does not cure."""
        self._check_alive()
        self._refuse_in_callback("wait_connected")
        return self._gate.wait(timeout_s)

    def close(self) -> None:
        """End every call.

        Waits at most timeouts.close_s for retrieves whose blocks are still being written. Their futures complete when
        the blocks are quiet, in the background if it takes longer.
        """
        if self._forked or self._closed:
            return
        self._refuse_in_callback("close")
        self._closed = True
        self._finalizer()
        self._loop.join(self.timeouts.close_s)

    # ---------------------------------------------------------------- caches

    def register_cache(self, spec: CacheSpec, *, namespace: "Future[bytes] | None" = None) -> Cache:
        """Register a cache now or as soon as there is a server, and again after every reconnect. Does not wait for the
        server.

        A GPU cache exports its memory, takes staging memory and loads kernels first, for which the driver may need a
        second.

        namespace: replaces the spec's namespace, and may come later. Until then no server hears of the cache.
        """
        self._check_alive()
        if self._closed:
            raise RequestError("closed", f"cache {spec.name!r}: this client is closed")
        if namespace is None and len(spec.namespace) != wire.NAMESPACE_BYTES:
            raise _wrong_namespace(spec.namespace)
        with self._caches_lock:
            if spec.name in self._caches:
                raise RequestError("registered-twice", f"this client has a cache named {spec.name!r} already")
            cache = self._caches[spec.name] = prepare(spec)
        cache.named = namespace is None
        self._loop.post(lambda: self._connection.add_cache(cache))
        if namespace is not None:
            namespace.add_done_callback(
                lambda answer: self._loop.post(lambda: self._connection.name_cache(cache, answer))
            )
        return cache

    def unregister(self, cache: Cache) -> "Future[bool]":
        """End a registration after its jobs. True: the server has let the memory go. False: it did not say so.

        In the second case the end of this process or of the server settles it.
        """
        self._check_alive()
        with self._caches_lock:
            self._check_own(cache)
            del self._caches[cache.name]
        answer: Future[bool] = _future()
        if not self._loop.post(lambda: self._connection.remove_cache(cache, answer)):
            answer.set_result(False)
        return answer

    # ---------------------------------------------------------------- lookup

    def lookup(
        self,
        namespace: bytes,
        keys: bytes,
        *,
        chunks_wanted_min: int = 1,
        may_wait: bool = False,
        timeout_s: float | None = None,
    ) -> Found:
        """The longest prefix that every group and shard can serve. It has a lease if it has at least chunks_wanted_min
        chunks.

        Runs in the caller's thread. A miss with `why` if the server cannot be asked.

        may_wait: the lease is also on chunks that another engine computes now (Found.awaited). A retrieve may reach to
        their end, and gets each as soon as it was stored. It ends early (`not-coming`, see right_chunks) when the other
        engine ends, fails or is too slow.

        keys: packed, in prefix order. Keys beyond the server's limit for one request are left out at the end. A prompt
        shorter than a chunk has no keys, and nothing is found.
        """
        self._check_alive()
        link = self._gate.link
        request = self._lookup_request(link, namespace, keys, chunks_wanted_min, may_wait=may_wait)
        if not keys:
            return Found(0, None)
        if link is None:
            found = Found(0, None, self._why_shut())
        else:
            found = self._ask_lane(link, request, self.timeouts.lookup_s if timeout_s is None else timeout_s)
        self.counters.add_lookup(found.chunks, served=not found.why)
        return found

    def lookup_async(
        self, namespace: bytes, keys: bytes, *, chunks_wanted_min: int = 1, timeout_s: float | None = None
    ) -> "Future[Found]":
        """As lookup(), but returns at once. Slower, because it goes through the background thread."""
        self._check_alive()
        link = self._gate.link
        request = self._lookup_request(link, namespace, keys, chunks_wanted_min)
        patience_s = self.timeouts.lookup_s if timeout_s is None else timeout_s
        answer: Future[Found] = _future()
        if not keys:
            answer.set_result(Found(0, None))
            return answer
        if link is None:
            why = self._why_shut()
        elif not self._lookup_slots.take(ASYNC_LOOKUPS_MAX):
            why = "busy"
        else:
            why = self._start(self._lookup_slots, lambda: self._calls.lookup(request, patience_s, answer))
        if why:
            found = Found(0, None, why)
            self.counters.add_lookup(found.chunks, served=not found.why)
            answer.set_result(found)
        return answer

    def inquiries(self) -> Inquiries:
        """Lookups whose answers the caller's thread collects later, while it does other work."""
        self._check_alive()
        return Inquiries(
            self._gate,
            self._connection.ids,
            self.counters,
            timeout_s=self.timeouts.lookup_s,
            compose=self._lookup_request,
            shut_gate=self._shut_gate,
        )

    def honours(self, lease: Lease) -> bool:
        """Whether the lease's server answers and still has it, as far as known without asking."""
        link = self._gate.link
        alive = link is not None and link.incarnation == lease.incarnation
        return alive and time.monotonic() < lease.expires_monotonic_s

    def release(self, lease: Lease) -> None:
        """Give a lease back early. If that fails, the lease expires by itself."""
        self._check_alive()
        link = self._gate.link
        if link is None or lease.incarnation != link.incarnation:
            return
        request = wire.Release(next(self._connection.ids), lease.number)
        try:
            link.lane.ask(request, wire.Released, time.monotonic() + self.timeouts.lookup_s)
        except Trouble as trouble:
            self._shut_gate(link, trouble)

    # ---------------------------------------------------------------- pledges

    def pledge(self, namespace: bytes, keys: bytes, *, ttl_s: float = DAY_S) -> PledgeResult:
        """Say that this engine computes the prompt now and will store it, so that others may wait for it.

        Call it when the request is scheduled. Runs in the caller's thread, as lookup() does. keys: all keys of the
        prompt. Chunks that are held, or pledged by others, are not pledged again. The pledge ends with its last chunk,
        with a store that fails or is short, when nothing is stored for a while, and with this process. It also
        ends after ttl_s, and after the longest time that the server allows (`pledge_ttl_ms`).
        """
        self._check_alive()
        link = self._gate.link
        if not 0 < ttl_s <= DAY_S:
            raise RequestError("ttl", f"ttl_s={ttl_s} must be in (0, {DAY_S:.0f}] seconds")
        asked = self._lookup_request(link, namespace, keys, 1)
        if not keys or link is None:
            return PledgeResult(0, 0, 0, why=self._why_shut() if keys else "")
        request = wire.Pledge(asked.id, namespace, asked.keys, max(1, int(ttl_s * 1000)))
        try:
            reply = link.lane.ask(request, wire.Pledged, time.monotonic() + self.timeouts.lookup_s)
        except Trouble as trouble:
            self._shut_gate(link, trouble)
            return PledgeResult(0, 0, 0, why=trouble.why)
        return PledgeResult(reply.pledge, reply.held, reply.chunks, link.incarnation)

    def unpledge(self, pledge: PledgeResult) -> None:
        """Take a pledge back: the request was preempted or aborted. If that fails, the pledge ends by itself."""
        self._check_alive()
        link = self._gate.link
        if link is None or not pledge.number or pledge.incarnation != link.incarnation:
            return
        request = wire.Unpledge(next(self._connection.ids), pledge.number)
        try:
            link.lane.ask(request, wire.Unpledged, time.monotonic() + self.timeouts.lookup_s)
        except Trouble as trouble:
            self._shut_gate(link, trouble)

    # ---------------------------------------------------------------- jobs

    def store(
        self,
        cache: Cache,
        first_chunk: int,
        parent: bytes,
        keys: bytes,
        groups: Sequence[Blocks | wire.GroupBlocks],
        *,
        after: object = None,
        timeout_s: float | None = None,
        beside: Sequence[Cache] = (),
    ) -> "Future[StoreResult]":
        """Store whole chunks [first_chunk, first_chunk + keys) of a prefix. `parent` is the key before them.

        after: on a GPU, the event after which the blocks hold their bytes: a recorded torch.cuda.Event, or the address
        of a driver's event, which must live until the future completes. The timeout counts from the call.

        The blocks must not change before the future completes. Requests above the server's limits are cut in chain
        order, and end at the first part that is stored short. A store without keys and blocks completes at once.

        beside: further caches of the same blocks, each with another shard of every chunk.
        """
        self._check_alive()
        caches = self._own_caches(cache, beside)
        if not keys and not any(len(item.block_ids) for item in groups):
            nothing: Future[StoreResult] = _future()
            nothing.set_result(StoreResult(0, 0, 0, ""))
            return nothing
        link = self._gate.link
        limits = link.limits if link is not None else ASSUMED_LIMITS
        check_event(cache, after)
        whole = StorePart(first_chunk, parent, keys, pack_groups(cache.spec, groups))
        parts = cut_store(cache.spec, whole, limits, part_chunks_max=cache.part_chunks_max)
        due_s = time.monotonic() + (self.timeouts.store_s if timeout_s is None else timeout_s)
        answer: Future[StoreResult] = _future()
        self.counters.add("stores")
        why = self._begin_job(caches, link) or self._start(
            self._job_slots, lambda: self._jobs.store(caches, parts, due_s, answer, after=after), count=len(caches)
        )
        if why:
            self.counters.add("stores_short")
            answer.set_result(StoreResult(0, 0, 0, why))
        return answer

    def retrieve(
        self,
        cache: Cache,
        lease: Lease,
        groups: Sequence[Blocks | wire.GroupBlocks],
        *,
        after: object = None,
        timeout_s: float | None = None,
        beside: Sequence[Cache] = (),
    ) -> "Future[RetrieveResult]":
        """Fill blocks with leased bytes; a range may start and end inside a chunk.

        Nothing else may touch the blocks before the future completes. Afterwards nobody writes them, whatever the
        result is.

        after: as in store(), the event after which the engine no longer uses the blocks.

        Blocks of chunks on disk are filled part by part, while disks read the next part. So are those of chunks that
        another engine still computes.

        beside: as in store(). ok says that the blocks hold the bytes of all these shards.
        """
        self._check_alive()
        caches = self._own_caches(cache, beside)
        link = self._gate.link
        check_event(cache, after)
        packed = pack_groups(cache.spec, groups)
        limits = link.limits if link is not None else ASSUMED_LIMITS
        from_disk, most = lease.chunks_on_disk > 0, cache.part_chunks_max
        here = lease.chunks if lease.awaited else wire.CHUNKS_MAX
        parts = cut_retrieve(cache.spec, packed, limits, from_disk=from_disk, chunks_here=here, part_chunks_max=most)
        due_s = time.monotonic() + (self.timeouts.retrieve_s if timeout_s is None else timeout_s)
        answer: Future[RetrieveResult] = _future()
        self.counters.add("retrieves")
        if link is not None and lease.incarnation != link.incarnation:
            why = "lease-lost"
        else:
            why = self._begin_job(caches, link) or self._start(
                self._job_slots,
                lambda: self._jobs.retrieve(caches, lease, parts, due_s, answer, after=after),
                count=len(caches),
            )
        if why:
            self.counters.add("retrieves_failed")
            answer.set_result(RetrieveResult(False, 0, why))
        return answer

    # ---------------------------------------------------------------- for operators

    def clear(self, namespace: bytes) -> int:
        """Forget every chunk of a namespace, and return how many.

        ResourceError if the server does not confirm it: old bytes may still be served then.
        """
        if len(namespace) != wire.NAMESPACE_BYTES:
            raise _wrong_namespace(namespace)
        return self._call(wire.Clear(next(self._connection.ids), namespace), wire.Cleared).chunks

    def drain(self, device: int) -> None:
        """Empty a device of the server's disk tier; status() shows the progress. RequestError if the device does not
        exist."""
        self._call(wire.Drain(next(self._connection.ids), device), wire.Draining)

    def status(self) -> dict[str, Any]:
        """The server's /status document. ResourceError if it does not answer."""
        document: dict[str, Any] = json.loads(
            self._call(wire.Status(next(self._connection.ids)), wire.StatusIs).document
        )
        return document

    def explain(self, keys: bytes, namespace: bytes = b"") -> list[Explanation]:
        """The answer that a lookup of these keys would get now, and why it finds no more.

        For every namespace unless one is given. A single key may be from the middle of a prompt. ResourceError if the
        server does not answer.
        """
        request = wire.Explain(next(self._connection.ids), namespace, keys)
        return decode_explanations(self._call(request, wire.Explained).document)

    # ---------------------------------------------------------------- helpers

    def _lookup_request(
        self, link: Link | None, namespace: bytes, keys: bytes, chunks_wanted_min: int, *, may_wait: bool = False
    ) -> wire.Lookup:
        if len(namespace) != wire.NAMESPACE_BYTES:
            raise _wrong_namespace(namespace)
        if keys:
            check_keys(keys)
        limits = link.limits if link is not None else ASSUMED_LIMITS
        kind = wire.Await if may_wait else wire.Lookup
        return kind(
            next(self._connection.ids), namespace, keys[: limits.chunks_max * wire.KEY_BYTES], chunks_wanted_min
        )

    def _ask_lane(self, link: Link, request: wire.Lookup, timeout_s: float) -> Found:
        asked_s = time.monotonic()
        try:
            reply = link.lane.ask(request, wire.Found, asked_s + timeout_s)
        except Trouble as trouble:
            self._shut_gate(link, trouble)
            return Found(0, None, trouble.why)
        return found_from(reply, link.incarnation, asked_s)

    def _shut_gate(self, link: Link, trouble: Trouble) -> None:
        """Shut the gate after a sign that the server does not answer. The background thread opens it again."""
        if isinstance(trouble, Overdue):
            self.counters.add("timeouts")
        if isinstance(trouble, Overdue | Lost) and self._gate.shut(trouble.why, link):
            self._loop.post(self._connection.probe)

    def _begin_job(self, caches: Sequence[Cache], link: Link | None) -> str:
        """Take the slots for a job, one for each cache. Returns why there can be none now; empty on success."""
        if link is None:
            return self._why_shut()
        if not all(cache.registered for cache in caches):
            return "not-registered"
        most = link.limits.jobs_max - link.limits.jobs_max // SPARE_SHARE
        return "" if self._job_slots.take(most, len(caches)) else "busy"

    def _start(self, slots: Slots, conversation: Callable[[], Conversation], count: int = 1) -> str:
        """Hand taken slots to a conversation. On failure give them back and return why."""
        if self._loop.enter(conversation):
            return ""
        slots.give(count)
        return "closed"

    def _call(self, request: Question, expects: type[R]) -> R:
        self._check_alive()
        self._refuse_in_callback("status, clear and drain")
        timeout_s = self.timeouts.request_s
        answer: Future[R] = _future()
        if self._gate.link is None:
            raise _unreachable(self._why_shut())
        if not self._loop.post(lambda: self._loop.start(self._calls.call(request, expects, timeout_s, answer))):
            raise _unreachable("closed")
        try:
            return answer.result(timeout_s + 1)
        except FutureTimeoutError:
            raise _unreachable("timeout") from None
        except Trouble as trouble:
            if trouble.message:
                raise ResourceError(trouble.why, trouble.message) from trouble
            raise _unreachable(trouble.why) from trouble

    def _why_shut(self) -> str:
        return "closed" if self._closed else self._gate.why or "connection-lost"

    def _own_caches(self, cache: Cache, beside: Sequence[Cache]) -> list[Cache]:
        """The caches of a job. RequestError if one is not ours, comes twice, or has blocks of other kinds."""
        caches = [cache, *beside]
        for one in caches:
            self._check_own(one)
        if len({one.name for one in caches}) != len(caches) or len({_blocks_of(one) for one in caches}) != 1:
            raise RequestError("cache", f"{caches} must differ from each other and have the same groups of blocks")
        return caches

    def _check_own(self, cache: Cache) -> None:
        if self._caches.get(cache.name) is not cache:
            raise RequestError("cache", f"{cache!r} is not registered with this client, or not any more")

    def _check_alive(self) -> None:
        if self._forked:
            raise RequestError("forked", "this client belongs to the parent process: make another one after fork()")

    def _refuse_in_callback(self, verb: str) -> None:
        if self._loop.is_current:
            raise RequestError("callback", f"{verb} waits for the thread that calls this callback; call it elsewhere")

    def _forsake_after_fork(self) -> None:
        """Close a forked child's copies of descriptors, so that they keep nothing open. The child has only this
        thread."""
        self._forked = True
        self._finalizer.detach()
        link, self._gate.link = self._gate.link, None
        if link is not None:
            link.lane.forsake_after_fork()
        self._connection.forsake_after_fork()
        self._loop.forsake_after_fork()


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _forsake_all_after_fork() -> None:
    for client in list(_clients):
        client._forsake_after_fork()


os.register_at_fork(after_in_child=_forsake_all_after_fork)


def _future() -> "Future[T]":
    """A future that cannot be cancelled, because a job's blocks are busy until it ends."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _checked_path(socket: str | os.PathLike[str]) -> str:
    path = os.fspath(socket)
    if "://" in path:
        raise RequestError("socket", f"{path!r} must be the path of a Unix socket; engines and server share a machine")
    encoded = os.fsencode(local_path(path))
    if len(encoded) > UNIX_PATH_BYTES_MAX or b"\0" in encoded:
        raise RequestError(
            "socket", f"{local_path(path)!r} has {len(encoded)} bytes; a Unix socket has at most {UNIX_PATH_BYTES_MAX}"
        )
    return path


def _blocks_of(cache: Cache) -> tuple[object, ...]:
    """Caches of the same blocks agree in this."""
    spec = cache.spec
    return spec.chunk_tokens, *((group.kind, group.block_tokens, group.blocks) for group in spec.groups)


def _wrong_namespace(namespace: bytes) -> RequestError:
    return RequestError(
        "namespace", f"{len(namespace)} bytes of namespace; expected a digest of {wire.NAMESPACE_BYTES} bytes"
    )


def _unreachable(why: str) -> ResourceError:
    return ResourceError("unreachable", f"the server does not answer: {why}")
