"""The layout of ATOM's blocks in KV memory, as registered with the server.

ATOM describes it twice: `kv_caches` has the layers' tensors, `transfer_tensors` the memory that holds them. Block b of
its scheduler is the b-th of `blocks` equal pieces of each tensor. This holds for any number of physical pages per block
(block_ratio), and for a first dimension of pages or, as with MLA, of tokens. So only `blocks` gives the stride.

    K of MHA       (pages, heads, dim / x, page tokens, x)      16 bytes in x: fp8 16, bf16 8
    V of MHA       (pages, heads, page tokens / x, dim, x)      or (pages, heads, dim, page tokens)
    scales         (pages, heads, page tokens)                  fp32, beside fp8
    MLA            (tokens, 1, dim)                             neither V nor scales
    index keys     (pages, page tokens, dim)                    DSA; of MiniMax-M3 only transfer_tensors has them

    recurrent      (entries, …) and (entries, …)                GDN, KDA: slots of requests instead of blocks
    DeepSeek-V4    no tensors                                   regions of blocks, and regions of slots

Everything else is refused before any byte moves, above all memory that is addressed neither by blocks nor by slots.
Without it, a restored prefix would be incomplete and nobody would notice.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvclient.atom.states import Plane, region_planes, tensor_plane
from kvclient.memory.layouts import Extent
from kvserver.errors import RequestError
from kvserver.wire.messages import RegionRun

PARTS = ("k_cache", "v_cache", "k_scale", "v_scale", "index_cache")
"""Fields of a KVCacheTensor. Regions are listed part by part, so that one tensor with all layers becomes one run."""
X_BYTES = 16
SCALE_BYTES = 4


class Segment(NamedTuple):
    """A layer's tensor, or a region that belongs to no known tensor."""

    part: str
    layer: str
    allocation: Extent
    offset: int
    """Offset in the allocation, in bytes."""
    bytes: int
    shape: tuple[int, ...] = ()
    kind: str = ""
    """Type of the elements."""

    @property
    def address(self) -> int:
        return self.allocation.address + self.offset


class Layout(NamedTuple):
    allocations: list[Extent]
    """Allocations, in the order of the buffers in the regions."""
    regions: list[RegionRun]
    segments: list[Segment]
    planes: list[Plane]
    """Parts of a request's state. Empty if the model keeps none."""

    @property
    def is_latent(self) -> bool:
        """Whether all layers use MLA. Then every tensor rank holds the same bytes."""
        return all(segment.part in ("k_cache", "index_cache") and len(segment.shape) == 3 for segment in self.segments)

    def facts(self, *, pipeline_stages: int) -> Sequence[object]:
        """Facts of the layout that must be equal before bytes are shared, and that are equal in all ranks.

        Pipeline stages have different layers, whose sizes the server compares shard by shard.
        """
        if pipeline_stages > 1:
            assert not self.planes, "refused at the start"
            main = [segment for segment in self.segments if segment.part in PARTS[:4]]
            return sorted({f"{segment.part} {len(segment.shape)} {segment.kind}" for segment in main})
        pages = [[item.part, item.layer, list(item.shape), item.kind, item.bytes] for item in self.segments]
        return [*pages, *(plane.facts for plane in self.planes)]


def layout_of(
    kv_caches: Mapping[str, Any],
    transfer_tensors: Any,
    *,
    blocks: int | None,
    block_tokens: int,
    entries: int = 0,
    span: int = 1,
) -> Layout:
    """The layout of a KV cache. Arguments as of register_kv_caches().

    block_tokens: tokens per block in one rank's memory. entries: of a state tensor, 0 if the model keeps no states.
    span: those of one request.

    RequestError("layout") names what is not understood, "unsupported" what cannot be cached.
    """
    if blocks is None or blocks < 1:
        raise RequestError("layout", f"num_blocks={blocks}: expected the blocks that the scheduler counts")
    slots = entries // span
    _refuse_unknown_state(transfer_tensors, slots)
    recurrent = {layer for layer, cache in kv_caches.items() if _is_recurrent(cache, entries=entries)}
    planes = [
        tensor_plane(part, layer, _dense(f"{part} of {layer}", getattr(kv_caches[layer], part)), span=span)
        for layer in kv_caches
        if layer in recurrent
        for part in PARTS[:2]
    ]
    planes += region_planes(transfer_tensors, slots=slots)
    segments = [
        _checked(part, layer, tensor, tokens=blocks * block_tokens)
        for part in PARTS
        for layer, cache in kv_caches.items()
        if layer not in recurrent and (tensor := getattr(cache, part, None)) is not None and math.prod(tensor.shape) > 1
    ]
    if _regions(transfer_tensors, "swa_block_regions"):
        segments += _named(transfer_tensors, segments)
    elif segments:
        segments += _untold(transfer_tensors, segments, scale_bytes=_missing_scales(kv_caches, segments))
    if slots and not planes:
        raise RequestError("layout", f"ATOM has {slots} slots of request state, but registers no memory of them")
    if not segments:  # regions alone do not say how many tokens they hold
        raise RequestError("layout", "ATOM has registered no KV cache of any layer")
    for segment in segments:
        if segment.bytes % blocks:
            raise RequestError(
                "layout", f"{segment.part} of {segment.layer}: {segment.bytes} bytes are not {blocks} equal blocks"
            )
    allocations = list(dict.fromkeys(segment.allocation for segment in segments))
    return Layout(allocations, _runs(segments, allocations, blocks), segments, planes)


