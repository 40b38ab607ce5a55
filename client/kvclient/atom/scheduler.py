"""The scheduler half of the ATOM connector: translates between ATOM's scheduler and kvclient.offload.

Rule 1: it decides nothing.

Rule 2: sequences are identified as objects, because ATOM reuses their ids.

Rule 3: a sequence whose blocks or slot a job reads or writes is in `jobs` until ATOM has reported the job's end. Only
then may its blocks be freed. This must hold after a bug of ours too, so `jobs` does not depend on decide.py.

ATOM asks once, synchronously, what can be loaded. It cannot be told to ask again. So match() waits for the answer, no
longer than a lookup may take. A server that did not answer is not asked again before it shows a sign of life. What a
remote store may bring later is not awaited: coming_wait_s is 0.

A state of a request is right at one token (states.py). It is stored only if the last forward ended at the end of a
chunk, with the step after that forward. A load brings it only to a sequence of which HBM has nothing: otherwise ATOM
restores a state of its own in the first forward after the load.
"""

import itertools
import logging
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from kvclient.atom.aborts import Aborts
from kvclient.atom.jobs import AtomJobs, EndedJob
from kvclient.atom.preemption_gaps import Gaps
from kvclient.atom.states import States
from kvclient.atom.steps import NAMESPACE, Name, Seq, Step
from kvclient.atom.versions import SEQUENCE, STATEFUL, check_fields
from kvclient.client import Client
from kvclient.keys import chunk_keys
from kvclient.offload.decide import Offload
from kvclient.offload.lookup_exchange import LookupExchange
from kvclient.offload.ranges import usable_tokens
from kvclient.offload.values import Options, RetrieveOrder, Statistics, StoreOrder
from kvclient.values import RetrieveResult, StoreResult

log = logging.getLogger("atom.kvserver")

SWEPT = 8
"""Sequences checked per step for an end that ATOM does not report, as when a waiting sequence is aborted."""
NAMESPACE_WAIT_S = 60.0
"""How long an idle engine keeps polling for the ranks' namespace."""


class _Life:
    """A sequence, from its first call until ATOM has finished it."""

    def __init__(self, seq: Seq, name: Name) -> None:
        self.seq = seq
        """Reference that keeps its id() from being reused."""
        self.name = name
        self.boundary = 0
        """Token at which it goes over from computing to loading. 0 if it does not."""
        self.is_keyed = True
        """False if it has no safe keys. Kept here because ATOM forgets why."""
        self.is_offered = False
        """True if match() returned more than 0 and ATOM has not allocated since."""
        self.whole_tokens = seq.num_prompt_tokens
        """Leading tokens that may be stored. After them ATOM may have left out KV."""
        self.seen_tokens = 0
        """Tokens that were computed when it got its blocks or the last step was made. If no more are, its slot may have
        gone on, or ATOM has yet to fill it."""
        self.seen_fork = -1
        """The slot that its next forward was to read when the last step was made. -1: its own."""
        self.trusted_tokens = sys.maxsize
        """Leading tokens that were certainly computed from its own state."""


