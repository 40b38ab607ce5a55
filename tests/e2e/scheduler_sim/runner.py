"""The simulated model runner: keeps its own block tables, as vLLM's do, and attends only to right KV."""

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from .content import BLOCK_TOKENS, NULL_BLOCK, Slots, kv, next_token, require
from .engine import Engine
from .shapes import Options

BEHIND_WRONG = b"behind wrong"
"""KV computed from wrong KV; it must never be stored."""


@dataclass
class Row:
    """The runner's view of a request."""

    tokens: list[int]
    tables: list[list[int]]
    computed: int
    prompt_tokens: int

    def place(self, group: int, position: int) -> tuple[int, int]:
        """(block, slot) of a token."""
        block, slot = divmod(position, BLOCK_TOKENS)
        return self.tables[group][block], slot


class Runner:
    def __init__(
        self, options: Options, engine: Engine, slots: Slots, *, may_be_wrong: bool, meanwhile: Callable[[], None]
    ) -> None:
        """may_be_wrong: another connector may fail. meanwhile: lets jobs advance at points where they could."""
        self.weights = 0
        self._options, self._engine, self._slots = options, engine, slots
        self._may_be_wrong, self._meanwhile = may_be_wrong, meanwhile
        self._rows: dict[str, Row] = {}

    def execute(self, step: Any) -> Any:
        """Runs a step on all ranks, with vLLM's calls in their order."""
        workers = self._engine.workers
        orders = pickle.dumps(step.kv_connector_metadata)
        for worker in workers:
            told = pickle.loads(orders)
            worker.handle_preemptions(told)
            worker.bind_connector_metadata(told)
        self._meanwhile()
        self._read(step)
        sampled = {name: self._compute(name, count) for name, count in step.num_scheduled_tokens.items()}
        self._meanwhile()
        for worker in workers:
            worker.start_load_kv(None)
            worker.wait_for_save()
        self._meanwhile()
        outputs = pickle.loads(pickle.dumps([_output(step, worker, sampled) for worker in workers]))
        if len(outputs) == 1:
            return outputs[0]
        # Equal objects unpickle as one shared object, and the aggregator writes into the first.
        return self._engine.aggregator.aggregate([copy.copy(output) for output in outputs])

    # ---------------------------------------------------------------- the scheduler's output

    def _read(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self._rows.pop(name, None)
        for new in step.scheduled_new_reqs:
            tokens = new.prefill_token_ids if self._options.has_new_runner else new.prompt_token_ids
            self._rows[new.req_id] = self._row(new.req_id, tokens, new.block_ids, new.num_computed_tokens)
        known = step.scheduled_cached_reqs
        for name, blocks, computed, said in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, known.num_output_tokens, strict=True
        ):
            if name in known.resumed_req_ids:
                self._rows[name] = self._row(name, known.all_token_ids[name], blocks, computed)
            else:
                self._go_on(self._rows[name], blocks, computed, said)

    def _row(self, name: str, tokens: Sequence[int], blocks: Any, computed: int) -> Row:
        prompt_tokens = self._engine.scheduler.requests[name].num_prompt_tokens
        return Row(list(tokens), [list(table) for table in blocks], computed, prompt_tokens)

    def _go_on(self, row: Row, blocks: Any, computed: int, said: int) -> None:
        """said: number of output tokens, including those in flight.

        A token sampled after a load that failed within a step does not count.
        """
        for table, more in zip(row.tables, blocks or [()] * len(row.tables), strict=True):
            table.extend(more)
        row.computed = computed
        del row.tokens[row.prompt_tokens + said :]

    # ---------------------------------------------------------------- the model

    def _compute(self, name: str, count: int) -> list[int]:
        """Computes `count` tokens of a request; returns the token sampled after the last one, if any."""
        row = self._rows[name]
        begin, end = row.computed, row.computed + count
        require(end <= len(row.tokens), f"{name} is to compute {count} tokens at {begin} of {len(row.tokens)}")
        is_right = self._is_behind_right(name, row, begin)
        for group in range(len(self._options.groups)):
            for position in range(begin, end):
                block, slot = row.place(group, position)
                self._slots.compute(block, slot, self._kv(row, group, position) if is_right else BEHIND_WRONG)
        row.computed = end
        if end < len(row.tokens):
            return []
        row.tokens.append(next_token(row.tokens))
        return row.tokens[-1:]

    def _is_behind_right(self, name: str, row: Row, begin: int) -> bool:
        """True if all KV that the model attends to is right.

        Wrong KV is allowed only after another connector failed: vLLM learns of that when the step is over.
        """
        for group, kind in enumerate(self._options.groups):
            for position in range(kind.first(begin), begin):
                block, slot = row.place(group, position)
                if block == NULL_BLOCK or not self._slots.hold(block, slot, self._kv(row, group, position)):
                    where = f"group {group} token {position} block {block}"
                    require(self._may_be_wrong, f"{name} computes token {begin} behind wrong KV: {where}")
                    return False
        return True

    def _kv(self, row: Row, group: int, position: int) -> bytes:
        return kv(self.weights, group, row.tokens[: position + 1])


def _output(step: Any, worker: Any, sampled: dict[str, list[int]]) -> Any:
    told = KVConnectorOutput()
    results = worker.get_transfer_results(step.finished_req_ids)
    told.finished_sending = results.finished_sending
    told.finished_recving = results.finished_recving
    told.failed_recving = results.failed_recving
    told.invalid_block_ids = worker.get_block_ids_with_load_errors()
    told.kv_connector_stats = worker.get_kv_connector_stats()
    told.kv_connector_worker_meta = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    if not step.total_num_scheduled_tokens:
        output = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
        output.kv_connector_output = None if told.is_empty() else told
        return output
    names = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[sampled[name] for name in names],
        kv_connector_output=told,
    )
