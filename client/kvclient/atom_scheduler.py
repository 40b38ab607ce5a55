"""The scheduler half of the ATOM connector: translates what ATOM's scheduler says and asks to kvclient.offload.

Rule 1: it decides nothing. Rule 2: sequences are told apart as objects; their ids are used again. Rule 3: whatever has
its blocks read or written by a job is in `jobs` until ATOM has reported the job's end, and may be freed only then. That
holds also after a bug of ours, so `jobs` needs nothing of offload.py.

ATOM asks once, and synchronously, what can be loaded: there is no "ask again". So the answer is waited for here, for
no longer than a lookup may take, and a server that did not answer is not asked again before it gives a sign of life.
"""

import itertools
import logging
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from kvclient.atom_aborts import Aborts
from kvclient.atom_gaps import Gaps
from kvclient.atom_jobs import AtomJobs
from kvclient.atom_steps import NAMESPACE, Name, Seq, Step
from kvclient.atom_versions import SEQUENCE, check_fields
from kvclient.client import Client
from kvclient.keys import chunk_keys
from kvclient.offload import Offload
from kvclient.offload_asking import Asking
from kvclient.offload_values import Options, RetrieveOrder, Statistics, StoreOrder
from kvclient.values import RetrieveResult, StoreResult

log = logging.getLogger("atom.kvserver")

SWEPT = 8
"""Sequences looked at in a step, whether ATOM has ended them without a word: those that were aborted while waiting."""
NAMESPACE_WAIT_S = 60.0
"""How long an idle engine is kept polling for the ranks' namespace."""


class _Life:
    """A sequence that was looked at, until ATOM has finished it and nothing of it is in flight."""

    def __init__(self, seq: Seq, name: Name) -> None:
        self.seq = seq
        """Held, so that its id() belongs to nobody else meanwhile."""
        self.name = name
        self.boundary = 0
        """Where it is handed over from computing to loading; 0 when it is not."""
        self.is_keyed = True
        """False for one that no name is safe for. ATOM forgets why, so the life has to remember it."""
        self.is_offered = False
        """match() said more than 0, and ATOM has not allocated since."""
        self.whole_tokens = seq.num_prompt_tokens
        """Behind these nothing is stored: ATOM has left KV out there."""


