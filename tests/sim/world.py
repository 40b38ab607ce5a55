"""The world around one Service: what carries messages, keeps time, starts movers, and goes wrong. One seed, one world.

The world plays the shell: it feeds events and carries out effects in order, and a dying brain may stop between any two
of them. Everything random comes from one random.Random, and no set or address decides an order, so a seed is a replay.
"""

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from kvserver.service.effects import (
    Answer,
    AnswerWithBoard,
    AnswerWithMover,
    Ask,
    CloseDescriptors,
    CloseSession,
    DropNamespace,
    Effect,
    Instruct,
    Log,
    Publish,
    PutNamespace,
    Withdraw,
)
from kvserver.service.events import ArenaGrew, Arrived, Event, MoverGone, PeerGone, Reported, Tick, WorkerGone
from kvserver.service.service import Service
from kvserver.wire.messages import (
    Attach,
    Error,
    Hello,
    Lane,
    Register,
    Reply,
    Request,
    Retrieve,
    Stored,
    Welcome,
)
from kvserver.wire.orders import Copy, Done, KillMover, MapCache, StartMover

from . import inside, nonsense
from .board import Board
from .content import Garbage
from .engines import SimEngine
from .ledger import Ledger, offsets_in, records_in, survivors
from .memory import Arena, Pool, Wrong
from .movers import SimMover, Supervisor
from .processes import Process, Received
from .promises import CacheFacts, Promises
from .shapes import Shape
from .swarm import Swarm

DRAIN_ROUNDS = 400
"""In which everything that is in flight must end once nothing new is begun."""


class Posted(NamedTuple):
    """A request on its way."""

    request: Request
    descriptor: int
    must_fail: bool
    sound: bool
    only_if: Callable[[Service], bool] | None
    """Lost on the way where this does not hold."""


class BrainDied(Exception):
    """Raised between two effects."""


