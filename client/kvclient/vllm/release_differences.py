"""Differences between the supported releases of vLLM, found by looking at its objects, not at version numbers.

releases.json says which releases it was held against. Each difference has one function in this file. If a release lacks
something that the connector needs, the refusal names the release and the field.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from kvclient.vllm.scheduler import Scheduled
from kvserver.errors import RequestError

READ_WHILE_SERVING = {
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
    ),
    "vllm.v1.core.sched.output.NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "vllm.v1.core.sched.output.CachedRequestData": (
        "req_ids",
        "resumed_req_ids",
        "new_block_ids",
        "num_computed_tokens",
    ),
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": ("get_block_ids",),
    "vllm.v1.core.block_pool.BlockPool": ("touch", "free_blocks"),
    "vllm.v1.outputs.KVConnectorOutput": ("invalid_block_ids", "kv_connector_worker_meta"),
    "vllm.v1.request.Request": ("num_tokens",),
}
"""vLLM's classes, and the fields that are read of their objects. READ_UNCHECKED
has the others."""

READ_ONE_OF = {"vllm.v1.core.sched.output.KVConnectorBlockState": ("get_block_ids", "block_ids")}
"""Classes that only some releases have, and fields of which one is read."""

READ_UNCHECKED = {
    "vllm.config.cache.CacheConfig": ("cache_dtype", "prefix_caching_hash_algo"),
    "vllm.config.compilation.CompilationConfig": ("static_forward_context",),
    "vllm.config.kv_transfer.KVTransferConfig": (
        "engine_id",
        "is_kv_consumer",
        "is_kv_producer",
        "kv_connector_extra_config",
    ),
    "vllm.config.load.LoadConfig": ("download_dir", "load_format"),
    "vllm.config.model.ModelConfig": (
        "dtype",
        "get_total_num_kv_heads",
        "hf_config",
        "is_prefix_caching_supported",
        "max_model_len",
        "model",
        "override_generation_config",
        "quantization",
        "revision",
        "runner_type",
        "try_get_generation_config",
        "use_mla",
    ),
    "vllm.config.parallel.ParallelConfig": ("distributed_executor_backend", "tensor_parallel_size"),
    "vllm.config.scheduler.SchedulerConfig": ("async_scheduling",),
    "vllm.config.speculative.SpeculativeConfig": ("draft_model_config", "method"),
    "vllm.config.vllm.VllmConfig": (
        "attention_config",
        "cache_config",
        "compilation_config",
        "instance_id",
        "kv_transfer_config",
        "load_config",
        "lora_config",
        "model_config",
        "parallel_config",
        "scheduler_config",
        "speculative_config",
    ),
    "vllm.lora.request.LoRARequest": ("lora_int_id", "lora_name", "lora_path"),
    "vllm.multimodal.inputs.MultiModalFeatureSpec": ("identifier", "mm_position", "modality"),
    "vllm.v1.kv_cache_interface.FullAttentionSpec": ("block_size", "page_size_bytes"),
    "vllm.v1.kv_cache_interface.KVCacheConfig": ("kv_cache_groups", "kv_cache_tensors", "num_blocks"),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": ("kv_cache_spec", "layer_names"),
    "vllm.v1.kv_cache_interface.KVCacheTensor": ("size",),
    "vllm.v1.kv_cache_interface.MambaSpec": (
        "block_size",
        "dtypes",
        "mamba_cache_mode",
        "mamba_type",
        "num_speculative_blocks",
        "page_size_bytes",
        "shapes",
    ),
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": ("block_size", "page_size_bytes", "sliding_window"),
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": ("kv_cache_specs",),
    "vllm.v1.request.Request": (
        "all_token_ids",
        "block_hashes",
        "cache_salt",
        "lora_request",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_token_ids",
        "request_id",
    ),
}
"""The same for what is read once, or set only in __init__. tools/vllm_releases.py looks for it in sources. An engine
notices that a field is missing when it is read."""

DEFAULT_SEED = "vllm-none-hash"
"""Seed of the engine's block hashes if the user sets none. Older releases without it use a random seed."""

NULL = 0
"""vLLM's null block, which fills empty places of a block table."""

Tables = Sequence[Sequence[int]]


@contextmanager
def reading(release: str) -> Iterator[None]:
    """Context or decorator: turns a missing attribute or import of vLLM into a RequestError."""
    try:
        yield
    except (AttributeError, ImportError) as problem:
        lack = lacking(problem, release)
        if lack is None:
            raise
        raise lack from problem


