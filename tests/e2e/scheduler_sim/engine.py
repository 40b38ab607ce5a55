"""vLLM's own scheduler and both halves of the connector, built for one seed. No model or worker is started."""

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.structured_output import StructuredOutputManager

from kvclient.offload import job_ends, lookup_exchange
from kvclient.vllm import connector as vllm
from kvclient.vllm import release_differences, scheduler

from .content import BLOCK_TOKENS
from .neighbour import Neighbour
from .server import Clock
from .shapes import Kind, Options

NAMESPACE = b"n" * 32
HASH = get_hash_fn_by_name("sha256")
_recovers = release_differences.recovers


@contextmanager
def stand_ins(clock: Clock, client_of: Callable[[int], object]) -> Iterator[None]:
    """Replaces time and clients (by rank; -1: the scheduler's), and hides the other half in this process.

    Everything is restored afterwards.
    """

    def client(connector: object, *, rank: int) -> object:
        return client_of(rank)

    with ExitStack() as stack:
        for module in (scheduler, job_ends, lookup_exchange):
            stack.enter_context(mock.patch.object(module, "time", clock))
        stack.enter_context(mock.patch.object(vllm.KvServerConnector, "_client", client))
        stack.enter_context(mock.patch.object(vllm, "_here", WeakValueDictionary()))
        # As with Model Runner V2, which a CPU does not have. Older releases have no such property.
        stack.enter_context(mock.patch.object(VllmConfig, "max_concurrent_batches", property(_batches), create=True))
        for name in ("NONE_HASH", "_NONE_HASH_SEED"):
            stack.enter_context(mock.patch.object(kv_cache_utils, name, None, create=True))
        kv_cache_utils.init_none_hash(HASH)
        # Thousands of failed loads and lost servers are intended, so their logs are silenced.
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.ERROR)
        yield


class Engine:
    def __init__(self, options: Options, model: Path) -> None:
        config, kv_config = _config(options, model), _kv_config(options)
        kind = AsyncScheduler if options.is_async else Scheduler
        drops = mock.patch.object(release_differences, "drops_quiet_steps", return_value=options.drops_quiet_steps)
        recovers = mock.patch.object(release_differences, "recovers", lambda base: options.recovers and _recovers(base))
        with set_current_vllm_config(config), drops, recovers:
            self.scheduler: Any = kind(
                config,
                kv_config,
                StructuredOutputManager(config),
                block_size=BLOCK_TOKENS,
                hash_block_size=BLOCK_TOKENS,
                log_stats=True,
            )
        self.scheduler.use_v2_model_runner = options.has_new_runner
        handshakes = {rank: vllm.Handshake(NAMESPACE) for rank in range(options.ranks)}
        self.scheduler.connector.set_xfer_handshake_metadata(handshakes)
        self.workers = [_worker(config, kv_config, rank) for rank in range(options.ranks)]
        if options.ranks > 1:
            vllm._here.clear()  # real ranks would be other processes
        self.aggregator: Any = KVOutputAggregator.from_connector(self.workers[0], options.ranks)
        self.hasher: Any = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, HASH)

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def guarded(self) -> Any:
        """The connector's scheduler half, GuardedScheduler."""
        return _ours(self.scheduler.connector)._scheduler

    @property
    def half(self) -> Any:
        """The guarded object, kvclient.vllm.scheduler.Scheduler."""
        return self.guarded._half

    @property
    def has_given_up(self) -> bool:
        return self.guarded._guard.tripped or any(_ours(worker)._worker.is_inert for worker in self.workers)

    def close(self) -> None:
        self.scheduler.shutdown()


