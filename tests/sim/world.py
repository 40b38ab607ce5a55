"""The world around one Service: carries messages, keeps time, starts movers, and injects faults. One seed, one world.

All randomness comes from one random.Random, and no set or address decides an order, so a seed is a replay.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

import msgspec

from kvserver.config.remotes import Remote
from kvserver.service.base.events import (
    ArenaGrew,
    Arrived,
    Event,
    GoOn,
    MoverGone,
    PeerGone,
    Reported,
    Tick,
    WorkerGone,
)
from kvserver.service.service import Service
from kvserver.wire.messages import Request

from . import nonsense, operators, service_view
from .content import Garbage, Path
from .disk import Devices, SimDiskMover, rot
from .engines import SimEngine
from .faults import dram_rot
from .initial_disk import leave_behind
from .ledger import Ledger
from .memory import Arena
from .movers import SimMover, Supervisor
from .processes import Process
from .promises import Promises
from .remote import NAMES, REMOTES, SimRemoteMover, Store, several
from .router import Router
from .shapes import Shape
from .shell import BrainDied, Shell
from .subscriber import Subscriber
from .swarm import Swarm

EVENTS_PER_COMPARISON = 4
EVENTS_PER_CATCHING_UP = 40
RECOVERY_STEPS_MAX = 2000
SEED_OF_OTHER = 1 << 40
"""A second remote store has a seed of its own, so far from that of the first."""


class Posted(NamedTuple):
    """A request on its way to the server."""

    request: Request
    descriptor: int
    must_fail: bool
    sound: bool
    only_if: Callable[[Service], bool] | None
    """The request is lost on the way if this is false then."""


class World:
    """The simulated world of one seed."""

    def __init__(self, seed: int, *, remotes: int = 0) -> None:
        """remotes: it has so many remote stores, which are hostile. 0: it may have some, which are not."""
        self.rng = Random(seed)
        self.swarm = Swarm(self.rng)
        self.counts: Counter[str] = Counter()
        self.events = 0
        self.now_ns = 1_000_000_000
        self.calm = False
        """No new work begins and no fault happens."""
        store = Store(self, seed, is_hostile=remotes > 0)
        self.stores: dict[str, Store] = {}
        """Remote stores by name; the only one is ""."""
        if (remotes or store.rng.random() < (0.6 if self.swarm.pledges_much else 0.3)) and self.swarm.verifies:
            other = Store(self, seed + SEED_OF_OTHER, is_hostile=remotes > 0)
            self.stores = {"": store}
            named: tuple[Remote, ...] = (store.rng.choice(REMOTES),)
            if remotes > 1 or (not remotes and other.rng.random() < 0.4):
                self.stores = dict(zip(NAMES, (store, other), strict=True))
                named = several(other.rng)
            self.swarm.bounds = replace(
                self.swarm.bounds,
                remotes=named,
                remote_patience_ms=self.swarm.ms(30) if len(named) > 1 else self.swarm.bounds.remote_patience_ms,
                remote_job_ms=self.swarm.ms(1500),
                remote_tell_ms=self.swarm.ms(20 if self.swarm.pledges_much else 50),
                remote_listen_ms=self.swarm.ms(30 if self.swarm.pledges_much else 100),
                remote_foretold_ms=self.swarm.ms(store.rng.choice((300, 900))),
            )
        bounds = self.swarm.bounds
        self.garbage = Garbage()
        self.arena = Arena(bounds.slab_bytes, bounds.arena_bytes // bounds.slab_bytes)
        self.ledger = Ledger(self.arena)
        self.devices = Devices(bounds.disk_segment_bytes, bounds.disk_devices)
        self.shapes: dict[bytes, Shape] = {
            bytes([index + 1]) * 32: shape for index, shape in enumerate(self.swarm.shapes)
        }
        self.subscriber = Subscriber(self.counts)
        size = {"depth": self.swarm.depth, "fanout": self.swarm.fanout}
        stored_in = dict(list(self.shapes.items())[: self.swarm.engines])
        self.router = Router(seed, stored_in, self.counts, **size)
        self.voided = operators.Voided()
        self.slabs = self.swarm.slabs_at_start
        self.peers: dict[int, Process] = {}
        self.mail: dict[int, deque[Posted]] = {}
        """Peer -> requests on their way."""
        self._feeding = False
        self._eager: deque[int] = deque()
        """Peers whose first message arrives at once."""
        self.gone: deque[Event] = deque()
        """Events that the shell has noticed and not yet fed to the service."""
        self.engines: list[SimEngine] = []
        self.pledged: list[tuple[bytes, Path]] = []
        """(namespace, prefix) of the last pledges, living or not."""
        self._numbers = Counter[str]()
        self._acts = {name: weight for name, weight in self.swarm.acts.items() if weight}
        self._act_names, self._act_weights = list(self._acts), _cumulated(list(self._acts.values()))
        self.supervisor = Supervisor(self)
        left: dict[bytes, list[Path]] = {}
        if self.swarm.begins_cold:
            left = leave_behind(self.devices, bounds, self.shapes, self.rng, **size)
        self.shell = self._start_brain(-1)
        if self.swarm.begins_cold and self.rng.random() < 0.8:
            self._recover()
        for index in range(self.swarm.engines):
            digest = list(self.shapes)[index % len(self.shapes)]
            shape = self.shapes[digest]
            if self.rng.random() < self.swarm.other_sizes:
                shape = shape.held_by(self.rng.choice((1, 2, 3)))
            self.engines.append(SimEngine(self, f"engine{index}", digest, shape, left.get(digest, [])))

    @property
    def verifies(self) -> bool:
        """Copies are summed and compared."""
        return self.swarm.bounds.verifies

    def chance(self, name: str) -> bool:
        return not self.calm and self.rng.random() < self.swarm.chances[name]

    # ---------------------------------------------------------------- the brain

    @property
    def brain(self) -> int:
        """The number of the brain's present life."""
        return self._numbers["brain"]

    @property
    def promises(self) -> Promises:
        """The promises of the present brain."""
        return self.shell.promises

    def feed(self, event: Event, *, must_fail: bool = False, sound: bool = False) -> None:
        """Feeds one event and its immediate consequences."""
        self.events += 1
        if isinstance(event, PeerGone):
            self.mail.pop(event.peer, None)
        self._feeding = True
        try:
            self.shell.feed(event, must_fail=must_fail, sound=sound)
        except BrainDied:
            self.brain_died()
        finally:
            self._feeding = False
        if self.events % EVENTS_PER_COMPARISON == 0:
            service = self.shell.service
            service_view.compare_with_ledger(service, self.ledger, self.rng, self.arena, self.shapes)
            service_view.compare_with_devices(service, self.devices, self.shapes)
            facts = service_view.told(service), service_view.untold(service)
            self.subscriber.check(*facts)
            if self.events % EVENTS_PER_CATCHING_UP == 0:
                self.router.check(*facts)
            self.voided.check(service_view.on_disk(service), are_owed=service_view.clears_are_owed(service))
        self._deliver_eagerly()

    def _start_brain(self, effects_left: int) -> Shell:
        """Starts brains until one lives: a brain may die while it withdraws records that it does not trust."""
        while True:
            self._numbers["brain"] += 1
            try:
                return Shell(self, self.brain, effects_left)
            except BrainDied:
                self.counts["brain died at start"] += 1
                effects_left = -1

    def _recover(self) -> None:
        """Runs recovery before the engines come. Its events do not count for the seed."""
        for _ in range(RECOVERY_STEPS_MAX):
            if service_view.disk_is_recovered(self.shell.service):
                break
            self._step_by_name(self.rng.choice(("mover", "supervisor", "deliver", "deliver", "tick")))
        self.events = 0

    def _lose_memory(self) -> None:
        """The supervisor died too, or the machine rebooted: only the devices keep their contents."""
        bounds = self.swarm.bounds
        self.counts["memory lost"] += 1
        resized = self.arena.resized
        self.arena = Arena(bounds.slab_bytes, bounds.arena_bytes // bounds.slab_bytes)
        self.arena.resized = resized
        self.ledger = Ledger(self.arena)

    def brain_died(self, *, wiped: bool = False) -> None:
        """kill -9 of the brain, with `wiped` of the supervisor too. Its movers are reaped before the next brain starts.
        Clients notice, unless they are stopped.
        """
        self.counts["brain died"] += 1
        self.count_what_the_brain_counted()
        self.supervisor.reap_all()
        if wiped or self.chance("memory-lost"):
            self._lose_memory()
        self.gone.clear()
        self.voided.brain_died()
        for peer in list(self.mail):
            process = self.peers.get(peer)
            if process is None or peer != process.peer or self.rng.random() < 0.5:
                del self.mail[peer]
        if self.chance("forged-rival"):
            service_view.forge_rival(self.shell.service, self.ledger)
        for engine in self.engines:
            engine.leases.clear()
        if self.swarm.verifies_later:
            self.swarm.bounds = replace(self.swarm.bounds, verifies=True)
        self.shell = self._start_brain(int(self.rng.random() * 3) if self.rng.random() < 0.3 else -1)
        self.shell.effects_left = -1
        for engine in self.engines:
            for process in engine.processes:
                if process.alive and not process.stalled:
                    process.disconnect()

    def count_what_the_brain_counted(self) -> None:
        counters = self.shell.service.counters
        for reason, chunks in counters.discarded.items():
            self.counts[f"discarded {reason}"] += chunks
        self.counts["chunks evicted"] += counters.evictions
        self.counts["leases expired"] += counters.leases_expired
        for name in ("disk_evictions", "disk_lost", "disk_reads", "disk_recovered", "disk_writes"):
            self.counts[name] += getattr(counters, name)
        for end, chunks in counters.disk_drained.items():
            self.counts[f"drained {end}"] += chunks
        for reason, chunks in counters.disk_refused.items():
            self.counts[f"disk refused {reason}"] += chunks
        for name, count in counters.totals().items():
            for key, value in count.items() if isinstance(count, dict) else [("", count)]:
                self.counts[f"counted {name} {key}".rstrip()] += value
        arc = self.shell.service.status(self.now_ns).arc
        if arc is not None:
            for name, count in msgspec.structs.asdict(arc).items():
                self.counts[f"arc {name}"] += count
        self.counts["shards with other bytes"] += sum(counters.digest_mismatches.values())
        for direction, histogram in counters.job_seconds.items():
            self.counts[f"counted job_seconds {direction}"] += histogram.count
        self.counts["slots of another size overwritten"] = self.arena.resized

    # ---------------------------------------------------------------- services for processes

    def new_peer(self, process: Process) -> int:
        self._numbers["peer"] += 1
        self.peers[self._numbers["peer"]] = process
        return self._numbers["peer"]

    def new_number(self) -> int:
        """A peer number without a process: an operator's, for one command."""
        self._numbers["peer"] += 1
        return self._numbers["peer"]

    def new_descriptor(self) -> int:
        self._numbers["descriptor"] += 1
        return self._numbers["descriptor"]

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
        """Sends a request. It arrives now or later, but in order with the peer's other messages."""
        self.mail.setdefault(peer, deque()).append(Posted(request, descriptor, must_fail, sound, only_if))
        if len(self.mail[peer]) == 1 and not self.calm and not self.chance("message-waits"):
            self._eager.append(peer)
            self._deliver_eagerly()

    def _deliver_eagerly(self) -> None:
        """Delivers messages that do not wait, as soon as the brain is free."""
        while self._eager and not self._feeding:
            peer = self._eager.popleft()
            if peer in self.mail:
                self._deliver(peer)

    def disconnected(self, process: Process) -> None:
        """A live process gives up its connections."""
        self.gone.extend(PeerGone(peer) for peer in (process.peer, process.local_peer, process.lane_peer) if peer)

    def lane_closed(self, peer: int) -> None:
        """A live process closed its lane. The shell notices after reading the lane's messages, or drops them."""
        while self.rng.random() < 0.7 and self.mail.get(peer):
            self._deliver(peer)
        self.gone.append(PeerGone(peer))

    def process_died(self, process: Process) -> None:
        """The shell notices both ends of a worker in any order. Messages already sent may arrive first, or never."""
        for peer in (process.peer, process.local_peer, process.lane_peer):
            if peer in self.mail and self.rng.random() < 0.4:
                del self.mail[peer]
        if process.brain != self.brain:
            return  # the present brain never heard of it
        peers = (process.peer, process.local_peer, process.lane_peer)
        news: list[Event] = [PeerGone(peer) for peer in peers if peer]
        if process.board is not None:
            news.append(WorkerGone(process.session))
        self.rng.shuffle(news)
        self.gone.extend(news)

    # ---------------------------------------------------------------- steps

    def be_calm(self) -> None:
        """No new work begins and no fault happens from now on."""
        self.calm = True
        self.swarm.bounds = replace(self.swarm.bounds, scrub_bytes_per_s=0)
        service_view.end_scrubs(self.shell.service)
        self.devices.notes_fail = ""
        self.shell.effects_left = -1

    def grow(self, slabs: int) -> None:
        """Grows the arena to that many slabs."""
        if slabs > self.slabs:
            self.slabs = slabs
            self.feed(ArenaGrew(slabs, ""))

    def tick_after(self, milliseconds: int) -> None:
        self.now_ns += milliseconds * 1_000_000
        self.feed(Tick())

    def step(self) -> None:
        """Takes one random step."""
        self.now_ns += int(self.rng.random() * 2_000_000 * self.swarm.step_ms)
        for store in self.stores.values():
            if store.rng.random() < store.act_share:
                store.act()
            if store.streams is not None:
                store.streams.act()
        name = self.rng.choices(self._act_names, cum_weights=self._act_weights)[0]
        self._step_by_name(name)

    def _step_by_name(self, name: str) -> None:
        rng = self.rng
        match name:
            case "deliver":
                self.deliver_something()
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
                    self.grow(self.slabs + 1 + int(rng.random() * (most - self.slabs)))
            case "plan-store":
                self._engine().plan_store()
            case "plan-lookup":
                self._engine().plan_lookup()
            case "plan-pledge":
                self._engine().plan_pledge()
            case "plan-pledged-store":
                self._engine().plan_pledged_store()
            case "plan-await":
                self._engine().plan_await()
            case "unpledge":
                self._engine().unpledge()
            case "plan-mixed-lookup":
                self._engine().plan_mixed_lookup()
            case "release":
                self._engine().release()
            case "resume":
                self._resume()
            case "admin":
                operators.act(self)
            case "clear-prefix":
                operators.clear_prefix(self)
            case "rot":
                rot(self)
            case "dram-rot":
                dram_rot(self)
            case "brain-dies":
                self.shell.effects_left = int(rng.random() * 6)
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
            case "drain" if process.ready:
                devices = self.swarm.bounds.disk_devices
                fullest = service_view.fullest_device(self.shell.service)
                device = self.rng.choice((-1, *range(devices), devices, *[fullest] * 9))
                process.drain(device, exists=0 <= device < devices)
            case "lane" if process.ready:
                process.open_lane()
            case "give-lane-up" if process.ready:
                process.give_lane_up()
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

    def deliver_something(self) -> bool:
        """Delivers one message or notice from a random source that has one."""
        sources: list[object] = [peer for peer, mail in self.mail.items() if mail]
        reporting = [mover for mover in self.supervisor.movers.values() if mover.reports]
        sources += reporting
        if self.gone and not (isinstance(self.gone[0], GoOn) and self.chance("go-on-waits")):
            sources.append("gone")
        elif self.gone:
            self.gone.rotate(-1)
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
            assert isinstance(source, SimMover | SimDiskMover | SimRemoteMover)
            self.feed(Reported(source.number, source.reports.popleft()))
        return True

    def _deliver(self, peer: int) -> None:
        mail = self.mail[peer]
        posted = mail.popleft()
        if not mail:
            del self.mail[peer]
        if posted.only_if is not None and not posted.only_if(self.shell.service):
            return
        if posted.descriptor >= 0:
            self.shell.descriptors[posted.descriptor] = self.peers[peer].pool
        self.feed(Arrived(peer, posted.request, posted.descriptor), must_fail=posted.must_fail, sound=posted.sound)


def _cumulated(weights: list[float]) -> list[float]:
    total, cumulated = 0.0, []
    for weight in weights:
        total += weight
        cumulated.append(total)
    return cumulated
