"""ATOM's own Scheduler, from the checkout in ATOM_DIR, with the stand-in's interface."""

from typing import Any

import numpy as np
from atom.model_engine.page_unit_checkpoint import PagedStateCheckpointSpec
from atom.model_engine.scheduler import ScheduledBatchOutput
from atom.model_engine.scheduler import Scheduler as AtomScheduler
from atom.model_engine.sequence import Sequence, SequenceStatus
from atom.model_engine.state_runtime import StateRuntime, StateTransfer
from atom.sampling_params import SamplingParams

from tests.atom_engine.scheduler import Batch

PAGED = PagedStateCheckpointSpec(page_unit_bytes=150, slot_bytes=320, layout_id="test", image_bytes=310)
"""A checkpoint of DeepSeek-V4 takes three blocks."""
RUNTIMES = {
    "": StateRuntime(),
    "fork": StateRuntime(transfer=StateTransfer.fork(1)),
    "copy": StateRuntime(transfer=StateTransfer.copy(PAGED.layout_id), checkpoint_spec=PAGED),
}
"""How ATOM keeps checkpoints of states: recurrent layers hand a slot on, DeepSeek-V4 copies it into blocks."""


class RealScheduler:
    def __init__(self, config: Any) -> None:
        self.inner = AtomScheduler(config, state_runtime=RUNTIMES[config.checkpoints])
        self.keeps_forks = True
        """Keeps slots that a running request reads next. ATOM itself gives them away after two passes."""
        self._previous: list[Any] | None = [] if config.deferred_output else None
        """Sequences whose tokens come a step late; None if they come at once."""
        self._config = config
        self._batch: Any = None
        self._seqs: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"waiting={[seq.status for seq in self.inner.waiting]} running={len(self.inner.running)}"

    @property
    def kv_connector(self) -> Any:
        return self.inner.kv_connector

    def sequence(self, tokens: list[int], *, max_tokens: int = 1, multimodal_data: Any = None, id: Any = None) -> Any:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Sequence(
            tokens,
            self._config.kv_cache_block_size,
            sampling_params=params,
            multimodal_data=multimodal_data,
            id=id,
            has_per_req_cache=bool(self._config.pool_entries),
        )

    def add(self, seq: Any) -> None:
        self.inner.add(seq)

    def abort(self, seq: Any) -> None:
        seq.status = SequenceStatus.ABORTED

    @property
    def is_idle(self) -> bool:
        return not (self.inner.waiting or self.inner.running)

    @property
    def deferred(self) -> dict[Any, Any]:
        return self.inner.deferred_free_blocks

    @property
    def blocks(self) -> Any:
        return self.inner.block_manager

    @property
    def preemptions(self) -> int:
        return self.inner.total_preemptions

    @property
    def parked(self) -> int:
        return self.inner._num_parked_remote_kv

    @property
    def free_blocks(self) -> int:
        """Blocks that no request has. Checkpoints of states are given up when a request needs their blocks."""
        manager = self.inner.block_manager
        paged = manager.paged_state_checkpoints
        kept = [] if paged is None else [len(record.unit_ids) for record in paged.store.records.values()]
        return manager.kv.num_free + sum(kept)

    @property
    def free_slots(self) -> int:
        self.inner.block_manager.complete_previous_state_batch()
        self.inner.block_manager.complete_previous_state_batch()  # a pin lasts two passes at most
        return int(self.inner.block_manager.state.num_free())

    def take_rejected(self) -> list[Any]:
        return self.inner.take_rejected()

    def take_spoiled(self) -> list[int]:
        """Always empty: ATOM's pool does not report reused blocks."""
        return []

    def forget_prefixes(self) -> None:
        self.inner.block_manager.clear_cache()

    def schedule(self) -> Batch | None:
        states = self.inner.block_manager.state
        for seq in self.inner.running if self.keeps_forks else ():
            if states.is_pinned(seq.state_fork_src):
                states._deferred.add(seq.state_fork_src)
        result = self.inner.schedule()
        if result is None or result[0] is None:
            return None
        self._batch, self._seqs = result
        batch = self._batch
        is_prefill = batch.total_seqs_num_prefill > 0
        seqs = list(self._seqs.values())
        counts = [int(count) for count in batch.num_scheduled_tokens]
        first = [int(at) for at in batch.num_cached_tokens] if is_prefill else [seq.num_tokens - 1 for seq in seqs]
        slots = tuple(
            (source if source >= 0 else slot, slot)
            for source, slot in zip(batch.state_fork_srcs, batch.per_req_cache_groups, strict=True)
        )
        moves = batch.state_maintenance_ops
        assert not moves.relocations
        kept = tuple((op.src_slot, op.unit_ids) for op in moves.checkpoint_stores)
        restored = tuple((op.dst_slot, op.unit_ids) for op in moves.checkpoint_restores)
        return Batch(seqs, first, counts, batch.connector_meta_output, is_prefill, slots, kept, restored)

    def release(self, seq: Any) -> None:
        """Releases it as if its end had been awaited."""
        self.inner.deferred_free_blocks[seq.id] = seq
        self.inner._maybe_release_deferred(seq)

    def kv_ended(self, output: Any) -> None:
        self.inner._update_from_kv_xfer_finished(output)

    def postprocess(self, batch: Batch) -> None:
        names = [seq.id for seq in batch.seqs]
        is_deferred = self._previous is not None
        if is_deferred:
            names, self._previous = self._previous or [], names
        zeros = np.zeros(len(names), dtype=np.int32)
        # ATOM's placeholder for a late token, so that the same KV is computed.
        tokens = [(self._config.eos_token_id,)] * len(names)
        output = ScheduledBatchOutput(names, tokens, zeros, zeros, None, is_deferred_out=is_deferred)
        self.inner.postprocess(list(self._seqs.values()), output, batch=self._batch)
