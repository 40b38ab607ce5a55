"""The shell around one brain: feeds it events, executes its effects in order, and may stop between any two of them.

Each life of the brain has its own shell. What outlives the brain (ledger, arena, processes) belongs to the world.
"""

from array import array
from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kvserver.remote.chunk_value import decode as decode_head
from kvserver.service.base.effects import (
    Answer,
    AnswerWithBoard,
    AnswerWithMover,
    Ask,
    Audit,
    ChangeLogLevel,
    CloseDescriptors,
    CloseSession,
    DropNamespace,
    Effect,
    GoOn,
    Instruct,
    Log,
    Publish,
    PutNamespace,
    Tell,
    Withdraw,
)
from kvserver.service.base.events import (
    ArenaGrew,
    Arrived,
    Commanded,
    Event,
    MoverGone,
    PeerGone,
    Reported,
    Tick,
    Unheard,
)
from kvserver.service.base.events import GoOn as GoneOn
from kvserver.service.operators.commands import COMMAND_ID
from kvserver.service.service import Service
from kvserver.tiers.records import NO_GROUP, unpack_disk
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.admin import AnyCommand, ClearNamespace, ClearTenant, Command, NewWeights, Outcome
from kvserver.wire.messages import (
    Attach,
    Clear,
    Error,
    Found,
    Hello,
    Lane,
    Lookup,
    Register,
    Reply,
    Retrieve,
    Store,
    Stored,
    Welcome,
)
from kvserver.wire.orders import (
    AnnounceRemote,
    Copy,
    Demote,
    Done,
    DropBoard,
    FetchRemote,
    FoundNote,
    FoundRecords,
    KillMover,
    Listed,
    MapCache,
    Moved,
    Promote,
    PutRemote,
    Ready,
    RemoteEnded,
    RemoteNoteRead,
    RemoteNoteWritten,
    Scrubbed,
    StartMover,
)

from . import ledger as ledgers
from . import operators, service_view
from .board import Board
from .content import path_of
from .deadline_promises import DeadlinePromises
from .digest_promises import Expected
from .ledger import offsets_in, records_in, survivors
from .memory import Pool, Wrong
from .movers import SimMover
from .operators import is_below
from .pledge_promises import PledgePromises
from .processes import Received
from .promises import CacheFacts, Promises
from .quota_promises import Quotas
from .remote import units_of
from .room_promises import RoomPromises
from .streams import OurWord
from .tenants import namespaces_of

if TYPE_CHECKING:
    from .world import World


class BrainDied(Exception):
    """The brain died between two effects."""


