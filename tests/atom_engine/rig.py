"""An ATOM engine in one process: a scheduler, a worker for each rank of each stage, and a model whose KV is known.

The scheduler is ATOM's own or the stand-in. Everything else is ours: the connector's two halves as ATOM constructs
them, the real server, KV memory on the host. A forward compares its context byte by byte before it writes, so a
request never continues after wrong KV.
"""

import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest import mock

from atom.kv_transfer.disaggregation.factory import KVConnectorFactory
from atom.kv_transfer.disaggregation.types import KVConnectorOutput

from kvclient.atom import connector
from kvclient.atom.steps import Step
from kvclient.atom_hook import register
from kvclient.memory.layouts import Extent
from kvclient.values import HostBuffer
from tests.atom_engine.aggregation import PipelineEnds, TensorEnds
from tests.atom_engine.forwards import Forwards
from tests.atom_engine.memory import Memory, Pool, Shape
from tests.atom_engine.scheduler import Batch, Scheduler
from tests.atom_engine.states import HostRows
from tests.process.harness import WAIT_S

IDLE_S = 0.001
"""Pause between polls of an engine that has nothing to compute."""
_lives = itertools.count(1)


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that no other seed draws."""
    draw = random.Random(seed)
    return [draw.randrange(3, 1 << 31) for _ in range(tokens)]


def config_of(server_path: str, shape: Shape, *, model: str, **options: Any) -> Any:
    """The fields of ATOM's Config that schedulers and connectors read."""
    extra = {"socket": server_path, "min_load_tokens": 1, "lookup_timeout_ms": 3000}
    extra |= {} if options.pop("by_files", False) else {"model_id": model}
    extra |= {name: options.pop(name) for name in list(options) if name in EXTRAS}
    entries = {"state": shape.slots * shape.span} if shape.slots else {}
    ratios = {"compress_ratios": [4, 128]} if shape.form == "v4" else {}
    fields: dict[str, Any] = {
        "model": model,
        "kv_cache_block_size": shape.block_tokens,
        "num_kvcache_blocks": shape.blocks,
        "kv_cache_dtype": "fp8" if shape.form in ("mha-fp8", "m3", "v4") else "bf16",
        "pool_entries": entries,
        "pool_entries_per_req": {"state": shape.span} if shape.slots else {},
        "state_checkpoint_interval_tokens": 0,
        "checkpoints": ("copy" if shape.form == "v4" else "fork") if shape.slots else "",
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "long_prefill_token_threshold": 0,
        "max_model_len": 900,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "stop_token_ids": [],
        "scheduler_delay_factor": 0.0,
        "speculative_config": None,
        "index_cache_dtype": None,
        "torch_dtype": "bfloat16",
        "online_quant_config": None,
        "load_dummy": None,
        "enable_rapidserve": False,
        "prefill_context_parallel_size": 1,
        "deferred_output": shape.slots > 0,  # as in ATOM without pipeline stages, where alone states are supported
        "hf_config": SimpleNamespace(
            architectures=["LlamaForCausalLM"], sliding_window=None, layers=shape.layers, **ratios
        ),
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": shape.contexts,
        "parallel_config": SimpleNamespace(pipeline_parallel_rank=0, data_parallel_rank=0, data_parallel_size=1),
        "kv_transfer_config": {
            "kv_connector": "kvserver",
            "kv_role": options.pop("kv_role", "offload"),
            "kv_connector_extra_config": extra,
        },
    }
    return SimpleNamespace(**(fields | options))


EXTRAS = (
    "chunk_tokens",
    "min_load_tokens",
    "lookup_timeout_ms",
    "load_timeout_ms",
    "store_timeout_ms",
    "staging_mib",
    "state_rows",
)