class Scheduler:
    """One engine's scheduler half, for all ranks and stages. Belongs to the scheduler's thread."""

    def __init__(self, client: Client, options: Options, *, state_rows: int = 0) -> None:
        """options: ranks=1, because ATOM itself waits until all ranks and stages have reported. coming_wait_s=0.

        state_rows: rows for states of requests, if there is a group of them. 0 otherwise.
        """
        assert options.ranks == 1
        assert not options.coming_wait_s
        assert (state_rows > 0) != options.is_plain
        self.jobs = AtomJobs()
        self._aborts = Aborts(self.jobs)
        self._gaps = Gaps(options.chunk_tokens)
        self.untold: list[RetrieveOrder] = []
        """Retrieves that the engine waits for and that no rank has received yet."""
        self.untold_stores: list[StoreOrder] = []
        """Stores that no rank has received yet. Their blocks are held already."""
        self.handoffs: set[int] = set()
        """id() of the sequences that compute up to their boundary."""
        self.states = States(state_rows) if state_rows else None
        self._options = options
        self._offload = Offload(options)
        self._exchange = LookupExchange(client, self._offload, log)
        self._patience_s = options.lookup_deadline_s
        self._lives: dict[int, _Life] = {}
        """id() of a sequence -> its life."""
        self._numbers = itertools.count(1)
        self._storing: dict[int, _Life] = {}
        """id() -> life, for sequences that may have chunks to store."""
        self._sweep: Iterator[int] = iter(())
        self._namespace_due_s = time.monotonic() + NAMESPACE_WAIT_S
        self._has_said = False

    @property
    def statistics(self) -> Statistics:
        return self._offload.statistics

    def wait_connected(self) -> None:
        self._exchange.wait_connected()

    @property
    def namespace(self) -> bytes:
        """The namespace of all ranks. Empty until they have reported it."""
        return self._exchange.namespace

    # ---------------------------------------------------------------- admission

    def match(self, seq: Seq) -> int:
        """Tokens that can be loaded. ATOM reports only later how many of them it has itself."""
        life = self._life_of(seq)
        life.boundary, life.is_offered = 0, False
        self.handoffs.discard(id(seq))
        self._exchange.notice_a_loss()
        self._exchange.listen()
        tokens = self._match(life, hbm_tokens=0)
        while tokens is None and self._offload.is_asking(life.name):
            self._exchange.wait(self._patience_s)
            tokens = self._match(life, hbm_tokens=0)
        life.is_offered = bool(tokens)
        return tokens or 0

    def allocated(self, seq: Seq) -> None:
        """The sequence has its blocks. After match() > 0, should_park() follows."""
        life = self._life_of(seq)
        self._gaps.look()
        if life.is_keyed:  # other sequences store nothing
            self._gaps.allocated(seq)
            life.whole_tokens = self._gaps.whole_tokens(seq)
        life.seen_tokens, life.seen_fork, life.trusted_tokens = seq.num_cached_tokens, -1, sys.maxsize
        is_offered, life.is_offered = life.is_offered, False
        if not is_offered:
            self._offload.admitted(life.name, hbm_tokens=seq.num_cached_tokens)
        if not self._offload.stored_whole(life.name):
            self._storing[id(seq)] = life

    def should_park(self, seq: Seq) -> bool:
        """Whether the sequence waits for a load of the tokens after its own prefix, which is known now."""
        life = self._life_of(seq)
        if self.states is not None:
            return self._retrieve(life)
        boundary = self._offload.handoff(life.name, hbm_tokens=seq.num_cached_tokens)
        if boundary is not None:
            life.boundary = seq.offload_handoff_boundary_tokens = boundary
            self.handoffs.add(id(seq))
            return False
        return self._retrieve(life)

    def chunk_until_handoff(self, seq: Seq, chunk_tokens: int) -> int:
        """The number of tokens to compute first, at most up to the boundary."""
        left = self._lives[id(seq)].boundary - seq.num_cached_tokens
        return min(chunk_tokens, left) if left > 0 else chunk_tokens

    def chunk_until_state(self, seq: Seq, chunk_tokens: int) -> int:
        """The number of tokens to compute first, so that a state is right at the end of a chunk that is not held.

        A sequence with output is not cut: ATOM could take the first part for all of it (preemption_gaps.py).
        """
        life = self._lives[id(seq)]
        may_store = life.is_keyed and self._options.stores and bool(self.namespace) and self._exchange.connected
        has_row = self.states is not None and self.states.has_row_for_store
        if not may_store or not has_row or seq.num_tokens > seq.num_prompt_tokens:
            return chunk_tokens
        begin, chunk = seq.num_cached_tokens, self._options.chunk_tokens
        end = min((begin + chunk_tokens) // chunk * chunk, usable_tokens(self._options, seq.num_tokens))
        is_new = end > max(begin, self._offload.held_tokens(life.name))
        return end - begin if is_new and end >= self._options.gain_min else chunk_tokens

    def should_park_now(self, seq: Seq) -> bool:
        """Whether a sequence in `handoffs` waits for its load now. Called in every step.

        A sequence that ATOM computed past the boundary goes on computing.
        """
        life = self._lives[id(seq)]
        if seq.num_cached_tokens < life.boundary:
            return False
        life.boundary = 0
        self.handoffs.discard(id(seq))
        if self._match(life, hbm_tokens=seq.num_cached_tokens):
            return self._retrieve(life)
        self._offload.admitted(life.name, hbm_tokens=seq.num_cached_tokens)
        return False

    # ---------------------------------------------------------------- steps

    def step(self, *, runs: bool = False) -> Step:
        """The workers' jobs for the next step. runs: ATOM's running sequences made progress in the previous step.

        Before the workers see the jobs, everything that ATOM counts as computed has been launched on their streams.
        """
        self._exchange.listen()
        self._exchange.tidy()
        self._aborts.look(runs=runs)
        self._end_the_unsaid()
        now_s = time.monotonic()
        if not self.namespace and now_s >= self._namespace_due_s and not self._has_said:
            self._has_said = True
            log.warning(
                "no cache yet: not all ranks have said the same namespace; weights are hashed, or ranks disagree"
            )
        for life in list(self._storing.values()):
            self._store_due(life, now_s)
            life.seen_tokens = life.seq.num_cached_tokens
        if self.states is not None:
            self._distrust_late_forks()
            self.untold.extend(self.states.take_loads())
        return self._take_untold()

    def last_step(self, why: str) -> Step:
        """The step after a bug. It ends what the engine waits for, which only workers can report: loads are refused."""
        waiting = self.states.take_waiting() if self.states is not None else ()
        self.untold[:] = [order._replace(refused=why) for order in (*self.untold, *waiting)]
        return self._take_untold()

    def _take_untold(self) -> Step:
        states = self.states.of((*self.untold, *self.untold_stores)) if self.states is not None else {}
        step = Step(tuple(self.untold), tuple(self.untold_stores), states)
        self.untold.clear()
        self.untold_stores.clear()
        return step

    def ended(self, jobs: Mapping[Any, EndedJob], *, failed: Container[Any], gaps: Container[Any]) -> None:
        """Take jobs that all ranks have ended, by ATOM's operation ids. failed: loads that did. gaps: stores that left
        out chunks."""
        for operation, job in jobs.items():
            if self.states is not None:
                self.states.ended(operation.generation)
            if job.is_retrieve:
                why = "rank-failed" if operation in failed else ""
                load = RetrieveResult(not why, 0, why)
                end = self._offload.retrieve_ended(operation.generation, 0, load, seconds=job.seconds)
                if end is not None and why:
                    self._store_again(end.order)
            else:
                why = "gap" if operation in gaps else ""
                store = StoreResult(0, 0, 0, why) if why else StoreResult(job.chunks, job.chunks, 0, "")
                self._offload.store_ended(operation.generation, 0, store, seconds=job.seconds)
        self._exchange.tidy()

    def learn(self, operations: Iterable[Any]) -> None:
        """Take the namespace that all ranks have registered.

        Called again after the engine slept, perhaps with new weights. Then nothing from before is found or continued.
        """
        for operation in operations:
            name = getattr(operation, "req_id", None)
            if isinstance(name, str) and name.startswith(NAMESPACE):
                self._use_namespace(bytes.fromhex(name.removeprefix(NAMESPACE)))

    def may_free(self, seq: Seq) -> bool:
        """Whether no job reads or writes the sequence's blocks. Stores its due chunks first, because later may be too
        late."""
        self._gaps.look()
        life = self._storing.get(id(seq))
        if life is not None:
            self._exchange.listen()
            self._store_due(life, time.monotonic())
        return not self.jobs.holds(seq)

    def finished(self, seq: Seq) -> None:
        """The sequence has finished or was aborted. Idempotent. Its jobs go on to their ends."""
        life = self._lives.get(id(seq))
        if life is None:
            return
        self._gaps.look()
        if id(seq) in self._storing:
            self._exchange.listen()
            self._store_due(life, time.monotonic())
        self._end(life)

    def released(self, seq: Seq) -> None:
        """The sequence has lost its blocks. If it was preempted it asks again; if it has ended, nothing more is
        stored."""
        life = self._lives.get(id(seq))
        if life is not None and seq.is_finished:
            self._gaps.look()
            self._end(life)

    def busy(self) -> bool:
        """Whether an idle engine has to keep polling. All reasons end by themselves."""
        learns = not self.namespace and time.monotonic() < self._namespace_due_s
        return learns or bool(self.untold or self.untold_stores) or self._offload.busy() or len(self._exchange) > 0

    def close(self) -> None:
        self._exchange.close()

    # ---------------------------------------------------------------- lives

    def _life_of(self, seq: Seq) -> _Life:
        life = self._lives.get(id(seq))
        if life is None:
            check_fields("Sequence", seq, SEQUENCE if self.states is None else (*SEQUENCE, *STATEFUL))
            life = self._lives[id(seq)] = _Life(seq, Name(seq.id, next(self._numbers)))
            self._begin(life)
        return life

    def _begin(self, life: _Life) -> None:
        seq = life.seq
        tokens = seq.num_prompt_tokens
        # Placeholder tokens are the same for every image.
        is_odd = seq.has_per_req_cache != (self.states is not None)
        why = "multimodal" if seq.multimodal_data is not None else "per-request-state" if is_odd else ""
        life.is_keyed = not why
        if why:
            self._offload.begin_unkeyed(life.name, tokens=tokens, why=why)
        else:
            keys = chunk_keys(seq.token_ids[:tokens], self._options.chunk_tokens)
            self._offload.begin(life.name, tokens=tokens, keys=keys)

    def _end(self, life: _Life) -> None:
        key = id(life.seq)
        self._offload.finish(life.name)
        self.handoffs.discard(key)
        self._gaps.forget(life.seq)
        self._storing.pop(key, None)
        self._lives.pop(key, None)

    def _end_the_unsaid(self) -> None:
        """End a few lives whose sequence ATOM has finished without telling."""
        keys = list(itertools.islice(self._sweep, SWEPT))
        if not keys and self._lives:
            self._sweep = iter(list(self._lives))
        for key in keys:
            life = self._lives.get(key)
            if life is not None and life.seq.is_finished and not self.jobs.holds(life.seq):
                self._end(life)

    # ---------------------------------------------------------------- jobs

    def _retrieve(self, life: _Life) -> bool:
        seq = life.seq
        tables = [seq.block_table]
        if self.states is not None:
            if seq.num_cached_tokens or seq.per_req_cache_group < 0:
                self._offload.admitted(life.name, hbm_tokens=seq.num_cached_tokens)
                return False
            tables.append(self.states.table_for_load(seq.num_tokens // self._options.chunk_tokens))
        order = self._offload.allocated(life.name, hbm_tokens=seq.num_cached_tokens, tables=tables)
        if order is None:
            return False
        seq.offload_load_start_tokens = order.hbm_tokens
        seq.offload_loaded_tokens = order.end_tokens
        # Flags left by a load before a preemption would make ATOM believe that this load has ended.
        seq.offload_loaded = seq.offload_load_failed = False
        self.jobs.begin(order, seq)
        self._aborts.parked(seq)
        if self.states is None:
            self.untold.append(order)
        else:
            self.states.wait(order, slot=seq.per_req_cache_group)
        return True

    def _store_due(self, life: _Life, now_s: float) -> None:
        seq = life.seq
        if life.boundary or not seq.block_table:  # waiting for its handoff, or preempted
            return
        computed = min(seq.num_cached_tokens, seq.num_prompt_tokens, life.whole_tokens)
        if self._offload.computed(life.name, computed, now_s):
            tables = [seq.block_table]
            if self.states is not None:
                tables.append(self._state_table(life, self.states, computed))
            order = self._offload.store(life.name, tables)
            if order is not None:
                self.jobs.begin(order, seq)
                self.untold_stores.append(order)
                if self.states is not None:
                    self.states.stored(order, slot=_slot_of(seq))
        if self._offload.stored_whole(life.name):
            self._storing.pop(id(seq), None)

    def _state_table(self, life: _Life, states: States, computed: int) -> list[int]:
        """The table of rows of a sequence, with the row that its state goes to if it is stored."""
        tokens = life.seq.num_cached_tokens
        chunks, inside = divmod(computed, self._options.chunk_tokens)
        is_right = tokens == computed and tokens > life.seen_tokens and not inside and _slot_of(life.seq) >= 0
        return states.table_for_store(chunks, has_state=is_right)

    def _distrust_late_forks(self) -> None:
        """Find sequences whose fork is pending in a second step: ATOM may have given that slot away.

        In a prefill num_cached_tokens is where the fork was made. In decode it stands still, and the checkpoint is.
        """
        for life in self._lives.values():
            seq = life.seq
            fork = seq.state_fork_src
            if fork >= 0 and fork == life.seen_fork and life.is_keyed:
                first = max(seq.num_cached_tokens, seq.last_checkpoint_pos)
                if first < life.trusted_tokens:
                    life.trusted_tokens = first
                    life.whole_tokens = min(life.whole_tokens, first)
                    self._gaps.distrust(seq, first)
            life.seen_fork = fork

    def _store_again(self, order: RetrieveOrder) -> None:
        """Store the tokens of a failed load again: they are computed now, and the server may not have them."""
        assert isinstance(order.request, Name)
        for key, life in self._lives.items():
            if life.name == order.request:
                self._storing[key] = life

    # ---------------------------------------------------------------- the server

    def _match(self, life: _Life, *, hbm_tokens: int) -> int | None:
        now_s = time.monotonic()
        tokens = self._offload.match(life.name, tokens=life.seq.num_tokens, hbm_tokens=hbm_tokens, now_s=now_s)
        self._exchange.send()
        return tokens

    def _use_namespace(self, namespace: bytes) -> None:
        if self.namespace and namespace != self.namespace:
            for life in [life for life in self._lives.values() if life.is_keyed]:
                self._end(life)
        self._exchange.use_namespace(namespace)
        log.info("namespace of all ranks namespace=%s", namespace.hex()[:16])


def _slot_of(seq: Seq) -> int:
    """The slot whose state is that of all computed tokens. A fork gives the sequence a new one for its next forward."""
    return seq.state_fork_src if seq.state_fork_src >= 0 else seq.per_req_cache_group