class Shell:
    """One brain and the resources of its process."""

    def __init__(self, world: "World", life: int, effects_left: int) -> None:
        """effects_left: number of effects to execute before the brain dies; -1: it lives on."""
        self._world = world
        self.effects_left = effects_left
        self.boards: dict[int, Board] = {}
        self.descriptors: dict[int, Pool | None] = {}
        """Open descriptors -> the pool of each."""
        self._movers_ready: dict[int, bool] = {}
        """Movers that are not gone -> whether orders may be sent."""
        self._killed: list[int] = []
        self._awaiting: set[int] = set()
        """Retrieves that have waited for chunks that an engine had pledged."""
        bounds, ledger = world.swarm.bounds, world.ledger
        ledger.read_again()
        expected, may_be_lost = survivors(ledger, world.shapes), ledgers.may_be_lost(ledger, world.shapes)
        self.service = Service(
            bounds,
            Random(world.rng.getrandbits(32)).randbytes,
            incarnation=life,
            started_ns=world.now_ns,
            documents=sorted(ledger.documents.items()),
            records=ledger.packed(),
        )
        self.namespaces_most = len(service_view.namespaces(self.service))
        """The most namespaces that the index has had at a time."""
        room = service_view.disk_room(self.service)
        if room is not None:
            sizes = {shape.slot_bytes(*part) for shape in world.shapes.values() for part in shape.parts()}
            chunk_bytes = max(shape.chunk_units() for shape in world.shapes.values()) * SLOT_ALIGN
            RoomPromises(room, bounds, len(sizes), chain_bytes=world.swarm.depth * chunk_bytes)
        leases = {"lease_ttl_ms": bounds.lease_ttl_ms, "lease_extended_ms": bounds.lease_extended_ms}
        times = {"ttl_ms": bounds.pledge_ttl_ms, "patience_ms": bounds.pledge_patience_ms}
        pledged_bytes = bounds.arena_bytes * bounds.pledged_percent_max // 100
        pledges_room = bounds.pledges_total_max, bounds.pledged_chunks_max, pledged_bytes
        pledges = PledgePromises(world.counts, room=pledges_room, **times)
        patience = {"job_ttl_ms": bounds.job_ttl_ms, "grace_ms": bounds.mover_grace_ms}
        deadlines = DeadlinePromises(world.counts, **patience)
        self.promises = Promises(ledger, world.shapes, pledges, deadlines, OurWord(world.counts), **leases)
        self.promises.streams = {
            name or "remote": store.streams for name, store in world.stores.items() if store.streams is not None
        }
        self.promises.foretold_ms = bounds.remote_foretold_ms
        self.promises.quotas = Quotas(bounds.tenants, ledger, world.shapes)
        self.promises.disk.began(bounds, world.now_ns)
        self.promises.may_decline = bounds.recompute_tokens_per_s > 0
        self._carry_out(self.service.effects())
        kept = ledger.slots
        ledger.cut_off.clear()
        ledger.undescribed.clear()
        if kept - expected or expected - kept - may_be_lost:
            raise Wrong(
                f"after a restart {sorted(kept - expected)} are held wrongly, {sorted(expected - kept)} are lost"
            )
        world.counts["slots restored"] += len(kept)
        world.counts["marks restored"] += len(ledger.records) - len(kept)
        self.service.check()
        self.service.handle(ArenaGrew(world.slabs, ""), world.now_ns)

    def feed(self, event: Event, *, must_fail: bool, sound: bool) -> None:
        """Handles one event, checks the promises, and executes the effects.

        must_fail: the request must be refused. sound: a retrieve in which only the lease can be wrong.
        """
        world = self._world
        world.counts[f"event {type(event).__name__}"] += 1
        refusal = ""
        match event:
            case Arrived(peer, request):
                world.counts[f"request {type(request).__name__}"] += 1
                self.promises.arrived(peer, request, must_fail, world.now_ns)
                if isinstance(request, Retrieve):
                    sound = sound and service_view.takes_jobs(self.service, request.cache)
                    refusal = self.promises.before_retrieve(peer, request, world.now_ns)
            case Commanded(peer, _, command):
                world.counts[f"command {type(command).__name__}"] += 1
                self.promises.commanded(peer, command, must_fail)
                operators.before(world, peer, command)
            case Reported(mover, report):
                world.counts[f"report {type(report).__name__}"] += 1
                if isinstance(report, Ready) and mover in self._movers_ready:
                    self._movers_ready[mover] = mover not in self._killed
        self.promises.now_ns = world.now_ns
        if world.swarm.bounds.disk_devices:
            self.promises.disk.now_ns = world.now_ns
            self.promises.knows_disks(
                service_view.on_disk(self.service),
                readable=service_view.disk_readable(self.service),
                recovered=service_view.disk_recovered(self.service),
            )
        self._note_clear(event)
        may_lose = self._may_lose(event)
        namespaces = service_view.namespaces(self.service) if isinstance(event, Arrived) else []
        due = self._to_be_sealed(event)
        quotas = self.promises.quotas
        sealed = quotas.sealed_bytes(set(service_view.going(self.service))) if quotas else Counter()
        shortages = service_view.disk_shortages(self.service)
        was_draining = service_view.is_draining(self.service)
        looked_for = service_view.looked_for(self.service)
        digests = self.promises.digests.before(event, self.service)
        self._awaiting |= service_view.awaiting(self.service)
        effects = self.service.handle(event, world.now_ns)
        published = [record for e in effects if isinstance(e, Publish) for record in records_in(e.records)]
        slots = [record.offset for record in published if record.group != NO_GROUP]
        if sorted(slots) != sorted(due):
            raise Wrong(f"slots {slots} were published; slots {due} were to be")
        match event:
            case PeerGone(peer):
                self.promises.peer_gone(peer)
            case Unheard(lease):
                self.promises.unheard(lease)
            case MoverGone(mover):
                self._movers_ready.pop(mover, None)
            case Arrived(peer, Retrieve() as request):
                held = service_view.holds_back(self.service, peer, request.id)
                self.promises.after_retrieve(
                    peer, request, effects, world.now_ns, refusal=refusal, sound=sound, held=held
                )
            case Arrived(peer, Register() as request) if _refuses(effects, peer, request.id):
                if service_view.namespaces(self.service) != namespaces:
                    raise Wrong("a registration was refused and changed the table of namespaces")
            case Arrived(peer, Register() as request):
                self.promises.by_peer[peer].engine.accounts.add(quotas.account(request.tenant))
            case _:
                pass
        self.service.check()
        for record in published:
            self.promises.pledges.published(record.namespace, record.key, world.now_ns)
        self.promises.pledges.servable(partial(service_view.servable_chunks_of, self.service), world.now_ns)
        self.promises.pledges_end(effects, world.now_ns)
        self.promises.begun_elsewhere = _begun_elsewhere(effects)
        self.promises.leases_left = service_view.leases(self.service)
        self._check_cuts(event, effects, digests)
        self._carry_out(effects)
        if isinstance(event, Arrived) and isinstance(event.request, Lookup) and not _refuses_now(effects, event.peer):
            self.service.lookup_took(0)  # counted when the reply is out
        for digest in self._dropped(effects):
            self.promises.namespace_dropped(digest)
        self.promises.digests.after(digests, event, effects, self.service)
        if quotas:
            self._check_quotas(event, effects, sealed)
        if shortages:
            self._check_disk_quotas(event, effects, shortages, was_draining=was_draining, looked_for=looked_for)
        match event:
            case Arrived(peer, Clear(number, namespace)) if not _refuses(effects, peer, number):
                self.promises.cleared(peer, number, namespace, answered=_answers(effects, peer, number))
        if isinstance(event, Commanded) and not _refuses_now(effects, event.peer):
            self._commanded(event.peer, event.command, answered=_answers(effects, event.peer, COMMAND_ID))
        if any(isinstance(effect, PutNamespace | DropNamespace) for effect in effects):
            world.ledger.check_documents(service_view.namespaces_with_chunks(self.service))
            known = service_view.namespaces(self.service)
            self.namespaces_most = max(self.namespaces_most, len(known))
            self.promises.namespaces_are(known)
        self.promises.operators.check(world.now_ns)
        if isinstance(event, Reported) and isinstance(event.report, Moved):
            self.promises.disk.ended(event.report, service_view.on_disk(self.service))
        if isinstance(event, Tick):
            facts = service_view.pledges(self.service), service_view.sessions(self.service)
            self.promises.pledges.check(world.now_ns, *facts)
            self.promises.check_in_time(world.now_ns)
        if may_lose:
            self.promises.lost_leases(service_view.leases(self.service), world.now_ns)
        unknown = service_view.leases(self.service) - self.promises.leases.keys()
        if unknown:
            raise Wrong(f"leases {sorted(unknown)} were never granted, or are over")

    def _note_clear(self, event: Event) -> None:
        """Each remote store is to know of the Clear of a namespace or a prefix before it is answered."""
        for store in self._world.stores.values():
            match event:
                case Arrived(peer, Clear(number, namespace)):
                    store.clear_comes(peer, number, namespace)
                case Commanded(peer, _, ClearNamespace(namespace) | NewWeights(namespace=namespace)):
                    store.clear_comes(peer, COMMAND_ID, namespace)
                case _:
                    pass

    def _dropped(self, effects: list[Effect]) -> list[bytes]:
        """Namespaces that are dropped because another server has cleared them."""
        lines = [effect for effect in effects if isinstance(effect, Log)]
        names = {dict(line.fields)["namespace"] for line in lines if line.event == "namespace cleared elsewhere"}
        return [digest for digest in self._world.shapes if digest[:6].hex() in names]

    def _check_cuts(self, event: Event, effects: list[Effect], digests: Expected) -> None:
        """Only what lies below a cleared prefix, below wrong bytes, or below what could not be read is cut off. It is
        held no more, although it is withdrawn later."""
        tops = {(record.namespace, path_of(record.key)) for record in digests.leaving}
        match event:
            case Commanded(peer, _, ClearNamespace(namespace, key)) if key and not _refuses_now(effects, peer):
                tops.add((namespace, path_of(key)))
            case Reported(_, Moved() as moved):
                tops |= {(record.namespace, path_of(record.key)) for record in self.promises.disk.failed(moved)}
            case _:
                pass
        for namespace, key in self._world.ledger.cut(service_view.going_of_cuts(self.service)):
            self._world.counts["chunks cut off in pieces"] += 1
            path = path_of(key)
            if not any(top[0] == namespace and is_below(path, top[1]) for top in tops):
                raise Wrong(f"chunk {path} was cut off, and nothing was wrong with it")

    def _check_quotas(self, event: Event, effects: list[Effect], sealed: "Counter[str]") -> None:
        """Checks DRAM quotas. sealed: bytes of each account before the event.

        Events that also start a read from disk are skipped: that read may be for any account.
        """
        quotas = self.promises.quotas
        quotas.check_most()
        if any(isinstance(effect, Instruct) and isinstance(effect.order, Promote | FetchRemote) for effect in effects):
            return
        match event:
            case Arrived(_, Store() as request) if request.cache in self.promises.caches:
                claimant = quotas.account_of(self.promises.caches[request.cache].digest)
            case Arrived(_, Register() as request):
                claimant = quotas.account(request.tenant)
            case _:
                return
        after = quotas.sealed_bytes(set(service_view.going(self.service)))
        gave = quotas.check_guarantees(sealed, after, claimant)
        self._world.counts["accounts that gave to others"] += gave

    def _check_disk_quotas(
        self,
        event: Event,
        effects: list[Effect],
        shortages: dict[str, int],
        *,
        was_draining: bool,
        looked_for: set[bytes],
    ) -> None:
        """No tenant takes disk from another: only faults, operators, drains and a tenant's own work do. looked_for:
        namespaces whose chunks may be read from the remote store now."""
        quotas = self.promises.quotas
        own = {quotas.account_of(digest) for digest in looked_for}
        takes = was_draining or service_view.is_draining(self.service)
        match event:
            case Arrived(_, Store() as request) if request.cache in self.promises.caches:
                own.add(quotas.account_of(self.promises.caches[request.cache].digest))
            case Arrived(_, Register() as request):
                own.add(quotas.account(request.tenant))
            case Arrived(_, Clear()) | Commanded() | MoverGone():
                takes = True
            case Reported(_, Moved(_, faults)) if faults:
                takes = True
            case Reported(_, Scrubbed(_, wrong)) if wrong:
                takes = True
            case Reported(_, Done(wrong=wrong)) if wrong:
                takes = True
            case Reported(_, FoundNote() | Listed() | FoundRecords()):
                takes = True
            case Reported(_, RemoteNoteRead() | RemoteNoteWritten() | RemoteEnded(_, "digest")):
                takes = True
        now = service_view.disk_shortages(self.service)
        orders = [effect.order for effect in effects if isinstance(effect, Instruct)]
        demotes = [record for order in orders if isinstance(order, Demote) for record in unpack_disk(order.records)]
        writing = {
            quotas.account_of(record.namespace) for record in demotes
        }  # its mover may be dead and never receive them
        writing |= {quotas.account_of(digest) for digest in service_view.parked_writes(self.service)}
        on_disk = service_view.on_disk(self.service)
        gave = quotas.check_disk(
            self.promises.on_disk,
            on_disk,
            writes=self.promises.disk.writes_by(quotas.account_of, on_disk),
            excused=lambda name: takes or name in own or name in writing or now[name] != shortages[name],
            known=service_view.disk_is_recovered(self.service),
        )
        self._world.counts["accounts that gave to others on disk"] += gave

    def _commanded(self, peer: int, command: AnyCommand, *, answered: bool) -> None:
        match command:
            case NewWeights(namespace=namespace):
                self.promises.cleared(peer, COMMAND_ID, namespace, answered=answered)
                self.promises.operators.weights_changed(command, self._world.now_ns)
            case ClearNamespace(namespace, b""):
                self.promises.cleared(peer, COMMAND_ID, namespace, answered=answered)
            case ClearNamespace(namespace, key):
                going = set(service_view.going(self.service))
                self.promises.prefix_cleared(peer, namespace, key, going, answered=answered)
            case ClearTenant(tenant):
                for namespace in namespaces_of(tenant, self._world.shapes):
                    self.promises.cleared(peer, COMMAND_ID, namespace, answered=answered)
            case _:
                pass

    def _may_lose(self, event: Event) -> bool:
        """True if this event may reveal that chunks on disk are lost."""
        match event:
            case Reported(_, Moved(_, faults)):
                return bool(faults)
            case Reported(_, Scrubbed(_, wrong)):
                return bool(wrong)
            case MoverGone(mover):
                return service_view.is_disk_mover(self.service, mover)
            case Tick():
                return self._world.swarm.bounds.disk_devices > 0
            case _:
                return False

    def _to_be_sealed(self, event: Event) -> list[int]:
        """Slots that this event may seal: those of a finished store whose client lives, and those read from disk."""
        match event:
            case Reported(_, Moved() as moved):
                return service_view.slots_being_read(self.service, moved)
            case Reported(_, RemoteEnded(job, "")):
                return service_view.remote_slots(self.service, job, self._world.now_ns)
            case Reported(_, Done(job, "done")) if self.promises.may_seal(job):
                return service_view.slots_being_written(self.service, job)
            case _:
                return []

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._world.counts[f"effect {type(effect).__name__}"] += 1
            match effect:
                case Publish(records):
                    self._world.ledger.check_order(records_in(records))
                    for record in records_in(records):
                        self._crash_point()
                        if record.group != NO_GROUP:
                            self.promises.sealed(record.offset)
                        self._world.ledger.publish(record, self._world.shapes[record.namespace])
                        self._world.voided.stored(record.namespace, record.key)
                case Withdraw(offsets):
                    self._withdraw(offsets_in(offsets))
                case _:
                    self._crash_point()
                    self._carry_out_one(effect)

    def _withdraw(self, offsets: list[int]) -> None:
        """If the brain dies on the way, the next one may find the rest, or lose it."""
        for place, offset in enumerate(offsets):
            try:
                self._crash_point()
            except BrainDied:
                self._world.ledger.died_before_withdrawing(offsets[place:])
                raise
            self._world.ledger.withdraw(offset)

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case PutNamespace(number, document):
                self._world.ledger.documents[number] = document
            case DropNamespace(number):
                self._world.ledger.drop_document(number)
            case Answer(peer, reply):
                self._answer(peer, reply)
            case AnswerWithBoard(peer, reply, session):
                self.boards[session] = Board(self._world.swarm.words)
                self.promises.sessions[session].attached = True
                self._answer(peer, reply)
            case AnswerWithMover(peer, reply, mover):
                if mover not in self._movers_ready:
                    raise Wrong(f"{reply} names a mover that is gone or was never wished for")
                self._answer(peer, reply)
            case Instruct():
                self._instruct(effect)
            case Ask(wish):
                self._world.counts[f"wish {type(wish).__name__}"] += 1
                self._wished(wish)
            case CloseDescriptors(numbers):
                for number in numbers:
                    self._close_descriptor(number)
            case CloseSession(session, _):
                self.boards.pop(session, None)
                self.promises.closed(session)
            case Tell(events):
                self._world.subscriber.take(events)
                self._world.router.told(self._world.brain, events)
            case GoOn():
                self._world.gone.append(GoneOn())
            case Log() | Audit() | ChangeLogLevel():
                pass

    def _wished(self, wish: StartMover | KillMover) -> None:
        if isinstance(wish, StartMover):
            if wish.mover in self._movers_ready:
                raise Wrong(f"mover {wish.mover} was started twice")
            self._movers_ready[wish.mover] = False
        else:
            if wish.mover not in self._movers_ready or wish.mover in self._killed:
                raise Wrong(f"mover {wish.mover} is to be killed, but is gone or being killed")
            self._movers_ready[wish.mover] = False
            self._killed.append(wish.mover)
            self.promises.deadlines.killed.add(wish.mover)
        self._world.supervisor.wishes.append(wish)

    def _instruct(self, effect: Instruct) -> None:
        order = effect.order
        self._world.counts[f"order {type(order).__name__}"] += 1
        if not self._movers_ready.get(effect.mover):
            raise Wrong(f"{order} was sent to mover {effect.mover}, which is not ready")
        pools = [self._close_descriptor(number) for number in effect.descriptors]
        if effect.board and effect.board not in self.boards:
            raise Wrong(f"{order} carries the board of session {effect.board}, which is closed")
        match order:
            case MapCache():
                pool = pools[0]
                assert pool is not None
                facts = CacheFacts(self.promises.sessions[order.session], pool.digest, pool.shape, pool.rank)
                self.promises.caches[order.cache] = facts
                self.promises.deadlines.mover_of[order.cache] = effect.mover
            case Copy():
                self.promises.copy_sent(order)
                across = "retrieves of what an engine of another size stored"
                self._world.counts[across] += self.promises.brings_from_another_size(order)
                self._world.counts["retrieves that waited for a store"] += order.job in self._awaiting
            case FetchRemote(_, packed_head, slots) | PutRemote(_, packed_head, slots):
                head = decode_head(packed_head)
                units = units_of(self._world.shapes[head.namespace], head, list(array("q", slots)))
                remote = service_view.remote_of(self.service, effect.mover)
                self.promises.remote_sent(order, head.namespace, units, remote=remote)
            case AnnounceRemote(_, namespace, epoch, marks):
                remote = service_view.remote_of(self.service, effect.mover)
                name = remote.name if remote.name in self._world.stores else ""
                earlier = self._world.stores[name].was_epoch.get(namespace, set())
                self.promises.our_word.told(name, namespace, epoch, marks, earlier)
            case Demote() | Promote():
                self.promises.disk.ordered(order, service_view.on_disk(self.service))
        mover = self._world.supervisor.movers.get(effect.mover)
        if isinstance(order, DropBoard) and isinstance(mover, SimMover) and mover.maps(order.session):
            raise Wrong(f"the board of session {order.session} was dropped while a cache of it is mapped")
        if mover is not None and mover.state in ("starting", "running"):
            mover.inbox.append((order, pools[0] if pools else None, self.boards.get(effect.board)))
        elif isinstance(order, Copy):
            self.promises.copy_over(order.job)
        elif isinstance(order, FetchRemote | PutRemote):
            self.promises.remote_over(order.job)
        elif isinstance(order, Demote | Promote):
            self.promises.disk.over(order.job)

    def _answer(self, peer: int, reply: Reply | Outcome) -> None:
        self._world.counts[f"reply {type(reply).__name__}"] += 1
        match reply:
            case Error():
                self._world.counts[f"error {reply.code}"] += 1
            case Stored():
                self._world.counts[f"why {reply.why}"] += 1
        request = self.promises.answered(peer, reply, self._world.now_ns)
        if not isinstance(reply, Error):
            if isinstance(request, Clear | ClearNamespace | NewWeights):
                for store in self._world.stores.values():
                    store.clear_is_answered(peer, reply.id)
            match request:
                case ClearNamespace(_, key) if key:
                    self.promises.check_prefix_gone(peer)
                case Clear(_, namespace) | ClearNamespace(namespace) | NewWeights(namespace=namespace):
                    self.promises.check_gone(peer, reply.id, [namespace])
                case ClearTenant(tenant):
                    self.promises.check_gone(peer, reply.id, namespaces_of(tenant, self._world.shapes))
        if isinstance(request, Command):
            operators.after(self._world, peer, reply)  # type: ignore[arg-type]
            return
        session = 0
        match request, reply:
            case Hello(), Welcome():
                session = service_view.session_number(self.service, reply.session)
                self.promises.welcomed(peer, session, request)
            case ((Attach() | Lane()), _) if not isinstance(reply, Error):
                session = service_view.session_number(self.service, request.session)
                self.promises.joined(peer, session)
            case _:
                pass
        process = self._world.peers.get(peer)
        if process is not None and process.hears(peer):
            process.receive(peer, Received(reply, session, self.boards.get(session)))
        elif isinstance(reply, Found) and reply.lease:
            self._world.gone.append(Unheard(reply.lease))

    def _crash_point(self) -> None:
        if self.effects_left >= 0:
            if self.effects_left == 0:
                self.effects_left = -1
                raise BrainDied
            self.effects_left -= 1

    def _close_descriptor(self, number: int) -> Pool | None:
        if number not in self.descriptors:
            raise Wrong(f"descriptor {number} is not open (any more)")
        return self.descriptors.pop(number)


def _refuses_now(effects: list[Effect], peer: int) -> bool:
    """True if the request was refused and did nothing. After `disk-clear` it was done, but is not durable."""
    errors = [e.reply.code for e in effects if isinstance(e, Answer) and e.peer == peer and isinstance(e.reply, Error)]
    return errors not in ([], ["disk-clear"])


def _answers(effects: list[Effect], peer: int, request_id: int) -> bool:
    answers = [e.reply for e in effects if isinstance(e, Answer) and e.peer == peer and e.reply.id == request_id]
    return any(not isinstance(reply, Error) for reply in answers)


def _refuses(effects: list[Effect], peer: int, request_id: int) -> bool:
    """Others may be refused in the same event: what they await does not come any more."""
    answers = [e.reply for e in effects if isinstance(e, Answer) and e.peer == peer and e.reply.id == request_id]
    return any(isinstance(reply, Error) for reply in answers)


def _begun_elsewhere(effects: list[Effect]) -> int:
    """The pledge that begins because another server has foretold its chunks; 0 if none does."""
    lines = [effect for effect in effects if isinstance(effect, Log) and effect.event == "chunks awaited from a store"]
    return int(str(dict(lines[0].fields)["pledge"])) if lines else 0
