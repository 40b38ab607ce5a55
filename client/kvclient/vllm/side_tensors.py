"""Per-block tensors that an attention layer keeps outside the caches that vLLM registers.

A block that is stored without them would come back with values of the block's previous use. So each such tensor is
either known and stored with its block, or the cache is refused.

The search needs no knowledge of the engine. An attention layer's tensor counts if all of this holds: it was created
after the connector, it lies on the caches' device, and it shares no memory with a registered cache. Also, one of its
dimensions counts blocks, parts of blocks, or their tokens. Older tensors (weights, buffers, position tables) were
created before the number of blocks was known.

Some engines create such tensors in the first forward pass that computes something, perhaps for the first request. So
the layers are checked again: at vLLM's handshake after its warm-up, before the first stores, and then ever more rarely.

The one known kind belongs to ATOM's plug-in for vLLM: with fp8 KV it keeps one scale per token and head.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvserver.errors import RequestError

ATOM = "atom.plugin.vllm."
ATOM_STATES = ATOM + "deepseek_v4_bridge"
"""Module of a layer that looks like full attention but keeps per-request state in its cache, outside of blocks."""
ATOM_SCALES = frozenset({"kv_scale", "k_scale", "v_scale"})


class SideTensor(NamedTuple):
    """A tensor of an attention layer."""

    layer: str
    attribute: str
    tensor: Any


class SideTensors:
    """The per-block tensors of one worker's layers. Create it before the engine allocates the KV cache."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        """layers: all layers by name, attention and others (vLLM's static_forward_context)."""
        self._layers = {name: layer for name, layer in layers.items() if hasattr(layer, "get_attn_backend")}
        self._before = {_identity(held) for held in _all_held(self._layers)}
        self._described: dict[str, int] | None = None
        """Layer -> address of its known tensor, as registered with the server. None before registration."""

    def awaited(self) -> list[str]:
        """Layers whose scales are created by a first forward pass that has not happened yet."""
        return [name for name, layer in self._layers.items() if _awaits_atom_scales(layer) or _resets_scales(layer)]

    def known(self, caches: Mapping[str, Any], *, blocks: int, block_tokens: Sequence[int]) -> dict[str, SideTensor]:
        """Return the tensor to store with each layer's blocks. RequestError("layout") names a tensor that cannot be
        stored.

        caches: as vLLM registers them. block_tokens: one number per group.
        """
        for name, layer in self._layers.items():
            if type(layer).__module__ == ATOM_STATES:
                raise RequestError(
                    "layout",
                    f"layer {name} is DeepSeek-V4 of ATOM's plug-in, which keeps state outside of blocks",
                )
        known = {
            name: _atom_scales(name, layer, caches, blocks=blocks, block_tokens=block_tokens)
            for name, layer in self._layers.items()
            if _has_atom_scales(layer) and layer.k_scale is not None
        }
        parts = [part for cache in caches.values() for part in _parts(cache)]
        covered = {_memory(part) for part in parts} | {_memory(held.tensor) for held in known.values()}
        devices = {str(part.device) for part in parts}
        for held in _all_held(self._layers):
            is_new = str(held.tensor.device) in devices and _identity(held) not in self._before
            if is_new and _counts_blocks(held.tensor, blocks, block_tokens) and _memory(held.tensor) not in covered:
                raise RequestError(
                    "layout",
                    f"layer {held.layer} keeps {held.attribute} of shape {tuple(held.tensor.shape)} beside its KV "
                    f"cache of {blocks} blocks, and vLLM does not register it. A loaded block would be used with what "
                    "another block left there. Start vLLM without this connector; or, if these are scales of its KV, "
                    "with --kv-cache-dtype auto",
                )
        where = {name: _memory(held.tensor) for name, held in known.items()}
        if self._described not in (None, where):
            raise RequestError("layout", f"the scales of layers {sorted(known)} are not where they were at the start")
        return known

    def described(self, known: Mapping[str, SideTensor]) -> None:
        """Remember the registered tensors. From now on known() must find the same."""
        self._described = {name: _memory(held.tensor) for name, held in known.items()}

    def forget(self) -> None:
        """Forget the registered tensors, because the caches are gone."""
        self._described = None


def _has_atom_scales(layer: Any) -> bool:
    return (
        type(layer).__module__.startswith(ATOM)
        and vars(layer).keys() >= ATOM_SCALES
        and getattr(layer, "kv_cache_dtype", "") == "fp8"
    )


def _awaits_atom_scales(layer: Any) -> bool:
    return _has_atom_scales(layer) and layer.k_scale is None


def _resets_scales(layer: Any) -> bool:
    """Whether the layer's first forward pass will overwrite its scales.

    vLLM's Triton attention can keep scales per token and head in the pages themselves (--kv-cache-dtype
    int8_per_token_head and similar). Its first forward pass sets all of them to 1, also those that were loaded.
    """
    impl = getattr(layer, "impl", None)
    return bool(getattr(impl, "_is_per_token_head_quant", False)) and getattr(impl, "_k_scale_cache", 0) is None


def _atom_scales(
    name: str, layer: Any, caches: Mapping[str, Any], *, blocks: int, block_tokens: Sequence[int]
) -> SideTensor:
    """The layer's kv_scale: [K or V, blocks or parts of blocks, heads, tokens]. k_scale and v_scale are its halves."""
    scales = layer.kv_scale
    shape = tuple(scales.shape)
    is_whole = len(shape) == 4 and shape[0] == 2 and shape[1] % blocks == 0
    is_whole = is_whole and shape[1] // blocks * shape[3] in block_tokens
    halves = {_memory(part) for part in (layer.k_scale, layer.v_scale)}
    if name not in caches or not is_whole or halves != {_memory(scales)}:
        raise RequestError(
            "layout",
            f"layer {name}: kv_scale of ATOM's plug-in has shape {shape}; expected (2, {blocks} blocks or a multiple, "
            "heads, tokens), with k_scale and v_scale as its halves, beside a registered cache",
        )
    return SideTensor(name, "kv_scale", scales)


