"""The simulated model runners: each keeps its own block tables, as vLLM's do, and attends only to right KV.

A pipeline stage has a runner of its own. A later stage may be steps behind an earlier one.
"""

import copy
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from kvclient.vllm import release_differences

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


@dataclass(eq=False)
class Running:
    """A step that some stage has not run yet, or whose output the scheduler has not received."""

    step: Any
    weights: int
    outputs: list[Any] = field(default_factory=list)
    """Of the ranks of the stages that have run it."""


class Pipeline:
    """The runners of all stages. Each runs every step, in the scheduler's order."""

    def __init__(
        self,
        options: Options,
        engine: Engine,
        slots: Slots,
        *,
        rng: Random,
        may_be_wrong: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        """may_be_wrong: another connector may fail. meanwhile: lets jobs and later stages advance where they could."""
        self.weights = 0
        self._rng, self._engine = rng, engine
        ranks = [range(at, at + options.tensor_ranks) for at in range(0, options.ranks, options.tensor_ranks)]
        self._runners = [
            Runner(options, engine, slots, ranks=own, may_be_wrong=may_be_wrong, meanwhile=meanwhile) for own in ranks
        ]
        self._waiting: list[deque[Running]] = [deque() for _ in ranks]
        """Steps that a stage has yet to run."""
        self._is_busy = [False for _ in ranks]

    def begin(self, step: Any) -> Running:
        """Runs a step on the first stage."""
        running = Running(step if len(self._runners) == 1 else pickle.loads(pickle.dumps(step)), self.weights)
        self._waiting[0].append(running)
        self._run(0)
        return running

    def progress(self) -> None:
        """May run a step on a later stage."""
        if len(self._runners) > 1:
            self._run(self._rng.randrange(1, len(self._runners)))

    def end(self, running: Running) -> Any:
        """Runs a step on all stages that have not, and returns its output."""
        for stage, waiting in enumerate(self._waiting):
            while running in waiting:
                self._run(stage)
        outputs = pickle.loads(pickle.dumps(running.outputs))
        if len(outputs) == 1:
            return outputs[0]
        # Equal objects unpickle as one shared object, and the aggregator writes into one of them.
        last = len(outputs) - len(self._runners[-1].ranks)
        return self._engine.aggregator.aggregate([copy.copy(output) for output in outputs], output_rank=last)

    def _run(self, stage: int) -> None:
        waiting = self._waiting[stage]
        if not waiting or self._is_busy[stage]:
            return
        self._is_busy[stage] = True
        running = waiting[0]
        running.outputs += self._runners[stage].execute(running.step, running.weights)
        waiting.popleft()
        self._is_busy[stage] = False
        if stage + 1 < len(self._runners):
            self._waiting[stage + 1].append(running)


class Runner:
    """The model runner of one stage's ranks."""

    def __init__(
        self,
        options: Options,
        engine: Engine,
        slots: Slots,
        *,
        ranks: range,
        may_be_wrong: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        self.ranks = ranks
        self._weights = 0
        self._options, self._engine, self._slots = options, engine, slots
        self._may_be_wrong, self._meanwhile = may_be_wrong, meanwhile
        self._rows: dict[str, Row] = {}

    def execute(self, step: Any, weights: int) -> list[Any]:
        """Runs a step on the stage's ranks, with vLLM's calls in their order."""
        self._weights = weights
        workers = [self._engine.workers[rank] for rank in self.ranks]
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
        return [_output(step, worker, sampled) for worker in workers]

    # ---------------------------------------------------------------- the scheduler's output

    def _read(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self._rows.pop(name, None)
        for new in step.scheduled_new_reqs:
            tokens = new.prefill_token_ids if self._options.has_new_runner else new.prompt_token_ids
            self._rows[new.req_id] = _row(tokens, new.block_ids, new.num_computed_tokens, len(new.prompt_token_ids))
        known = step.scheduled_cached_reqs
        for name, blocks, computed, said in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, known.num_output_tokens, strict=True
        ):
            if name in known.resumed_req_ids:
                prompt_tokens = self._rows[name].prompt_tokens
                self._rows[name] = _row(known.all_token_ids[name], blocks, computed, prompt_tokens)
            else:
                self._go_on(self._rows[name], blocks, computed, said)

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
        known = len(row.tokens)
        # vLLM goes wrong by itself where it schedules ahead and another connector fails within a step.
        may_be_unknown = self._may_be_wrong and self._options.batches > 1
        require(end <= known or may_be_unknown, f"{name} is to compute {count} tokens at {begin} of {known}")
        row.tokens += [0] * (end - known)
        is_right = self._is_behind_right(name, row, begin)
        for group in range(len(self._options.groups)):
            for position in range(begin, end):
                block, slot = row.place(group, position)
                is_computed = is_right and position < known
                self._slots.compute(
                    self.ranks, block, slot, self._kv(row, group, position) if is_computed else BEHIND_WRONG
                )
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
                if block == NULL_BLOCK or not self._slots.hold(self.ranks, block, slot, self._kv(row, group, position)):
                    where = f"group {group} token {position} block {block}"
                    require(self._may_be_wrong, f"{name} computes token {begin} behind wrong KV: {where}")
                    return False
        return True

    def _kv(self, row: Row, group: int, position: int) -> bytes:
        return kv(self._weights, group, row.tokens[: position + 1])


def _row(tokens: Sequence[int], blocks: Any, computed: int, prompt_tokens: int) -> Row:
    return Row(list(tokens), [list(table) for table in blocks], computed, prompt_tokens)


def _output(step: Any, worker: Any, sampled: dict[str, list[int]]) -> Any:
    told = KVConnectorOutput()
    if release_differences.reports_failed_requests(KVConnectorBase_V1):
        results = worker.get_transfer_results(step.finished_req_ids)
        told.finished_sending = results.finished_sending
        told.finished_recving = results.finished_recving
        told.failed_recving = results.failed_recving
    else:
        told.finished_sending, told.finished_recving = worker.get_finished(step.finished_req_ids)
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
