"""The connector that ATOM makes: `kv_connector` "kvserver", registered by atom_register.py. docs/atom.md is the manual.

This file only translates: decisions are made in offload.py, the two halves are atom_scheduler.py and offload_worker.py.
Behind the first unexpected exception of ours a half does nothing more than to end what it has begun, and the engine
computes on; what is refused when the engine starts does get through.
"""

import importlib.metadata
import logging
import platform
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import atom

from kvclient import atom_versions as versions
from kvclient.atom_layout import Allocation, Layout, layout_of
from kvclient.atom_namespace import facts_of, models_of
from kvclient.atom_process import SCHEDULER, WORKER, ancestor, life_of
from kvclient.atom_scheduler import Scheduler
from kvclient.atom_settings import Settings, chosen_chunk_tokens, parse, role_of
from kvclient.atom_steps import NAMESPACE, STORED, Name, Seq, Step
from kvclient.client import Client
from kvclient.file_times import began_ns
from kvclient.identity import code_digest, label_of
from kvclient.late_namespaces import namespace_of
from kvclient.offload import CHAIN_GOES_ON
from kvclient.offload_guard import WHY, Guard, GuardedWorker
from kvclient.offload_values import Group, Options
from kvclient.offload_worker import Worker
from kvclient.settings import MIB
from kvclient.values import CacheSpec, DeviceBuffer, HostBuffer, RetrieveResult
from kvserver.errors import RequestError
from kvserver.wire.messages import GroupSpec

try:
    from atom.kv_transfer.disaggregation.base import KVConnectorBase, KVConnectorSchedulerBase
    from atom.kv_transfer.disaggregation.types import (
        ConnectorCompletion,
        KVConnectorOutput,
        LoadOperationId,
        SaveOperationId,
    )
except ImportError as problem:
    raise versions.refusal(f"has not what its connectors are made of ({problem})") from problem

log = logging.getLogger("atom.kvserver")

SAID_TIMES = 8
"""A rank says each end in so many polls. ATOM drops a poll for which one rank takes more than 10 s (it compiles a
kernel, say), and with it what others have said; what it hears twice it counts once."""


ROLLOUT = "atom.rollout.memory_manager"
"""Imported in workers that can sleep. Before that ATOM overwrites its KV with zeros, also under a store that reads it,
and tells no connector. So nobody else ever looks for what such an engine stores, nor the engine itself afterwards."""


class Engine:
    """What both halves take from ATOM's Config."""

    def __init__(self, config: Any) -> None:
        versions.check_config(config)
        transfer: Mapping[str, Any] = config.kv_transfer_config or {}
        self.config = config
        self.settings: Settings = parse(transfer)
        self.stores, self.loads = role_of(transfer)
        _refuse_unsupported(config)
        self.local_block_tokens = int(config.kv_cache_block_size)
        self.block_tokens = self.local_block_tokens * _count(config, "decode_context_parallel_size")
        self.chunk_tokens = chosen_chunk_tokens(self.block_tokens, self.settings.chunk_tokens)
        self.stages = _count(config, "pipeline_parallel_size")
        self.tensor_ranks = _count(config, "tensor_parallel_size")
        self.ranks = self.stages * self.tensor_ranks
        self.stage = int(config.parallel_config.pipeline_parallel_rank or 0)
        self.name = f"atom-dp{int(config.parallel_config.data_parallel_rank or 0)}"

    def life(self, generations: int) -> int:
        """The same in the scheduler and in all workers of this engine."""
        return life_of(generations + (self.stages > 1), name=self.name)

    def client(self, *, rank: int, generations: int) -> Client:
        return Client(
            self.settings.socket,
            engine=self.name,
            epoch=self.life(generations),
            ranks=self.ranks,
            rank=rank,
            timeouts=self.settings.timeouts,
        )


# ---------------------------------------------------------------- scheduler


