"""The layout of vLLM's block groups in KV memory, as registered with the server.

vLLM 0.29 and later place all layers in one allocation and describe where. Earlier releases make one or more
allocations, and some describe less. The shapes and strides of the tensors decide here. The engine's own description is
compared with them. A layout that is not understood is refused before any byte moves.

Objects of vLLM are recognized by attributes and class names, so this file does not import vLLM.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvclient.memory.layouts import Extent, Heads, Tensor, region_runs
from kvclient.offload.values import Group
from kvclient.vllm.release_differences import layers_of, place_of
from kvclient.vllm.side_tensors import SideTensor
from kvserver.errors import RequestError
from kvserver.wire.messages import GroupSpec, RegionRun

FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
WINDOW = frozenset({"SlidingWindowSpec"})
STATE = frozenset({"MambaSpec"})
REFUSED = frozenset({"SinkFullAttentionSpec", "HiddenStateCacheSpec", "RSWASpec"})
"""Classes that are not supported although their base classes are."""
HEADS_DIMS = 4
"""Dimensions of a layer's cache whose heads can be told apart: blocks, heads, tokens, content of a head."""


class HeadShard(NamedTuple):
    """One of `shards` equal parts of the KV heads that this rank holds, counted from 0."""

    number: int
    shards: int


class Layout(NamedTuple):
    """Everything needed for registration, except how the memory is shared."""

    allocations: list[Extent]
    """Allocations, in the order of the buffers in the regions."""
    regions: list[list[RegionRun]]
    """Region runs per group."""
    layers: list[list[str]]
    """Layer names per group, in the order of the regions. Part of the namespace."""
    orders: list[str]
    """Each layer's dimensions within a block, in memory order, with sizes. The regions do not show this."""
    side_tensors: Sequence[str] = ()
    """The same for the tensors that layers keep outside their caches, with layer and attribute."""
    storages: Sequence[Any] = ()
    """The storages that are the allocations."""


# ---------------------------------------------------------------- groups


def groups_of(config: Any, *, contexts: int = 1) -> list[Group]:
    """The groups of a KVCacheConfig. RequestError if one cannot be cached.

    contexts: ranks over which vLLM deals out the tokens of a block (decode context parallel). Its scheduler counts in
    blocks of as many times the tokens that one rank's block holds.
    """
    if not config.kv_cache_groups:
        raise RequestError("layout", "the model has no KV cache")
    groups = [_group(number, group) for number, group in enumerate(config.kv_cache_groups)]
    if contexts == 1:
        return groups
    if (kinds := {group.kind for group in groups}) != {"full"}:
        raise RequestError(
            "unsupported", f"decode context parallel with groups of kinds {sorted(kinds)}; expected full alone"
        )
    return [
        group._replace(block_tokens=group.block_tokens * (contexts if _is_dealt_out(described) else 1))
        for group, described in zip(groups, config.kv_cache_groups, strict=True)
    ]


def _is_dealt_out(group: Any) -> bool:
    """Whether each rank of a context holds other tokens of the group's blocks. Older releases do so for every group."""
    return any(getattr(spec, "dcp_sharded", True) for spec in layer_specs(group))


def _group(number: int, group: Any) -> Group:
    specs = layer_specs(group)
    found = {_kind(number, spec) for spec in specs}
    if len(found) != 1:
        raise RequestError("layout", f"group {number} mixes layers of kinds {sorted(found)}")
    cacheable = all(getattr(spec, "prefix_cacheable", True) for spec in specs)
    if not (cacheable and getattr(group, "enable_kv_transfer", True)) or getattr(group, "host_resident", False):
        raise RequestError("layout", f"group {number} ({_names(group)}) holds no KV that a prefix cache may keep")
    return found.pop()


