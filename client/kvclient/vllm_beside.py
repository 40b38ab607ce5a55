"""Tensors with an entry for each block that an attention layer keeps beside the caches that vLLM registers.

A block that is stored without them comes back with whatever the block before it has left there. So each is either
known, and stored with its block, or the cache is refused. To find them nothing has to be known of an engine. A tensor
of an attention layer counts if it came after the connector was made, lies on the caches' device, has a dimension that
counts blocks, or parts of blocks, or their tokens, and shares no memory with a registered cache. What was there before
(weights, buffers, tables of positions) was made when nobody knew how many blocks there would be.

Some engines make such tensors in the first forward that has something to compute, which may be the first request's. So
the layers are looked at again: when vLLM asks for the handshake, behind its warm-up; before the first stores; and from
then on ever more rarely.

Known is what ATOM's plug-in of vLLM keeps beside KV in fp8: one scale for each token and head.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvserver.errors import RequestError

ATOM = "atom.plugin.vllm."
ATOM_STATES = ATOM + "deepseek_v4_bridge"
"""Whose layer looks like one of full attention and has a state of each request in its cache, outside of blocks."""
ATOM_SCALES = frozenset({"kv_scale", "k_scale", "v_scale"})


class Held(NamedTuple):
    """A tensor of an attention layer."""

    layer: str
    attribute: str
    tensor: Any


class Beside:
    """Of one worker. Made before its engine allocates the KV cache."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        """layers: by name, attention and others; vLLM's static_forward_context."""
        self._layers = {name: layer for name, layer in layers.items() if hasattr(layer, "get_attn_backend")}
        self._before = {_identity(held) for held in _all_held(self._layers)}
        self._described: dict[str, int] | None = None
        """Of layers whose known tensors the server has been told of: where these are."""

    def awaited(self) -> list[str]:
        """Layers whose scales come with their first forward, which has not been yet."""
        return [name for name, layer in self._layers.items() if _awaits_atom_scales(layer) or _resets_scales(layer)]

    def known(self, caches: Mapping[str, Any], *, blocks: int, block_tokens: Sequence[int]) -> dict[str, Held]:
        """By layer, what is to be stored with its blocks. RequestError("layout") names what cannot be.

        caches: as vLLM registers them. block_tokens: of each group."""
        for name, layer in self._layers.items():
            if type(layer).__module__ == ATOM_STATES:
                raise RequestError(
                    "layout", f"layer {name} is DeepSeek-V4 of ATOM's plug-in, whose states of requests are in no block"
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
                    f"cache of {blocks} blocks, and vLLM does not register it: a block that is brought back would be "
                    "read with what another one has left there. Start vLLM without this connector; or, if these are "
                    "scales of its KV, with --kv-cache-dtype auto",
                )
        where = {name: _memory(held.tensor) for name, held in known.items()}
        if self._described not in (None, where):
            raise RequestError("layout", f"the scales of layers {sorted(known)} are not where they were at the start")
        return known

    def described(self, known: Mapping[str, Held]) -> None:
        """From now on known() must find the same."""
        self._described = {name: _memory(held.tensor) for name, held in known.items()}

    def forget(self) -> None:
        """The caches are gone, and what lies beside them."""
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
    """vLLM's Triton attention keeps scales for each token and head in the pages themselves (--kv-cache-dtype
    int8_per_token_head and the like), and in its first forward it writes 1 over all of them, loaded ones too."""
    impl = getattr(layer, "impl", None)
    return bool(getattr(impl, "_is_per_token_head_quant", False)) and getattr(impl, "_k_scale_cache", 0) is None


def _atom_scales(name: str, layer: Any, caches: Mapping[str, Any], *, blocks: int, block_tokens: Sequence[int]) -> Held:
    """[K or V, blocks or parts of them, heads, tokens], of which k_scale and v_scale are the halves."""
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
    return Held(name, "kv_scale", scales)


def _all_held(layers: Mapping[str, Any]) -> Iterator[Held]:
    for name, layer in layers.items():
        yield from _held(name, "", layer)
        for child, module in getattr(layer, "_modules", {}).items():
            yield from _held(name, f"{child}.", module)
        impl = getattr(layer, "impl", None)
        if impl is not None and impl is not layer:
            yield from _held(name, "impl.", impl)


def _held(layer: str, prefix: str, owner: Any) -> Iterator[Held]:
    """Of its attributes, also in lists, tuples and dicts, as modules keep their buffers."""
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
                yield Held(layer, prefix + where, item)


def _parts(cache: Any) -> list[Any]:
    return list(cache) if isinstance(cache, list | tuple) else [cache]


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _identity(held: Held) -> tuple[object, ...]:
    """What tells a tensor from one that takes its place."""
    return (held.layer, held.attribute, held.tensor.data_ptr(), tuple(held.tensor.shape), str(held.tensor.device))


def _counts_blocks(tensor: Any, blocks: int, block_tokens: Sequence[int]) -> bool:
    """A dimension is as long as there are blocks, kernel blocks of which several make one, or tokens of blocks."""
    return any(
        size and size % blocks == 0 and any(tokens % (size // blocks) == 0 for tokens in block_tokens)
        for size in tensor.shape
    )
