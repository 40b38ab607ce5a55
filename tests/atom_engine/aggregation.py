"""Combines the terminals of ranks and stages: ATOM's aggregators, or their stand-ins.

An operation has ended when all have reported it, and has failed if any of them reports a failure. Stages do not pass
on completions of connectors.
"""

from typing import Any

from atom.kv_transfer.disaggregation.types import ConnectorCompletion, KVConnectorOutput

FIELDS = ("finished_loading", "failed_loading", "finished_saving")


class _Quorum:
    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._said: dict[Any, dict[int, bool]] = {}
        self._over: set[Any] = set()

    def say(self, who: int, what: Any, ok: bool) -> None:
        if what not in self._over:
            said = self._said.setdefault(what, {})
            said[who] = said.get(who, True) and ok

    def take(self) -> list[tuple[Any, bool]]:
        done = [(what, all(said.values())) for what, said in self._said.items() if len(said) == self._wanted]
        for what, _ in done:
            del self._said[what]
            self._over.add(what)
        return done


class TensorEnds:
    """The aggregator of one stage's ranks."""

    def __init__(self, ranks: int, *, is_real: bool) -> None:
        self._real = None
        if is_real:
            from atom.kv_transfer.disaggregation.aggregator import KVOutputAggregator  # noqa: PLC0415

            self._real = KVOutputAggregator(world_size=ranks)
        self._loads, self._saves, self._completions = _Quorum(ranks), _Quorum(ranks), _Quorum(ranks)

    def together(self, outputs: list[Any]) -> Any:
        if self._real is not None:
            return self._real.aggregate(outputs)
        for rank, output in enumerate(outputs):
            for name in output.finished_loading:
                self._loads.say(rank, name, True)
            for name in output.failed_loading:
                self._loads.say(rank, name, False)
            for name in output.finished_saving:
                self._saves.say(rank, name, True)
            for item in output.connector_completions:
                self._completions.say(rank, (item.channel, item.operation_id), item.succeeded)
        loads = self._loads.take()
        return KVConnectorOutput(
            finished_loading={name for name, ok in loads if ok},
            failed_loading={name for name, ok in loads if not ok},
            finished_saving={name for name, _ in self._saves.take()},
            connector_completions={
                ConnectorCompletion(channel, name, ok) for (channel, name), ok in self._completions.take()
            },
        )


class PipelineEnds:
    """The aggregator of all stages. Passes on nothing if nothing has ended."""

    def __init__(self, stages: int, *, is_real: bool) -> None:
        self._real = None
        if is_real:
            from atom.kv_transfer.disaggregation.pp_kv_aggregator import PPKVAggregator  # noqa: PLC0415

            self._real = PPKVAggregator(stages)
        self._loads, self._saves = _Quorum(stages), _Quorum(stages)

    def ended(self, stage: int, output: Any) -> list[Any]:
        if self._real is not None:
            whole = self._real.ingest(stage, output)
            return [] if whole.is_empty() else [whole]
        for name in output.finished_loading:
            self._loads.say(stage, name, True)
        for name in output.failed_loading:
            self._loads.say(stage, name, False)
        for name in output.finished_saving:
            self._saves.say(stage, name, True)
        loads, saves = self._loads.take(), self._saves.take()
        if not (loads or saves):
            return []
        return [
            KVConnectorOutput(
                finished_loading={name for name, ok in loads if ok},
                failed_loading={name for name, ok in loads if not ok},
                finished_saving={name for name, _ in saves},
            )
        ]
