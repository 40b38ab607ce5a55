"""Layout.parse against a map of bytes: an accepted layout never overlaps and never leaves a buffer."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserver.errors import RequestError
from kvserver.transfer.layout import Layout
from kvserver.wire.messages import Buffer, GroupSpec, RegionRun, Register

BUFFERS = (211, 97)


def group(runs: list[RegionRun], blocks: int, **changes: object) -> GroupSpec:
    fields = {
        "block_tokens": 3, "blocks": blocks, "kind": "full", "window_tokens": 0, "shards": 2, "shard": 1, "writers": 1,
        "writer": 0, "regions": runs,
    }  # fmt: skip
    return GroupSpec(**{**fields, **changes})


def register(groups: list[GroupSpec], buffers: tuple[int, ...] = BUFFERS, chunk_tokens: int = 15) -> Register:
    shared = [Buffer(descriptor, b"", size) for descriptor, size in enumerate(buffers)]
    return Register(1, "kv", bytes(32), chunk_tokens, "host", "", "", "direct", "", shared, groups, [], 0, "")


def pages(spec: GroupSpec) -> list[tuple[int, int, int]]:
    """(buffer, first byte, byte after the last) of every page."""
    found = []
    for run in spec.regions:
        for region in range(run.regions):
            for block in range(spec.blocks):
                begin = run.offset + region * run.region_stride + block * run.block_stride
                found.append((run.buffer, begin, begin + run.page_bytes))
    return found


def is_sound(spec: GroupSpec) -> bool:
    """Whether no byte is covered twice and none lies outside."""
    used: set[tuple[int, int]] = set()
    for buffer, begin, end in pages(spec):
        if begin < 0 or end > BUFFERS[buffer]:
            return False
        page = {(buffer, byte) for byte in range(begin, end)}
        if used & page:
            return False
        used |= page
    return True


@st.composite
def tensors(draw: st.DrawFn) -> GroupSpec:
    """Regions as engines lay them out, and then perhaps one number off."""
    blocks, regions, page = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 9))
    gap = draw(st.integers(0, 3))
    offset = draw(st.integers(0, 20))
    if draw(st.booleans()):  # regions one after another, blocks inside a region
        block_stride = page + gap
        region_stride = blocks * block_stride
    else:  # blocks one after another, regions inside a block
        region_stride = page + gap
        block_stride = regions * region_stride
    numbers = [draw(st.integers(0, 1)), offset, regions, region_stride, block_stride, page]
    runs = [numbers]
    if draw(st.booleans()):  # a second run beside, after or inside the first
        shift = draw(st.sampled_from([page, regions * region_stride, blocks * block_stride, region_stride, 0]))
        runs.append([numbers[0], offset + shift, *numbers[2:5], draw(st.integers(1, 9))])
    if draw(st.booleans()):
        at = draw(st.integers(0, 5))
        run = draw(st.sampled_from(runs))
        run[at] = max(0, run[at] + draw(st.integers(-2, 2))) if at else min(1, run[at])
    return group([RegionRun(*run) for run in runs], blocks)


@settings(max_examples=500)
@given(tensors())
def test_what_is_accepted_never_overlaps_and_never_leaves_its_buffer(spec: GroupSpec) -> None:
    layout = parsed_or_refused(spec)
    if isinstance(layout, RequestError):
        assert layout.code == "layout"
        assert re.search(r"\d", layout.message), "a refusal names numbers"
        return
    assert is_sound(spec)
    parsed = layout.groups[0]
    assert parsed.blocks_per_chunk == 5
    assert parsed.shard_bytes == 5 * sum(run.regions * run.page_bytes for run in spec.regions)
    assert parsed.pages == tuple((run.regions, run.page_bytes) for run in spec.regions)


def parsed_or_refused(spec: GroupSpec) -> Layout | RequestError:
    try:
        return Layout.parse(register([spec]))
    except RequestError as refusal:
        return refusal


RIGHT = {
    "K and V behind each other": [RegionRun(0, 3, 2, 50, 10, 10)],
    "blocks with all regions inside": [RegionRun(0, 0, 4, 7, 28, 7)],
    "K inside a block beside V": [RegionRun(0, 0, 1, 0, 17, 8), RegionRun(0, 8, 1, 0, 17, 9)],
    "two buffers": [RegionRun(0, 0, 1, 0, 40, 40), RegionRun(1, 0, 1, 0, 19, 19)],
    "gaps between blocks": [RegionRun(0, 1, 2, 100, 13, 11)],
    "regions interleaved across their blocks": [RegionRun(0, 0, 3, 5, 20, 5)],
}


@pytest.mark.parametrize("name", RIGHT)
def test_layouts_of_real_engines_are_accepted(name: str) -> None:
    spec = group(RIGHT[name], 5)
    assert is_sound(spec)
    assert Layout.parse(register([spec])).groups[0].blocks == 5


RUN = RegionRun(0, 0, 2, 50, 10, 10)

WRONG = {
    "region-buffer": (register([group([RegionRun(2, 0, 1, 0, 10, 10)], 5)]), "layout", "buffer=2 .*[0, 1]"),
    "region-end": (register([group([RegionRun(0, 0, 3, 90, 10, 10)], 5)]), "layout", "ends at 230, .* 211 bytes"),
    "one byte too long": (register([group([RegionRun(0, 162, 1, 0, 10, 10)], 5)]), "layout", "ends at 212, .* 211 "),
    "pages longer than their stride": (
        register([group([RegionRun(0, 0, 1, 0, 10, 11)], 5)]),
        "layout",
        "block_stride=10.*page_bytes=11",
    ),
    "all blocks in one place": (
        register([group([RegionRun(0, 0, 1, 0, 0, 4)], 5)]),
        "layout",
        "block_stride=0.*page_bytes=4",
    ),
    "regions in one place": (register([group([RegionRun(0, 0, 2, 0, 10, 10)], 5)]), "layout", "overlap"),
    "the same run twice": (register([group([RUN, RUN], 5)]), "layout", r"\[0\].*\[1\].*overlap"),
    "wrapping into the next block": (
        register([group([RegionRun(0, 0, 1, 0, 10, 4), RegionRun(0, 8, 1, 0, 10, 4)], 5)]),
        "layout",
        "overlap",
    ),
    "no page": (register([group([RegionRun(0, 0, 1, 0, 10, 0)], 5)]), "layout", "page_bytes=0 must be in"),
    "negative offset": (register([group([RegionRun(0, -1, 1, 0, 10, 10)], 5)]), "layout", "offset=-1 must be in"),
    "no regions": (register([group([], 5)]), "layout", "must be in|at least one run"),
    "no blocks": (register([group([RUN], 0)]), "layout", "blocks=0 must be in"),
    "no buffers": (register([group([RUN], 5)], buffers=()), "layout", "buffers=0 must be in"),
    "empty buffer": (register([group([RUN], 5)], buffers=(0,)), "layout", "bytes=0 must be in"),
    "no groups": (register([]), "geometry", "groups=0 must be in"),
    "no chunk": (register([group([RUN], 5)], chunk_tokens=0), "geometry", "chunk_tokens=0 must be in"),
    "chunk of part blocks": (
        register([group([RUN], 5)], chunk_tokens=16),
        "geometry",
        "block_tokens=3 must divide chunk_tokens=16",
    ),
    "state of half a chunk": (
        register([group([RUN], 5, kind="state")]),
        "geometry",
        "block_tokens=3 .* chunk_tokens=15",
    ),
    "window without length": (register([group([RUN], 5, kind="window")]), "geometry", "window_tokens=0 must be in"),
    "length without window": (
        register([group([RUN], 5, window_tokens=4)]),
        "geometry",
        r"window_tokens=4 must be in \[0, 0\]",
    ),
    "no such shard": (register([group([RUN], 5, shard=2)]), "geometry", r"shard=2 must be in \[0, 1\]"),
    "no such writer": (register([group([RUN], 5, writer=1)]), "geometry", r"writer=1 must be in \[0, 0\]"),
    "no writers": (register([group([RUN], 5, writers=0)]), "geometry", "writers=0 must be in"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refusal_names_what_was_expected_and_what_came(name: str) -> None:
    request, code, message = WRONG[name]
    with pytest.raises(RequestError) as refusal:
        Layout.parse(request)
    assert refusal.value.code == code
    assert re.search(message.replace("[0, 1]", r"\[0, 1\]"), refusal.value.message), refusal.value.message
