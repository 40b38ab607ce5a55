"""The connector's statistics for vLLM's metrics: counts of the decisions, and durations of retrieves and stores.

They form one flat document. A name maps to a number, which is summed, or to a list of observations. vLLM sends it from
the engine's processes to its API server, logs it, and exports it to Prometheus as vllm:kvserver_….
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "requests": "Requests that the connector has seen.",
    "requests_unkeyed": "Part of requests: without safe keys, so neither looked up nor stored.",
    "tokens_asked": "Tokens of the sequences that were admitted.",
    "tokens_hbm": "Part of tokens_asked: in the engine's own prefix cache.",
    "tokens_found": "Part of tokens_asked: held by the server, the engine's own included.",
    "tokens_retrieved": "Tokens whose KV was brought back from the server.",
    "tokens_from_disk": "Part of tokens_retrieved: in chunks that the server had only on disk when asked. The server "
    "says how many, not which; they are taken for the last ones that it found.",
    "tokens_stored": "Tokens of chunks that the server holds because of a store of this engine.",
    "lookups": "Lookups.",
    "tokens_looked_up": "Tokens that lookups asked for. A request that waits asks several times.",
    "lookups_late": "Part of lookups: not answered before their deadline.",
    "lookups_unserved": "Part of lookups: not answered, or not completely. The server was away, too slow, or had not "
    "read yet what its disks hold.",
    "retrieves": "Retrieves begun.",
    "retrieves_failed": "Part of retrieves: failed on some rank, so that the request was computed.",
    "stores": "Stores begun.",
    "stores_short": "Part of stores: the server did not take every chunk.",
    "preemptions": "Preempted requests.",
    "bugs": "Unexpected exceptions. After the first the connector does nothing more, and the engine computes.",
}
SKIPPED = "skipped_tokens"
"""Prefix of a counter's name; ":" and the reason follow."""
SECONDS = {
    "retrieve_seconds": "Duration of one rank's retrieve.",
    "store_seconds": "Duration of one rank's store.",
}
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Stats(KVConnectorStats):
    """Statistics of one step, or of several steps added up."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Values for one log line: a list becomes its count and mean."""
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                reduced[f"{name}_count"], reduced[f"{name}_mean"] = len(value), round(fmean(value), 6)
            else:
                reduced[name] = value
        return reduced


class PromMetrics(KVConnectorPromMetrics):
    """The same statistics as Prometheus metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(f"vllm:kvserver_{name}", text, labelnames) for name, text in COUNTERS.items()
        }
        self._skipped = self._counter_cls(
            f"vllm:kvserver_{SKIPPED}",
            "Tokens that were not stored, or could have been retrieved and were not, by reason.",
            [*labelnames, "why"],
        )
        self._seconds = {
            name: self._histogram_cls(f"vllm:kvserver_{name}", text, labelnames, buckets=BUCKETS)
            for name, text in SECONDS.items()
        }
        for labels in per_engine_labelvalues.values():
            for metric in (*self._counters.values(), *self._seconds.values()):
                metric.labels(*labels)  # exported from the start, as 0

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name in self._seconds:
                for seconds in value:
                    self._seconds[name].labels(*labels).observe(seconds)
            elif name.startswith(f"{SKIPPED}:"):
                self._skipped.labels(*labels, name.partition(":")[2]).inc(value)