# ---------------------------------------------------------------- what is refused


def _refuse_unknown_state(transfer_tensors: Any, slots: int) -> None:
    """Refuse state of requests in regions that are not known to have all of it."""
    full = _regions(transfer_tensors, "swa_block_regions")
    partial = _regions(transfer_tensors, "slot_regions")
    is_stateful = full or partial or getattr(transfer_tensors, "expected_full_slot_region_count", None)
    if is_stateful and (partial or not slots):
        raise RequestError(
            "unsupported",
            f"the model keeps {len(full) + len(partial)} regions of state for each request (as DeepSeek-V4 does), "
            f"{len(partial)} of a kind that is not understood, and ATOM's pool_entries have {slots} slots for them; "
            "a prefix without that state would be wrong",
        )
    if any(getattr(region, "reverse_indexed", False) for region in _regions(transfer_tensors, "block_regions")):
        raise RequestError("layout", "regions of blocks that are counted from their end are not understood")


def _is_recurrent(cache: Any, *, entries: int) -> bool:
    """Whether a layer's two tensors have one row for each entry of a state. K of MHA has five dimensions, MLA no V."""
    tensors = [getattr(cache, part, None) for part in PARTS[:2]]
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
    if not entries or len(shapes) != 2 or len(shapes[0]) == 5:
        return False
    return all(shape[:1] == (entries,) for shape in shapes)


def _checked(part: str, layer: str, tensor: Any, *, tokens: int) -> Segment:
    """The tensor's segment. RequestError unless it has a known form and holds `tokens` tokens.

    This refuses the slots of recurrent layers if ATOM does not tell how many there are.
    """
    shape = tuple(int(size) for size in tensor.shape)
    item_bytes = tensor.element_size()
    shown = f"{part} of {layer}: shape {shape}, {item_bytes} bytes each"
    held = _tokens_of(part, shape, item_bytes)
    if held is None:
        raise RequestError(
            "unsupported",
            f"{shown}: a layout that is not understood; expected pages of K, V, scales or index keys, or a latent by "
            "token (GDN, KDA and other recurrent layers need the slots that ATOM's pool_entries say)",
        )
    if held != tokens:
        raise RequestError(
            "unsupported",
            f"{shown} holds {held} tokens, not the {tokens} of all blocks: it is not addressed by blocks "
            "(GDN, KDA and other recurrent layers need the slots that ATOM's pool_entries say)",
        )
    storage = _dense(shown, tensor).untyped_storage()
    allocation = Extent(storage.data_ptr(), storage.nbytes())
    offset = tensor.data_ptr() - allocation.address
    kind = str(getattr(tensor, "dtype", item_bytes))
    return Segment(part, layer, allocation, offset, math.prod(shape) * item_bytes, shape, kind)


def _dense(shown: str, tensor: Any) -> Any:
    """The tensor. RequestError if its elements have gaps between them."""
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step *= size
    if any(
        size > 1 and got != wanted for size, got, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    ):
        raise RequestError("layout", f"{shown}, strides {tuple(tensor.stride())}: it has gaps")
    return tensor


