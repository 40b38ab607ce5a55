"""Pages of a registered cache, and the geometry that a namespace fixes.

Parse, don't validate: `Layout.parse` checks a Register once; afterwards every page of every block id in range lies
inside its buffer and no two pages of a group share a byte. The address of page (region r, block b) of a run is

    offset + r * region_stride + b * block_stride

which covers K/V-first, block-first, MLA and cross-layer tensors alike. A shard's bytes in its slot are
[run][region][block of the chunk][page_bytes], so equal chunks are equal bytes whatever the engine's strides are.
"""

from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import astuple

from kvserver.errors import RequestError
from kvserver.wire.messages import (
    BUFFERS_MAX,
    GROUPS_MAX,
    REGION_RUNS_MAX,
    SHARDS_MAX,
    Buffer,
    GroupSpec,
    Kind,
    RegionRun,
    Register,
)

BYTES_MAX = 1 << 50
"""No offset, stride or size is larger; keeps every product far inside int64."""

REGIONS_MAX = 1 << 16
"""Regions of all groups together."""
MIXED_REGIONS_MAX = 1 << 12
"""Regions of runs that reach into each other: to compare them one by one takes about 2 us for each, on the only
thread that decides."""

Span = tuple[int, int, int, int]
"""A run: its buffer, the begin of its first page, the end of its last one, and its number."""
PageShape = tuple[tuple[int, int], ...]
"""(regions, page_bytes) of each run, in order: what must be equal for two ranks' shards to be interchangeable."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The geometry of one group, on which every cache of a namespace agrees."""

    block_tokens: int
    kind: Kind
    window_tokens: int
    shards: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The geometry on which every cache of a namespace agrees."""

    chunk_tokens: int
    groups: tuple[GroupGeometry, ...]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group of one rank's cache."""

    blocks_per_chunk: int
    blocks: int
    shard: int
    writers: int
    """Ranks of the cache's own engine that hold this shard. Other engines of the namespace may have other numbers."""
    writer: int
    pages: PageShape
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A checked Register."""

    geometry: Geometry
    groups: tuple[GroupLayout, ...]

    @staticmethod
    def parse(register: Register) -> "Layout":
        """Raises RequestError("layout" | "geometry"), naming what was expected and what came."""
        _require("geometry", "chunk_tokens", register.chunk_tokens, 1, 1 << 20)
        _require("geometry", "groups", len(register.groups), 1, GROUPS_MAX)
        _require("layout", "buffers", len(register.buffers), 1, BUFFERS_MAX)
        for index, buffer in enumerate(register.buffers):
            _require("layout", f"buffers[{index}].bytes", buffer.bytes, 1, BYTES_MAX)
        runs = [run for group in register.groups for run in group.regions]
        _require("layout", "region runs", len(runs), 1, REGION_RUNS_MAX)
        _require("layout", "regions", sum(run.regions for run in runs), 1, REGIONS_MAX)
        shapes = [_group_geometry(index, group, register.chunk_tokens) for index, group in enumerate(register.groups)]
        spans = [_group_spans(index, group, register.buffers) for index, group in enumerate(register.groups)]
        groups = [_group_layout(group, register.chunk_tokens) for group in register.groups]
        _check_overlap(register.groups, spans)
        return Layout(Geometry(register.chunk_tokens, tuple(shapes)), tuple(groups))


def _require(code: str, what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise RequestError(code, f"{what}={value} must be in [{least}, {most}]")


def _group_geometry(index: int, group: GroupSpec, chunk_tokens: int) -> GroupGeometry:
    where = f"groups[{index}]"
    _require("geometry", f"{where}.block_tokens", group.block_tokens, 1, chunk_tokens)
    if chunk_tokens % group.block_tokens:
        raise RequestError(
            "geometry", f"{where}.block_tokens={group.block_tokens} must divide chunk_tokens={chunk_tokens}"
        )
    if group.kind == "state" and group.block_tokens != chunk_tokens:
        raise RequestError(
            "geometry",
            f"{where}.block_tokens={group.block_tokens} of a state group must equal chunk_tokens={chunk_tokens}",
        )
    if group.kind == "window":
        _require("geometry", f"{where}.window_tokens", group.window_tokens, 1, 1 << 30)
    else:
        _require("geometry", f"{where}.window_tokens", group.window_tokens, 0, 0)
    _require("geometry", f"{where}.shards", group.shards, 1, SHARDS_MAX)
    _require("geometry", f"{where}.shard", group.shard, 0, group.shards - 1)
    _require("geometry", f"{where}.writers", group.writers, 1, SHARDS_MAX)
    _require("geometry", f"{where}.writer", group.writer, 0, group.writers - 1)
    return GroupGeometry(group.block_tokens, group.kind, group.window_tokens, group.shards)


def _group_layout(group: GroupSpec, chunk_tokens: int) -> GroupLayout:
    pages = tuple((run.regions, run.page_bytes) for run in group.regions)
    blocks_per_chunk = chunk_tokens // group.block_tokens
    shard_bytes = blocks_per_chunk * sum(regions * page_bytes for regions, page_bytes in pages)
    return GroupLayout(blocks_per_chunk, group.blocks, group.shard, group.writers, group.writer, pages, shard_bytes)


def _group_spans(index: int, group: GroupSpec, buffers: list[Buffer]) -> list[Span]:
    """Spans of all runs. There can be thousands, so each is taken apart once; only a refused one is put in words."""
    where = f"groups[{index}]"
    _require("layout", f"{where}.blocks", group.blocks, 1, 1 << 30)
    if not group.regions:
        raise RequestError("layout", f"{where}.regions is empty, expected at least one run")
    sizes = [buffer.bytes for buffer in buffers]
    count, last_block = len(buffers), group.blocks - 1
    spans: list[Span] = []
    for number, run in enumerate(group.regions):
        buffer, offset, regions, region_stride, block_stride, page_bytes = astuple(run)
        fits = (
            0 <= buffer < count
            and 0 < regions <= REGIONS_MAX
            and 0 < page_bytes <= BYTES_MAX
            and 0 <= offset <= BYTES_MAX
            and 0 <= region_stride <= BYTES_MAX
            and 0 <= block_stride <= BYTES_MAX
        )
        if not fits:
            _refuse_run(f"{where}.regions[{number}]", run, count)
        end = offset + (regions - 1) * region_stride + last_block * block_stride + page_bytes
        if end > sizes[buffer]:
            raise RequestError(
                "layout", f"{where}.regions[{number}] ends at {end}, beyond its buffer of {sizes[buffer]} bytes"
            )
        spans.append((buffer, offset, end, number))
    return spans


def _refuse_run(where: str, run: RegionRun, buffers: int) -> None:
    _require("layout", f"{where}.buffer", run.buffer, 0, buffers - 1)
    _require("layout", f"{where}.regions", run.regions, 1, REGIONS_MAX)
    _require("layout", f"{where}.page_bytes", run.page_bytes, 1, BYTES_MAX)
    for name in ("offset", "region_stride", "block_stride"):
        _require("layout", f"{where}.{name}", getattr(run, name), 0, BYTES_MAX)


def _check_overlap(groups: list[GroupSpec], spans: list[list[Span]]) -> None:
    """No two pages of a group share a byte. Groups may alias each other: a block id belongs to one group at a time."""
    mixed = [_mixed(group.regions, group.blocks, of_group) for group, of_group in zip(groups, spans, strict=True)]
    regions = sum(
        group.regions[number].regions for group, numbers in zip(groups, mixed, strict=True) for number in numbers
    )
    _require("layout", "regions of runs that reach into each other", regions, 0, MIXED_REGIONS_MAX)
    for index, (group, numbers) in enumerate(zip(groups, mixed, strict=True)):
        _check_regions(f"groups[{index}]", numbers, group.regions, group.blocks)


def _mixed(runs: list[RegionRun], blocks: int, spans: list[Span]) -> list[int]:
    """The runs that have to be compared region by region. Most have extents of their own, and cannot meet others."""
    spans.sort()
    cluster: list[int] = []
    reach = of_buffer = -1
    mixed: list[int] = []
    for buffer, start, end, number in spans:
        if cluster and (buffer != of_buffer or start >= reach):
            mixed += _unclear(cluster, runs, blocks)
            cluster, reach = [], -1
        cluster.append(number)
        of_buffer = buffer
        reach = max(reach, end)
    return mixed + _unclear(cluster, runs, blocks)


def _unclear(cluster: list[int], runs: list[RegionRun], blocks: int) -> list[int]:
    """Those runs of a cluster that have to be looked at region by region."""
    if len(cluster) == 1 and _is_apart(runs[cluster[0]], blocks):
        return []
    stride = runs[cluster[0]].block_stride
    if blocks == 1 or not stride:
        return cluster
    spans = []
    for number in cluster:
        _, offset, regions, region_stride, block_stride, page_bytes = astuple(runs[number])
        width = (regions - 1) * region_stride + page_bytes
        if block_stride != stride or width > stride or (page_bytes > region_stride and regions > 1):
            return cluster
        begin = offset % stride
        spans.append((begin, begin + width))
    spans.sort()
    reach = spans[-1][1] - stride
    for begin, end in spans:
        if begin < reach:
            return cluster
        reach = end
    return []


def _is_apart(run: RegionRun, blocks: int) -> bool:
    """The extents of its regions are, and so are the pages of each."""
    extent = (blocks - 1) * run.block_stride + run.page_bytes
    pages_apart = blocks == 1 or run.page_bytes <= run.block_stride
    return pages_apart and (run.regions == 1 or extent <= run.region_stride)


def _check_regions(where: str, numbers: list[int], runs: list[RegionRun], blocks: int) -> None:
    """Every region is an arithmetic progression of pages. Progressions whose extents are apart cannot meet; those whose
    extents touch must share one stride and keep to disjoint parts of it."""
    regions = sorted(
        (runs[number].buffer, runs[number].offset + region * runs[number].region_stride, number)
        for number in numbers
        for region in range(runs[number].regions)
    )
    cluster: list[tuple[int, int, int]] = []
    reach = -1
    for entry in regions:
        buffer, start, number = entry
        if cluster and (buffer != cluster[0][0] or start >= reach):
            _check_cluster(where, cluster, runs, blocks)
            cluster, reach = [], -1
        cluster.append(entry)
        reach = max(reach, start + (blocks - 1) * runs[number].block_stride + runs[number].page_bytes)
    if cluster:
        _check_cluster(where, cluster, runs, blocks)


def _check_cluster(where: str, cluster: list[tuple[int, int, int]], runs: list[RegionRun], blocks: int) -> None:
    first = cluster[0][2]
    stride = runs[first].block_stride
    parts = []
    for _, start, number in cluster:
        run = runs[number]
        if run.block_stride != stride or (blocks > 1 and run.page_bytes > stride):
            raise RequestError(
                "layout",
                f"{where}.regions[{first}] (block_stride={stride}) and [{number}] (block_stride={run.block_stride}, "
                f"page_bytes={run.page_bytes}) overlap or interleave unevenly",
            )
        begin = start % stride if blocks > 1 else start
        parts.append((begin, begin + run.page_bytes, number))
    parts.sort()
    for (_, end, one), (begin, _, other) in pairwise(parts):
        if begin < end:
            raise RequestError("layout", f"{where}.regions[{one}] and [{other}] overlap")
    if blocks > 1 and parts[-1][1] > parts[0][0] + stride:
        raise RequestError("layout", f"{where}.regions[{parts[-1][2]}] and [{parts[0][2]}] overlap")
