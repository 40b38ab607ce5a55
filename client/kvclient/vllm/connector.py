"""The connector that vLLM loads: kv_connector="KvServerConnector", kv_connector_module_path="kvclient.vllm".

This file only translates. offload/decide.py makes the decisions. vllm/scheduler.py and offload/worker.py are the two
halves, and this file calls both through guards. vllm/release_differences.py knows what differs between vLLM's releases.

Importing this file opens no socket, because vLLM's API server imports it too. docs/vllm.md is the manual.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import vllm

from kvclient.client import Client
from kvclient.identity.late_namespaces import namespace_of
from kvclient.identity.model_files import ModelFiles, hub_folder, model_files, settings_text
from kvclient.identity.processes import began_ns
from kvclient.memory.torch_device import flat
from kvclient.offload.announced import Announced
from kvclient.offload.guard import GuardedWorker
from kvclient.offload.job_ends import Ended, Ends, Report
from kvclient.offload.settings import MIB, NO_GRAPHS, chosen_chunk_tokens
from kvclient.offload.values import Group, Options, RetrieveOrder, StoreOrder
from kvclient.offload.worker import Worker
from kvclient.transport.event_stream import EventStream, ZeroMqSockets
from kvclient.values import Buffered, CacheSpec, DeviceBuffer, TensorBuffer
from kvclient.vllm import release_differences, release_table
from kvclient.vllm.answers import Answers
from kvclient.vllm.devices import PORTABLE, device_kind, device_name, stream_events
from kvclient.vllm.events import TOKENS_MAX, RouterEvents, Words, kinds_of
from kvclient.vllm.guard import GuardedScheduler
from kvclient.vllm.head_shards import HeadShards, check_head_shards, head_shard_specs
from kvclient.vllm.keys import Keyer, adapter_settings, names_media
from kvclient.vllm.layout import (
    Layout,
    block_tensors,
    group_specs,
    groups_of,
    layout_of,
    ordered_layers,
    states_of,
)
from kvclient.vllm.memory import SharedZeros
from kvclient.vllm.namespace import (
    backend_called,
    called,
    check_told_by_files,
    cpu_kind,
    environment_that_counts,
    facts_of,
    handler_called,
)
from kvclient.vllm.scheduler import Scheduled, Scheduler
from kvclient.vllm.self_test import BlockTensor, self_test
from kvclient.vllm.settings import parse
from kvclient.vllm.side_tensors import SideTensor, SideTensors
from kvclient.vllm.stages import Stage, told_by_all
from kvclient.vllm.transfer_params import TransferParams
from kvserver.errors import RequestError

with release_differences.reading(vllm.__version__):
    from vllm import envs
    from vllm.distributed import kv_events
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as interface
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
    from vllm.platforms import current_platform
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import kv_cache_utils

    from kvclient.vllm.stats import PromMetrics, Stats

log = logging.getLogger("vllm.kvserver")

SPECULATION = ("ngram", "ngram_gpu", "suffix", "medusa")
"""Speculation methods that have no KV of their own."""

DRAFTS = ("draft_model", "eagle", "eagle3", "mtp")
"""Speculation methods with KV of their own: a draft model's layers have pages in the same blocks as the model's."""
UNLISTED = (
    "vLLM %s is not among the releases that this connector was held against (up to %s): its layout is tested at "
    "registration, unless self_test is off"
)

_here: "WeakValueDictionary[tuple[str, int, str], Ends]" = WeakValueDictionary()
"""(engine, life, socket) -> the worker's ends. Used only if the worker runs in the scheduler's process, as with one
rank. The socket is part of the key because an engine may have one connector per server, and their job numbers overlap.
"""


@dataclass
class Step(KVConnectorMetadata):
    """The scheduler's message to each worker, sent in every step."""

    retrieves: tuple[RetrieveOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """The workers' message to the scheduler."""

    reports: list[Report] = field(default_factory=list)
    namespaces: frozenset[tuple[int, bytes]] = frozenset()
    """Each rank sends its (rank, namespace) once, as soon as its cache is registered."""
    is_inert: bool = False
    """True if a rank has stopped caching after a bug."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Reports":
        assert isinstance(other, Reports)
        is_inert = self.is_inert or other.is_inert
        return Reports(self.reports + other.reports, self.namespaces | other.namespaces, is_inert)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """The worker's first message to the scheduler, sent during vLLM's handshake."""

    namespace: bytes = b""
    """Empty while the model's files are still being hashed."""


class KvServerConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector interface: one instance in the scheduler's process, one in each worker's."""

    @release_differences.reading(vllm.__version__)
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._is_listed = release_table.check_release(vllm.__version__)
        transfer = vllm_config.kv_transfer_config
        self._settings = parse(transfer.kv_connector_extra_config)
        self._device = device_kind(current_platform, self._settings.device)
        parallel = vllm_config.parallel_config
        self._contexts = getattr(parallel, "decode_context_parallel_size", 1)
        self._tensor_ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self._ranks = stages * self._tensor_ranks
        self._always_counts = role == KVConnectorRole.WORKER and release_differences.counts_beside_workers_only()
        """A worker says in each step that it has counted, even if nothing, so that the scheduler's half is asked."""
        with release_differences.understanding(vllm.__version__, "the description of the KV cache"):
            if role == KVConnectorRole.SCHEDULER or stages == 1:
                self._shards = self._check_supported()
                self._stages: list[Stage] = []
            else:  # before anything else that may fail on one stage alone
                self._stages = told_by_all(self._checked_stage, _gathered)
            self._groups = groups_of(kv_cache_config, contexts=self._contexts)
        self._chunk_tokens = chosen_chunk_tokens(self._groups, self._settings.chunk_tokens)
        self._engine, self._epoch = _engine(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._is_one_of_several = release_differences.is_made_by("multi_connector")
            if not self._is_listed:
                log.warning(UNLISTED, vllm.__version__, release_table.newest())
            release_differences.check_read_while_serving(vllm.__version__)
            states = {place: group.block_tokens for place, group in enumerate(self._groups) if group.kind == "state"}
            self._tables = release_differences.BlockTables(states)
            self._scheduler = self._scheduler_half(vllm_config, kv_cache_config)
            if not _recomputes(transfer):
                log.warning('kv_load_failure_policy is not "recompute": a request ends with an error when a load fails')
            if not current_platform.is_cpu() and (setting := release_differences.without_graphs(vllm_config)):
                log.warning(NO_GRAPHS, setting)
        else:
            self._allocating = ExitStack()
            self._zeros = self._shared_zeros() if self._device == "host" else None
            self._side_tensors = SideTensors(vllm_config.compilation_config.static_forward_context)
            self._kv_caches: dict[str, Any] = {}
            self._is_described = self._is_asleep = self._is_bound = False
            self._steps = 0
            self._ended = Ended([], set(), set(), set())
            stage = get_pp_group().rank_in_group if stages > 1 else 0
            self._rank = stage * self._tensor_ranks + get_tensor_model_parallel_rank()
            self._event = stream_events(current_platform, self._device)
            worker = Worker(self._client(rank=self._rank), rank=self._rank, event=self._event, log=log)
            self._worker = GuardedWorker(worker, log)
            _here[self._engine, self._epoch, self._settings.socket] = worker.ends

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether the KV cache may be given back and made anew.

        On GPUs the memory of vLLM's sleep mode cannot be shared with the server. Portable engines share none."""
        further = getattr(kv_transfer_config, "kv_connector_extra_config", None) or {}
        return bool(current_platform.is_cpu()) or further.get("device") == PORTABLE

    @property
    def requires_kv_delivery(self) -> bool:
        """Always False, because a store that does not happen only causes a miss later."""
        return False

    # ---------------------------------------------------------------- scheduler

    def _scheduler_half(self, config: Any, kv_config: Any) -> GuardedScheduler:
        transfer = config.kv_transfer_config
        hash_block_tokens = release_differences.hash_block_tokens(kv_config, config.cache_config, kv_cache_utils)
        shards = max(1, self._shards.here)
        options = Options(
            chunk_tokens=self._chunk_tokens,
            groups=tuple(self._groups),
            ranks=self._ranks,
            stores=transfer.is_kv_producer,
            retrieves=transfer.is_kv_consumer,
            retrieve_tokens_min=self._settings.min_load_tokens,
            # vLLM steps back by one token after a full hit. With a window it would then need one token more than was
            # filled.
            engine_steps_back=all(group.kind == "full" for group in self._groups),
            null_block=release_differences.NULL,
            lookup_deadline_s=self._settings.lookup_timeout_ms / 1000,
            coming_wait_s=self._settings.remote_wait_ms / 1000,
            await_others=self._settings.await_others == "on",
            await_wait_s=self._settings.await_wait_ms / 1000,
            await_producer_s=self._settings.await_producer_ms / 1000,
            await_tokens_max=self._await_tokens_max(transfer, kv_config),
            # Each job of an engine is as many jobs of a rank as the rank has shards.
            retrieves_max=Options.retrieves_max // shards,
            stores_max=Options.stores_max // shards,
            awaiting_max=Options.awaiting_max // shards,
        )
        keyer = Keyer(
            chunk_tokens=self._chunk_tokens,
            hash_block_tokens=hash_block_tokens,
            adapters=adapter_settings(config.lora_config),
            names_media=names_media(config.model_config, config.cache_config),
        )
        half = Scheduler(
            self._client(rank=-1),
            options,
            keyer,
            steps_ahead=release_differences.steps_ahead(config),
            workers_go_back=not release_differences.workers_count(config, os.environ),
            recovers=release_differences.recovers(KVConnectorBase_V1),
            store_output=self._settings.store_output,
            step_wait_s=self._settings.step_wait_us / 1e6,
            stores_over=self._stores_over,
            events=self._events(config, kv_config),
            answers=Answers() if self._may_lose_counts(config) else None,
            transfer_params=TransferParams(self._engine) if not self._is_one_of_several else None,
        )
        return GuardedScheduler(half, self._groups, release=vllm.__version__)

    def _await_tokens_max(self, transfer: Any, kv_config: Any) -> int:
        """Most tokens whose blocks may wait for another engine. None where a retrieve that ends short would fail its
        request or lose what came, or where it would keep other retrieves from the memory through which they pass."""
        if not (_recomputes(transfer) and _fails_by_block(self._groups)) or self._device == PORTABLE:
            return 0
        return int(kv_config.num_blocks) * self._groups[0].block_tokens * self._settings.await_blocks_percent // 100

    def _events(self, config: Any, kv_config: Any) -> RouterEvents | None:
        """The events for routers. None unless vLLM's own events are on and this engine can fetch what it tells."""
        told = config.kv_events_config
        if told is None or not told.enable_kv_cache_events or not config.kv_transfer_config.is_kv_consumer:
            return None
        if not self._settings.events_endpoint:
            log.info("routers are not told of the server's chunks: events_endpoint is not set")
            return None
        words = Words(kv_events, kv_cache_utils, self._groups, kinds_of(kv_config, kv_cache_interface))
        stream = EventStream(ZeroMqSockets(self._settings.events_endpoint))
        announced = Announced(chunks_max=max(1, TOKENS_MAX // self._chunk_tokens))
        return RouterEvents(stream, words, announced, chunk_tokens=self._chunk_tokens)

    def _may_lose_counts(self, config: Any) -> bool:
        """Whether counts get lost in steps that say nothing. A pooling model says no token that they could wait for."""
        return config.model_config.runner_type != "pooling" and release_differences.drops_quiet_steps()

    def _stores_over(self) -> list[tuple[int, int]]:
        ends = _here.get((self._engine, self._epoch, self._settings.socket))
        return ends.stores_over() if ends is not None else []

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.use_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        told = {item.namespace for item in metadata.values() if isinstance(item, Handshake)}
        if told and b"" not in told:  # otherwise the ranks send their namespaces in their reports
            self._scheduler.use_namespace(told)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.allocated(request, tables, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        from_disk = min(self._scheduler.disk_tokens(request.request_id), num_external_tokens)
        return release_differences.hit_sources(interface, num_external_tokens, from_disk=from_disk)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        def step() -> tuple[Iterator[Scheduled], Callable[[str], release_differences.Tables]]:
            return release_differences.scheduled(scheduler_output), self._tables.of_step(scheduler_output)

        if preempted := getattr(scheduler_output, "preempted_req_ids", None):
            self._scheduler.preempted(preempted)
        return Step(*self._scheduler.step(step))

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            self._scheduler.failed(connector_output.invalid_block_ids)
        told = connector_output.kv_connector_worker_meta
        if told is not None:
            self._scheduler.ended(told.reports, namespaces=told.namespaces, is_inert=told.is_inert)

    def take_events(self) -> Iterable[Any]:
        """Collects lookup answers after each forward pass, and returns the events about the server's chunks."""
        self._scheduler.collect()
        return self._scheduler.take_events()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        told = self._scheduler.finished(request.request_id, block_ids)
        self._tables.forget(request.request_id)
        return False, told

    def has_pending_push_work(self) -> bool:
        return self._scheduler.busy()

    def get_kv_connector_stats(self) -> Stats | None:
        if self.role == KVConnectorRole.SCHEDULER:
            counted: dict[str, Any] = dict(self._scheduler.take_counts())
        else:
            counted = self._worker.take_counts()
        return Stats(data=counted) if counted or self._always_counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True

    # ---------------------------------------------------------------- worker

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._zeros

    def _shared_zeros(self) -> SharedZeros:
        """Makes the context that allocates the KV cache in shared memory.

        Older vLLM releases do not ask for this context. They allocate the KV cache next, so the context is entered
        here.
        """
        zeros = SharedZeros(release_differences.allocations(self._kv_cache_config))
        if not release_differences.asks_where_to_allocate(KVConnectorBase_V1):
            self._allocating.enter_context(zeros)
        return zeros

    @release_differences.reading(vllm.__version__)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._allocating.close()
        self._kv_caches, self._is_described, self._steps = kv_caches, False, 0
        self._is_asleep = False
        self._side_tensors.forget()
        self._describe_or_look()

    def unregister_kv_caches(self) -> None:
        """Has the server let the KV cache go, before the engine gives its memory back. Until restore_kv_caches() every
        job is a miss."""
        self._is_asleep, self._is_described = True, False
        self._worker.unregister()

    @release_differences.reading(vllm.__version__)
    def restore_kv_caches(self) -> None:
        """Registers the KV cache anew. With the same weights it has the same namespace, and finds what it stored."""
        if self._is_asleep:
            self.register_kv_caches(self._kv_caches)

    def _describe_or_look(self) -> None:
        """Registers the cache once every tensor that belongs to its blocks exists.

        Engines may create such tensors as late as the first forward pass that computes something. RequestError if more
        tensors appear after the cache was registered.
        """
        if self._is_asleep:
            return
        blocks = self._kv_cache_config.num_blocks
        block_tokens = [group.block_tokens for group in groups_of(self._kv_cache_config)]
        known = self._side_tensors.known(self._kv_caches, blocks=blocks, block_tokens=block_tokens)
        awaited = self._side_tensors.awaited()
        if awaited and self._steps == 0:
            log.info("no cache before the first forward: layer %s and others have no scales yet", awaited[0])
        if not (awaited or self._is_described):
            with release_differences.understanding(vllm.__version__, "the layout of the KV cache"):
                layout = layout_of(self._kv_cache_config, self._kv_caches, known)
            self._describe(layout, known)
            self._side_tensors.described(known)

    def _describe(self, layout: Layout, known: dict[str, SideTensor]) -> None:
        config, stages = self._vllm_config, self._stages or [self._stage()]
        replicas = stages[0].replicas
        _check_draft_shards(config, replicas)
        if layout.layers != (told := stages[self._rank // self._tensor_ranks].layers):
            raise RequestError("layout", f"layers {layout.layers} are registered; expected {told}, as described")
        if self._shards.here and layout.side_tensors:
            raise RequestError("unsupported", f"head_shards beside {layout.side_tensors[0]}, which is not divided")
        if len(stages) > 1 and layout.side_tensors:
            raise RequestError("unsupported", f"{layout.side_tensors[0]} beside the KV caches of pipeline stages")
        facts = facts_of(
            config,
            model_id=self._settings.model_id,
            weights_epoch=self._settings.weights_epoch,
            tenant=self._settings.tenant,
            groups=self._groups,
            stages=stages,
            chunk_tokens=self._chunk_tokens,
            drafts=_drafts(config),
            version=vllm.__version__,
            device=cpu_kind() if current_platform.is_cpu() else device_name(current_platform),
            layout=release_differences.page_orders(self._kv_cache_config, layout.orders, os.environ),
            beside=layout.side_tensors,
            environment=environment_that_counts(os.environ, envs),
            handler=handler_called(release_differences.cache_dtype_handler(config.cache_config)),
            head_shards=self._shards.total,
        )
        models = [] if self._settings.model_id else _model_files(config)
        life, is_first = f"{self._engine} {self._epoch}", self._rank == 0
        # All ranks share a parent that started before them, so its start time gives each rank the same answer.
        has_siblings = self._ranks > 1 and config.parallel_config.distributed_executor_backend == "mp"
        since_ns = began_ns(os.getppid() if has_siblings else os.getpid())
        namespace = namespace_of(facts, models, life=life, log=log, is_first=is_first, since_ns=since_ns)
        spec = CacheSpec(
            name="kv",
            namespace=b"",
            chunk_tokens=self._chunk_tokens,
            buffers=self._buffers(layout),
            groups=group_specs(
                self._groups,
                layout,
                blocks=self._kv_cache_config.num_blocks,
                ranks=self._ranks,
                rank=self._rank,
                replicas=replicas,
            ),
            device=self._device,
            tenant=self._settings.tenant,
            staging_bytes=self._settings.staging_mib * MIB,
            tokens_max=config.model_config.max_model_len,
            model=called(config.model_config),
        )
        specs = [spec]
        if self._shards.here:
            specs = head_shard_specs(
                spec,
                self._groups,
                self._kv_cache_config,
                self._kv_caches,
                here=self._shards.here,
                ranks=self._ranks,
                rank=self._rank,
                replicas=replicas,
            )
        if self._settings.self_test == "on" or (self._settings.self_test == "auto" and not self._is_listed):
            self._test(specs, known)
        self._worker.register(specs[0], namespace, facts, specs[1:])
        self._is_described = True

    def _test(self, specs: Sequence[CacheSpec], known: dict[str, SideTensor]) -> None:
        found = block_tensors(self._kv_cache_config, self._kv_caches, known)
        tensors = [[BlockTensor(*part) for part in group] for group in found]
        name = f"self-test {self._rank} {self._engine}"[:128]
        with Client(self._settings.socket, engine=name, epoch=self._epoch) as client:
            why = self_test(client, specs[0], tensors, event=self._event, beside=specs[1:])
        log.info("self-test of the layout rank=%d %s", self._rank, f"skipped: {why}" if why else "passed")

    def _stage(self) -> Stage:
        """The part of the model that this worker holds."""
        config, kv_config = self._vllm_config, self._kv_cache_config
        layers = ordered_layers(kv_config)
        return Stage(layers, _backends(config, layers), states_of(kv_config), self._replicas())

    def _replicas(self) -> int:
        """Consecutive tensor ranks that hold the same KV."""
        return release_differences.replicas_of(
            self._kv_cache_config,
            ranks=self._tensor_ranks,
            heads=_kv_heads(self._vllm_config.model_config),
            contexts=self._contexts,
        )

    def _checked_stage(self) -> Stage:
        self._shards = self._check_supported()
        return self._stage()

    def _check_supported(self) -> HeadShards:
        """How the setting head_shards divides the KV. RequestError for what is not supported."""
        config, wanted = self._vllm_config, self._settings.head_shards
        _check_supported(config, self._kv_cache_config)
        if not wanted:
            return HeadShards()
        return check_head_shards(
            wanted,
            self._kv_cache_config,
            ranks=self._tensor_ranks,
            replicas=self._replicas(),
            heads=_kv_heads(config.model_config),
            contexts=self._contexts,
            has_drafts=bool(_drafts(config)),
            is_portable=self._device == PORTABLE,
            is_shuffled=release_differences.is_shuffled(os.environ),
        )

    def _buffers(self, layout: Layout) -> Sequence[Buffered]:
        if self._device == PORTABLE:
            return [TensorBuffer(flat(storage)) for storage in layout.storages]
        if self._device != "host":
            return [DeviceBuffer(*found) for found in layout.allocations]
        made = self._zeros.made if self._zeros is not None else {}
        elsewhere = [found for found in layout.allocations if found.address not in made]
        if elsewhere:
            raise RequestError("layout", f"{elsewhere} of the KV cache are not in the connector's shared memory")
        return [made[found.address] for found in layout.allocations]

    @release_differences.reading(vllm.__version__)
    def get_handshake_metadata(self) -> Handshake | None:
        """Return the namespace, or None if there is none yet.

        Also None inside MultiConnector, which allows one handshake for all its connectors.
        """
        self._describe_or_look()
        return Handshake(self._worker.namespace) if self._is_described and get_kv_transfer_group() is self else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        if self._is_bound:  # beside speculation vLLM ends a step on the last pipeline stage only
            self.wait_for_save()
        super().bind_connector_metadata(connector_metadata)
        self._is_bound = True
        self._worker.begin(connector_metadata.retrieves, connector_metadata.stores)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Does nothing: loads begin when the step is bound. On a CPU vLLM calls this only after the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: no load belongs to a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Does nothing: whole chunks of all layers are stored after the forward pass."""

    def wait_for_save(self) -> None:
        """Begins the stores and does not wait for them, because their blocks are pinned."""
        self._steps += 1
        self._is_bound = False
        if self._steps & (self._steps - 1) == 0 or not self._is_described:
            self._worker.attempt(self._describe_or_look)
        self._worker.computed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._ended = self._worker.take_ended()
        return None, self._ended.retrieved or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        _, retrieved = self.get_finished(finished_req_ids)
        failed = set() if _fails_by_block(self._groups) else self._ended.failed
        return interface.KVConnectorTransferResults(
            finished_sending=set(), finished_recving=retrieved or set(), failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._ended.failed_blocks if _fails_by_block(self._groups) else set()

    def build_connector_worker_meta(self) -> Reports | None:
        namespace = self._worker.take_namespace()
        namespaces = frozenset({(self._rank, namespace)}) if namespace else frozenset()
        told = Reports(self._ended.reports, namespaces, self._worker.is_inert)
        return told if told.reports or told.namespaces or told.is_inert else None

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        else:
            self._worker.close()

    # ---------------------------------------------------------------- both

    def _client(self, *, rank: int) -> Client:
        return Client(
            self._settings.socket,
            engine=self._engine,
            epoch=self._epoch,
            ranks=self._ranks,
            rank=rank,
            timeouts=self._settings.timeouts,
        )


# MultiConnector looks up its connectors by name when it reads their statistics.
with suppress(ValueError):  # the name is taken if vLLM ships this connector one day
    KVConnectorFactory.register_connector(KvServerConnector.__name__, __name__, KvServerConnector.__name__)


def _check_supported(config: Any, kv_config: Any) -> None:
    """Raise RequestError at engine start for a configuration that would be wrong or is not supported yet."""
    model, parallel, speculation = config.model_config, config.parallel_config, config.speculative_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise RequestError(
            "unsupported", "a model that pools over all positions of a prompt, which vLLM has to compute at once"
        )
    if getattr(model, "is_diffusion", False):
        raise RequestError("unsupported", "a diffusion model, which computes each token several times")
    if release_differences.is_hisparse(config, kv_config):
        raise RequestError("unsupported", "HiSparse, which keeps part of the KV cache in host memory of its own")
    if release_differences.scales_kv_by_its_first_prompt(config.cache_config):
        raise RequestError(
            "unsupported",
            "--calculate-kv-scales: neither another engine nor this one restarted has these scales",
        )
    _check_ranks(parallel)
    if model.runner_type == "pooling" and parallel.pipeline_parallel_size > 1:
        raise RequestError("unsupported", "a pooling model in pipeline stages: vLLM loses all reports but the last's")
    if speculation is not None and speculation.method not in SPECULATION + DRAFTS:
        expected = SPECULATION + DRAFTS
        raise RequestError("unsupported", f"speculative decoding by {speculation.method!r}; expected {expected}")
    if speculation is not None and states_of(kv_config):
        raise RequestError("unsupported", "speculative decoding of a model with states (Mamba and the like)")
    has_drafts = speculation is not None and speculation.method in DRAFTS
    if has_drafts and (kinds := {group.kind for group in groups_of(kv_config)}) != {"full"}:
        raise RequestError("unsupported", f"a draft model beside groups of kinds {sorted(kinds)}; expected full alone")
    if has_drafts and not release_differences.saves_behind_drafts(KVConnectorBase_V1):
        raise RequestError("unsupported", "this release of vLLM may have blocks saved before a draft model computes")
    if not (_fails_by_block(groups_of(kv_config)) or release_differences.reports_failed_requests(KVConnectorBase_V1)):
        raise RequestError("unsupported", "this release of vLLM cannot be told of failed loads of windows and states")
    if has_drafts and getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise RequestError("unsupported", "a draft model beside decode_context_parallel_size; not supported yet")


def _check_ranks(parallel: Any) -> None:
    """Raise RequestError if the workers of this engine cannot all be reached, or hold KV in an unknown way."""
    executor, stages = parallel.distributed_executor_backend, parallel.pipeline_parallel_size
    if (size := getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        raise RequestError("unsupported", f"prefill_context_parallel_size={size} is not supported yet; expected 1")
    if executor == "external_launcher" and parallel.tensor_parallel_size * stages > 1:
        raise RequestError("unsupported", "external_launcher: a rank's scheduler gets only that rank's reports")
    if stages > 1 and executor != "mp":
        raise RequestError(
            "unsupported",
            f"pipeline_parallel_size={stages} with distributed_executor_backend={executor!r}; expected 'mp', which "
            "passes on the reports of all stages",
        )
    if stages > 1 and not release_differences.knows_stages(KVConnectorBase_V1):
        raise RequestError("unsupported", "pipeline_parallel_size: this release of vLLM takes one stage's handshake")
    if (nodes := getattr(parallel, "nnodes_within_dp", 1)) > 1:
        raise RequestError("unsupported", f"an engine on {nodes} nodes: a server sees only the ranks of its own node")


def _gathered(mine: object) -> list[Any]:
    """The values of all pipeline stages, from the workers of this tensor rank."""
    stages = get_pp_group()
    told: list[Any] = [None] * stages.world_size
    torch.distributed.all_gather_object(told, mine, group=stages.cpu_group)
    return told


def _recomputes(transfer: Any) -> bool:
    """Whether vLLM computes what a failed load did not bring."""
    return bool(getattr(transfer, "kv_load_failure_policy", "recompute") == "recompute")


def _fails_by_block(groups: Sequence[Group]) -> bool:
    """Whether a failed load is reported to vLLM by block ids, not by request.

    vLLM then recomputes from the first failed block and trusts all blocks before it. This is wrong for windows and
    states, even in a model with a single group.
    """
    return [group.kind for group in groups] == ["full"]


def _engine(config: Any) -> tuple[str, int]:
    """Name and life of the engine, equal in all its processes: vLLM draws instance_id when it starts."""
    name = str(config.kv_transfer_config.engine_id)
    life = hashlib.sha256(f"{name} {config.instance_id}".encode()).digest()
    return name[:128], int.from_bytes(life[:7], "little")


def _check_draft_shards(config: Any, replicas: int) -> None:
    """Raise RequestError if ranks hold the same KV and the draft model has another number of KV heads.

    KV that several ranks share is stored once for all of them, and this has to hold for every layer.
    """
    speculation = config.speculative_config
    if replicas == 1 or speculation is None or speculation.method not in DRAFTS:
        return
    heads = {"model": _kv_heads(config.model_config), "draft model": _kv_heads(speculation.draft_model_config)}
    if len(set(heads.values())) != 1:
        raise RequestError("unsupported", f"ranks that hold the same KV ({replicas}), and not of both: {heads=}")


def _drafts(config: Any) -> list[str]:
    """The draft model's facts except its files. Empty if no draft model has KV in the cache."""
    speculation = config.speculative_config
    if speculation is None or speculation.method not in DRAFTS:
        return []
    draft = speculation.draft_model_config
    return [speculation.method, settings_text(draft.hf_config.to_dict()), str(draft.dtype)]


def _model_files(config: Any) -> list[ModelFiles]:
    """Files of the model, and of a draft model whose KV is cached.

    With --download-dir, a Hub model has only its weights in that directory.
    """
    check_told_by_files(config.load_config.load_format)
    models = [config.model_config, *([config.speculative_config.draft_model_config] if _drafts(config) else [])]
    found = []
    for model in models:
        settings_in = Path(model.model) if Path(model.model).is_dir() else _snapshot(model, None)
        apart = None if Path(model.model).is_dir() else config.load_config.download_dir
        weights_in = settings_in if apart is None else _snapshot(model, apart)
        found.append(model_files(weights_in, settings_in=settings_in))
    return found


def _snapshot(model: Any, cache_folder: str | None) -> Path:
    commit = getattr(model.hf_config, "_commit_hash", None)
    return hub_folder(model.model, revision=model.revision, commit=commit, cache_folder=cache_folder)


def _kv_heads(model: Any) -> int:
    return 0 if model.use_mla else int(model.get_total_num_kv_heads())


def _backends(config: Any, layers: Sequence[Sequence[str]]) -> list[str]:
    """Names of the layers' attention backends."""
    contexts = config.compilation_config.static_forward_context
    found = (getattr(contexts.get(name), "attn_backend", None) for names in layers for name in names)
    return [backend_called(backend) if backend is not None else "" for backend in found]