def _tokens_of(part: str, shape: Sequence[int], item_bytes: int) -> int | None:
    """Number of tokens in a tensor; None if its form is unknown."""
    match part, shape:
        case "k_cache", [pages, _, _, page_tokens, x] if x * item_bytes == X_BYTES:
            return pages * page_tokens
        case "v_cache", [pages, _, page_parts, _, x] if x * item_bytes == X_BYTES:
            return pages * page_parts * x
        case "v_cache", [pages, _, _, page_tokens]:
            return pages * page_tokens
        case "k_cache", [tokens, 1, _]:
            return tokens
        case (("k_scale" | "v_scale"), [pages, _, page_tokens]) if item_bytes == SCALE_BYTES:
            return pages * page_tokens
        case "index_cache", [pages, page_tokens, _]:
            return pages * page_tokens
    return None


# ---------------------------------------------------------------- regions that no tensor was told of


def _untold(transfer_tensors: Any, known: Sequence[Segment], *, scale_bytes: Sequence[int]) -> list[Segment]:
    """Segments of regions outside all tensors: the index keys of MiniMax-M3.

    ATOM may also report scales here that the cache does not need. They are left out if the regions can be nothing else,
    and otherwise stored too.
    """
    regions = [region for region in _regions(transfer_tensors, "block_regions") if not _is_known(region, known)]
    if sorted(region.total_bytes for region in regions) == sorted(scale_bytes):
        return []
    if not regions:
        return []
    begin = min(region.base_addr for region in regions)
    end = max(region.base_addr + region.total_bytes for region in regions)
    dense = sum(region.total_bytes for region in regions) == end - begin
    found = []
    for number, region in enumerate(sorted(regions, key=lambda region: int(region.base_addr)) if dense else regions):
        memory = Extent(begin, end - begin) if dense else Extent(region.base_addr, region.total_bytes)
        offset = region.base_addr - memory.address
        found.append(Segment("region", f"region_{number}", memory, offset, region.total_bytes))
    return found


def _named(transfer_tensors: Any, known: Sequence[Segment]) -> list[Segment]:
    """Segments of regions of blocks beside regions of slots, in ATOM's order: planes of all layers, then index keys."""
    regions = [region for region in _regions(transfer_tensors, "block_regions") if not _is_known(region, known)]
    memory = [Extent(region.base_addr, region.total_bytes) for region in regions]
    return [
        Segment("region", str(region.semantic_role), extent, 0, extent.bytes)
        for region, extent in zip(regions, memory, strict=True)
    ]


def _missing_scales(kv_caches: Mapping[str, Any], segments: Sequence[Segment]) -> list[int]:
    """Bytes of the scales that K and V of layers without scales would have."""
    scaled = {segment.layer for segment in segments if segment.part == "k_scale"}
    plain = [item for item in segments if item.part == "k_cache" and len(item.shape) == 5 and item.layer not in scaled]
    return [bytes_ for item in plain for bytes_ in [item.shape[0] * item.shape[1] * item.shape[3] * SCALE_BYTES] * 2]


def _is_known(region: Any, known: Iterable[Segment]) -> bool:
    """Whether a region is inside a tensor, or consists of tensors without gaps."""
    begin, end = region.base_addr, region.base_addr + region.total_bytes
    if any(item.address <= begin and end <= item.address + item.bytes for item in known):
        return True
    inside = [item for item in known if begin <= item.address and item.address + item.bytes <= end]
    if inside and sum(item.bytes for item in inside) != region.total_bytes:
        raise RequestError("layout", f"a region of {region.total_bytes} bytes holds tensors, and more than these")
    return bool(inside)


def _regions(transfer_tensors: Any, name: str) -> list[Any]:
    return list(getattr(transfer_tensors, name, None) or ())


# ---------------------------------------------------------------- runs


def _runs(segments: Sequence[Segment], allocations: Sequence[Extent], blocks: int) -> list[RegionRun]:
    """The region runs. Segments of one part that follow each other evenly in one allocation become one run.

    So the same tensors always give the same runs, wherever they lie.
    """
    runs: list[RegionRun] = []
    before = ""
    for segment in segments:
        page_bytes = segment.bytes // blocks
        run = RegionRun(allocations.index(segment.allocation), segment.offset, 1, 0, page_bytes, page_bytes)
        joined = _joined(runs[-1], run) if runs and segment.part == before else None
        if joined is None:
            runs.append(run)
        else:
            runs[-1] = joined
        before = segment.part
    return runs


def _joined(run: RegionRun, following: RegionRun) -> RegionRun | None:
    if run.buffer != following.buffer or run.page_bytes != following.page_bytes:
        return None
    last = run.offset + (run.regions - 1) * run.region_stride
    step = following.offset - last
    if step <= 0 or (run.regions > 1 and step != run.region_stride):
        return None
    return replace(run, regions=run.regions + 1, region_stride=step)