def _kind(number: int, spec: Any) -> Group:
    classes = {base.__name__ for base in type(spec).__mro__}
    if not classes & REFUSED and classes & WINDOW:
        # A token attends to itself and to window - 1 tokens before it.
        window_tokens = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        return Group(spec.block_size, "window", max(1, window_tokens))
    if not classes & REFUSED and classes & FULL:
        return Group(spec.block_size)
    if not classes & REFUSED and classes & STATE:
        return _state(number, spec)
    raise RequestError("layout", f"group {number} has layers of {type(spec).__name__}, which are not supported yet")


def _state(number: int, spec: Any) -> Group:
    """The group of Mamba and other recurrent layers.

    vLLM keeps their states at block ends only with its own prefix cache. Without it there is only the running state.
    """
    if spec.mamba_cache_mode != "align":
        raise RequestError(
            "layout",
            f"group {number} keeps no state at the ends of blocks (mamba_cache_mode={spec.mamba_cache_mode!r}): start "
            "vLLM with --enable-prefix-caching",
        )
    if spec.num_speculative_blocks:
        raise RequestError("layout", f"group {number} has states, beside speculative decoding, which is not supported")
    return Group(spec.block_size, "state")


def states_of(config: Any) -> list[str]:
    """Types and shapes of the states in a KVCacheConfig, which their page sizes do not show."""
    specs = [spec for group in config.kv_cache_groups for spec in layer_specs(group)]
    states = [spec for spec in specs if STATE & {base.__name__ for base in type(spec).__mro__}]
    return [f"{spec.mamba_type} {spec.shapes} {spec.dtypes}" for spec in states]


