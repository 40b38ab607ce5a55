"""One seed: an engine, a server, a clock, random events; and an end at which nothing may be left."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

from .content import Prompts, require
from .engine import Engine
from .pool import Pool
from .server import TTLS_S, Server
from .shapes import draw_day, draw_options, draw_ways

TOKENS_MAX = 60
STEPS_TO_END_MAX = 4000


class World:
    def __init__(self, seed: int) -> None:
        rng = self._rng = Random(seed)
        remote = Random(f"remote {seed}")  # as with the tiers
        self.options = replace(draw_options(rng), coming_wait_s=remote.choice((0.0, 0.0, 0.03, 0.4)))
        self.ways = draw_ways(rng, self.options, 2 * TOKENS_MAX)
        self.day = draw_day(rng)
        self._tiers = Random(f"tiers {seed}")  # so that disks change nothing else in a seed
        self.server = Server(self.options, self.day, rng, self._tiers, remote)
        self._demote = self._tiers.choice((0.0, 0.05, 0.5))
        self._pool = Pool(self.ways.blocks, self.options.ranks)
        self.engine = Engine(self.options, self.ways, day=self.day, rng=rng, server=self.server, pool=self._pool)
        self._prompts = Prompts(rng, TOKENS_MAX)
        self._pace = rng.choice((1, 3, 12))
        """Steps of the ranks per step of the engine."""
        self._company = rng.choice((0.0, 0.02, 0.1)) if self.options.stores else 0.1
        """How often another engine stores something."""
        if rng.random() < 0.3:
            for _ in range(3):
                self.server.bring(self._prompts.seen_elsewhere())
            self.server.know_nothing_of_disks()
        self._arrivals = 0
        self._names: list[str] = []
        self.now_s = 1000.0

    def event(self) -> None:
        rng, day, engine = self._rng, self.day, self.engine
        self.now_s += rng.random() * 0.003
        self.server.expire(self.now_s)
        what = rng.random()
        if what < 0.1 and len(engine.alive) < 12:
            self._arrive()
        elif what < 0.4:
            engine.step(self.now_s, self._prompts)
        elif what < 0.6:
            self._answer()
        else:
            for _ in range(self._pace):
                engine.ranks.advance(self.now_s)
        self._mishap(rng.random(), day.evict, self.server.evict)
        self._mishap(rng.random(), day.restart, self._restart)
        self._mishap(rng.random(), 0.03, self.server.read_disks)
        self._mishap(self._tiers.random(), self._demote, self.server.demote)
        self._mishap(rng.random(), day.down, self._up_or_down)
        self._mishap(rng.random(), day.leap, self._leap)
        self._mishap(rng.random(), day.forget, self._pool.forget)
        self._mishap(rng.random(), self._company, lambda: self.server.bring(self._prompts.seen_elsewhere()))
        if engine.running and rng.random() < day.preempt:
            engine.preempt(rng.choice(engine.running))
        if engine.alive and rng.random() < day.abort:
            candidates = [sequence for sequence in engine.alive if not sequence.aborted]
            if candidates:
                engine.abort(rng.choice(candidates))

    def end(self) -> None:
        """The server recovers and users wait for their requests; then everything must have been returned."""
        self.server.up, self.server.faulty = True, False
        engine = self.engine
        for _ in range(STEPS_TO_END_MAX):
            self.now_s += 0.003
            self._answer()
            for _ in range(4):
                engine.ranks.advance(self.now_s)
            engine.step(self.now_s, self._prompts)
            if not (engine.alive or engine.zombies or engine.lookups or engine.offload.busy()):
                break
        else:
            require(False, f"not at an end: {len(engine.waiting)} wait, {len(engine.parked)} parked")
        self._check_nothing_is_left()
        self._check_what_is_held()

    def counts(self) -> Counter[str]:
        seen = vars(self.engine.offload.statistics)
        numbers = {name: value for name, value in seen.items() if isinstance(value, int)}
        return Counter({**numbers, "generated": self.engine.generated, **self.engine.offload.statistics.skipped_tokens})

    # ---------------------------------------------------------------- events

    def _arrive(self) -> None:
        rng = self._rng
        alive = {sequence.name for sequence in self.engine.alive + self.engine.zombies}
        old = [name for name in self._names if name not in alive]
        name = rng.choice(old) if old and self._may_reuse(rng) else f"r{self._arrivals}"
        self._arrivals += 1
        self._names.append(name)
        self.engine.arrive(name, self._prompts.draw(), rng.choice((0, 1, 9, 30)), self.now_s, faulty=self.server.faulty)

    def _may_reuse(self, rng: Random) -> bool:
        """A name may be reused while jobs of its last owner run, unless the engine asks about jobs by name."""
        return not self.ways.defers_free and rng.random() < 0.2

    def _answer(self) -> None:
        engine = self.engine
        if engine.lookups:
            order = engine.lookups.pop(self._rng.randrange(len(engine.lookups)))
            engine.answer(order, self.server.lookup(order, self.now_s), self.now_s)

    def _mishap(self, draw: float, chance: float, happens: Callable[[], None]) -> None:
        if draw < chance:
            happens()

    def _restart(self) -> None:
        self.server.restart(wipe=self._rng.random() < self.day.wipe)
        self.engine.watch.server_restarted()
        self.engine.ranks.server_died()
        if self._rng.random() < 0.5:
            self._tell_of_loss()

    def _tell_of_loss(self) -> None:
        self.engine.offload.leases_lost()
        for life in self.engine.watch.lives:
            if life.answer is not None and life.answer.lease is not None:
                life.answer, life.questions = None, 0

    def _up_or_down(self) -> None:
        self.server.up = not self.server.up
        if not self.server.up:
            self._restart()

    def _leap(self) -> None:
        self.now_s += self._rng.choice((0.03, 0.3, 2.0, max(TTLS_S) + 1))

    # ---------------------------------------------------------------- checks at the end

    def _check_nothing_is_left(self) -> None:
        engine = self.engine
        require(not self._pool.used, f"blocks {self._pool.used} belong to nobody")
        require(not self.server.leases, f"leases {list(self.server.leases)} are left in the server")
        require(not engine.watch.leases_out, f"leases {engine.watch.leases_out} were not given back")
        require(not engine.watch.jobs and not engine.ranks.tasks, "jobs are left")
        without = [life.name for life in engine.watch.lives if life.summaries != 1]
        require(not without, f"requests {without} were not summed up once")
        seen = engine.offload.statistics
        require(seen.requests == len(engine.watch.lives) == engine.finished, "requests were miscounted")
        brought = seen.tokens_retrieved, seen.tokens_from_disk
        require(brought == engine.watch.brought, f"counts {brought} as brought, expected {engine.watch.brought}")
        require(seen.retrieves_in_flight == seen.stores_in_flight == 0, "jobs in flight were miscounted")

    def _check_what_is_held(self) -> None:
        """Without faults and limits, the server holds every whole chunk that was computed."""
        day = vars(self.day) | {"wipe": 0.0, "preempt": 0.0, "forget": 0.0, "unread": 0.0, "unkeyed": 0.0}
        skipped = self.engine.offload.statistics.skipped_tokens
        if any(day.values()) or set(skipped) - {"below-min", "multimodal"} or not self.options.stores:
            return
        for life in self.engine.watch.lives:
            missing = [index for index, key in enumerate(life.keys) if key not in self.server.chunks]
            require(not missing, f"{life.name}: chunks {missing} of {len(life.keys)} were never stored")
