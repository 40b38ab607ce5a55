"""The client's lasting connection: keeps it connected and its caches registered.

There are three kinds of conversations, each a loop. One opens session after session. One per session keeps the lane and
the gate open, and probes after a trip. One per session and cache keeps that cache registered, also if its mover dies.
"""

import itertools
import logging
import time
from concurrent.futures import Future
from dataclasses import replace

from kvclient.base.loop import Conversation, Loop, Lost, Overdue, Trouble, Waiter
from kvclient.counters import Counters
from kvclient.transport.caches import Cache, Registration
from kvclient.transport.gate import Backoff, Gate, Link
from kvclient.transport.lane import Lane
from kvclient.transport.session import Identity, Session, local_path
from kvclient.transport.transports import Door, LocalTransport, close_all
from kvclient.values import CacheSpec, HostBuffer, Timeouts
from kvserver.errors import RequestError
from kvserver.wire import messages as wire

log = logging.getLogger(__name__)

TWICE = "registered-twice"
QUIET_POLL_S = 0.005
ABSENT_PAUSE_S_MAX = 0.1
"""Longest pause while nobody listens at the socket. A try costs 20 us, and a starting server is found soon."""


class Connection:
    """The connection of one client. Belongs to the loop's thread; other threads post its methods."""

    def __init__(
        self, path: str, identity: Identity, *, loop: Loop, gate: Gate, counters: Counters, timeouts: Timeouts
    ) -> None:
        self.ids = itertools.count(1)
        self.loop = loop
        self.timeouts = timeouts
        self.counters = counters
        self._gate = gate
        self._path = path
        self._identity = identity
        self._caches: list[Cache] = []
        self._session: Session | None = None
        self._closing = False
        self._nap = Waiter()
        self._tripped = Waiter()
        self._main: Conversation = self._stay_connected()
        loop.recover = self._recover

    @property
    def session(self) -> Session | None:
        """The open session; None if there is none."""
        return self._session if self._session is not None and self._session.ready else None

    # ---------------------------------------------------------------- what the client posts

    def start(self) -> None:
        self.loop.start(self._main)

    def close(self) -> None:
        """End the session. Jobs end as lost, and the loop ends when their blocks are quiet."""
        self._closing = True
        self._lose(Lost("closed"))
        self.loop.settle(self._nap)
        for cache in list(self._caches):
            cache.wanted = False
            self._forget(cache, let_go=False)
        self.loop.stop()

    def add_cache(self, cache: Cache) -> None:
        self._caches.append(cache)
        if cache.device is not None:
            cache.device.attach(self.loop)
        if cache.portable is not None:
            cache.portable.attach(self.loop)
        if self.session is not None and cache.named:
            self._start_keeping(self.session, cache)

    def name_cache(self, cache: Cache, answer: "Future[bytes]") -> None:
        """Take the namespace of a cache that was added without one, or the failure to get one."""
        if not cache.wanted:
            return
        problem = answer.exception()
        if problem is not None:
            log.error("cache without a namespace name=%s", cache.name, exc_info=problem)
            cache.settle(None, RequestError("namespace", f"there is none: {problem!r}"))
            return
        cache.spec, cache.named = replace(cache.spec, namespace=answer.result()), True
        if self.session is not None:
            self._start_keeping(self.session, cache)

    def remove_cache(self, cache: Cache, answer: "Future[bool]") -> None:
        """Unregister a cache. The answer is True if the server has let its memory go or never had it."""
        cache.wanted = False
        cache.farewells.append(answer)
        if not cache.kept:
            self._forget(cache, let_go=self.session is not None)
            _answer(cache, let_go=self.session is not None)
        elif cache.registration is not None:
            self.loop.settle(cache.registration.over)

    def trip(self, why: str) -> None:
        """A request timed out. Shut the gate until a probe is answered."""
        self.counters.add("timeouts")
        self._gate.shut(why)
        self.probe()

    def job_overdue(self, session: Session, asked_s: float, why: str) -> None:
        """A job timed out. As trip(), unless the server has said something since: then only a disk or a mover
        is late."""
        if session.heard_s > max(asked_s, time.monotonic() - self.timeouts.probe_s):
            self.counters.add("timeouts")
        else:
            self.trip(why)

    def probe(self) -> None:
        self.loop.settle(self._tripped)

    # ---------------------------------------------------------------- sessions

    async def _stay_connected(self) -> None:
        first_s, max_s = self.timeouts.backoff_first_s, self.timeouts.backoff_max_s
        backoff, while_absent = Backoff(first_s, max_s), Backoff(first_s, min(max_s, ABSENT_PAUSE_S_MAX))
        while not self._closing:
            pause = backoff
            try:
                await self._live_through_a_session(backoff)
            except RequestError as error:
                self._fail_to_connect(Lost("refused", str(error)), error)
            except Trouble as trouble:
                refusal = RequestError("frame", trouble.message) if trouble.why == "frame" else None
                self._fail_to_connect(trouble, refusal)
                if trouble.why == "not-connected":
                    pause = while_absent
            if not self._closing:
                self._nap = Waiter(time.monotonic() + pause.next_s(), is_pause=True)
                await self._nap

    async def _live_through_a_session(self, backoff: Backoff) -> None:
        """Open a session and wait until it is lost. Raises if it cannot be opened."""
        session = self._session = Session(self.loop, self.counters, self._path, self.ids)
        try:
            await session.open(self._identity, time.monotonic() + self.timeouts.connect_s)
            opened_s = time.monotonic()
            self.counters.add("connects")
            log.info("connected server=%s incarnation=%d", session.welcome.server, session.welcome.incarnation)
            self.loop.start(self._keep_gate_open(session))
            for cache in self._caches:
                if cache.named:
                    self._start_keeping(session, cache)
            try:
                await session.wait(Waiter())
            except Lost as lost:
                log.info("disconnected why=%s", lost)
            if time.monotonic() - opened_s > self.timeouts.backoff_max_s:
                backoff.reset()  # not for a server that accepts the client and drops it again at once
        finally:
            session.lose(Lost("connection-lost"))
            self._session = None
            self._gate.shut("closed" if self._closing else "connection-lost")

    def _fail_to_connect(self, trouble: Trouble, refusal: RequestError | None) -> None:
        self.counters.add("connects_failed")
        if refusal is None:
            log.debug("cannot connect: %s", trouble)
        elif self._gate.problem is None or self._gate.problem.message != refusal.message:
            log.error("the server refuses this client: %s", refusal)
        if refusal is not None:
            self._gate.refuse(refusal)

    def _lose(self, lost: Lost) -> None:
        self._gate.shut(lost.why)
        if self._session is not None:
            self._session.lose(lost)

    def _recover(self) -> None:
        """Open a new session after an unexpected exception, and restart the main conversation if it died."""
        self._lose(Lost("client-bug"))
        if self._main.cr_frame is None and not self._closing:  # type: ignore[attr-defined]
            self._main = self._stay_connected()
            self.loop.start(self._main)

    # ---------------------------------------------------------------- the gate and its lane

    async def _keep_gate_open(self, session: Session) -> None:
        """Keep the gate open until the session is lost."""
        backoff = Backoff(self.timeouts.backoff_first_s, self.timeouts.backoff_max_s)
        probing = False  # the handshake served as the first probe
        try:
            while True:
                try:
                    lane = await self._probe(session) if probing else await self._open_lane(session)
                except (Trouble, RequestError) as problem:
                    log.debug("probe failed: %s", problem)
                    await self._pause(session, backoff.next_s())
                else:
                    backoff.reset()
                    self._tripped = Waiter()
                    self._gate.open(Link(lane, session.welcome.limits, session.welcome.incarnation))
                    await session.wait(self._tripped)
                probing = True
        except Lost:
            return

    async def _probe(self, session: Session) -> Lane:
        """Open a new lane, after the server has answered at both doors."""
        due_s = time.monotonic() + self.timeouts.probe_s
        await session.zmq.ask(wire.Status(next(self.ids)), wire.StatusIs, due_s)
        return await self._open_lane(session)

    async def _open_lane(self, session: Session) -> Lane:
        due_s = time.monotonic() + self.timeouts.probe_s
        try:
            transport = LocalTransport(local_path(self._path))
        except OSError as problem:
            raise Trouble("connection-lost", str(problem)) from problem
        door = Door(self.loop, self.counters, transport, lambda lost: None)
        try:
            await door.ask(wire.Lane(next(self.ids), session.welcome.session), wire.LaneOpen, due_s)
        except (Trouble, RequestError) as problem:
            door.lose(Lost("connection-lost"))
            if isinstance(problem, Lost) and problem.why == "session-unknown":
                session.lose(problem)
            raise
        door.detach()
        return Lane(transport.socket)

    async def _pause(self, session: Session, seconds: float) -> None:
        """Wait. Raises Lost if the session is lost meanwhile."""
        await session.wait(Waiter(time.monotonic() + seconds, is_pause=True))

    # ---------------------------------------------------------------- caches

    def _start_keeping(self, session: Session, cache: Cache) -> None:
        cache.kept = True
        self.loop.start(self._keep_registered(session, cache))

    async def _keep_registered(self, session: Session, cache: Cache) -> None:
        """Keep the cache registered until it is unwanted or refused, or the session is lost."""
        let_go = True
        registration = None
        cache.settle(None)
        try:
            while cache.wanted:
                registration = await self._registered(session, cache)
                if registration is None:
                    break
                if cache.wanted:
                    cache.settle(registration)
                    await registration.over
                    cache.settle(None)
                let_go = registration.gone or await self._unregister(session, registration)
                registration.retire()
                await self._quieten(session, cache)
        except RequestError as error:
            log.error("cache refused name=%s %s", cache.name, error)
            cache.settle(None, error)
        except Lost:
            let_go = False
            cache.settle(None)
        finally:
            cache.kept = False
            if registration is not None:
                registration.retire()
            if not cache.wanted:
                self._forget(cache, let_go=let_go)
                _answer(cache, let_go)

    async def _registered(self, session: Session, cache: Cache) -> Registration | None:
        """Try until the server takes the cache, or it is unwanted. RequestError if the server never will."""
        backoff = Backoff(self.timeouts.backoff_first_s, self.timeouts.backoff_max_s)
        offered: list[int] = []
        why = ""
        twice_until_s = time.monotonic() + self.timeouts.register_s
        while cache.wanted:
            if not offered:
                await self._quieten(session, cache)  # leftovers of an earlier session or a failed attempt
            now_s = time.monotonic()
            try:
                return await self._register(session, cache, offered, now_s + self.timeouts.register_s)
            except Lost:
                raise
            except Trouble as trouble:
                if trouble.why != why:
                    why = trouble.why
                    # Ordinary and soon over: we have seen the end of its mover before the server.
                    level = logging.DEBUG if trouble.unchanged and why == TWICE else logging.WARNING
                    log.log(level, "cannot register yet name=%s %s", cache.name, trouble)
                if isinstance(trouble, Overdue) or (trouble.why == TWICE and now_s > twice_until_s):
                    # The registration's outcome is unknown. Only a new session settles that.
                    session.lose(Lost("timeout"))
                if not trouble.unchanged:
                    offered.clear()
            await self._pause(session, backoff.next_s())
        return None

    async def _register(self, session: Session, cache: Cache, offered: list[int], due_s: float) -> Registration:
        """Register by Offer, Register and Watch. `offered` keeps descriptors that a refusal has not used up."""
        ours = cache.descriptors if cache.device is None or offered else cache.device.begin_ring()
        for descriptor in ours[len(offered) :]:
            reply = await session.local.ask(wire.Offer(next(self.ids)), wire.Offered, due_s, descriptor=descriptor)
            offered.append(reply.descriptor)
        request = _register_request(next(self.ids), cache, offered)
        try:
            registered = await session.zmq.ask(request, wire.Registered, due_s)
        except RequestError as error:
            if error.code == TWICE and cache.name in session.names:
                # We know that its mover is gone, and the server will know in a moment.
                raise Trouble(error.code, error.message, unchanged=True) from None
            raise
        session.names.add(cache.name)
        watch = wire.Watch(next(self.ids), registered.cache)
        _, descriptors = await session.local.ask_for_descriptor(watch, wire.Watched, due_s)
        if len(descriptors) != 1:
            close_all(descriptors)
            raise session.local.lose(
                Lost("frame", f"Watched came with {len(descriptors)} descriptors, expected a pidfd")
            )
        self.counters.add("registrations")
        log.info("cache registered name=%s cache=%d mover=%d", cache.name, registered.cache, registered.mover)
        return Registration(self.loop, session, registered.cache, descriptors[0])

    async def _quieten(self, session: Session, cache: Cache) -> None:
        """Wait until no earlier registration uses the staging memory, or the cache through the host."""
        if cache.device is not None:
            cache.device.end_ring()
        while not cache.quiet:
            await self._pause(session, QUIET_POLL_S)

    async def _unregister(self, session: Session, registration: Registration) -> bool:
        due_s = time.monotonic() + self.timeouts.register_s
        try:
            await session.zmq.ask(wire.Unregister(next(self.ids), registration.number), wire.Unregistered, due_s)
        except Lost:
            raise
        except Trouble as trouble:
            log.warning("cannot unregister cache=%d %s", registration.number, trouble)
            return registration.gone
        return True

    def _forget(self, cache: Cache, *, let_go: bool) -> None:
        if cache in self._caches:
            self._caches.remove(cache)
            cache.close(let_go=let_go)

    def forsake_after_fork(self) -> None:
        """Close a forked child's copies of the descriptors."""
        if self._session is not None:
            self._session.forsake_after_fork()
        for cache in self._caches:
            cache.forsake_after_fork()