def layer_specs(group: Any) -> list[Any]:
    """The specs of a group's layers: one for all, or one each."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(inner.values()) if inner is not None else [group.kv_cache_spec]


# ---------------------------------------------------------------- memory


def layout_of(
    config: Any,
    kv_caches: Mapping[str, Any],
    side_tensors: Mapping[str, SideTensor] = MappingProxyType({}),
    *,
    shard: HeadShard | None = None,
) -> Layout:
    """The regions of all groups.

    kv_caches: as passed to register_kv_caches(). side_tensors: per-block tensors outside the caches, with blocks
    in dimension 1. shard: the regions of these heads alone, in pages that are the same whichever rank holds them.

    RequestError("layout") if tensors and description contradict each other or are not understood.
    """
    memory = _Memory(config.num_blocks, kv_caches, shard)
    regions, layers = [], []
    for number, group in enumerate(config.kv_cache_groups):
        runs: list[RegionRun] = []
        names: list[str] = []
        for tensor in config.kv_cache_tensors:
            here = [name for name in layers_of(tensor) if name in group.layer_names and name not in names]
            runs += _tensor_runs(memory, group, tensor, here)
            names += here
        if sorted(names) != sorted(group.layer_names):
            missing = sorted(set(group.layer_names) - set(names))
            raise RequestError("layout", f"group {number}: no memory is described for layers {missing}")
        kept = [side_tensors[name].tensor for name in names if name in side_tensors]
        runs += [run for tensor in kept for run in memory.part_runs(tensor, block_dim=1)]
        regions.append(runs)
        layers.append(names)
    orders = [memory.order(name) for names in layers for name in names]
    shown = [
        f"{held.layer}.{held.attribute} {held.tensor.dtype} {_order(held.tensor, config.num_blocks, block_dim=1)}"
        for names in layers
        for name in names
        if (held := side_tensors.get(name)) is not None
    ]
    return Layout(memory.allocations, regions, layers, orders, shown, memory.storages)


def block_tensors(
    config: Any, kv_caches: Mapping[str, Any], side_tensors: Mapping[str, SideTensor] = MappingProxyType({})
) -> list[list[tuple[str, Any, int]]]:
    """Per group: layer, tensor, and the dimension that counts blocks or equal parts of them.

    Each tensor comes once, also if layers share it. Arguments are those of layout_of(), which has accepted them.
    """
    found = []
    for group in config.kv_cache_groups:
        parts = [
            (name, part, part.shape.index(config.num_blocks) if dim is None else dim)
            for name in group.layer_names
            for value in [kv_caches[name]]
            for part in (value if isinstance(value, list | tuple) else [value])
            for dim in [_block_dimension(part, config.num_blocks)]
        ]
        parts += [(name, side_tensors[name].tensor, 1) for name in group.layer_names if name in side_tensors]
        found.append(list({_identity(part): (name, part, dim) for name, part, dim in parts}.values()))
    return found


def _identity(part: Tensor) -> tuple[object, ...]:
    return part.data_ptr(), tuple(part.shape), tuple(part.stride())


def ordered_layers(config: Any) -> list[list[str]]:
    """The layers of layout_of(), known before there is memory."""
    described = [name for tensor in config.kv_cache_tensors for name in layers_of(tensor)]
    return [
        list(dict.fromkeys(name for name in described if name in group.layer_names)) for group in config.kv_cache_groups
    ]


def group_specs(
    groups: Sequence[Group], layout: Layout, *, blocks: int, ranks: int, rank: int, replicas: int
) -> list[GroupSpec]:
    """The groups as registered by one rank.

    ranks, rank: in all pipeline stages, numbered stage by stage.

    replicas: consecutive ranks that hold the same KV. States are not shared: each rank has its own.
    """
    shared = [1 if group.kind == "state" else replicas for group in groups]
    return [
        GroupSpec(
            block_tokens=group.block_tokens,
            blocks=blocks,
            kind=group.kind,
            window_tokens=group.window_tokens,
            shards=ranks // writers,
            shard=rank // writers,
            writers=writers,
            writer=rank % writers,
            regions=runs,
        )
        for group, runs, writers in zip(groups, layout.regions, shared, strict=True)
    ]


class _Memory:
    """The KV tensors and the allocations that contain them."""

    def __init__(self, blocks: int, kv_caches: Mapping[str, Any], shard: HeadShard | None) -> None:
        self.shard = shard
        self.allocations: list[Extent] = []
        self.storages: list[Any] = []
        self._blocks = blocks
        self._kv_caches = kv_caches

    def shard_runs(self, name: str, spec: Any) -> list[RegionRun]:
        """Region runs of one layer's heads that belong to the shard. check_head_shards() has accepted the spec."""
        assert self.shard is not None
        parts, heads = self._parts(name), spec.num_kv_heads
        shapes = [tuple(part.shape) for part in parts]
        if len(parts) != 1 or len(shapes[0]) != HEADS_DIMS or shapes[0][0] % self._blocks or shapes[0][1] != heads:
            raise RequestError("layout", f"layer {name} has shapes {shapes}; expected one of (blocks, {heads}, …, …)")
        begin, end = (heads * number // self.shard.shards for number in (self.shard.number, self.shard.number + 1))
        return self.part_runs(parts[0], block_dim=0, heads=Heads(1, begin, end))

    def runs(self, name: str) -> list[RegionRun]:
        """Region runs of one layer, whose cache may have several parts."""
        if name not in self._kv_caches:
            raise RequestError("layout", f"layer {name} has no KV cache here")
        try:
            return [
                run
                for part in self._parts(name)
                for run in self.part_runs(part, block_dim=_block_dimension(part, self._blocks))
            ]
        except RequestError as problem:
            raise RequestError("layout", f"layer {name}: {problem}") from problem

    def order(self, name: str) -> str:
        parts = self._parts(name)
        return "; ".join(_order(part, self._blocks, block_dim=_block_dimension(part, self._blocks)) for part in parts)

    def _parts(self, name: str) -> list[Any]:
        value = self._kv_caches[name]
        return list(value) if isinstance(value, list | tuple) else [value]

    def part_runs(self, part: Any, *, block_dim: int | None, heads: Heads | None = None) -> list[RegionRun]:
        storage = part.untyped_storage()
        allocation = Extent(storage.data_ptr(), storage.nbytes())
        if allocation not in self.allocations:
            self.allocations.append(allocation)
            self.storages.append(storage)
        runs = region_runs(
            part,
            buffer=self.allocations.index(allocation),
            blocks=self._blocks,
            block_dim=block_dim,
            heads=heads,
        )
        start = part.data_ptr() - allocation.address
        return [_moved(run, start) for run in runs]


def _tensor_runs(memory: _Memory, group: Any, tensor: Any, names: list[str]) -> list[RegionRun]:
    """The runs of one KVCacheTensor. Joins only its own layers, because other tensors may continue it only by luck."""
    per_layer = []
    for name in names:
        runs = memory.runs(name)
        _check_page(group, name, runs)
        _check_place(tensor, name, runs)
        per_layer.append(runs if memory.shard is None else memory.shard_runs(name, _spec_of(group, name)))
    return _joined(per_layer, is_shard=memory.shard is not None)


def _moved(run: RegionRun, bytes_: int) -> RegionRun:
    return replace(run, offset=run.offset + bytes_)


def _block_dimension(part: Tensor, blocks: int) -> int | None:
    """The dimension that counts blocks, or None if there is none.

    The first dimension counts blocks, or kernel blocks (several per block). Otherwise K and V come first, then blocks.
    """
    shape = part.shape
    if shape[0] % blocks == 0:
        return 0
    return 1 if len(shape) > 1 and shape[0] == 2 and shape[1] % blocks == 0 else None


def _order(part: Tensor, blocks: int, *, block_dim: int | None) -> str:
    """A block's dimensions ordered by stride, as "index:size". Dimensions of size 1 are left out."""
    of_blocks = part.shape.index(blocks) if block_dim is None else block_dim
    sizes = {index: size // blocks if index == of_blocks else size for index, size in enumerate(part.shape)}
    strides = part.stride()
    inside = sorted((index for index, size in sizes.items() if size > 1), key=lambda index: -strides[index])
    return " ".join(f"{index}:{sizes[index]}" for index in inside)


def _check_page(group: Any, name: str, runs: list[RegionRun]) -> None:
    """Check that the regions hold as many bytes per block of a layer as the engine says, with or without padding."""
    spec = _spec_of(group, name)
    found = sum(run.regions * run.page_bytes for run in runs)
    wanted = {spec.page_size_bytes, getattr(spec, "real_page_size_bytes", spec.page_size_bytes)}
    if found not in wanted:
        raise RequestError("layout", f"layer {name}: {found} bytes of a block were found, {sorted(wanted)} expected")


def _spec_of(group: Any, name: str) -> Any:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return inner[name] if inner is not None else group.kv_cache_spec


def _check_place(tensor: Any, name: str, runs: list[RegionRun]) -> None:
    """Compare with the engine's own description, if the release has one."""
    wanted = place_of(tensor, name)
    if wanted is None:
        return
    if min(run.offset for run in runs) != wanted.offset or {run.block_stride for run in runs} != {wanted.block_stride}:
        raise RequestError("layout", f"layer {name}: {runs[0]} was found; expected {wanted}")


def _joined(per_layer: list[list[RegionRun]], *, is_shard: bool) -> list[RegionRun]:
    """Joins layers that have one run each and follow each other evenly.

    is_shard: not if a layer has several regions. Whether these go on evenly depends on how many heads the rank holds.
    """
    runs = [run for layer in per_layer for run in layer]
    if len(runs) != len(per_layer) or len(runs) < 2 or (is_shard and runs[0].regions > 1):
        return runs
    first = runs[0]
    step = first.region_stride if first.regions > 1 else runs[1].offset - first.offset
    even = all(run == _moved(first, index * first.regions * step) and step > 0 for index, run in enumerate(runs))
    if not even:
        return runs
    return [replace(first, regions=len(runs) * first.regions, region_stride=step)]


def _names(group: Any) -> str:
    return ", ".join(group.layer_names[:3]) + (", …" if len(group.layer_names) > 3 else "")