class KvServerScheduler(KVConnectorSchedulerBase):  # type: ignore[misc]
    """In the process of the EngineCore."""

    is_producer = False
    """Otherwise ATOM would free blocks as after prefill on another node."""
    is_offload = True
    """A request whose load has ended prefills the rest, instead of going on to decode."""

    def __new__(cls, config: Any) -> Any:
        versions.check_whole(cls)  # before Python says it in its own words
        return super().__new__(cls)

    def __init__(self, config: Any) -> None:
        engine = Engine(config)
        options = Options(
            chunk_tokens=engine.chunk_tokens,
            groups=(Group(engine.block_tokens),),
            stores=engine.stores,
            retrieves=engine.loads,
            retrieve_tokens_min=engine.settings.min_load_tokens,
            # ATOM sizes the prefill behind a load by the prompt alone: output that was generated before a preemption
            # would have no KV.
            resumes_output=False,
            lookup_deadline_s=engine.settings.lookup_timeout_ms / 1000,
            retrieves_max=max(32, int(config.max_num_seqs or 0)),  # ATOM bounds what is parked
            retrieve_wait_s=0.0,
        )
        self._half = Scheduler(engine.client(rank=-1, generations=SCHEDULER), options)
        self._half.wait_connected()
        self._guard = Guard(_nothing, log)
        self._handoffs = self._half.handoffs
        self._running_tokens, self._running_tokens_before = 0, 0
        """Of the running sequences that ATOM has asked about since the last step, and between the two before: they grow
        as long as anything is computed. One that runs and finds no block for its next token stands still too."""

    def get_num_new_matched_tokens(self, seq: Seq) -> tuple[int, bool]:
        with self._guard as serves:
            if serves:
                tokens = self._half.match(seq)
                return tokens, tokens > 0
        return 0, False

    def update_state_after_alloc(self, seq: Seq) -> None:
        with self._guard as serves:
            if serves:
                self._half.allocated(seq)

    def should_park_for_load_after_alloc(self, seq: Seq) -> bool:
        with self._guard as serves:
            if serves:
                return self._half.should_park(seq)
        return False

    def adjust_prefill_chunk_after_alloc(self, seq: Seq, chunk: int) -> int:
        with self._guard as serves:
            if serves and id(seq) in self._half.handoffs:
                return self._half.chunk_until_handoff(seq, chunk)
        return chunk

    def should_park_partial_prefill_for_load(self, seq: Seq) -> bool:
        self._running_tokens += seq.num_tokens + seq.num_cached_tokens
        if not self._handoffs or id(seq) not in self._handoffs:  # asked for every running sequence in every step
            return False
        with self._guard as serves:
            if serves:
                return self._half.should_park_now(seq)
        return False

    def build_connector_meta(self) -> Step:
        runs = self._running_tokens not in (0, self._running_tokens_before)
        self._running_tokens, self._running_tokens_before = 0, self._running_tokens
        with self._guard as serves:
            if serves:
                return self._half.step(runs=runs)
        return self._last_words()

    def process_completions(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Terminals of all ranks. ATOM wants to hear of requests, and only of those whose end it waits for."""
        ours = {item for item in output.connector_completions if item.channel == STORED}
        output.connector_completions -= ours
        gaps = {item.operation_id for item in ours if not item.succeeded}
        loaded, failed, saved = output.finished_loading, output.failed_loading, output.finished_saving
        # Apart from the decisions, and before them: what ATOM waits for has to reach it also when these fail.
        known = self._half.jobs.ended((*loaded, *failed, *saved))
        with self._guard as serves:
            if serves:
                self._half.learn(saved)
                self._half.ended(
                    loaded=[one for one in loaded if one in known],
                    failed=[one for one in failed if one in known],
                    saved={one: known[one] for one in saved if one in known},
                    gaps=gaps,
                )
        output.finished_loading = {one.req_id for one in loaded if one in known}
        output.failed_loading = {one.req_id for one in failed if one in known}
        output.finished_saving = {one.req_id for one in saved if one in known}
        return output

    def should_defer_free(self, seq: Seq) -> bool:
        with self._guard as serves:
            if serves:
                return not self._half.may_free(seq)
        return self._half.jobs.holds(seq)

    def request_finished(self, seq: Seq) -> None:
        with self._guard as serves:
            if serves:
                self._half.finished(seq)

    def source_blocks_released(self, seq: Seq) -> None:
        """Since ATOM's #2167, in the place of a second request_finished(): of a sequence that has ended or was
        preempted, whose blocks may be anybody's now."""
        with self._guard as serves:
            if serves:
                self._half.released(seq)

    def send_finished(self, req_id: Any) -> None:
        """Since ATOM's #2167, of what goes to a decode node. Nothing of ours does."""

    def has_pending_work(self) -> bool:
        with self._guard as serves:
            if serves:
                return self._half.busy()
        return len(self._half.jobs) > 0

    def get_statistics(self) -> dict[str, int]:
        """By the names of ATOM's metrics, atom:lmcache_…"""
        it = self._half.statistics
        return {
            "load_requests": it.retrieves - it.retrieves_in_flight - it.retrieves_failed,
            "loaded_tokens": it.tokens_retrieved,
            "load_failures": it.retrieves_failed,
            "save_requests": it.stores - it.stores_in_flight,
            "saved_tokens": it.tokens_stored,
            "loads_pending": it.retrieves_in_flight,
            "saves_pending": it.stores_in_flight,
        }

    def _last_words(self) -> Step:
        """After a bug: what the engine waits for has to end, and only workers can say so. Loads are not carried out."""
        half = self._half
        step = Step(tuple(order._replace(refused=WHY) for order in half.untold), tuple(half.untold_stores))
        half.untold.clear()
        half.untold_stores.clear()
        return step


# ---------------------------------------------------------------- worker


class KvServerConnector(KVConnectorBase):  # type: ignore[misc]
    """In the process of each ModelRunner. Belongs to the thread that launches its forwards."""

    is_producer = False

    def __new__(cls, config: Any) -> Any:
        versions.check_whole(cls)
        return super().__new__(cls)

    def __init__(self, config: Any) -> None:
        self._engine = Engine(config)
        tensor_rank, tensor_ranks = _tensor_rank()
        if tensor_ranks != self._engine.tensor_ranks:
            raise RequestError(
                "unsupported",
                f"{tensor_ranks} tensor ranks in a group; expected {self._engine.tensor_ranks}",
            )
        self._tensor_rank = tensor_rank
        self._rank = self._engine.stage * tensor_ranks + tensor_rank
        self._worker: GuardedWorker | None = None
        self._registered = 0
        self._watched: weakref.finalize[..., Any] | None = None
        self._said: deque[KVConnectorOutput] = deque(maxlen=SAID_TIMES)
        """What was new in the last polls."""
        self._names: dict[int, Name] = {}
        """Of jobs in flight, whose they are."""

    def register_kv_caches(
        self, kv_caches: dict[str, Any], transfer_tensors: Any = None, num_blocks: int | None = None
    ) -> None:
        """Again after the engine has slept: its memory is another then, and its weights may be."""
        if self._watched is not None:
            self._watched.detach()
        engine = self._engine
        layout = layout_of(kv_caches, transfer_tensors, blocks=num_blocks, block_tokens=engine.local_block_tokens)
        assert num_blocks is not None
        kind = _device_kind(kv_caches)
        can_sleep = ROLLOUT in sys.modules
        contexts = engine.block_tokens // engine.local_block_tokens
        replicas = engine.tensor_ranks if layout.is_latent and contexts == 1 else 1
        facts = facts_of(
            engine.config,
            layout,
            model_id=engine.settings.model_id,
            weights_epoch=engine.settings.weights_epoch,
            tenant=engine.settings.tenant,
            chunk_tokens=engine.chunk_tokens,
            replicas=replicas,
            versions=_versions(),
            device=_device_name(kind),
            sleeps=[engine.name, engine.life(WORKER), self._registered] if self._registered or can_sleep else [],
        )
        models = [] if engine.settings.model_id else models_of(engine.config)
        life, is_first = f"{engine.name} {engine.life(WORKER)}", self._rank == 0
        since_ns = began_ns(ancestor(WORKER + (engine.stages > 1)))
        namespace = namespace_of(facts, models, life=life, log=log, is_first=is_first, since_ns=since_ns)
        spec = CacheSpec(
            name="kv",
            namespace=b"",
            chunk_tokens=engine.chunk_tokens,
            buffers=_buffers(kind, layout.allocations),
            groups=[self._group(layout, blocks=num_blocks, replicas=replicas)],
            device=kind,
            tenant=engine.settings.tenant,
            staging_bytes=engine.settings.staging_mib * MIB,
            tokens_max=int(engine.config.max_model_len or 0),
            model=label_of(engine.config.model),
        )
        half = self._half(kind)
        half.register(spec, namespace)
        self._watched = _watch(kv_caches, self._given_back)
        self._registered += 1
        if can_sleep:
            log.warning("this engine's weights can change; kvserver notices it only if the engine sleeps meanwhile")
        known = half.namespace.hex()[:16] or "later"
        log.info("cache described namespace=%s rank=%d facts=%s", known, self._rank, _shown(facts))

    def _given_back(self, thread: int) -> None:
        """ATOM has dropped its KV cache, which it tells nobody: what the server has mapped would stay allocated."""
        if thread == threading.get_ident() and self._worker is not None:  # elsewhere nothing may be waited for
            self._worker.unregister()

    def start_load_kv(self, metadata: Any) -> None:
        """Before the forward of a step; what ATOM counts as computed was launched by earlier ones."""
        if self._worker is None or not isinstance(metadata, Step):
            return
        for order in metadata.requests:
            assert isinstance(order.request, Name)
            self._names[order.job] = order.request
        self._worker.begin(metadata.retrieves, metadata.stores)
        self._worker.computed()

    def get_finished(self) -> KVConnectorOutput:
        self._said.append(self._ended())
        output = KVConnectorOutput()
        for said in self._said:
            output.finished_loading |= said.finished_loading
            output.failed_loading |= said.failed_loading
            output.finished_saving |= said.finished_saving
            output.connector_completions |= said.connector_completions
        return output

    def _ended(self) -> KVConnectorOutput:
        """Since the last call."""
        output = KVConnectorOutput()
        if self._worker is None:
            return output
        for report in self._worker.take_ended().reports:
            name = self._names.pop(report.job)
            result = report.result
            if isinstance(result, RetrieveResult):
                (output.finished_loading if result.ok else output.failed_loading).add(
                    LoadOperationId(name.id, report.job)
                )
            else:
                operation = SaveOperationId(name.id, report.job)
                output.finished_saving.add(operation)  # also when it failed: its blocks are free
                whole = not result.why or result.why in CHAIN_GOES_ON
                output.connector_completions.add(ConnectorCompletion(STORED, operation, whole))
        if namespace := self._worker.take_namespace():
            output.finished_saving.add(SaveOperationId(NAMESPACE + namespace.hex(), 0))
        return output

    def get_finished_recv_blocks(self) -> list[int]:
        """Copies have ended, as the stream sees them, before a load is reported."""
        return []

    def _half(self, kind: str) -> GuardedWorker:
        if self._worker is None:
            client = self._engine.client(rank=self._rank, generations=WORKER)
            event = _no_event if kind == "host" else _recorded_event
            self._worker = GuardedWorker(Worker(client, rank=self._rank, event=event, log=log), log)
        return self._worker

    def _group(self, layout: Layout, *, blocks: int, replicas: int) -> GroupSpec:
        return GroupSpec(
            block_tokens=self._engine.block_tokens,
            blocks=blocks,
            kind="full",
            window_tokens=0,
            shards=self._engine.ranks // replicas,
            shard=self._rank // replicas,
            writers=replicas,
            writer=self._rank % replicas,
            regions=layout.regions,
        )


# ---------------------------------------------------------------- what ATOM and its device say


def _count(config: Any, name: str) -> int:
    return int(getattr(config, name) or 1)


def _refuse_unsupported(config: Any) -> None:
    if _count(config, "prefill_context_parallel_size") > 1:
        raise RequestError("unsupported", "prefill_context_parallel_size > 1: which rank holds what is not known here")
    if config.enable_rapidserve:
        raise RequestError("unsupported", "rapidserve: two processes share one KV cache, and only one schedules")
    if getattr(config.hf_config, "compress_ratios", None):
        raise RequestError(
            "unsupported",
            "DeepSeek-V4 keeps compressor state and windows for each request beside its pages; kvserver stores blocks "
            "only, and a prefix without that state would be wrong",
        )


def _tensor_rank() -> tuple[int, int]:
    """This worker's, and how many there are."""
    from aiter.dist.parallel_state import get_tp_group  # noqa: PLC0415  (on GPUs only)

    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def _versions() -> dict[str, str]:
    """ATOM runs from checkouts, whose version may stay as it is: so the code that lays out caches counts as well."""
    found = {}
    for name in ("atom", "aiter", "amd-aiter"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["attention"] = code_digest(Path(str(atom.__file__)).parent / "model_ops" / "attentions")
    return found


def _device_kind(kv_caches: Mapping[str, Any]) -> str:
    import torch  # noqa: PLC0415  (the scheduler's half has no use for it)

    tensors = [cache.k_cache for cache in kv_caches.values() if cache.k_cache is not None]
    kinds = {str(tensor.device.type) for tensor in tensors if tensor.numel()}  # ATOM's default is an empty one
    if kinds - {"cuda"}:
        raise RequestError("unsupported", f"KV cache on {sorted(kinds)}; expected GPUs")
    return "rocm" if torch.version.hip else "cuda"


def _watch(kv_caches: Mapping[str, Any], given_back: Callable[[int], None]) -> "weakref.finalize[..., Any] | None":
    """Calls when the memory goes, with the thread that is here now."""
    tensors = [cache.k_cache for cache in kv_caches.values() if cache.k_cache is not None]
    first = next((tensor for tensor in tensors if len(tensor.shape) > 1), None)  # ATOM's default is an empty one
    if first is None:
        return None
    watched = weakref.finalize(first, given_back, threading.get_ident())
    watched.atexit = False  # the end of the process says it as well
    return watched


def _device_name(kind: str) -> str:
    if kind == "host":
        return platform.machine()
    import torch  # noqa: PLC0415

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(properties, "gcnArchName", "") or properties.name)


def _buffers(kind: str, allocations: list[Allocation]) -> list[HostBuffer | DeviceBuffer]:
    assert kind != "host", "ATOM's caches are on GPUs"
    return [DeviceBuffer(found.address, found.bytes) for found in allocations]


def _recorded_event() -> object:
    import torch  # noqa: PLC0415

    event = torch.cuda.Event()
    event.record()
    return event


def _no_event() -> None:
    return None


def _nothing() -> None:
    """What is to be done after a bug, each call does by itself."""


def _shown(facts: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in facts.items() if name not in ("settings", "layout")}