class Rig:
    def __init__(
        self,
        server: Any,
        *,
        is_real: bool = False,
        model: str = "m",
        shape: Shape | None = None,
        tensor: int = 1,
        stages: int = 1,
        tells_of_release: bool = False,
        is_late: bool = False,
        **options: Any,
    ) -> None:
        """tells_of_release: the stand-in has the order of calls of ATOM since its #2167.
        is_late: the start does not wait for the ranks' namespace.
        """
        self.shape = shape if shape is not None else Shape()
        self._is_real = is_real
        self._tells_of_release = tells_of_release
        self._is_late = is_late
        self._server = server
        self._life = next(_lives)
        options.setdefault("chunk_tokens", 3 * self.shape.block_tokens * self.shape.contexts)
        self.config = config_of(
            str(server.path),
            self.shape,
            model=model,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
            **options,
        )
        self.chunk_tokens = options["chunk_tokens"]
        self._tensor, self._stages = tensor, stages
        self.memories: list[Memory] = []
        self.rows: list[HostRows] = []
        """Rows of all registrations of all ranks."""
        self.forwards = Forwards(self.memories, self.shape.block_tokens * self.shape.contexts)
        self.workers: list[Any] = []
        self._added: dict[Any, Any] = {}
        self.orders: list[Any] = []
        """Steps with work that were given to the workers."""
        self.metadata_filter: Callable[[int, Any], Any] = lambda rank, step: step
        self.get_finished: Callable[[int], Any] = lambda rank: self.workers[rank].get_finished()
        self.computed_tokens = 0
        self.prefilled_tokens = 0
        self.max_poll_s = 0.0
        self._on_stages = [TensorEnds(tensor, is_real=is_real) for _ in range(stages)]
        self._pipeline = PipelineEnds(stages, is_real=is_real)

    # ---------------------------------------------------------------- life

    def __enter__(self) -> "Rig":
        with self._as_atom():
            for rank in range(self._stages * self._tensor):
                self.memories.append(self._memory_of(rank))
                self.workers.append(self._worker(rank))
            self.register()
            self.scheduler = self._scheduler()
        self.connector = self.scheduler.kv_connector
        if self._is_served:
            assert self.connector._half._exchange._client.wait_connected(WAIT_S)
        if not self._is_late:
            self.idle_until("the ranks' namespace to be known", lambda: not self.connector.has_pending_work())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.drain()
                assert self.scheduler.free_blocks == self.shape.blocks, "blocks leaked"
                assert not self.scheduler.deferred
                self._check_states()
        finally:
            self.connector._half.close()
            for worker in self.workers:
                worker._worker.close()
            for memory in self.memories:
                memory.close()
            for rows in self.rows:
                rows.pool.close()

    def _check_states(self) -> None:
        states = self.connector._half.states
        if states is not None:
            assert self.scheduler.free_slots == self.shape.slots, "slots leaked"
            if not self.connector._guard.tripped:
                assert len(states._free) == self.connector_rows, "rows leaked"
                assert not states._copies
            assert not any(worker._restores for worker in self.workers)

    @property
    def connector_rows(self) -> int:
        return int(self.config.kv_transfer_config["kv_connector_extra_config"].get("state_rows", 4))

    def register(self) -> None:
        """Registers again after a sleep of the engine; its memories may have changed."""
        with self._as_atom():
            for memory, worker in zip(self.memories, self.workers, strict=True):
                worker.register_kv_caches(memory.kv_caches(), memory.transfer_tensors(), num_blocks=self.shape.blocks)
        for worker in self.workers if self._is_served and not self._is_late else ():
            assert worker._worker._half._caches[0].wait_registered(WAIT_S)

    @property
    def _is_served(self) -> bool:
        """True if the server was started. Then it will answer eventually; an engine itself does not wait for it."""
        return self._server.process is not None

    def _memory_of(self, rank: int) -> Memory:
        layers = self.shape.layers
        stage = rank // self._tensor
        shape = Shape(**{**vars(self.shape), "first_layer": stage * layers, "layers": layers + stage})
        return Memory(shape, rank)

    def _worker(self, rank: int) -> Any:
        stage, tensor_rank = divmod(rank, self._tensor)
        parallel = SimpleNamespace(pipeline_parallel_rank=stage, data_parallel_rank=0, data_parallel_size=1)
        config = SimpleNamespace(**{**vars(self.config), "parallel_config": parallel})
        with mock.patch.object(connector, "_tensor_rank", return_value=(tensor_rank, self._tensor)):
            return connector.KvServerConnector(config)

    def _scheduler(self) -> Any:
        register(KVConnectorFactory)
        if self._is_real:
            from tests.atom_engine.real import RealScheduler  # noqa: PLC0415  (it needs all of ATOM)

            return RealScheduler(self.config)
        half = KVConnectorFactory.create_connector(self.config, role="scheduler")
        return Scheduler(self.config, half, tells_of_release=self._tells_of_release)

    @contextmanager
    def _as_atom(self) -> Iterator[None]:
        """Patches the differences from ATOM's processes: all are one process here, and memory is not on a GPU."""

        def buffers(kind: str, allocations: Sequence[Extent]) -> list[HostBuffer]:
            known = {pool.address: pool.fd for pool in self._pools()}
            return [HostBuffer(known[found.address], found.bytes) for found in allocations]

        def on_host(_: object) -> str:
            """A plain function, because a Mock would keep references to the tensors."""
            return "host"

        def row_memory(_: object, bytes_: int) -> HostRows:
            pool = Pool(0x7F00_0000_0000 + (len(self.rows) << 34), bytes_)
            self.rows.append(HostRows(pool, self._pool_at))
            return self.rows[-1]

        with (
            mock.patch.object(connector, "_row_memory", row_memory),
            mock.patch.object(connector, "life_of", return_value=self._life),
            mock.patch.object(connector, "_device_kind", on_host),
            mock.patch.object(connector, "_buffers", buffers),
        ):
            yield

    def _pools(self) -> list[Pool]:
        return [*(pool for memory in self.memories for pool in memory.pools), *(rows.pool for rows in self.rows)]

    def _pool_at(self, address: int) -> Pool:
        (pool,) = (pool for pool in self._pools() if pool.address <= address < pool.address + pool.bytes)
        return pool

    # ---------------------------------------------------------------- requests

    def add(self, tokens: Sequence[int], **options: Any) -> Any:
        seq = self.scheduler.sequence(list(tokens), **options)
        self.scheduler.add(seq)
        self._added[seq.id] = seq
        return seq

    def run(self, *prompts: Sequence[int], **options: Any) -> list[Any]:
        """Runs requests to their ends, until nothing is left to do."""
        seqs = [self.add(tokens, **options) for tokens in prompts]
        self.drain()
        return seqs

    def run_on(self, *prompts: Sequence[int], **options: Any) -> list[Any]:
        """Like run(), for a connector with pending work of its own."""
        seqs = [self.add(tokens, **options) for tokens in prompts]
        self.until("their ends", lambda: self.scheduler.is_idle and not self.scheduler.deferred)
        return seqs

    def abort(self, seq: Any) -> None:
        self.scheduler.abort(seq)

    # ---------------------------------------------------------------- steps

    def step(self) -> bool:
        """One step of EngineCore: dispatch, forward, poll, postprocess. Returns False if nothing was computed."""
        batch = self.scheduler.schedule()
        for seq in self.scheduler.take_rejected():
            assert "unschedulable" not in getattr(seq, "leave_reason", ""), seq.leave_reason
        if batch is None:
            self.idle()
            return False
        for block in self.scheduler.take_spoiled():
            for memory in self.memories:
                memory.spoil(block)
        self.dispatch(batch.metadata)
        self.forward(batch)
        self.poll()
        if batch.seqs:
            self.scheduler.postprocess(batch)
        return bool(batch.seqs)

    def idle(self) -> None:
        step = self.connector.build_connector_meta()
        if step.requests:
            self.dispatch(step)
        self.poll()
        time.sleep(IDLE_S)

    def drain(self) -> None:
        """Runs until the engine has nothing to do and nothing is in flight.

        The timeout counts only time without progress: on a crowded machine many steps once took 32 s, 29 of them
        without a CPU.
        """
        due_s = time.monotonic() + WAIT_S
        while not self.is_over:
            assert time.monotonic() < due_s, self.state
            if self.scheduler.is_idle:
                self.idle()
            elif self.step():
                due_s = time.monotonic() + WAIT_S
            else:
                time.sleep(IDLE_S)

    @property
    def is_over(self) -> bool:
        return self.scheduler.is_idle and not self.scheduler.deferred and not self.connector.has_pending_work()

    @property
    def state(self) -> str:
        return f"deferred={self.scheduler.deferred} jobs={self.connector._half.jobs._jobs} {self.scheduler}"

    def until(self, what: str, probe: Callable[[], object]) -> None:
        due_s = time.monotonic() + WAIT_S
        while not probe():
            assert time.monotonic() < due_s, f"waited for {what}; {self.state}"
            self.step()

    def idle_until(self, what: str, probe: Callable[[], object]) -> None:
        due_s = time.monotonic() + WAIT_S
        while not probe():
            assert time.monotonic() < due_s, f"waited for {what}"
            self.idle()

    def reconnect(self) -> None:
        """Waits until scheduler and workers are connected to the server again, and registered."""
        self.until("the server to be back", lambda: self.connector._half._exchange._client.connected)
        caches = [worker._worker._half._caches[0] for worker in self.workers]
        self.until("the caches to be registered", lambda: all(cache.registered for cache in caches))

    def dispatch(self, step: Any) -> None:
        if step.requests:
            self.orders.append(step)
            for order in step.retrieves:
                seq = self._added[order.request.id]
                # Otherwise a gap caused by a load would look like ATOM's own gap.
                assert seq.num_tokens == seq.num_prompt_tokens, f"request {seq.id} has output, and is loaded"
        sent = pickle.dumps(step)
        for rank, worker in enumerate(self.workers):
            worker.start_load_kv(self.metadata_filter(rank, pickle.loads(sent)))

    def forward(self, batch: Batch) -> None:
        self.forwards.run(batch)
        self.computed_tokens += sum(batch.counts)
        self.prefilled_tokens += sum(batch.counts) if batch.is_prefill else 0

    def poll(self) -> None:
        began_s = time.monotonic()
        outputs = [self.get_finished(rank) for rank in range(len(self.workers))]
        self.max_poll_s = max(self.max_poll_s, time.monotonic() - began_s)
        on_stages = [
            ends.together(outputs[stage * self._tensor : (stage + 1) * self._tensor])
            for stage, ends in enumerate(self._on_stages)
        ]
        if self._stages == 1:
            self.scheduler.kv_ended(on_stages[0])
            return
        for stage, output in enumerate(on_stages):
            for whole in self._pipeline.ended(stage, output):
                self.scheduler.kv_ended(whole)

    # ---------------------------------------------------------------- orders

    @contextmanager
    def silence(self, *ranks: int) -> Iterator[None]:
        """Holds back the reports of these ranks, as if their copies took until then."""
        said, self.get_finished = self.get_finished, lambda rank: KVConnectorOutput() if rank in ranks else said(rank)
        try:
            yield
        finally:
            self.get_finished = said

    def said(self, rank: int) -> Any:
        """The next report of a rank."""
        due_s = time.monotonic() + WAIT_S
        while (output := self.get_finished(rank)) == KVConnectorOutput():
            assert time.monotonic() < due_s, f"rank {rank} says nothing"
            time.sleep(IDLE_S)
        return output

    @contextmanager
    def refuse(self, *ranks: int) -> Iterator[None]:
        """Makes loads of these ranks fail."""

        def refused(rank: int, step: Step) -> Step:
            if rank not in ranks:
                return step
            return replace(step, retrieves=tuple(order._replace(refused="test") for order in step.retrieves))

        self.metadata_filter, before = refused, self.metadata_filter
        try:
            yield
        finally:
            self.metadata_filter = before

    def loads(self) -> list[Any]:
        return [order for step in self.orders for order in step.retrieves]

    def stored_tokens(self) -> list[tuple[int, int]]:
        """The token range [first, end) of each store, in order."""
        return [
            (order.first_chunk * self.chunk_tokens, (order.first_chunk + order.chunks) * self.chunk_tokens)
            for step in self.orders
            for order in step.stores
        ]

    @contextmanager
    def prefixes_end_early(self, tokens: int) -> Iterator[None]:
        """Makes HBM's own prefixes end `tokens` tokens before their last block; ATOM's prefixes end with the block."""
        blocks = self.scheduler.blocks
        allocate = blocks.allocate

        def allocated(seq: Any, cached: int) -> None:
            allocate(seq, cached)
            seq.num_cached_tokens = max(0, seq.num_cached_tokens - tokens)

        with mock.patch.object(blocks, "allocate", allocated):
            yield

    def written_bytes(self) -> int:
        """Bytes that movers have copied into the server's arena so far."""
        return int(self._server.status().counters["bytes_stored"])

    def forget_hbm(self) -> None:
        """Drops all unused blocks from HBM."""
        self.scheduler.forget_prefixes()
        for block in range(self.shape.blocks):
            for memory in self.memories:
                memory.spoil(block)
