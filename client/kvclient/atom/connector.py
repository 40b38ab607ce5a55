"""The connector that ATOM creates for `kv_connector` "kvserver" (register.py). docs/atom.md is the manual.

This file only translates. offload/decide.py makes the decisions; atom/scheduler.py and offload/worker.py are the two
halves. After the first unexpected exception of ours, a half only ends what it has begun, and the engine computes on.
Refusals at engine start do reach the engine.
"""

import importlib.metadata
import logging
import platform
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import atom

from kvclient.atom import versions
from kvclient.atom.layout import Layout, layout_of
from kvclient.atom.namespace import facts_of, models_of
from kvclient.atom.scheduler import Scheduler
from kvclient.atom.settings import Settings, parse, role_of
from kvclient.atom.states import CLASS, NO_ROW, RowMemory, Rows, TorchRows, row_bytes
from kvclient.atom.steps import NAMESPACE, STORED, Name, Seq, StateCopy, Step
from kvclient.client import Client
from kvclient.identity.late_namespaces import namespace_of
from kvclient.identity.model_files import code_digest, label_of
from kvclient.identity.processes import ancestor, began_ns, life_of
from kvclient.memory.layouts import Extent
from kvclient.offload.decide import CHAIN_GOES_ON
from kvclient.offload.guard import WHY, Guard, GuardedWorker
from kvclient.offload.settings import MIB, NO_GRAPHS, chosen_chunk_tokens
from kvclient.offload.values import Group, Options
from kvclient.offload.worker import Worker
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
    raise versions.refusal(f"lacks the classes that connectors are made of ({problem})") from problem

log = logging.getLogger("atom.kvserver")

SAID_TIMES = 8
"""Number of polls in which a rank repeats each end. ATOM drops a poll if one rank takes more than 10 s, for example to
compile a kernel, and loses the other ranks' ends. It counts repeated ends once."""


SCHEDULER, WORKER = 0, 1
"""Generations between a process and its EngineCore, which is the scheduler's process. ATOM gives its processes nothing
that tells one start of an engine from the next, so their common ancestor does. With pipeline stages there is an
EngineCore for each stage, and one process is the parent of them all."""

ROLLOUT = "atom.rollout.memory_manager"
"""Module that ATOM imports in workers that can sleep. Before sleeping, ATOM overwrites its KV with zeros, even under a
running store, and tells no connector. So neither another engine nor this one after waking may find what it stored."""