class Scheduler:
    """One engine's scheduler, for all its ranks and stages. Belongs to its thread."""

    def __init__(self, client: Client, options: Options) -> None:
        """options: ranks=1, because ATOM itself waits until all ranks and stages have reported."""
        assert options.ranks == 1
        self.jobs = AtomJobs()
        self._aborts = Aborts(self.jobs)
        self._gaps = Gaps(options.chunk_tokens)
        self.untold: list[RetrieveOrder] = []
        """Retrieves that the engine waits for and no rank knows of yet."""
        self.untold_stores: list[StoreOrder] = []
        """That no rank knows of yet; their blocks are held already."""
        self.handoffs: set[int] = set()
        """id() of sequences that compute up to their boundary."""
        self._options = options
        self._offload = Offload(options)
        self._asking = Asking(client, self._offload, log)
        self._patience_s = options.lookup_deadline_s
        self._lives: dict[int, _Life] = {}
        """By id() of their sequences."""
        self._numbers = itertools.count(1)
        self._storing: dict[int, _Life] = {}
        """Those of which chunks may become due, by id()."""
        self._sweep: Iterator[int] = iter(())
        self._namespace_due_s = time.monotonic() + NAMESPACE_WAIT_S
        self._has_said = False

    @property
    def statistics(self) -> Statistics:
        return self._offload.statistics

    def wait_connected(self) -> None:
        self._asking.wait_connected()

    @property
    def namespace(self) -> bytes:
        """Of all ranks; empty until they have said it."""
        return self._asking.namespace

    # ---------------------------------------------------------------- admission

    def match(self, seq: Seq) -> int:
        """Tokens that can be loaded, before ATOM says how many of them it has itself."""
        life = self._life_of(seq)
        life.boundary, life.is_offered = 0, False
        self.handoffs.discard(id(seq))
        if not self.namespace:
            return 0
        self._asking.notice_a_loss()
        self._asking.listen()
        tokens = self._match(life, hbm_tokens=0)
        while tokens is None and self._offload.is_asking(life.name):
            self._asking.wait(self._patience_s)
            tokens = self._match(life, hbm_tokens=0)
        life.is_offered = bool(tokens)
        return tokens or 0

    def allocated(self, seq: Seq) -> None:
        """It has its blocks. When match() has said more than 0, should_park() follows."""
        life = self._life_of(seq)
        self._gaps.look()
        if life.is_keyed:  # of others nothing is stored
            self._gaps.allocated(seq)
            life.whole_tokens = self._gaps.whole_tokens(seq)
        is_offered, life.is_offered = life.is_offered, False
        if not is_offered:
            self._offload.admitted(life.name, hbm_tokens=seq.num_cached_tokens)
        if not self._offload.stored_whole(life.name):
            self._storing[id(seq)] = life

    def should_park(self, seq: Seq) -> bool:
        """Whether it waits for a load of what lies behind its own prefix, which is known now."""
        life = self._life_of(seq)
        boundary = self._offload.handoff(life.name, hbm_tokens=seq.num_cached_tokens)
        if boundary is not None:
            life.boundary = seq.offload_handoff_boundary_tokens = boundary
            self.handoffs.add(id(seq))
            return False
        return self._retrieve(life)

    def chunk_until_handoff(self, seq: Seq, chunk_tokens: int) -> int:
        """At most so many tokens are computed first."""
        left = self._lives[id(seq)].boundary - seq.num_cached_tokens
        return min(chunk_tokens, left) if left > 0 else chunk_tokens

    def should_park_now(self, seq: Seq) -> bool:
        """Of a sequence in `handoffs`, at every step. One that was computed too far goes on to its end."""
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
        """What the workers are to do next. All that ATOM counts as computed has been launched on their streams before
        they see it. runs: ATOM's running sequences got on in the step before."""
        self._asking.listen()
        self._tidy()
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
        step = Step(tuple(self.untold), tuple(self.untold_stores))
        self.untold.clear()
        self.untold_stores.clear()
        return step

    def ended(
        self, *, loaded: Iterable[Any], failed: Iterable[Any], saved: Mapping[Any, int], gaps: Container[Any]
    ) -> None:
        """Of all ranks, jobs that were in flight until now, by ATOM's operation ids; of stores with their chunks.
        gaps: stores behind which chunks are missing."""
        for operation, why in [*((one, "") for one in loaded), *((one, "rank-failed") for one in failed)]:
            end = self._offload.retrieve_ended(operation.generation, 0, RetrieveResult(not why, 0, why))
            if end is not None and why:
                self._store_again(end.order)
        for operation, chunks in saved.items():
            result = StoreResult(0, 0, 0, "gap") if operation in gaps else StoreResult(chunks, chunks, 0, "")
            self._offload.store_ended(operation.generation, 0, result)
        self._tidy()

    def learn(self, operations: Iterable[Any]) -> None:
        """All ranks have registered, under one namespace; again when the engine has slept and its weights may be
        others: then nothing of before is found, nor goes on under a name that is not its own."""
        for operation in operations:
            name = getattr(operation, "req_id", None)
            if isinstance(name, str) and name.startswith(NAMESPACE):
                self._use_namespace(bytes.fromhex(name.removeprefix(NAMESPACE)))

    def may_free(self, seq: Seq) -> bool:
        """False while a job reads or writes its blocks. Chunks that are due are taken first: afterwards it may be too
        late."""
        self._gaps.look()
        life = self._storing.get(id(seq))
        if life is not None:
            self._asking.listen()
            self._store_due(life, time.monotonic())
        return not self.jobs.holds(seq)

    def finished(self, seq: Seq) -> None:
        """Finished or aborted; may be said several times. Jobs go on to their ends."""
        life = self._lives.get(id(seq))
        if life is None:
            return
        self._gaps.look()
        if id(seq) in self._storing:
            self._asking.listen()
            self._store_due(life, time.monotonic())
        self._end(life)

    def released(self, seq: Seq) -> None:
        """Its blocks are not its own any more. One that was preempted goes on, and asks again; of one that has ended
        nothing more can be stored."""
        life = self._lives.get(id(seq))
        if life is not None and seq.is_finished:
            self._gaps.look()
            self._end(life)

    def busy(self) -> bool:
        """Whether an idle engine has to go on polling. All of it ends by itself."""
        learns = not self.namespace and time.monotonic() < self._namespace_due_s
        return learns or bool(self.untold or self.untold_stores) or self._offload.busy() or len(self._asking) > 0

    def close(self) -> None:
        self._asking.close()

    # ---------------------------------------------------------------- lives

    def _life_of(self, seq: Seq) -> _Life:
        life = self._lives.get(id(seq))
        if life is None:
            check_fields("Sequence", seq, SEQUENCE)
            life = self._lives[id(seq)] = _Life(seq, Name(seq.id, next(self._numbers)))
            self._begin(life)
        return life

    def _begin(self, life: _Life) -> None:
        seq = life.seq
        tokens = seq.num_prompt_tokens
        # Placeholders are the same tokens whatever the image is.
        why = "multimodal" if seq.multimodal_data is not None else "per-request-state" if seq.has_per_req_cache else ""
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
        """A few in turn."""
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
        order = self._offload.allocated(life.name, hbm_tokens=seq.num_cached_tokens, tables=[seq.block_table])
        if order is None:
            return False
        seq.offload_load_start_tokens = order.hbm_tokens
        seq.offload_loaded_tokens = order.end_tokens
        # Left by a load before a preemption, these would have ATOM believe that this one has ended.
        seq.offload_loaded = seq.offload_load_failed = False
        self.jobs.begin(order, seq)
        self._aborts.parked(seq)
        self.untold.append(order)
        return True

    def _store_due(self, life: _Life, now_s: float) -> None:
        seq = life.seq
        if life.boundary or not seq.block_table:  # to be handed over; preempted
            return
        if not self.namespace:  # nobody has heard a rank yet, and perhaps nobody ever will: ends would not come either
            return
        computed = min(seq.num_cached_tokens, seq.num_prompt_tokens, life.whole_tokens)
        if self._offload.computed(life.name, computed, now_s):
            order = self._offload.store(life.name, [seq.block_table])
            if order is not None:
                self.jobs.begin(order, seq)
                self.untold_stores.append(order)
        if self._offload.stored_whole(life.name):
            self._storing.pop(id(seq), None)

    def _store_again(self, order: RetrieveOrder) -> None:
        """What the load was to bring is computed now, and the server may not have it."""
        assert isinstance(order.request, Name)
        for key, life in self._lives.items():
            if life.name == order.request:
                self._storing[key] = life

    # ---------------------------------------------------------------- the server

    def _match(self, life: _Life, *, hbm_tokens: int) -> int | None:
        now_s = time.monotonic()
        tokens = self._offload.match(life.name, tokens=life.seq.num_tokens, hbm_tokens=hbm_tokens, now_s=now_s)
        self._asking.send()
        return tokens

    def _use_namespace(self, namespace: bytes) -> None:
        if self.namespace and namespace != self.namespace:
            for life in [life for life in self._lives.values() if life.is_keyed]:
                self._end(life)
        self._asking.namespace = namespace
        log.info("namespace of all ranks namespace=%s", namespace.hex()[:16])

    def _tidy(self) -> None:
        self._asking.give_back()
        for summary in self._offload.take_summaries():
            assert isinstance(summary.request, Name)
            log.info("%s", summary._replace(request=summary.request.id))