def lacking(problem: BaseException, release: str) -> RequestError | None:
    """The RequestError for an exception, if it means that the engine lacks something. Otherwise None."""
    if isinstance(problem, ImportError):
        return _refusal(release, str(problem))
    if not isinstance(problem, AttributeError) or problem.name is None:
        return None
    holder = _named(problem.obj)
    return None if holder.startswith(("kvclient.", "kvserver.")) else _lack(release, holder, problem.name)


@contextmanager
def understanding(release: str, subject: str) -> Iterator[None]:
    """Context: turns any Python error of code that reads the engine's objects at start into a RequestError.

    Such code decides whether the objects are understood, and an error means that they are not.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as problem:
        lack = lacking(problem, release) or _refusal(
            release, f"{subject} is not understood ({type(problem).__name__}: {problem})"
        )
        raise lack from problem


def check_read_while_serving(release: str) -> None:
    """Raise RequestError at engine start if a class of vLLM lacks a field that is read later."""
    for path, wanted in READ_WHILE_SERVING.items():
        module, _, name = path.rpartition(".")
        found = getattr(import_module(module), name)
        for field in wanted:
            if not _has(found, field):
                raise _lack(release, path, field)
    for path, either in READ_ONE_OF.items():
        module, _, name = path.rpartition(".")
        found = getattr(import_module(module), name, None)
        if found is not None and not any(_has(found, field) for field in either):
            raise _lack(release, path, either[0])


def _has(found: type, field: str) -> bool:
    """A class has this member, or its objects have this field."""
    fields = {one.name for one in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    return field in fields or hasattr(found, field)


def is_made_by(module: str) -> bool:
    """Whether code of a module of vLLM is making the connector that asks. MultiConnector does not say so otherwise."""
    frame = inspect.currentframe()
    while frame is not None and not str(frame.f_globals.get("__name__")).endswith(f".{module}"):
        frame = frame.f_back
    return frame is not None


def counts_beside_workers_only() -> bool:
    """Whether vLLM asks the scheduler's half for counts only in a step in which a worker has some, as up to 0.23."""
    return "if kv_connector_stats and self.connector:" in _code("vllm.v1.core.sched.scheduler", "update_from_output")


def drops_quiet_steps() -> bool:
    """Whether vLLM's class LLM drops the statistics of steps in which no request says anything, as up to 0.27."""
    return "len(outputs.outputs) > 0" in _code("vllm.v1.engine.llm_engine", "step")


def _code(module: str, function: str) -> str:
    """The code of a method of the module, where nothing else tells what it does. Empty if there is none: newer code."""
    try:
        kinds = vars(import_module(module)).values()
        owners = [kind for kind in kinds if isinstance(kind, type) and kind.__module__ == module]
        return "".join(inspect.getsource(getattr(kind, function)) for kind in owners if hasattr(kind, function))
    except (ImportError, OSError, TypeError):
        return ""


def _named(owner: object) -> str:
    """The name of a module, class or object, as "module.Class"."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def _lack(release: str, holder: str, field: str) -> RequestError:
    return _refusal(release, f"{holder} has no {field!r}, which the connector reads")


def _refusal(release: str, what: str) -> RequestError:
    return RequestError("vllm-release", f"vLLM {release}: {what}; docs/vllm.md says which releases have been run")


def reports_failed_requests(base: type) -> bool:
    """Whether a failed retrieve can be reported by request. Older releases take block ids, which are unambiguous only
    for a single group."""
    return hasattr(base, "get_transfer_results")


def asks_where_to_allocate(base: type) -> bool:
    """Whether a connector can choose where the KV cache is allocated. True since 0.31."""
    return hasattr(base, "get_mem_pool_context")


def saves_behind_drafts(base: type) -> bool:
    """Whether wait_for_save() is called after the draft model has computed too, with either of vLLM's runners."""
    return hasattr(base, "get_transfer_results")


def knows_stages(base: type) -> bool:
    """Whether vLLM takes the handshakes and reports of every pipeline stage. True since 0.31.

    0.26 takes the handshakes as well, but there requests go on behind wrong KV (scheduler_sim).
    """
    return hasattr(base, "set_xfer_handshake_metadata_pp_aware") and asks_where_to_allocate(base)


def recovers(base: type) -> bool:
    """Whether vLLM counts a request's tokens right again after a failed load, once it is admitted again. Since 0.31.

    scheduler_sim stored wrong KV with 0.26 in 3 of 3000 seeds before the connector looked at this.
    """
    return asks_where_to_allocate(base)


def steps_ahead(config: Any) -> int:
    """How many more steps the engine schedules at most before it knows the outcome of one."""
    batches = getattr(config, "max_concurrent_batches", None)
    if batches is None:
        batches = config.parallel_config.pipeline_parallel_size + bool(config.scheduler_config.async_scheduling)
    return max(int(batches) - 1, int(bool(config.scheduler_config.async_scheduling)))