def _register_request(request_id: int, cache: Cache, offered: list[int]) -> wire.Register:
    spec, device = cache.told, cache.device
    return wire.Register(
        id=request_id,
        name=spec.name,
        namespace=spec.namespace,
        chunk_tokens=spec.chunk_tokens,
        device=spec.device,  # type: ignore[arg-type]  # the server names the kinds that it knows
        device_id=device.memory.device_id if device is not None else "",
        ipc_mode=device.memory.ipc_mode if device is not None else "",
        mode=spec.chosen_mode,
        tenant=spec.tenant,
        buffers=device.memory.buffers if device is not None else _host_buffers(spec, offered),
        groups=device.memory.groups if device is not None else list(spec.groups),
        staging=device.staging(offered) if device is not None else [],
        tokens_max=spec.tokens_max,
        model=spec.model,
    )


def _host_buffers(spec: CacheSpec, offered: list[int]) -> list[wire.Buffer]:
    sizes = [buffer.bytes for buffer in spec.buffers if isinstance(buffer, HostBuffer)]
    return [wire.Buffer(number, b"", size) for number, size in zip(offered, sizes, strict=True)]


def _answer(cache: Cache, let_go: bool) -> None:
    farewells, cache.farewells = cache.farewells, []
    for answer in farewells:
        answer.set_result(let_go)