def _worker(config: Any, kv_config: Any, rank: int) -> Any:
    """A worker whose KV is registered."""
    kind = MultiConnector if config.kv_transfer_config.kv_connector == "MultiConnector" else vllm.KvServerConnector
    stage, tensor_rank = divmod(rank, config.parallel_config.tensor_parallel_size)
    with (
        mock.patch.object(vllm, "get_tensor_model_parallel_rank", return_value=tensor_rank),
        mock.patch.object(vllm, "get_pp_group", return_value=SimpleNamespace(rank_in_group=stage)),
        mock.patch.object(vllm, "told_by_all", return_value=[]),
    ):
        worker: Any = kind(config, KVConnectorRole.WORKER, kv_config)
    for half in _connectors(worker):
        if isinstance(half, Neighbour):
            half.rank = rank
        else:
            half._allocating.close()  # as the registration does
            half._is_described = True
            half._worker._half.ends.begin_cache([half._chunk_tokens // BLOCK_TOKENS for _ in half._groups])
            half._worker._half._namespace = Future()
            half._worker._half._namespace.set_result(NAMESPACE)
            half._worker._half._caches = [SimpleNamespace(problem=None, registered=True)]
    return worker


def _connectors(connector: Any) -> list[Any]:
    # All releases have this field; sub_connectors is newer than 0.26.
    return connector._connectors if isinstance(connector, MultiConnector) else [connector]


def _ours(connector: Any) -> Any:
    return next(half for half in _connectors(connector) if not isinstance(half, Neighbour))


@functools.cache
def _base(model: Path) -> Any:
    """A valid vLLM configuration, which is slow to make. Seeds change only fields that no model depends on."""
    transfer = KVTransferConfig(
        kv_connector="KvServerConnector", kv_connector_module_path="kvclient.vllm", kv_role="kv_both"
    )
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        dtype="float32",
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
    ).create_engine_config()


def _config(options: Options, model: Path) -> Any:
    config = copy.deepcopy(_base(model))
    config.cache_config.block_size = BLOCK_TOKENS // options.contexts
    config.cache_config.num_gpu_blocks = options.blocks
    scheduling = config.scheduler_config
    scheduling.max_num_batched_tokens = scheduling.max_num_scheduled_tokens = options.step_tokens
    scheduling.max_num_seqs = options.running_max
    scheduling.async_scheduling = options.is_async
    scheduling.policy = "priority" if options.has_priorities else "fcfs"
    config.parallel_config.tensor_parallel_size = options.tensor_ranks
    config.parallel_config.pipeline_parallel_size = options.stages
    config.parallel_config.decode_context_parallel_size = options.contexts
    config.parallel_config.distributed_executor_backend = "mp"
    config.kv_transfer_config = _transfer_config(options)
    return config


def _batches(config: Any) -> int:
    return int(config.parallel_config.pipeline_parallel_size + config.scheduler_config.async_scheduling)


def _transfer_config(options: Options) -> Any:
    ours: dict[str, Any] = {
        "kv_connector": "KvServerConnector",
        "kv_connector_module_path": "kvclient.vllm",
        "kv_role": options.role,
        "kv_load_failure_policy": options.on_failed_loads,
        "kv_connector_extra_config": {
            "socket": "/nowhere",
            "chunk_tokens": options.chunk_tokens,
            "min_load_tokens": options.min_load_tokens,
            "step_wait_us": options.step_wait_us,
            "await_others": "on" if options.await_others else "off",
            "await_wait_ms": options.await_wait_ms,
            "await_producer_ms": options.await_producer_ms,
            "await_blocks_percent": options.await_blocks_percent,
        },
    }
    if not options.beside:
        return KVTransferConfig(**ours)
    other = {"kv_connector": "Neighbour", "kv_connector_module_path": Neighbour.__module__, "kv_role": "kv_both"}
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=options.on_failed_loads,
        kv_connector_extra_config={"connectors": [other, ours] if options.beside == "before" else [ours, other]},
    )


def _kv_config(options: Options) -> Any:
    groups = [
        KVCacheGroupSpec([f"layer{index}"], _spec(kind, options.contexts)) for index, kind in enumerate(options.groups)
    ]
    # Releases differ in whether this field exists.
    said = {"hash_block_size": BLOCK_TOKENS} if "hash_block_size" in KVCacheConfig.__dataclass_fields__ else {}
    return KVCacheConfig(num_blocks=options.blocks, kv_cache_tensors=[], kv_cache_groups=groups, **said)


def _spec(kind: Kind, contexts: int) -> Any:
    shape: dict[str, Any] = {
        "block_size": BLOCK_TOKENS // contexts,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    return SlidingWindowSpec(**shape, sliding_window=kind.window) if kind.window else FullAttentionSpec(**shape)