def workers_count(config: Any, environment: Mapping[str, str]) -> bool:
    """Whether workers count a request's computed tokens by themselves: Model Runner V2, which later releases choose."""
    chosen = getattr(config, "use_v2_model_runner", None)
    return bool(environment.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0") if chosen is None else chosen)


def scales_kv_by_its_first_prompt(cache_config: Any) -> bool:
    """Whether pages are useful only to this engine in this life, because their scales come from its first prompt and
    are stored in no page. Releases before 0.31."""
    return bool(getattr(cache_config, "calculate_kv_scales", False)) and "fp8" in str(cache_config.cache_dtype)


def is_hisparse(config: Any, kv_config: Any) -> bool:
    """Whether blocks lie partly in host memory that vLLM manages. Since 0.30."""
    wanted = getattr(getattr(config, "attention_config", None), "hisparse_config", None)
    return wanted is not None or getattr(kv_config, "hisparse_host_num_blocks", None) is not None


def cache_dtype_handler(cache_config: Any) -> Any:
    """A platform's handler for the type of the KV cache. None for vLLM's own types and before 0.33."""
    handler_of = getattr(import_module("vllm.config.cache"), "get_kv_cache_dtype_handler", None)
    return handler_of(str(cache_config.cache_dtype)) if handler_of is not None else None


def without_graphs(config: Any) -> str:
    """The setting by which an engine runs without CUDA graphs, chosen or by default. Empty if it has them."""
    if getattr(config.model_config, "enforce_eager", False):
        return "enforce_eager"
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    return "cudagraph_mode=NONE" if getattr(mode, "name", "") == "NONE" else ""


def hit_sources(interface: Any, tokens: int, *, from_disk: int) -> dict[Any, int]:
    """Tokens of a hit by tier, in vLLM's words. Empty for releases before 0.32, which do not ask."""
    sources = getattr(interface, "CacheHitSource", None)
    if sources is None:
        return {}
    told = {sources.HOST: tokens - from_disk, sources.DISK: from_disk}
    return {source: count for source, count in told.items() if count}


def replicas_of(kv_config: Any, *, ranks: int, heads: int, contexts: int = 1) -> int:
    """Number of consecutive tensor ranks that hold the same KV.

    heads: KV heads of the whole model; 0 for latent attention, which has no heads to divide.

    contexts: ranks over which the tokens of a block are dealt out. Ranks that are neighbours then hold other tokens, so
    each stores its own part, also where a rank further away holds the same.
    """
    if contexts > 1:
        return 1
    told = getattr(kv_config, "kv_tp_replicas", None)
    if told is not None:
        return int(told)
    return max(1, ranks // heads) if heads else ranks


def has_a_slot_for_each_head(spec: Any) -> bool:
    """Whether a layer's cache has a dimension of its KV heads, and everything of a head lies under it.

    Since 0.32 each backend says whether its kernels keep another order within a block. Older releases do not tell.
    """
    kinds = {base.__name__ for base in type(spec).__mro__}
    return "MLAAttentionSpec" not in kinds and getattr(spec, "num_head_slots", 0) is None


def is_latent(spec: Any) -> bool:
    """Whether every tensor rank holds the same KV of a layer, because latent attention has no heads to divide."""
    return bool({"MLAAttentionSpec", "SlidingWindowMLASpec"} & {base.__name__ for base in type(spec).__mro__})


def page_orders(kv_config: Any, orders: Sequence[str], environment: Mapping[str, str]) -> str:
    """Order of the elements in a page, as the engine describes it, otherwise as its tensors show. orders: one per
    layer.

    On ROCm an environment variable makes a backend use another order in tensors that look the same.
    """
    told = getattr(kv_config, "kv_cache_layout", None)
    shown = sorted(set(orders)) if len(set(orders)) == 1 else orders
    return (str(told) if told is not None else ", ".join(shown)) + (" shuffled" if is_shuffled(environment) else "")


def is_shuffled(environment: Mapping[str, str]) -> bool:
    """Whether kernels of ROCm keep an order within blocks that nothing else shows."""
    return environment.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "").lower() in ("true", "1")


def hash_block_tokens(kv_config: Any, cache_config: Any, kv_cache_utils: Any) -> int:
    """Tokens per block hash of the engine if the hashes can serve as keys, otherwise 0.

    They can if they have 256 bits over a canonical encoding and a seed common to all engines. The default, sha256,
    encodes by pickle, which may encode one value in two ways.
    """
    tokens = getattr(kv_config, "hash_block_size", None) or 0
    common_seed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "") == DEFAULT_SEED
    if cache_config.prefix_caching_hash_algo != "sha256_cbor" or not common_seed or "PYTHONHASHSEED" in os.environ:
        return 0
    return int(tokens)


