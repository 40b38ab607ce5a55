"""The engine's side of the contract: a minimal stand-in for ATOM's Scheduler, with its order of calls.

schedule()   loaded requests come first; running sequences are asked whether they are handed over; partial
             prefills go on; then from `waiting`: match, allocate, update_state_after_alloc, park or adjust the
             chunk; a step without prefills decodes; build_connector_meta() once, always
then         workers get the metadata, the forward runs, terminals of all ranks are collected:
kv_ended()   process_completions(), and its consequences
postprocess()  computed tokens count, and can be found; sequences end; their blocks are freed, or kept until the
             connector lets go of them
"""

from collections import deque
from typing import Any, NamedTuple

from tests.atom_engine.blocks import Blocks
from tests.atom_engine.sequence import Sequence, Status


class Batch(NamedTuple):
    seqs: list[Sequence]
    first: list[int]
    """First token that each sequence computes."""
    counts: list[int]
    metadata: Any
    is_prefill: bool
    slots: tuple[tuple[int, int], ...] = ()
    """For each sequence with a state: the slot that its forward reads, and the one that it writes."""
    kept: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Checkpoints made before the forwards: slot, and the blocks that ATOM keeps it in."""
    restored: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Scheduler:
    def __init__(self, config: Any, connector: Any, *, tells_of_release: bool = False) -> None:
        """tells_of_release: behaves like ATOM since its #2167.

        source_blocks_released() is called wherever blocks are freed; request_finished() is called only when a
        request ends, not again when its blocks are freed.
        """
        self.kv_connector = connector
        self._tells_of_release = tells_of_release
        block_tokens = config.kv_cache_block_size * config.decode_context_parallel_size
        self._is_stateful = bool(config.pool_entries)
        slots = config.pool_entries.get("state", 0) // config.pool_entries_per_req.get("state", 1)
        self.blocks = Blocks(config.num_kvcache_blocks, block_tokens, slots=slots)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.deferred: dict[Any, Sequence] = {}
        self.rejected: list[Sequence] = []
        self.parked = 0
        self.preemptions = 0
        self._seqs_max = config.max_num_seqs
        self._tokens_max = config.max_num_batched_tokens
        self._advances_early = config.pipeline_parallel_size > 1
        self._loaded: set[Any] = set()
        self._failed: set[Any] = set()
        self._aborted_loads: set[Any] = set()

    def sequence(self, tokens: list[int], **options: Any) -> Sequence:
        return Sequence(tokens, has_per_req_cache=self._is_stateful, **options)

    def take_rejected(self) -> list[Sequence]:
        taken, self.rejected = self.rejected, []
        return taken

    def take_spoiled(self) -> list[int]:
        taken, self.blocks.spoiled = self.blocks.spoiled, []
        return taken

    def forget_prefixes(self) -> None:
        self.blocks.forget_prefixes()

    @property
    def free_blocks(self) -> int:
        return self.blocks.free

    @property
    def free_slots(self) -> int:
        return self.blocks.free_slots

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        seq.status = Status.ABORTED

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)

    # ---------------------------------------------------------------- schedule

    def schedule(self) -> Batch:
        # As in ATOM: without those aborted meanwhile, though they have blocks.
        parked = [seq for seq in self.waiting if seq.status is Status.WAITING_FOR_REMOTE_KVS]
        ready = [seq for seq in parked if seq.id in self._loaded | self._failed]
        self.waiting = deque([*ready, *(seq for seq in self.waiting if seq not in ready)])
        self._hand_over()
        chosen: dict[Sequence, int] = {}
        for seq in self.running:
            left = self._tokens_max - sum(chosen.values())
            if seq.is_partial_prefill and left > 0:
                chosen[seq] = min(left, seq.num_tokens - seq.num_cached_tokens)
        skipped: list[Sequence] = []
        while self.waiting and len(self.running) < self._seqs_max and sum(chosen.values()) < self._tokens_max:
            if not self._admit(self.waiting.popleft(), chosen, skipped):
                break
        self.waiting.extend(skipped)
        is_prefill = bool(chosen)
        if not is_prefill:
            self._decode(chosen)
        first = [seq.num_cached_tokens if is_prefill else seq.num_tokens - 1 for seq in chosen]
        metadata = self.kv_connector.build_connector_meta()
        slots = tuple((seq.per_req_cache_group, seq.per_req_cache_group) for seq in chosen if seq.has_per_req_cache)
        batch = Batch(list(chosen), first, list(chosen.values()), metadata, is_prefill, slots)
        if is_prefill and self._advances_early:
            self._advance(batch)
        return batch

    def _hand_over(self) -> None:
        parked = [seq for seq in self.running if self.kv_connector.should_park_partial_prefill_for_load(seq)]
        for seq in parked:
            self.running.remove(seq)
            seq.is_partial_prefill = False
            seq.status = Status.WAITING_FOR_REMOTE_KVS
            self.parked += 1
            self.waiting.appendleft(seq)

    def _admit(self, seq: Sequence, chosen: dict[Sequence, int], skipped: list[Sequence]) -> bool:
        """Admits one sequence. Returns False if no other can be admitted."""
        budget = self._tokens_max - sum(chosen.values())
        if seq.status is Status.ABORTED:
            self._reject(seq)
            return True
        if seq.status is Status.WAITING_FOR_REMOTE_KVS:
            if seq.id in self._failed:
                self._failed.discard(seq.id)
                seq.offload_load_failed, seq.offload_loaded_tokens = True, seq.num_cached_tokens
            elif seq.id in self._loaded:
                self._loaded.discard(seq.id)
                self._take_loaded(seq)
            else:
                skipped.append(seq)
                return True
            seq.status = Status.WAITING
        resumes = getattr(seq, "offload_loaded", False) or getattr(seq, "offload_load_failed", False)
        if resumes and seq.block_table:
            # Sized by the prompt alone: earlier output would not be computed.
            self._run(seq, min(budget, seq.num_prompt_tokens - seq.num_cached_tokens), chosen)
            self.parked -= 1
            return True
        _, wants_load = self.kv_connector.get_num_new_matched_tokens(seq)
        hits = self.blocks.cached(seq)
        if (wants_load and len(self.running) + self.parked >= self._seqs_max) or hits is None:
            self.waiting.appendleft(seq)
            return False
        self.blocks.allocate(seq, hits)
        self.kv_connector.update_state_after_alloc(seq)
        if wants_load and self.kv_connector.should_park_for_load_after_alloc(seq):
            seq.status = Status.WAITING_FOR_REMOTE_KVS
            self.parked += 1
            skipped.append(seq)
            return True
        chunk = min(budget, seq.num_tokens - seq.num_cached_tokens)
        self._run(seq, self.kv_connector.adjust_prefill_chunk_after_alloc(seq, chunk), chosen)
        return True

    def _run(self, seq: Sequence, chunk: int, chosen: dict[Sequence, int]) -> None:
        assert chunk > 0
        seq.status, seq.is_prefill = Status.RUNNING, True
        self.running.append(seq)
        chosen[seq] = chunk

    def _take_loaded(self, seq: Sequence) -> None:
        loaded, first = seq.offload_loaded_tokens, seq.offload_load_start_tokens  # type: ignore[attr-defined]
        if loaded > seq.num_cached_tokens:
            if first is not None:
                self.blocks.publish(seq, first, loaded)
            seq.num_cached_tokens = loaded
        seq.offload_loaded, seq.offload_load_start_tokens = True, None  # type: ignore[attr-defined]

    def _decode(self, chosen: dict[Sequence, int]) -> None:
        for seq in list(self.running):
            if seq not in self.running or seq.is_partial_prefill:
                continue
            while not self.blocks.grow(seq):
                if not self._preempt_another(seq, chosen):
                    return
            chosen[seq] = 1

    def _preempt_another(self, seq: Sequence, chosen: dict[Sequence, int]) -> bool:
        for victim in reversed(self.running):
            if victim is not seq and not self.kv_connector.should_defer_free(victim):
                self.running.remove(victim)
                chosen.pop(victim, None)
                self.preemptions += 1
                victim.status, victim.is_partial_prefill = Status.WAITING, False
                self._deallocate(victim)
                self.waiting.appendleft(victim)
                return True
        return False

    # ---------------------------------------------------------------- ends

    def kv_ended(self, output: Any) -> None:
        output = self.kv_connector.process_completions(output)
        for found, ends in ((output.finished_loading, self._loaded), (output.failed_loading, self._failed)):
            for name in found:
                if name in self._aborted_loads:
                    self._aborted_loads.discard(name)
                    self.parked -= 1
                    self.release(self.deferred[name])
                else:
                    ends.add(name)
        for name in output.finished_saving:
            if name in self.deferred:
                self.release(self.deferred[name])

    def _reject(self, seq: Sequence) -> None:
        """Ends a sequence aborted before it ran. The connector is not told, unless the sequence waits for a load."""
        was_parked = bool(seq.block_table)
        seq.status = Status.FINISHED
        self.rejected.append(seq)
        if not was_parked:
            return
        self.deferred[seq.id] = seq
        if seq.id in self._loaded | self._failed or getattr(seq, "offload_loaded", False):
            self._loaded.discard(seq.id)
            self._failed.discard(seq.id)
            self.parked -= 1
            self.release(seq)
        else:
            self._aborted_loads.add(seq.id)

    def release(self, seq: Sequence) -> None:
        if seq.id in self._aborted_loads or self.kv_connector.should_defer_free(seq):
            return
        if not self._tells_of_release:
            self.kv_connector.request_finished(seq)
        self.deferred.pop(seq.id, None)
        self._deallocate(seq)

    def _deallocate(self, seq: Sequence) -> None:
        self.blocks.deallocate(seq)
        if self._tells_of_release:
            self.kv_connector.source_blocks_released(seq)

    def postprocess(self, batch: Batch) -> None:
        if batch.is_prefill:
            for seq, first, count in zip(batch.seqs, batch.first, batch.counts, strict=True):
                self.blocks.publish(seq, first, first + count)
            if not self._advances_early:
                self._advance(batch)
        for seq in batch.seqs:
            if seq.is_partial_prefill:
                continue
            seq.token_ids.append(7)  # the model's output
            # As in ATOM: from the end of the index, computed or not.
            self.blocks.publish(seq, seq.num_hashed_tokens, seq.num_tokens - 1)
            done = seq.num_tokens - seq.num_prompt_tokens >= seq.max_tokens
            if done or seq.status is Status.ABORTED:
                self.kv_connector.request_finished(seq)
                self._finish(seq)

    def _advance(self, batch: Batch) -> None:
        for seq, count in zip(batch.seqs, batch.counts, strict=True):
            seq.num_cached_tokens += count
            seq.is_partial_prefill = seq.num_cached_tokens < seq.num_prompt_tokens

    def _finish(self, seq: Sequence) -> None:
        seq.status = Status.FINISHED
        self.running.remove(seq)
        self.kv_connector.request_finished(seq)
        if self.kv_connector.should_defer_free(seq):
            self.deferred[seq.id] = seq
        else:
            self._deallocate(seq)
