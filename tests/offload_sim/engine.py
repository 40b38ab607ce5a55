"""A model engine around kvclient.offload: schedules, allocates, preempts, aborts, computes, and verifies everything.

One step: ends are delivered; running requests go on and waiting ones are admitted while there are blocks; stores are
ordered; the model computes; orders go to the ranks.
"""

from collections.abc import Hashable
from random import Random

from kvclient.offload.decide import Offload
from kvclient.offload.values import LookupOrder, Options, RetrieveOrder, StoreOrder
from kvclient.values import Found, RetrieveResult

from .content import Prompts, keys, next_token, require
from .pool import Pool
from .ranks import Ranks
from .sequences import Memory, Sequence
from .server import Server
from .shapes import NULL, Day, Ways
from .watch import Watch


class Engine:
    def __init__(self, options: Options, ways: Ways, *, day: Day, rng: Random, server: Server, pool: Pool) -> None:
        self.offload = Offload(options)
        self.watch = Watch(options, pool)
        self.ranks = Ranks(options.ranks, pool, server, rng)
        self.lookups: list[LookupOrder] = []
        """Lookups on their way to the server."""
        self.waiting: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.running: list[Sequence] = []
        self.zombies: list[Sequence] = []
        """Finished sequences whose blocks a job still needs."""
        self.finished = 0
        self.generated = 0
        self._options, self._ways, self._day, self._rng = options, ways, day, rng
        self._server, self._pool = server, pool
        self._memory = Memory(options, pool, window_slack=rng.choice((0, 1)))
        self._retrieves: list[RetrieveOrder] = []
        self._ok: dict[int, bool] = {}
        self._preempted: list[Sequence] = []
        """Sequences preempted in this step, which are not admitted again in it."""

    @property
    def alive(self) -> list[Sequence]:
        return self.waiting + self.parked + self.running

    # ---------------------------------------------------------------- users

    def arrive(self, name: Hashable, prompt: bytes, output: int, now_s: float, *, faulty: bool) -> None:
        keyed = not (faulty and self._rng.random() < self._day.unkeyed)
        reads = not (faulty and self._rng.random() < self._day.unread)
        named = self._named(prompt) if keyed else []
        life = self.watch.begin(name, len(prompt), named, reads=reads, keyed=keyed)
        sequence = Sequence(name, life, bytearray(prompt), output, [[] for _ in self._options.groups])
        self.waiting.append(sequence)
        if not keyed:
            self.offload.begin_unkeyed(name, tokens=len(prompt), why="multimodal")
            return
        self.offload.begin(name, tokens=len(prompt), keys=b"".join(named), reads=reads)
        self._ask_ahead(now_s)

    def abort(self, sequence: Sequence) -> None:
        self._finish(sequence)
        sequence.aborted = True
        if sequence in self.parked:
            return  # its blocks are being written
        (self.waiting if sequence in self.waiting else self.running).remove(sequence)
        self._let_go(sequence)

    def preempt(self, sequence: Sequence) -> bool:
        """Moves a sequence back to the front of the queue, without its blocks."""
        if self._ways.defers_free and self.offload.holds(sequence.name):
            return False
        self.running.remove(sequence)
        self._memory.free(sequence)
        self.waiting.insert(0, sequence)
        self._preempted.append(sequence)
        sequence.untold = not self._ways.tells_of_preemptions
        if not sequence.untold:
            self.watch.preempted(sequence.life)
            self.offload.preempted(sequence.name)
        return True

    # ---------------------------------------------------------------- a step

    def step(self, now_s: float, prompts: Prompts) -> None:
        self._deliver()
        self._ask_ahead(now_s)
        self._preempted.clear()
        work = [(sequence, count) for sequence in list(self.running) if (count := self._room_to_go_on(sequence))]
        work += self._admit(now_s)
        work = [(sequence, count) for sequence, count in work if sequence not in self._preempted]
        stored = [self._store(sequence, count, now_s) for sequence, count in work]
        for sequence, count in work:
            self._memory.compute(sequence, count)
        retrieves, self._retrieves = self._retrieves, []
        for order in [*retrieves, *stored]:
            if order is not None:
                self.ranks.begin(order)
        for sequence, _ in work:
            if sequence.computed == len(sequence.tokens):
                self._generate(sequence, now_s, prompts)
        self._tidy()

    def answer(self, order: LookupOrder, found: Found, now_s: float) -> None:
        self.watch.answered(order.number, found, now_s)
        self.offload.found(order.number, found)
        self._tidy()

    def _room_to_go_on(self, sequence: Sequence) -> int:
        """Number of tokens to compute in this step, after allocating blocks for them."""
        if sequence not in self.running:
            return 0  # preempted for another
        count = min(len(sequence.tokens) - sequence.computed, self._rng.randint(1, self._ways.step_tokens))
        missing = self._memory.missing(sequence, sequence.computed + count)
        while self._pool.free < len(missing):
            others = [other for other in reversed(self.running) if other is not sequence]
            if not any(self.preempt(other) for other in others):
                return 0
        self._memory.grow(sequence, missing)
        return count

    def _admit(self, now_s: float) -> list[tuple[Sequence, int]]:
        work = []
        for sequence in [sequence for sequence in self.waiting if sequence not in self._preempted]:
            if len(self.running) + len(self.parked) >= self._ways.running_max:
                break
            hbm = self._memory.hbm_hit(sequence.tokens)
            gain = self._match(sequence, 0 if self._ways.defers_free else hbm, now_s)
            if gain is None:
                continue
            if gain:
                known = 0 if self._ways.defers_free else hbm
                if self._ways.takes_less and self._rng.random() < 0.5:
                    gain = self._rng.randint(1, gain)
                if not self._park(sequence, hbm, max(hbm, known + gain)):
                    break
                if sequence in self.parked:
                    continue
            elif not self._admit_computing(sequence, hbm):
                break
            count = self._room_to_go_on(sequence)
            if count:
                work.append((sequence, count))
        return work

    def _park(self, sequence: Sequence, hbm: int, end: int) -> bool:
        """Allocates for a retrieve. Also returns True if a retrieve turned out not to be worth it."""
        ahead = len(sequence.tokens) if self._ways.defers_free else end
        self._memory.adopt(sequence, hbm)
        missing = self._memory.missing_for_retrieve(sequence, end, ahead=ahead)
        if self._pool.free < len(missing):
            self._memory.free(sequence)
            return False
        self._memory.grow(sequence, missing)
        tokens = None if self._ways.defers_free else end - hbm
        order = self.offload.allocated(sequence.name, hbm_tokens=hbm, tables=sequence.tables, tokens=tokens)
        self.waiting.remove(sequence)
        if order is None:
            require(self._ways.defers_free, "match() promised a retrieve")
            self.watch.preempted(sequence.life)
            self.running.append(sequence)
            return True
        require(tokens is None or order.end_tokens == end, "another end than the engine's")
        self.watch.retrieves(sequence.life, order, hbm, sequence.tables)
        self.parked.append(sequence)
        self._retrieves.append(order)
        sequence.retrieve_end, sequence.ranks_left, sequence.retrieve_failed = (
            order.end_tokens,
            self._options.ranks,
            False,
        )
        return True

    def _admit_computing(self, sequence: Sequence, hbm: int) -> bool:
        self._memory.adopt(sequence, hbm)
        if self._pool.free < len(self._memory.missing(sequence, hbm + 1)):
            self._memory.free(sequence)
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.offload.admitted(sequence.name, hbm_tokens=hbm)
        return True

    def _match(self, sequence: Sequence, hbm: int, now_s: float) -> int | None:
        if sequence.untold:  # match() notices it by itself
            sequence.untold = False
            self.watch.preempted(sequence.life)
        tokens, said = len(sequence.tokens), None
        for _ in range(3):
            said = self.offload.match(sequence.name, tokens=tokens, hbm_tokens=hbm, now_s=now_s)
            if said is not None:
                break
            if not (self._send_lookups(sequence, now_s) and self._ways.looks_up_in_line):
                break
        retrieves = self.offload.statistics.retrieves_in_flight
        self.watch.matched(sequence.life, said, tokens=tokens, hbm=hbm, now_s=now_s, retrieves=retrieves)
        self._send_lookups(sequence, now_s)  # a new question, while the present answer stands
        return said

    def _store(self, sequence: Sequence, count: int, now_s: float) -> StoreOrder | None:
        """A store order. A pinning engine counts this step's tokens as computed, the other does not yet."""
        computed = sequence.computed + (0 if self._ways.defers_free else count)
        if not self.offload.computed(sequence.name, computed, now_s):
            return None
        order = self.offload.store(sequence.name, sequence.tables)
        if order is None:
            return None
        self.watch.stores(sequence.life, order, computed)
        if not self._ways.defers_free:
            for block in _blocks(order):
                self._pool.take(block)
        return order

    # ---------------------------------------------------------------- ends

    def _deliver(self) -> None:
        reports, self.ranks.reports = self.ranks.reports, []
        for report in reports:
            order, job = report.order, report.order.job
            if isinstance(order, RetrieveOrder):
                assert isinstance(report.result, RetrieveResult)
                self._ok[job] = self._ok.get(job, True) and report.result.ok
                end = self.offload.retrieve_ended(job, report.rank, report.result)
                if end is not None:
                    self.watch.retrieve_ended(order, ok=end.ok, all_ok=self._ok.pop(job))
                self._wake(order, ok=report.result.ok)
                continue
            assert not isinstance(report.result, RetrieveResult)
            stored = self.offload.store_ended(job, report.rank, report.result)
            if stored is not None:
                self.watch.stored(stored.order, stored.chunks)
                self.watch.store_ended(stored.order)
                if not self._ways.defers_free:
                    for block in _blocks(stored.order):
                        self._pool.give(block)
        self._tidy()

    def _wake(self, order: RetrieveOrder, *, ok: bool) -> None:
        """The engine's own count of ranks, as its aggregator has one."""
        sequence = next(sequence for sequence in self.parked if sequence.name == order.request)
        sequence.ranks_left -= 1
        sequence.retrieve_failed |= not ok
        if sequence.ranks_left:
            return
        self.parked.remove(sequence)
        if sequence.aborted:
            self._let_go(sequence)
        elif not sequence.retrieve_failed:
            self._memory.retrieved(sequence, sequence.retrieve_end)
            self.running.append(sequence)
        elif len(self._options.groups) == 1 and order.hbm_tokens:
            self.running.append(sequence)  # computed again from there, into its present blocks
        else:
            self._memory.free(sequence)
            self.waiting.insert(0, sequence)

    def _generate(self, sequence: Sequence, now_s: float, prompts: Prompts) -> None:
        self._memory.check(sequence)
        if sequence.output_left:
            sequence.output_left -= 1
            self.generated += 1
            sequence.tokens.append(next_token(sequence.tokens))
            self._extend(sequence)
            return
        prompts.remember(sequence.tokens)
        if self._ways.defers_free:
            order = self._store(sequence, 0, now_s)
            if order is not None:
                self.ranks.begin(order)
        self.running.remove(sequence)
        self._finish(sequence)
        self._let_go(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.offload.finish(sequence.name)
        sequence.life.finished = True

    def _extend(self, sequence: Sequence) -> None:
        if len(sequence.tokens) % self._options.chunk_tokens == 0 and sequence.life.keyed:
            named = self._named(sequence.tokens)
            sequence.life.keys.append(named[-1])
            self.offload.extend(sequence.name, named[-1])

    def _let_go(self, sequence: Sequence) -> None:
        if self._ways.defers_free and self.offload.holds(sequence.name):
            self.zombies.append(sequence)
            return
        self._memory.free(sequence)
        self.finished += 1

    def _tidy(self) -> None:
        for sequence in [zombie for zombie in self.zombies if not self.offload.holds(zombie.name)]:
            self.zombies.remove(sequence)
            self._let_go(sequence)
        for lease in self.offload.take_releases():
            self.watch.released(lease)
            self._server.release(lease)
        for summary in self.offload.take_summaries():
            self.watch.summed_up(summary)

    # ---------------------------------------------------------------- helpers

    def _named(self, tokens: bytes | bytearray) -> list[bytes]:
        named = keys(bytes(tokens), self._options.chunk_tokens)
        for index, key in enumerate(named):
            self._server.tokens_of.setdefault(key, bytes(tokens[: (index + 1) * self._options.chunk_tokens]))
        return named

    def _ask_ahead(self, now_s: float) -> None:
        """Asks ahead with a guess of the HBM prefix: nothing, the present one, or far too much."""
        while self._ways.asks_early and (name := self.offload.next_to_ask()) is not None:
            sequence = next(sequence for sequence in self.waiting if sequence.name == name)
            tokens = len(sequence.tokens)
            guess = self._rng.choice((0, self._memory.hbm_hit(sequence.tokens), tokens))
            self.offload.ask(name, now_s, hbm_tokens=guess)
            self._send_lookups(sequence, now_s, is_ahead=True)

    def _send_lookups(self, sequence: Sequence, now_s: float, *, is_ahead: bool = False) -> bool:
        orders = self.offload.take_lookups()
        for order in orders:
            self.watch.asked(sequence.life, order, now_s, is_ahead=is_ahead)
            if self._ways.looks_up_in_line:
                self.answer(order, self._server.lookup(order, now_s), now_s)
            else:
                self.lookups.append(order)
        return bool(orders)


def _blocks(order: StoreOrder) -> list[int]:
    return [block for item in order.blocks for block in item.block_ids if block != NULL]
