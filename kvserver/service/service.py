"""The entrance of the service: `Service.handle(event, now_ns) -> effects`.

Pure: no socket, clock, thread, file, process or GPU. Time and randomness are arguments, events come in, effects go out.
The shell (server.py) and the simulator (tests/sim) drive the same object.
"""

from array import array
from collections.abc import Callable

from kvserver.errors import KvError, RequestError
from kvserver.service.base.effects import Effect, Publish, Withdraw
from kvserver.service.base.events import (
    ArenaGrew,
    Arrived,
    Commanded,
    Event,
    GoOn,
    MoverGone,
    PeerGone,
    Reported,
    Tick,
    Unheard,
    WorkerGone,
)
from kvserver.service.disk import drain, restore
from kvserver.service.disk import mover as disk
from kvserver.service.operators import clear_namespaces, clear_prefix, commands, server_drain
from kvserver.service.remote import mover as remote
from kvserver.service.report import throughput
from kvserver.service.report.status import status
from kvserver.service.requests import (
    awaits,
    caches,
    explain,
    holds,
    kv_events,
    lookup,
    movers,
    scrub,
    sessions,
    transfers,
)
from kvserver.service.state.bounds import Bounds
from kvserver.service.state.core import Core
from kvserver.service.state.sessions import Session
from kvserver.service.telling.counters import Counters
from kvserver.wire.messages import (
    Attach,
    Clear,
    Drain,
    Draining,
    Explain,
    Hello,
    Lane,
    Lookup,
    Offer,
    Pledge,
    Register,
    Release,
    Retrieve,
    Status,
    StatusIs,
    Store,
    Unpledge,
    Unregister,
    Watch,
)
from kvserver.wire.orders import (
    Done,
    MapFailed,
    Mapped,
    Ready,
    RemoteEnded,
    RemoteHeard,
    RemoteIs,
    RemoteNoteRead,
    RemoteNoteWritten,
    RemoteProbed,
    Scrubbed,
    Unmapped,
)
from kvserver.wire.status import Status as StatusDocument
from kvserver.wire.status import encode_status

TIMERS_PER_TICK_MAX = 1000
"""Timers that fire in one tick, so that no tick takes long. The others fire at the next one."""