class World:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.swarm = Swarm(self.rng)
        self.counts: Counter[str] = Counter()
        self.events = 0
        self.now_ns = 1_000_000_000
        self.calm = False
        """Nothing new is begun and nothing goes wrong."""
        bounds = self.swarm.bounds
        self.garbage = Garbage()
        self.arena = Arena(bounds.slab_bytes, bounds.arena_bytes // bounds.slab_bytes)
        self.ledger = Ledger(self.arena)
        self.shapes: dict[bytes, Shape] = {
            bytes([index + 1]) * 32: shape for index, shape in enumerate(self.swarm.shapes)
        }
        self.slabs = self.swarm.slabs_at_start
        self.peers: dict[int, Process] = {}
        self.mail: dict[int, deque[Posted]] = {}
        """Peer -> requests on their way."""
        self._feeding = False
        self._eager: deque[int] = deque()
        """Peers whose first message arrives at once."""
        self.gone: deque[Event] = deque()
        """What the shell has noticed and not yet told."""
        self.boards: dict[int, Board] = {}
        self.descriptors: dict[int, Pool | None] = {}
        """Open descriptors of the present brain, and the pool behind each."""
        self.engines: list[SimEngine] = []
        self._numbers = Counter[str]()
        self._crash_after = -1
        """Effects that are still carried out before the brain dies; -1 when it shall live."""
        self._acts = {name: weight for name, weight in self.swarm.acts.items() if weight}
        self._act_names, self._act_weights = list(self._acts), _cumulated(list(self._acts.values()))
        self.supervisor = Supervisor(self)
        self._start_brains()
        for index in range(self.swarm.engines):
            digest = list(self.shapes)[index % len(self.shapes)]
            self.engines.append(SimEngine(self, f"engine{index}", digest, self.shapes[digest]))

    def chance(self, name: str) -> bool:
        return not self.calm and self.rng.random() < self.swarm.chances[name]

    # ---------------------------------------------------------------- the brain and its shell

    @property
    def brain(self) -> int:
        """Which life of the brain this is."""
        return self._numbers["brain"]

    def _start_brains(self) -> None:
        """Until one lives; a brain may die while it still withdraws what it does not trust."""
        while True:
            try:
                self._start_brain()
            except BrainDied:
                self.counts["brain died at start"] += 1
            else:
                return

    def _start_brain(self) -> None:
        self._numbers["brain"] += 1
        expected = survivors(self.ledger, self.shapes)
        rng = Random(self.rng.getrandbits(32))
        self.service = Service(
            self.swarm.bounds,
            rng.randbytes,
            incarnation=self._numbers["brain"],
            started_ns=self.now_ns,
            documents=sorted(self.ledger.documents.items()),
            records=self.ledger.packed(),
        )
        bounds = self.swarm.bounds
        leases = {"lease_ttl_ms": bounds.lease_ttl_ms, "lease_extended_ms": bounds.lease_extended_ms}
        self.promises = Promises(self.ledger, self.shapes, **leases)
        self.movers_ready: dict[int, bool] = {}
        """Movers of this brain that are not gone; True while orders may be sent."""
        self._killed: list[int] = []
        self._carry_out(self.service.effects())
        kept = set(self.ledger.records)
        if kept != expected and len(expected) <= bounds.chunks_max:
            raise Wrong(
                f"after a restart {sorted(kept - expected)} are held wrongly, {sorted(expected - kept)} are lost"
            )
        self.counts["slots restored"] += len(kept)
        self.service.check()
        self.service.handle(ArenaGrew(self.slabs, ""), self.now_ns)

    def feed(self, event: Event, *, must_fail: bool = False, sound: bool = False) -> None:
        """One event: decided, held against the promises, carried out."""
        self.events += 1
        self.counts[f"event {type(event).__name__}"] += 1
        refusal = ""
        match event:
            case Arrived(peer, request):
                self.counts[f"request {type(request).__name__}"] += 1
                self.promises.arrived(peer, request, must_fail)
                if isinstance(request, Retrieve):
                    sound = sound and inside.takes_jobs(self.service, request.cache)
                    refusal = self.promises.before_retrieve(peer, request, self.now_ns)
            case Reported(mover, report):
                self.counts[f"report {type(report).__name__}"] += 1
                if type(report).__name__ == "Ready" and mover in self.movers_ready:
                    self.movers_ready[mover] = mover not in self._killed
        namespaces = inside.namespaces(self.service) if isinstance(event, Arrived) else []
        due = self._to_be_sealed(event)
        effects = self.service.handle(event, self.now_ns)
        published = [record.offset for e in effects if isinstance(e, Publish) for record in records_in(e.records)]
        if sorted(published) != sorted(due):
            raise Wrong(f"slots {published} were published; slots {due} were to be")
        match event:
            case PeerGone(peer):
                self.promises.peer_gone(peer)
                self.mail.pop(peer, None)
            case MoverGone(mover):
                self.movers_ready.pop(mover, None)
            case Arrived(peer, Retrieve() as request):
                self.promises.after_retrieve(peer, request, effects, self.now_ns, refusal=refusal, sound=sound)
            case Arrived(_, Register() as request):
                if (
                    any(
                        isinstance(e, Answer) and isinstance(e.reply, Error) and e.reply.id == request.id
                        for e in effects
                    )
                    and inside.namespaces(self.service) != namespaces
                ):
                    raise Wrong("a registration was refused and changed the table of namespaces")
            case _:
                pass
        self.service.check()
        self._feeding = True
        try:
            self._carry_out(effects)
        except BrainDied:
            self._brain_died()
            return
        finally:
            self._feeding = False
        if self.events % 4 == 0:
            inside.compare_with_ledger(self.service, self.ledger, self.rng, self.arena, self.shapes)
        self._deliver_eagerly()

    def _to_be_sealed(self, event: Event) -> list[int]:
        """A store that is done is sealed unless its client is gone; nothing else is."""
        match event:
            case Reported(_, Done(job, "done")) if self.promises.may_seal(job):
                return inside.slots_being_written(self.service, job)
            case _:
                return []

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.counts[f"effect {type(effect).__name__}"] += 1
            match effect:
                case Publish(records):
                    for record in records_in(records):
                        self._crash_point()
                        self.promises.sealed(record.offset)
                        self.ledger.publish(record, self.shapes[record.namespace])
                case Withdraw(offsets):
                    for offset in offsets_in(offsets):
                        self._crash_point()
                        self.ledger.withdraw(offset)
                case _:
                    self._crash_point()
                    self._carry_out_one(effect)

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case PutNamespace(number, document):
                self.ledger.documents[number] = document
            case DropNamespace(number):
                del self.ledger.documents[number]
            case Answer(peer, reply):
                self._answer(peer, reply)
            case AnswerWithBoard(peer, reply, session):
                self.boards[session] = Board(self.swarm.words)
                self.promises.sessions[session].attached = True
                self._answer(peer, reply)
            case AnswerWithMover(peer, reply, mover):
                if mover not in self.movers_ready:
                    raise Wrong(f"{reply} names a mover that is gone or was never wished for")
                self._answer(peer, reply)
            case Instruct():
                self._instruct(effect)
            case Ask(wish):
                self.counts[f"wish {type(wish).__name__}"] += 1
                self._wished(wish)
            case CloseDescriptors(numbers):
                for number in numbers:
                    self._close_descriptor(number)
            case CloseSession(session, _):
                self.boards.pop(session, None)
                self.promises.closed(session)
            case Log():
                pass

    def _wished(self, wish: StartMover | KillMover) -> None:
        if isinstance(wish, StartMover):
            if wish.mover in self.movers_ready:
                raise Wrong(f"mover {wish.mover} was started twice")
            self.movers_ready[wish.mover] = False
        else:
            if wish.mover not in self.movers_ready or wish.mover in self._killed:
                raise Wrong(f"mover {wish.mover} is to be killed, but is gone or being killed")
            self.movers_ready[wish.mover] = False
            self._killed.append(wish.mover)
        self.supervisor.wishes.append(wish)

    def _instruct(self, effect: Instruct) -> None:
        order = effect.order
        self.counts[f"order {type(order).__name__}"] += 1
        if not self.movers_ready.get(effect.mover):
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
            case Copy():
                self.promises.copy_sent(order)
        mover = self.supervisor.movers.get(effect.mover)
        if mover is not None and mover.state in ("starting", "running"):
            mover.inbox.append((order, pools[0] if pools else None, self.boards.get(effect.board)))
        elif isinstance(order, Copy):
            self.promises.copy_over(order.job)

    def _answer(self, peer: int, reply: Reply) -> None:
        self.counts[f"reply {type(reply).__name__}"] += 1
        match reply:
            case Error():
                self.counts[f"error {reply.code}"] += 1
            case Stored():
                self.counts[f"why {reply.why}"] += 1
        request = self.promises.answered(peer, reply, self.now_ns)
        session = 0
        match request, reply:
            case Hello(), Welcome():
                session = inside.session_number(self.service, reply.session)
                self.promises.welcomed(peer, session, request)
            case ((Attach() | Lane()), _) if not isinstance(reply, Error):
                session = inside.session_number(self.service, request.session)
                self.promises.joined(peer, session)
            case _:
                pass
        process = self.peers.get(peer)
        if process is not None and process.alive:
            process.receive(peer, Received(reply, session, self.boards.get(session)))

    def _crash_point(self) -> None:
        if self._crash_after >= 0:
            if self._crash_after == 0:
                self._crash_after = -1
                raise BrainDied
            self._crash_after -= 1

    def _brain_died(self) -> None:
        """kill -9. Its movers are reaped before there is another brain; clients notice, unless they are stopped."""
        self.counts["brain died"] += 1
        self._count_what_the_brain_counted()
        self.supervisor.reap_all()
        self.boards.clear()
        self.descriptors.clear()
        self.gone.clear()
        for peer in list(self.mail):
            process = self.peers.get(peer)
            if process is None or peer != process.peer or self.rng.random() < 0.5:
                del self.mail[peer]
        if self.chance("forged-rival"):
            inside.forge_rival(self.service, self.ledger)
        for engine in self.engines:
            engine.leases.clear()
        if self.rng.random() < 0.3:
            self._crash_after = int(self.rng.random() * 3)
        self._start_brains()
        self._crash_after = -1
        for engine in self.engines:
            for process in engine.processes:
                if process.alive and not process.stalled:
                    process.disconnect()

    # ---------------------------------------------------------------- what processes use

    def new_peer(self, process: Process) -> int:
        self._numbers["peer"] += 1
        self.peers[self._numbers["peer"]] = process
        return self._numbers["peer"]

    def new_descriptor(self) -> int:
        self._numbers["descriptor"] += 1
        return self._numbers["descriptor"]

    def _close_descriptor(self, number: int) -> Pool | None:
        if number not in self.descriptors:
            raise Wrong(f"descriptor {number} is not open (any more)")
        return self.descriptors.pop(number)

    def post(
        self,
        peer: int,
        request: Request,
        *,
        descriptor: int = -1,
        must_fail: bool = False,
        sound: bool = False,
        only_if: Callable[[Service], bool] | None = None,
    ) -> None:
        """A request sets out; it arrives now or later, but after those that the same peer sent before."""
        self.mail.setdefault(peer, deque()).append(Posted(request, descriptor, must_fail, sound, only_if))
        if len(self.mail[peer]) == 1 and not self.calm and not self.chance("message-waits"):
            self._eager.append(peer)
            self._deliver_eagerly()

    def _deliver_eagerly(self) -> None:
        """What does not wait arrives as soon as the brain is free."""
        while self._eager and not self._feeding:
            peer = self._eager.popleft()
            if peer in self.mail:
                self._deliver(peer)

    def disconnected(self, process: Process) -> None:
        """A process that lives gives up its connections."""
        self.gone.extend(PeerGone(peer) for peer in (process.local_peer, process.lane_peer) if peer)

    def process_died(self, process: Process) -> None:
        """The shell notices both ends of a worker in any order; what it had sent may still arrive first, or never."""
        for peer in (process.peer, process.local_peer, process.lane_peer):
            if peer in self.mail and self.rng.random() < 0.4:
                del self.mail[peer]
        if process.brain != self.brain:
            return  # the present brain never heard of it
        news: list[Event] = [PeerGone(peer) for peer in (process.local_peer, process.lane_peer) if peer]
        if process.board is not None:
            news.append(WorkerGone(process.session))
        self.rng.shuffle(news)
        self.gone.extend(news)

    # ---------------------------------------------------------------- steps

    def step(self) -> None:
        """Something happens."""
        self.now_ns += int(self.rng.random() * 2_000_000 * self.swarm.step_ms)
        name = self.rng.choices(self._act_names, cum_weights=self._act_weights)[0]
        self._step_by_name(name)

    def _step_by_name(self, name: str) -> None:
        rng = self.rng
        match name:
            case "deliver":
                self._deliver_something()
            case "mover":
                movers = list(self.supervisor.movers.values())
                if movers:
                    for _ in range(1 + int(rng.random() * 4)):
                        rng.choice(movers).step()
            case "supervisor":
                self.supervisor.step()
            case "process":
                rng.choice(self._engine().processes).act()
            case "tick":
                self.feed(Tick())
            case "jump":
                self.now_ns += int(rng.random() * self.swarm.ms(900)) * 1_000_000
            case "grow":
                most = self.swarm.bounds.arena_bytes // self.swarm.bounds.slab_bytes
                if self.slabs < most:
                    self.slabs += 1 + int(rng.random() * (most - self.slabs))
                    self.feed(ArenaGrew(self.slabs, ""))
            case "plan-store":
                self._engine().plan_store()
            case "plan-lookup":
                self._engine().plan_lookup()
            case "plan-mixed-lookup":
                self._engine().plan_mixed_lookup()
            case "release":
                self._engine().release()
            case "resume":
                self._resume()
            case "brain-dies":
                self._crash_after = int(rng.random() * 6)
            case "mover-dies" | "mover-stops":
                self._hurt_mover(name)
            case _:
                self._act_on_process(name)

    def _act_on_process(self, name: str) -> None:
        engine = self._engine()
        process = self.rng.choice(engine.processes)
        if not process.alive:
            engine.replace(process)
            return
        match name:
            case "process-dies":
                process.die()
            case "process-stalls":
                process.stalled = True
            case "abandon" if not process.stalled:
                process.abandon()
            case "unregister" if process.ready:
                process.unregister()
            case "clear" if process.ready:
                process.clear(self.rng.choice([*self.shapes, bytes(32)]))
            case "lane" if process.ready:
                process.open_lane()
            case "status" if process.ready:
                process.ask_status()
            case "repeat" if process.ready:
                process.repeat()
            case "nonsense" if not process.stalled:
                nonsense.send_some(self, process)

    def _resume(self) -> None:
        engine = self._engine()
        for process in engine.processes:
            if not process.alive and self.rng.random() < 0.3:
                engine.replace(process)
                return
            if process.stalled and self.rng.random() < 0.3:
                process.stalled = False
        for mover in self.supervisor.movers.values():
            if mover.stopped and self.rng.random() < 0.3:
                mover.stopped = False

    def _hurt_mover(self, name: str) -> None:
        movers = [mover for mover in self.supervisor.movers.values() if mover.state in ("starting", "running")]
        if movers:
            mover = self.rng.choice(movers)
            if name == "mover-dies":
                self.counts["mover died"] += 1
                self.supervisor.died(mover)
            else:
                self.counts["mover stopped"] += 1
                mover.stopped = True

    def _engine(self) -> SimEngine:
        return self.engines[int(self.rng.random() * len(self.engines))]

    def _deliver_something(self) -> bool:
        """One message or piece of news, from a random source that has any."""
        sources: list[object] = [peer for peer, mail in self.mail.items() if mail]
        reporting = [mover for mover in self.supervisor.movers.values() if mover.reports]
        sources += reporting
        if self.gone:
            sources.append("gone")
        if self.supervisor.reaped:
            sources.append("reaped")
        if not sources:
            return False
        source = sources[int(self.rng.random() * len(sources))]
        if source == "gone":
            self.feed(self.gone.popleft())
        elif source == "reaped":
            self.feed(MoverGone(*self.supervisor.reaped.popleft()))
        elif isinstance(source, int):
            self._deliver(source)
        else:
            assert isinstance(source, SimMover)
            self.feed(Reported(source.number, source.reports.popleft()))
        return True

    def _deliver(self, peer: int) -> None:
        mail = self.mail[peer]
        posted = mail.popleft()
        if not mail:
            del self.mail[peer]
        if posted.only_if is not None and not posted.only_if(self.service):
            return
        if posted.descriptor >= 0:
            self.descriptors[posted.descriptor] = self.peers[peer].pool
        self.feed(Arrived(peer, posted.request, posted.descriptor), must_fail=posted.must_fail, sound=posted.sound)

    # ---------------------------------------------------------------- the end of a seed

    def drain(self) -> None:
        """Nothing new: all must be answered and settled. Then everybody goes: nothing may be left but sealed chunks."""
        self.calm = True
        self._crash_after = -1
        for engine in self.engines:
            for process in engine.processes:
                process.stalled = False
        self._until(self._all_settled, "requests are answered and transfers settled")
        for engine in self.engines:
            for process in engine.processes:
                if process.alive:
                    process.die()
        self._until(lambda: inside.is_idle(self.service), "sessions, caches, jobs, leases and pins are gone")
        inside.check_idle(self.service, self.ledger)
        if self.descriptors:
            raise Wrong(f"descriptors {list(self.descriptors)} were never closed")
        self._clear_everything()

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        for _ in range(DRAIN_ROUNDS):
            if holds():
                return
            while self._deliver_something():
                pass
            for engine in self.engines:
                for process in engine.processes:
                    process.act()
            while self.supervisor.busy:
                self.supervisor.step()
            for mover in list(self.supervisor.movers.values()):
                for _ in range(200):
                    if mover.stopped or not mover.busy:
                        break
                    mover.step()
            self.now_ns += self.swarm.ms(30) * 1_000_000
            self.feed(Tick())
        raise Wrong(f"after {DRAIN_ROUNDS} calm rounds it is not so that {what}: {self._unsettled()}")

    def _all_settled(self) -> bool:
        transfers = any(process.transfers for engine in self.engines for process in engine.processes if process.alive)
        return not self.mail and not self.gone and not transfers and not self.promises.unanswered()

    def _unsettled(self) -> str:
        transfers = [
            t for engine in self.engines for process in engine.processes if process.alive for t in process.transfers
        ]
        return f"{self.promises.unanswered()} {[t.request for t in transfers]} {inside.leftovers(self.service)}"

    def _clear_everything(self) -> None:
        engine = SimEngine(self, "last", *next(iter(self.shapes.items())))
        self.engines = [engine]
        process = engine.scheduler
        process.registers = False
        self.calm = False
        process.act()
        self.calm = True
        self._until(lambda: process.session != 0, "a last client is welcome")
        for digest in self.shapes:
            process.clear(digest)
        self._until(self._all_settled, "namespaces are cleared")
        inside.check_empty(self.service, self.ledger)
        self._count_what_the_brain_counted()

    def _count_what_the_brain_counted(self) -> None:
        counters = self.service.counters
        for reason, chunks in counters.discarded.items():
            self.counts[f"discarded {reason}"] += chunks
        self.counts["chunks evicted"] += counters.evictions
        self.counts["leases expired"] += counters.leases_expired
        self.counts["slots of another size overwritten"] = self.arena.resized


def _cumulated(weights: list[float]) -> list[float]:
    total, cumulated = 0.0, []
    for weight in weights:
        total += weight
        cumulated.append(total)
    return cumulated
