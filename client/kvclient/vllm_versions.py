"""What differs between the releases of vLLM that are supported, found out by looking, not by their numbers.

Written against 0.20.2 to 0.32.0. Each difference has its function here and nowhere else. What a release lacks and the
connector needs is refused by name of the release and the field.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from kvclient.vllm_scheduler import Scheduled
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
    "vllm.v1.outputs.KVConnectorOutput": ("kv_connector_worker_meta",),
    "vllm.v1.request.Request": ("num_tokens",),
}
"""vLLM's classes, and what is read of their objects. (What these only get when they are made is not seen here.)"""

DEFAULT_SEED = "vllm-none-hash"
"""Starts the engine's block hashes when nobody has chosen a seed. Releases before it had none take a random one."""

NULL = 0
"""vLLM's null block: what a table holds where there is nothing."""

Tables = Sequence[Sequence[int]]


@contextmanager
def reading(release: str) -> Iterator[None]:
    """Within it, or within a function that it decorates: what this release of vLLM lacks is a RequestError."""
    try:
        yield
    except (AttributeError, ImportError) as problem:
        lack = lacking(problem, release)
        if lack is None:
            raise
        raise lack from problem


def lacking(problem: BaseException, release: str) -> RequestError | None:
    """The refusal that an exception amounts to, if something was read of the engine and not found."""
    if isinstance(problem, ImportError):
        return _refusal(release, str(problem))
    if not isinstance(problem, AttributeError) or problem.name is None:
        return None
    holder = _named(problem.obj)
    return None if holder.startswith(("kvclient.", "kvserver.")) else _lack(release, holder, problem.name)


def check_read_while_serving(release: str) -> None:
    """When the engine starts. RequestError where a class of vLLM has not what will be read of its objects."""
    for path, wanted in READ_WHILE_SERVING.items():
        module, _, name = path.rpartition(".")
        found = getattr(import_module(module), name)
        fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
        for field in wanted:
            if field not in fields and not hasattr(found, field):
                raise _lack(release, path, field)


def _named(owner: object) -> str:
    """A module, a class or an object, as "module.Class"."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def _lack(release: str, holder: str, field: str) -> RequestError:
    return _refusal(release, f"{holder} has no {field!r}, which the connector reads")


def _refusal(release: str, what: str) -> RequestError:
    return RequestError("vllm-release", f"vLLM {release}: {what}; docs/vllm.md says which releases have been run")


def reports_failed_requests(base: type) -> bool:
    """Whether a failed retrieve can be reported by request. Otherwise only by block ids, which are unambiguous for a
    single group only."""
    return hasattr(base, "get_transfer_results")


def asks_where_to_allocate(base: type) -> bool:
    """Whether a connector may say where the KV cache is allocated. From 0.31 on."""
    return hasattr(base, "get_mem_pool_context")


def saves_behind_drafts(base: type) -> bool:
    """Whether wait_for_save() comes when a draft model has computed as well, with either of vLLM's runners."""
    return hasattr(base, "get_transfer_results")


def steps_when_idle(base: type) -> bool:
    """Whether an engine without requests goes on stepping for a connector's sake. Where it does not, blocks of the last
    stores stay pinned until the next request comes."""
    return hasattr(base, "has_pending_push_work")


def scales_kv_by_its_first_prompt(cache_config: Any) -> bool:
    """Whether what lies in a page means something to this engine alone, in this life: the scales are in no page, and of
    the first prompt that it computes. Releases before 0.31."""
    return bool(getattr(cache_config, "calculate_kv_scales", False)) and "fp8" in str(cache_config.cache_dtype)


def hit_sources(interface: Any, tokens: int, *, from_disk: int) -> dict[Any, int]:
    """Tokens of a hit by where they were, in the engine's words; for releases that ask, which 0.32 is the first of."""
    sources = getattr(interface, "CacheHitSource", None)
    if sources is None:
        return {}
    told = {sources.HOST: tokens - from_disk, sources.DISK: from_disk}
    return {source: count for source, count in told.items() if count}