class Service:
    """The service. It runs on one thread, and every call runs to its end."""

    def __init__(
        self,
        bounds: Bounds,
        random_bytes: Callable[[int], bytes],
        *,
        server: str = "kvserver",
        incarnation: int = 1,
        started_ns: int = 0,
        documents: list[tuple[int, bytes]] | None = None,
        records: bytes = b"",
        damaged: int = 0,
    ) -> None:
        """documents, records: contents of the ledger, left by an earlier brain. effects() then withdraws what is
        dropped. damaged: number of damaged entries and documents that were found; they are already gone from the
        ledger."""
        self._core = Core(bounds, random_bytes, server, incarnation, started_ns)
        self._core.counters.add("ledger_damaged", damaged)
        restore.restore(self._core, documents or [], records)
        if bounds.kv_events:
            kv_events.begin(self._core)

    @property
    def counters(self) -> Counters:
        """All counters, up to date."""
        self._core.lookup_counts.settle()
        return self._core.counters

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Handles one event. The caller carries the effects out in order."""
        core = self._core
        match event:
            case Arrived():
                self._arrived(event, now_ns)
            case Reported():
                self._reported(event, now_ns)
            case Commanded():
                commands.command(core, event, now_ns)
            case Tick():
                self._tick(now_ns)
            case GoOn():
                core.clears.go_on()
            case PeerGone(peer):
                sessions.peer_gone(core, peer, now_ns)
            case Unheard(lease):
                lookup.unheard(core, lease)
            case WorkerGone(number):
                if number in core.sessions:
                    sessions.end(core, core.sessions[number], "process ended", now_ns)
            case MoverGone(number, how):
                if number in core.movers:
                    mover = core.movers[number]
                    movers.gone(core, mover, how, now_ns)
                    if core.disk is not None and core.disk.mover is mover:
                        disk.gone(core, core.disk, now_ns)
                    if (tier := core.remote_of(mover)) is not None:
                        remote.gone(core, tier, now_ns)
            case ArenaGrew(slabs, problem, placement):
                core.arena_grew(slabs, problem, placement)
                movers.arena_grew(core)
        if core.pledges.has_news:
            awaits.turn(core, now_ns)
        disk.turn(core, now_ns)
        core.chunks.event_ended()
        if core.clears.waiting or core.chunks.forgetting:
            core.clears.turn()
        if core.chunks.changes:
            kv_events.tell(core, core.chunks.changes)
        if core.chunks.gone:
            core.evicted_keys.add(core.chunks.take_gone(), now_ns)
        return self.effects()

    def lookup_took(self, nanoseconds: int) -> None:
        """Counts a lookup after its reply is out, so that no client waits for the counting. nanoseconds: the time that
        it took to decide."""
        self._core.counters.lookup_handle_seconds.observe(nanoseconds / 1e9)
        self._core.lookup_counts.settle()

    def effects(self) -> list[Effect]:
        """Takes the effects that are to be carried out now, ledger first (see effects.py)."""
        chunks = self._core.chunks
        effects = self._core.take_effects()
        if chunks.withdrawn:
            effects = [Withdraw(_pack(chunks.take_withdrawn())), *effects]
        if chunks.records:
            effects = [Publish(b"".join(chunks.take_records())), *effects]
        return effects

    def status(self, now_ns: int) -> StatusDocument:
        """The status document: what the server is doing now."""
        return status(self._core, now_ns)

    def check(self) -> None:
        """Asserts every invariant; for tests and the simulator."""
        from kvserver.service.check.memory import check  # noqa: PLC0415 - no server does this

        check(self._core)

    # ---------------------------------------------------------------- requests

    def _arrived(self, event: Arrived, now_ns: int) -> None:
        core = self._core
        peer, request, descriptor = event
        try:
            match request:
                case Hello():
                    sessions.hello(core, peer, request, now_ns)
                case Attach():
                    sessions.attach(core, peer, request)
                case Lane():
                    sessions.lane(core, peer, request)
                case _:
                    session = core.sessions.by_peer.get(peer)
                    if session is None:
                        if descriptor >= 0:
                            core.close((descriptor,))
                        raise sessions.session_unknown()
                    self._from_session(session, event, now_ns)
        except KvError as error:
            core.refuse(peer, request.id, error)

    def _from_session(self, session: Session, event: Arrived, now_ns: int) -> None:
        core = self._core
        peer, request, descriptor = event
        match request:
            case Lookup():
                lookup.lookup(core, session, peer, request, now_ns)
            case Release():
                lookup.release(core, session, peer, request)
                transfers.lease_released(core, session, request, now_ns)
            case Store():
                transfers.store(core, session, peer, request, now_ns)
            case Retrieve():
                transfers.retrieve(core, session, peer, request, now_ns)
            case Pledge():
                awaits.pledge(core, session, peer, request, now_ns)
            case Unpledge():
                awaits.unpledge(core, session, peer, request, now_ns)
            case Offer():
                sessions.offer(core, session, peer, request, descriptor)
            case Register():
                caches.register(core, session, peer, request, now_ns)
            case Unregister():
                caches.unregister(core, session, peer, request, now_ns)
            case Watch():
                caches.watch(core, session, peer, request)
            case Clear():
                clear_namespaces.clear(core, peer, request.id, request.namespace, now_ns)
            case Drain():
                drain.begin(core, request.device)
                core.answer(peer, Draining(request.id))
            case Explain():
                explain.explain(core, peer, request, now_ns)
            case Status():
                core.answer(peer, StatusIs(request.id, encode_status(status(core, now_ns))))
            case _:
                raise RequestError("order", f"{type(request).__name__} cannot come here")

    # ---------------------------------------------------------------- movers and time

    def _reported(self, event: Reported, now_ns: int) -> None:
        core = self._core
        mover = core.movers.get(event.mover)
        if mover is None:
            return
        throughput.count(core, event.report)
        match event.report:
            case Done() as done:
                job = core.jobs.get(done.job)
                if job is not None and job.cache.mover is mover:
                    transfers.ended(core, job, done, now_ns)
            case Ready() as report:
                movers.ready(core, mover, report)
                if core.disk is not None and core.disk.mover is mover:
                    disk.ready(core, core.disk, now_ns)
            case Mapped() as report:
                movers.mapped(core, mover, report)
            case MapFailed() as report:
                movers.map_failed(core, mover, report)
            case Unmapped() as report:
                movers.unmapped(core, mover, report)
            case Scrubbed() as report:
                scrub.ended(core, mover, report, now_ns)
            case (
                RemoteProbed() | RemoteEnded() | RemoteNoteRead() | RemoteNoteWritten() | RemoteHeard() | RemoteIs()
            ) as report:
                if (tier := core.remote_of(mover)) is not None:
                    remote.reported(core, tier, report, now_ns)
            case disk_report:
                if core.disk is not None and core.disk.mover is mover:
                    disk.reported(core, core.disk, disk_report, now_ns)

    def _tick(self, now_ns: int) -> None:
        core = self._core
        transfers.discard_overdue(core, now_ns)
        core.lookup_counts.settle()
        core.reuse.turn(now_ns)
        disk.tick(core, now_ns)
        remote.tick(core, now_ns)
        scrub.turn(core, now_ns)
        clear_prefix.tick(core)
        server_drain.turn(core)
        kv_events.tick(core)
        for _ in range(TIMERS_PER_TICK_MAX):
            due = core.timers.due(now_ns)
            if due is None:
                break
            match due:
                case ("lease", number):
                    lookup.expire(core, number, now_ns)
                case ("pledge", number):
                    awaits.overdue(core, number, now_ns)
                case ("hold", number):
                    holds.expire(core, number)
                case ("job", number):
                    job = transfers.overdue(core, number, now_ns)
                    if job is not None:
                        movers.kill(core, job.cache.mover, f"did not end job {number}")
                case ("map", number):
                    movers.map_overdue(core, number)
                case ("unmap", number):
                    movers.unmap_overdue(core, number, now_ns)
                case ("attach", number):
                    sessions.attach_overdue(core, number, now_ns)
                case ("mover-start", number):
                    movers.start_overdue(core, number)
                case ("scrub", number):
                    assert core.scrub.job is not None
                    movers.kill(core, core.scrub.job.mover, f"did not end scrub {number}")
                case ("disk", number) if core.disk is not None:
                    disk.overdue(core, core.disk, number, now_ns)
                case ("remote", number):
                    remote.overdue(core, number)
                case ("remote-clear", number):
                    clear_namespaces.remote_overdue(core, number)
                case ("recover", _) if core.disk is not None:
                    disk.recover_overdue(core, core.disk)
                case ("erase", number) if core.disk is not None:
                    drain.erase_overdue(core, core.disk, number)
                case ("clear", number) if core.disk is not None:
                    core.disk.notes.give_up(number)
                case (kind, _):
                    raise AssertionError(f"unknown timer {kind}")


def _pack(offsets: list[int]) -> bytes:
    return array("q", offsets).tobytes()