class Place(NamedTuple):
    """Position of a layer's blocks in their allocation, as the engine describes it. In bytes."""

    offset: int
    """Offset of block 0."""
    block_stride: int


def layers_of(tensor: Any) -> list[str]:
    """Layers of a KVCacheTensor. Before 0.29 the field is shared_by, and its layers share the same bytes."""
    layers = getattr(tensor, "layers", None)
    return list(layers if layers is not None else tensor.shared_by)


def place_of(tensor: Any, layer: str) -> Place | None:
    """Place of one layer in a KVCacheTensor, or None if the release does not say.

    Since 0.29 the layers of a KVCacheTensor lie evenly one after another. In 0.24 to 0.28, if several KVCacheTensors
    lie in one allocation, its offset is the start of the bytes that all its layers share; otherwise there is none.
    Earlier releases say nothing.
    """
    if hasattr(tensor, "layers"):
        return Place(tensor.offset + layers_of(tensor).index(layer) * tensor.layer_stride, tensor.block_stride)
    if _is_placed(tensor):
        return Place(tensor.offset, tensor.block_stride)
    return None


def allocations(kv_config: Any) -> list[int]:
    """Bytes of each allocation that a KVCacheConfig causes."""
    common = [tensor for tensor in kv_config.kv_cache_tensors if _is_placed(tensor)]
    alone = [tensor for tensor in kv_config.kv_cache_tensors if not _is_placed(tensor)]
    return [tensor.size for tensor in (*common[:1], *alone)]


def _is_placed(tensor: Any) -> bool:
    """Whether a KVCacheTensor lies beside all others that are placed, in one allocation."""
    return hasattr(tensor, "layers") or bool(getattr(tensor, "block_stride", 0))


class BlockTables:
    """Block ids of the requests in a step. Newer releases provide them; for older ones this class tracks them."""

    def __init__(self, state_tokens: Mapping[int, int]) -> None:
        """state_tokens: group -> tokens per block, for groups of kind "state"."""
        self._state_tokens = state_tokens
        self._followed: dict[str, list[list[int]]] = {}

    def allocated(self, name: str, tables: Tables) -> None:
        self._followed[name] = [list(table) for table in tables]

    def forget(self, name: str) -> None:
        self._followed.pop(name, None)

    def of_step(self, output: Any) -> Callable[[str], Tables]:
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None:
            self._followed.clear()
            return lambda name: self._offered(state, name)
        for new in output.scheduled_new_reqs:
            self.allocated(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._append(name, added, anew=name in cached.resumed_req_ids)
        return lambda name: self._followed.get(name, ())

    def _offered(self, state: Any, name: str) -> Tables:
        """Tables from vLLM, with only those state blocks that vLLM hands over in this step.

        These are complete when the step's forward pass is done. For other state blocks in a table, nobody knows at
        which token the state stopped.
        """
        held = getattr(state, "block_ids", None)  # in 0.29; newer releases have a method
        tables: Tables = (held.get(name) if held is not None else state.get_block_ids(name)) or ()
        if not (self._state_tokens and tables):
            return tables
        shown = [[NULL] * len(table) if group in self._state_tokens else table for group, table in enumerate(tables)]
        for group, block, tokens in state.boundary_state_offloads.get(name, ()):
            place, rest = divmod(tokens, self._state_tokens[group])
            if not rest:
                shown[group][place - 1] = block
        return shown

    def _append(self, name: str, added: Tables | None, *, anew: bool) -> None:
        if anew:
            self.allocated(name, added or ())
        elif added is not None and name in self._followed:
            for table, more in zip(self._followed[name], added, strict=True):
                table.extend(more)


def scheduled(output: Any) -> Iterator[Scheduled]:
    """The requests of a step. Draft tokens are not counted as computed, because they may be rejected."""
    drafts = output.scheduled_spec_decode_tokens
    for new in output.scheduled_new_reqs:
        yield _scheduled(output, drafts, new.req_id, new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    for name, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield _scheduled(output, drafts, name, tokens)


def _scheduled(output: Any, drafts: Any, name: str, tokens: int) -> Scheduled:
    loads_within = getattr(output, "has_sync_kv_loads", True)
    return Scheduled(name, tokens, tokens + output.num_scheduled_tokens[name] - len(drafts.get(name, ())), loads_within)