def replicas_of(kv_config: Any, *, ranks: int, heads: int) -> int:
    """Consecutive ranks that hold the same KV. heads: of KV, of the whole model; 0 for latent attention, which has
    none to share out."""
    told = getattr(kv_config, "kv_tp_replicas", None)
    if told is not None:
        return int(told)
    return max(1, ranks // heads) if heads else ranks


def page_orders(kv_config: Any, orders: Sequence[str], environment: Mapping[str, str]) -> str:
    """How the elements of a page lie: what the engine says, or what its tensors show. orders: of each layer.

    On ROCm an environment variable has a backend put them elsewhere in tensors that look the same."""
    told = getattr(kv_config, "kv_cache_layout", None)
    shown = sorted(set(orders)) if len(set(orders)) == 1 else orders
    is_shuffled = environment.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "").lower() in ("true", "1")
    return (str(told) if told is not None else ", ".join(shown)) + (" shuffled" if is_shuffled else "")


def hash_block_tokens(kv_config: Any, cache_config: Any, kv_cache_utils: Any) -> int:
    """Tokens behind one of the engine's block hashes if they may serve as names: 256 bits over a canonical encoding,
    started by a seed that all engines have in common. Otherwise 0.

    The default, sha256, encodes by pickle, which may have two texts for one value."""
    tokens = getattr(kv_config, "hash_block_size", None) or 0
    common_seed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "") == DEFAULT_SEED
    if cache_config.prefix_caching_hash_algo != "sha256_cbor" or not common_seed or "PYTHONHASHSEED" in os.environ:
        return 0
    return int(tokens)


class Place(NamedTuple):
    """Where a layer's blocks lie in their allocation, as the engine says."""

    offset: int
    """Of block 0."""
    block_stride: int


def layers_of(tensor: Any) -> list[str]:
    """Of a KVCacheTensor. Releases before 0.29 say shared_by, and mean layers whose bytes are the same."""
    layers = getattr(tensor, "layers", None)
    return list(layers if layers is not None else tensor.shared_by)


def place_of(tensor: Any, layer: str) -> Place | None:
    """What a KVCacheTensor says of one of its layers, or None.

    From 0.29 on its layers lie evenly behind each other. 0.24 to 0.28 say where the bytes begin that all of them share,
    if several KVCacheTensors lie in one allocation, and otherwise 0. Releases before say nothing."""
    if hasattr(tensor, "layers"):
        return Place(tensor.offset + layers_of(tensor).index(layer) * tensor.layer_stride, tensor.block_stride)
    if getattr(tensor, "block_stride", 0):
        return Place(tensor.offset, tensor.block_stride)
    return None


def allocations(kv_config: Any) -> list[int]:
    """The bytes of each allocation that a KVCacheConfig leads to."""
    tensors = kv_config.kv_cache_tensors
    is_one = any(hasattr(tensor, "layers") or getattr(tensor, "block_stride", 0) for tensor in tensors)
    return [tensor.size for tensor in (tensors[:1] if is_one else tensors)]


class BlockTables:
    """The block ids of the requests of a step. Later releases offer them; for earlier ones they are followed."""

    def __init__(self, state_tokens: Mapping[int, int]) -> None:
        """state_tokens: of groups that hold states, the tokens of a block."""
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
        """Of states only those that vLLM hands over in this step, which are whole when its forward is done. Where a
        state stopped that just lies in a table, nobody knows."""
        tables: Tables = state.get_block_ids(name) or ()
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
    """The requests of a step. Drafts of speculative decoding may be rejected, so they do not count as computed."""
    drafts = output.scheduled_spec_decode_tokens
    for new in output.scheduled_new_reqs:
        yield _scheduled(output, drafts, new.req_id, new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    for name, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield _scheduled(output, drafts, name, tokens)


def _scheduled(output: Any, drafts: Any, name: str, tokens: int) -> Scheduled:
    loads_within = getattr(output, "has_sync_kv_loads", True)
    return Scheduled(name, tokens, tokens + output.num_scheduled_tokens[name] - len(drafts.get(name, ())), loads_within)