def _all_held(layers: Mapping[str, Any]) -> Iterator[SideTensor]:
    for name, layer in layers.items():
        yield from _held(name, "", layer)
        for child, module in getattr(layer, "_modules", {}).items():
            yield from _held(name, f"{child}.", module)
        impl = getattr(layer, "impl", None)
        if impl is not None and impl is not layer:
            yield from _held(name, "impl.", impl)


def _held(layer: str, prefix: str, owner: Any) -> Iterator[SideTensor]:
    """Tensors among the owner's attributes, also inside lists, tuples and dicts (modules keep buffers in dicts)."""
    for name, value in getattr(owner, "__dict__", {}).items():
        if name == "_parameters":
            continue
        if isinstance(value, dict):
            inner = [(f"{name}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            inner = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
        else:
            inner = [(name, value)]
        for where, item in inner:
            if hasattr(item, "untyped_storage") and hasattr(item, "shape"):
                yield SideTensor(layer, prefix + where, item)


def _parts(cache: Any) -> list[Any]:
    return list(cache) if isinstance(cache, list | tuple) else [cache]


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _identity(held: SideTensor) -> tuple[object, ...]:
    """A value that differs between a tensor and its replacement."""
    return (held.layer, held.attribute, held.tensor.data_ptr(), tuple(held.tensor.shape), str(held.tensor.device))


def _counts_blocks(tensor: Any, blocks: int, block_tokens: Sequence[int]) -> bool:
    """Whether a dimension counts blocks, kernel blocks (several per block), or tokens of blocks."""
    return any(
        size and size % blocks == 0 and any(tokens % (size // blocks) == 0 for tokens in block_tokens)
        for size in tensor.shape
    )