class Engine:
    """The part of ATOM's Config that both halves use."""

    def __init__(self, config: Any) -> None:
        versions.check_config(config)
        transfer: Mapping[str, Any] = config.kv_transfer_config or {}
        self.config = config
        self.settings: Settings = parse(transfer)
        self.stores, self.loads = role_of(transfer)
        entries, per_request = (getattr(config, name, None) or {} for name in ("pool_entries", "pool_entries_per_req"))
        self.span = int(per_request.get(CLASS, 1)) or 1
        """Entries of a state tensor for each request."""
        self.entries = int(entries.get(CLASS, 0))
        self.slots = self.entries // self.span
        """Requests that can have a state. 0 if the model keeps none."""
        _refuse_unsupported(config, slots=self.slots, state_rows=self.settings.state_rows)
        self.local_block_tokens = int(config.kv_cache_block_size)
        self.block_tokens = self.local_block_tokens * _count(config, "decode_context_parallel_size")
        self.chunk_tokens = chosen_chunk_tokens([Group(self.block_tokens)], self.settings.chunk_tokens)
        self.groups = (Group(self.block_tokens), *([Group(self.chunk_tokens, "state")] if self.slots else []))
        self.stages = _count(config, "pipeline_parallel_size")
        self.tensor_ranks = _count(config, "tensor_parallel_size")
        self.ranks = self.stages * self.tensor_ranks
        self.stage = int(config.parallel_config.pipeline_parallel_rank or 0)
        self.name = f"atom-dp{int(config.parallel_config.data_parallel_rank or 0)}"

    def life(self, generations: int) -> int:
        """The engine's life number, the same in its scheduler and all its workers."""
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
    """ATOM's scheduler interface, in the EngineCore's process."""

    is_producer = False
    """True would make ATOM free blocks as it does after prefill on another node."""
    is_offload = True
    """A request prefills the rest after a load. False would make it go on to decode."""

    def __new__(cls, config: Any) -> Any:
        versions.check_whole(cls)  # before Python raises its own error
        return super().__new__(cls)

    def __init__(self, config: Any) -> None:
        engine = Engine(config)
        options = Options(
            chunk_tokens=engine.chunk_tokens,
            groups=engine.groups,
            null_block=NO_ROW if engine.slots else None,
            stores=engine.stores,
            retrieves=engine.loads,
            retrieve_tokens_min=engine.settings.min_load_tokens,
            # ATOM sizes the prefill after a load by the prompt alone. Output generated before a preemption would get no
            # KV.
            resumes_output=False,
            lookup_deadline_s=engine.settings.lookup_timeout_ms / 1000,
            retrieves_max=max(32, int(config.max_num_seqs or 0)),  # ATOM limits the number of waiting requests
            retrieve_wait_s=0.0,
        )
        state_rows = engine.settings.state_rows if engine.slots else 0
        self._half = Scheduler(engine.client(rank=-1, generations=SCHEDULER), options, state_rows=state_rows)
        self._half.wait_connected()
        if getattr(config, "enforce_eager", False):
            log.warning(NO_GRAPHS, "enforce_eager")
        self._guard = Guard(log)  # each call handles the time after a bug by itself
        self._running_tokens, self._running_tokens_before = 0, 0
        """Token sums of the running sequences that ATOM has asked about: since the last step, and in the step before.

        The sum grows while anything is computed. It stands still too if the only running sequence finds no block.
        """

    def get_num_new_matched_tokens(self, seq: Seq) -> tuple[int, bool]:
        tokens = self._guard.run(self._half.match, seq) or 0
        return tokens, tokens > 0

    def update_state_after_alloc(self, seq: Seq) -> None:
        self._guard.run(self._half.allocated, seq)

    def should_park_for_load_after_alloc(self, seq: Seq) -> bool:
        return self._guard.run(self._half.should_park, seq) or False

    def adjust_prefill_chunk_after_alloc(self, seq: Seq, chunk: int) -> int:
        if self._half.states is not None:
            return self._guard.run(self._half.chunk_until_state, seq, chunk) or chunk
        if id(seq) not in self._half.handoffs:
            return chunk
        return self._guard.run(self._half.chunk_until_handoff, seq, chunk) or chunk

    def should_park_partial_prefill_for_load(self, seq: Seq) -> bool:
        self._running_tokens += seq.num_tokens + seq.num_cached_tokens
        if id(seq) not in self._half.handoffs:  # ATOM asks for every running sequence in every step
            return False
        return self._guard.run(self._half.should_park_now, seq) or False

    def build_connector_meta(self) -> Step:
        runs = self._running_tokens not in (0, self._running_tokens_before)
        self._running_tokens, self._running_tokens_before = 0, self._running_tokens
        return self._guard.run(self._half.step, runs=runs) or self._half.last_step(WHY)

    def process_completions(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Take ended jobs of all ranks. Returns only the requests whose end ATOM waits for."""
        ours = {item for item in output.connector_completions if item.channel == STORED}
        output.connector_completions -= ours
        gaps = {item.operation_id for item in ours if not item.succeeded}
        loaded, failed, saved = output.finished_loading, output.failed_loading, output.finished_saving
        # First and separate from the decisions: what ATOM waits for must reach it even if these fail.
        known = self._half.jobs.ended((*loaded, *failed, *saved))
        self._guard.run(self._half.learn, saved)
        self._guard.run(self._half.ended, known, failed=failed, gaps=gaps)
        output.finished_loading = {one.req_id for one in loaded if one in known}
        output.failed_loading = {one.req_id for one in failed if one in known}
        output.finished_saving = {one.req_id for one in saved if one in known}
        return output

    def should_defer_free(self, seq: Seq) -> bool:
        may_free = self._guard.run(self._half.may_free, seq)
        return self._half.jobs.holds(seq) if may_free is None else not may_free

    def request_finished(self, seq: Seq) -> None:
        self._guard.run(self._half.finished, seq)

    def source_blocks_released(self, seq: Seq) -> None:
        """Called since ATOM's #2167 instead of a second request_finished(), when a sequence has ended or was preempted.

        Its blocks may belong to another sequence now.
        """
        self._guard.run(self._half.released, seq)

    def send_finished(self, req_id: Any) -> None:
        """Does nothing: since ATOM's #2167 this is for KV sent to a decode node, and this connector sends none."""

    def has_pending_work(self) -> bool:
        busy = self._guard.run(self._half.busy)
        return len(self._half.jobs) > 0 if busy is None else busy

    def get_statistics(self) -> dict[str, int]:
        """Statistics under the names of ATOM's metrics, atom:lmcache_…."""
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


# ---------------------------------------------------------------- worker


class KvServerConnector(KVConnectorBase):  # type: ignore[misc]
    """ATOM's worker interface, in each ModelRunner's process. Belongs to the thread that launches its forward
    passes."""

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
        """New ends of the last SAID_TIMES polls."""
        self._names: dict[int, Name] = {}
        """Job in flight -> its request."""
        self._rows: Rows | None = None
        """Rows for states of requests, if the registered cache has such states."""
        self._restores: dict[int, tuple[Rows, StateCopy]] = {}
        """Load in flight -> the state that it brings."""

    def register_kv_caches(
        self, kv_caches: dict[str, Any], transfer_tensors: Any = None, num_blocks: int | None = None
    ) -> None:
        """Register the cache. ATOM calls it again after a sleep, with new memory and perhaps new weights."""
        if self._watched is not None:
            self._watched.detach()
        engine = self._engine
        layout = layout_of(
            kv_caches,
            transfer_tensors,
            blocks=num_blocks,
            block_tokens=engine.local_block_tokens,
            entries=engine.entries,
            span=engine.span,
        )
        assert num_blocks is not None
        kind = _device_kind(kv_caches)
        can_sleep = ROLLOUT in sys.modules
        watched = _first_tensor(kv_caches, but={plane.layer for plane in layout.planes})
        if can_sleep and watched is None:
            raise RequestError(
                "unsupported", "this engine can sleep, and registers addresses only: nobody could tell when they end"
            )
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
        groups = [self._group(layout, blocks=num_blocks, replicas=replicas)]
        allocations, rows = list(layout.allocations), None
        if layout.planes:
            rows = Rows(layout.planes, _row_memory(kind, engine.settings.state_rows * row_bytes(layout.planes)))
            groups.append(self._state_group(rows, buffer=len(allocations)))
            allocations.append(rows.extent)
        spec = CacheSpec(
            name="kv",
            namespace=b"",
            chunk_tokens=engine.chunk_tokens,
            buffers=_buffers(kind, allocations),
            groups=groups,
            device=kind,
            tenant=engine.settings.tenant,
            staging_bytes=engine.settings.staging_mib * MIB,
            tokens_max=int(engine.config.max_model_len or 0),
            model=label_of(engine.config.model),
        )
        half = self._half(kind)
        half.register(spec, namespace, {name: value for name, value in facts.items() if name != "layout"})
        self._rows = rows  # not before: until the new cache is registered, the server may use the old rows
        self._watched = _watch(watched, self._given_back) if watched is not None else None
        self._registered += 1
        if can_sleep:
            log.warning("this engine's weights can change; kvserver notices it only if the engine sleeps meanwhile")

    def _given_back(self, thread: int) -> None:
        """Unregister, because ATOM has dropped its KV cache without telling. Otherwise the server's mapping would keep
        it alive."""
        if thread == threading.get_ident() and self._worker is not None:  # on other threads nothing may wait
            self._worker.unregister()
            self._rows = None

    def start_load_kv(self, metadata: Any) -> None:
        """Begin the step's jobs, before its forward pass. Earlier steps launched everything that ATOM counts as
        computed."""
        if self._worker is None or not isinstance(metadata, Step):
            return
        for order in metadata.requests:
            assert isinstance(order.request, Name)
            self._names[order.job] = order.request
        self._worker.attempt(lambda: self._take_states(metadata))
        self._worker.begin(metadata.retrieves, metadata.stores)
        self._worker.computed()

    def _take_states(self, step: Step) -> None:
        """Copy the states of the step's stores before its forward overwrites them, and note those of its loads."""
        rows = self._rows
        if rows is None:
            return
        rows.note_stream()
        for order in step.stores:
            if order.job in step.states:
                rows.keep(step.states[order.job])
        loads = (order.job for order in step.retrieves if order.job in step.states)
        self._restores.update((job, (rows, step.states[job])) for job in loads)

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
        """New ends since the last call."""
        output = KVConnectorOutput()
        if self._worker is None:
            return output
        for report in self._worker.take_ended().reports:
            name = self._names.pop(report.job)
            result = report.result
            if isinstance(result, RetrieveResult):
                ok = self._restored(report.job, ok=result.ok)
                (output.finished_loading if ok else output.failed_loading).add(LoadOperationId(name.id, report.job))
            else:
                operation = SaveOperationId(name.id, report.job)
                output.finished_saving.add(operation)  # also if it failed, because its blocks are free now
                whole = not result.why or result.why in CHAIN_GOES_ON
                output.connector_completions.add(ConnectorCompletion(STORED, operation, whole))
        if namespace := self._worker.take_namespace():
            output.finished_saving.add(SaveOperationId(NAMESPACE + namespace.hex(), 0))
        return output

    def _restored(self, job: int, *, ok: bool) -> bool:
        """Whether a load ended well, and so did the copy of its state into its slot, if the model keeps states."""
        found = self._restores.pop(job, None)
        if not ok or not self._engine.slots:
            return ok
        if found is None or self._worker is None or found[0] is not self._rows:
            return False  # after a sleep of the engine the slot is other memory
        rows, copy = found
        self._worker.attempt(lambda: rows.restore(copy))
        return not self._worker.is_inert

    def get_finished_recv_blocks(self) -> list[int]:
        """Always empty: the copies of a load end, in stream order, before the load is reported."""
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

    def _state_group(self, rows: Rows, *, buffer: int) -> GroupSpec:
        """Each rank has states of its own: recurrent layers deal out their heads."""
        return GroupSpec(
            block_tokens=self._engine.chunk_tokens,
            blocks=self._engine.settings.state_rows,
            kind="state",
            window_tokens=0,
            shards=self._engine.ranks,
            shard=self._rank,
            writers=1,
            writer=0,
            regions=[rows.run(buffer)],
        )


# ---------------------------------------------------------------- what ATOM and its device say


def _count(config: Any, name: str) -> int:
    return int(getattr(config, name) or 1)


def _refuse_unsupported(config: Any, *, slots: int, state_rows: int) -> None:
    if _count(config, "prefill_context_parallel_size") > 1:
        raise RequestError(
            "unsupported",
            "prefill_context_parallel_size > 1: unknown which rank holds which tokens",
        )
    if config.enable_rapidserve:
        raise RequestError("unsupported", "rapidserve: two processes share one KV cache, and only one schedules")
    if getattr(config.hf_config, "compress_ratios", None) and not slots:
        raise RequestError(
            "unsupported",
            "DeepSeek-V4 keeps compressor state and windows for each request beside its pages, and ATOM's pool_entries "
            "have no slots for them; a prefix without that state would be wrong",
        )
    if slots and _count(config, "pipeline_parallel_size") > 1:
        raise RequestError(
            "unsupported",
            "pipeline_parallel_size > 1 beside states of requests (recurrent layers, DeepSeek-V4): unknown when each "
            "stage has which state",
        )
    if slots and _count(config.parallel_config, "data_parallel_size") > 1:
        raise RequestError(
            "unsupported",
            "data_parallel_size > 1 beside states of requests (recurrent layers, DeepSeek-V4): a forward that "
            "ATOM runs on an idle replica names no slot, and may write into one whose state was loaded",
        )
    if slots and state_rows < 1:
        raise RequestError("settings", f"state_rows={state_rows} must be at least 1: this model keeps states")


def _tensor_rank() -> tuple[int, int]:
    """This worker's tensor rank, and the number of ranks."""
    from aiter.dist.parallel_state import get_tp_group  # noqa: PLC0415  (on GPUs only)

    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def _versions() -> dict[str, str]:
    """Versions of ATOM and aiter, and a digest of the code that lays out caches.

    ATOM runs from checkouts, whose version number may stay the same while the code changes.
    """
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


def _first_tensor(kv_caches: Mapping[str, Any], *, but: Container[str]) -> Any:
    """A tensor of the registered memory: K of the first layer that is not among these. None if there is none."""
    tensors = (cache.k_cache for layer, cache in kv_caches.items() if layer not in but and cache.k_cache is not None)
    return next((tensor for tensor in tensors if len(tensor.shape) > 1), None)  # ATOM's default is an empty one


def _watch(tensor: Any, given_back: Callable[[int], None]) -> "weakref.finalize[..., Any]":
    """Call given_back when the tensor's memory is freed, with the id of the current thread."""
    watched = weakref.finalize(tensor, given_back, threading.get_ident())
    watched.atexit = False  # at process exit the server notices anyway
    return watched


def _device_name(kind: str) -> str:
    if kind == "host":
        return platform.machine()
    import torch  # noqa: PLC0415

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(properties, "gcnArchName", "") or properties.name)


def _buffers(kind: str, allocations: list[Extent]) -> list[HostBuffer | DeviceBuffer]:
    assert kind != "host", "ATOM's caches are on GPUs"
    return [DeviceBuffer(*found) for found in allocations]


def _row_memory(kind: str, bytes_: int) -> RowMemory:
    assert kind != "host", "ATOM's caches are on GPUs"
    return TorchRows(bytes_)


def _recorded_event() -> object:
    import torch  # noqa: PLC0415

    event = torch.cuda.Event()
    event.record()
    return event


def _no_event() -> None:
    return None
