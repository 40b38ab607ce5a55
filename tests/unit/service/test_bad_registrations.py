"""Wrong registrations: one typed error each, with expected and actual value."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvserver.errors import RequestError
from kvserver.tiers.records import SHAPES_BYTES_MAX
from kvserver.transfer.layout import Layout
from kvserver.wire.messages import (
    GROUPS_MAX,
    PROTOCOL,
    SHARDS_MAX,
    Buffer,
    Error,
    GroupBlocks,
    GroupSpec,
    Hello,
    RegionRun,
    Register,
    Registered,
    Staging,
    Stored,
    Unregister,
    Unregistered,
    Watch,
)
from kvserver.wire.orders import MapFailed, Unmapped
from tests.rigs.bad_scene import HUGE, Scene, change
from tests.rigs.brain_rig import (
    ARENA_BYTES,
    BUFFER_BYTES,
    CHUNK_TOKENS,
    FULL,
    NAMESPACE,
    PAGE_BYTES,
    SLAB_BYTES,
    STATE,
    WINDOW,
    Client,
    Rig,
    chain,
    ids,
    is_refusal,
)

RUN = FULL.regions[0]


@pytest.fixture
def scene() -> Scene:
    return Scene()


WIDE = change(RUN, offset=0, regions=1, block_stride=300)
"""A run with room for more than one page in each stride."""


def with_run(**changes: int) -> list[GroupSpec]:
    return [change(FULL, regions=[change(RUN, **changes)])]


def with_group(group: GroupSpec = FULL, **changes: Any) -> list[GroupSpec]:
    return [change(group, **changes)]


BAD_LAYOUTS: list[tuple[str, Sequence[GroupSpec], str, str]] = [
    ("no group", [], "geometry", "groups=0 must be in [1, 16]"),
    ("too many groups", [FULL] * (GROUPS_MAX + 1), "geometry", "groups=17 must be in [1, 16]"),
    (
        "chunk no multiple of the block",
        with_group(block_tokens=4),
        "geometry",
        "block_tokens=4 must divide chunk_tokens=6",
    ),
    ("block larger than chunk", with_group(block_tokens=12), "geometry", "block_tokens=12 must be in [1, 6]"),
    ("block of nothing", with_group(block_tokens=0), "geometry", "block_tokens=0 must be in [1, 6]"),
    ("window without tokens", with_group(WINDOW, window_tokens=0), "geometry", "window_tokens=0 must be in [1, "),
    ("window of a full group", with_group(window_tokens=4), "geometry", "window_tokens=4 must be in [0, 0]"),
    ("window of a state group", with_group(STATE, window_tokens=4), "geometry", "window_tokens=4 must be in [0, 0]"),
    ("state in blocks", with_group(STATE, block_tokens=3), "geometry", "of a state group must equal chunk_tokens=6"),
    ("no shards", with_group(shards=0), "geometry", "shards=0 must be in [1, 256]"),
    ("too many shards", with_group(shards=SHARDS_MAX + 1), "geometry", "shards=257 must be in [1, 256]"),
    ("shard that is none", with_group(shards=3, shard=3), "geometry", "shard=3 must be in [0, 2]"),
    ("negative shard", with_group(shard=-1), "geometry", "shard=-1 must be in [0, 0]"),
    ("no writers", with_group(writers=0), "geometry", "writers=0 must be in [1, 256]"),
    ("writer that is none", with_group(writers=2, writer=2), "geometry", "writer=2 must be in [0, 1]"),
    ("no blocks", with_group(blocks=0), "layout", "blocks=0 must be in [1, "),
    ("negative blocks", with_group(blocks=-7), "layout", "blocks=-7 must be in [1, "),
    ("huge blocks", with_group(blocks=HUGE), "layout", f"blocks={HUGE} must be in [1, "),
    ("no regions", with_group(regions=[]), "layout", "region runs=0 must be in [1, 4096]"),
    ("one group without regions", [FULL, change(WINDOW, regions=[])], "layout", "groups[1].regions is empty"),
    ("too many runs", with_group(regions=[RUN] * 4097), "layout", "region runs=4097 must be in [1, 4096]"),
    ("too many regions", with_run(regions=65_537), "layout", "regions=65537 must be in [1, 65536]"),
    ("run of no regions", with_run(regions=0), "layout", "regions=0 must be in [1, 65536]"),
    (
        "negative regions that make up for others",
        with_group(regions=[RUN, change(RUN, regions=-1)]),
        "layout",
        "regions[1].regions=-1 must be in [1, ",
    ),
    ("buffer that is none", with_run(buffer=1), "layout", "buffer=1 must be in [0, 0]"),
    ("negative buffer", with_run(buffer=-1), "layout", "buffer=-1 must be in [0, 0]"),
    ("empty pages", with_run(page_bytes=0), "layout", "page_bytes=0 must be in [1, "),
    ("negative offset", with_run(offset=-1), "layout", "offset=-1 must be in [0, "),
    ("negative block stride", with_run(block_stride=-130), "layout", "block_stride=-130 must be in [0, "),
    ("negative region stride", with_run(region_stride=-130), "layout", "region_stride=-130 must be in [0, "),
    ("huge stride", with_run(region_stride=HUGE), "layout", f"region_stride={HUGE} must be in [0, "),
    ("huge page", with_run(page_bytes=HUGE), "layout", f"page_bytes={HUGE} must be in [1, "),
    (
        "one byte beyond the buffer",
        with_run(offset=BUFFER_BYTES - 2858),
        "layout",
        f"ends at {BUFFER_BYTES + 1}, beyond",
    ),
    ("pages larger than the block stride", with_run(page_bytes=131), "layout", "overlap"),
    ("regions inside of each other", with_run(region_stride=130 * 10), "layout", "overlap"),
    ("regions on top of each other", with_run(region_stride=0), "layout", "overlap"),
    ("blocks on top of each other", with_run(block_stride=0, region_stride=200), "layout", "overlap"),
    ("two runs on the same bytes", with_group(regions=[RUN, RUN]), "layout", "overlap"),
    (
        "two runs with one byte in common",
        with_group(regions=[RUN, change(RUN, offset=13 + 2 * 11 * 130 - 2, regions=1)]),
        "layout",
        "overlap",
    ),
    (
        "pages with one byte in common",
        with_group(regions=[WIDE, change(WIDE, offset=PAGE_BYTES - 1)]),
        "layout",
        "overlap",
    ),
    (
        "pages that reach one byte into the next block",
        with_group(regions=[WIDE, change(WIDE, offset=300 - PAGE_BYTES + 1)]),
        "layout",
        "overlap",
    ),
    (
        "runs that interleave unevenly",
        with_group(regions=[change(RUN, regions=1), change(RUN, regions=1, offset=20, block_stride=140)]),
        "layout",
        "interleave unevenly",
    ),
]


@pytest.mark.parametrize(
    ("groups", "code", "says"), [bad[1:] for bad in BAD_LAYOUTS], ids=[bad[0] for bad in BAD_LAYOUTS]
)
def test_a_bad_layout_is_refused(scene: Scene, groups: Sequence[GroupSpec], code: str, says: str) -> None:
    descriptors = [scene.culprit.offer()]
    request = scene.culprit.registration(groups, namespace=bytes(32), descriptors=descriptors)
    scene.refuses(request, "request", code, says)
    scene.culprit.register(namespace=bytes(32), descriptors=descriptors)


@pytest.mark.parametrize(
    "groups",
    [
        with_run(offset=BUFFER_BYTES - 2859),
        with_group(regions=[WIDE, change(WIDE, offset=PAGE_BYTES)]),
        with_group(regions=[WIDE, change(WIDE, offset=300 - PAGE_BYTES)]),
    ],
)
def test_layouts_that_just_fit_are_taken(scene: Scene, groups: Sequence[GroupSpec]) -> None:
    """Counterpart of the refusals above: with one byte less it is a valid layout."""
    scene.culprit.register(groups, namespace=bytes(32))


@pytest.mark.parametrize(
    ("changes", "family", "code", "says"),
    [
        ({"name": ""}, "request", "name", "name='' must be 1 to 128 printable bytes"),
        ({"name": "x" * 129}, "request", "name", "must be 1 to 128 printable bytes"),
        ({"name": "a\x1bb"}, "request", "name", "must be 1 to 128 printable bytes"),
        ({"tenant": "x" * 129}, "request", "name", "tenant='xxx"),
        ({"namespace": bytes(31)}, "request", "namespace", "31 bytes; a namespace is a digest of 32 bytes"),
        (
            {"mode": "staged"},
            "request",
            "mode",
            "'staged' is not one of device kind host; expected direct, engine-driven",
        ),
        ({"device_id": "0"}, "request", "device", "device_id='0', ipc_mode=''; device kind host has neither"),
        ({"ipc_mode": "legacy"}, "request", "device", "device_id='', ipc_mode='legacy'; device kind host has neither"),
        ({"staging": [Staging(bytes(64), 1 << 20, 1)]}, "request", "staging", "device kind host needs no staging"),
        ({"chunk_tokens": 0}, "request", "geometry", "chunk_tokens=0 must be in [1, "),
        ({"chunk_tokens": -6}, "request", "geometry", "chunk_tokens=-6 must be in [1, "),
        ({"chunk_tokens": (1 << 20) + 6}, "request", "geometry", "chunk_tokens=1048582 must be in [1, 1048576]"),
        ({"buffers": []}, "request", "layout", "buffers=0 must be in [1, 256]"),
        ({"buffers": [Buffer(1, b"", 9)] * 257}, "request", "descriptor-unknown", "descriptor 1 was not offered"),
        ({"buffers": [Buffer(1, b"handle", 9999)]}, "request", "handle", "on device kind host handles are empty"),
    ],
)
def test_a_bad_registration_is_refused(
    scene: Scene, changes: dict[str, Any], family: str, code: str, says: str
) -> None:
    descriptor = scene.culprit.offer()
    request = change(scene.culprit.registration(descriptors=[descriptor]), **changes)
    scene.refuses(request, family, code, says)


@pytest.mark.parametrize("size", [0, -1, HUGE])
def test_a_buffer_of_a_wrong_size_is_refused(scene: Scene, size: int) -> None:
    request = scene.culprit.registration(buffer_bytes=size)
    scene.refuses(request, "request", "layout", f"buffers[0].bytes={size} must be in [1, ")


def test_a_descriptor_that_was_not_offered_is_refused_before_the_layout_is_read(scene: Scene) -> None:
    """Reading thousands of runs takes milliseconds, in which no other client is served."""
    runs = [change(RUN, page_bytes=0)] * 4096
    request = scene.culprit.registration([change(FULL, regions=runs)], descriptors=[9999])
    scene.refuses(request, "request", "descriptor-unknown", "descriptor 9999 was not offered")


def test_registering_needs_an_attached_connection(scene: Scene) -> None:
    peer = scene.rig.number()
    scene.rig.ask(peer, Hello(1, PROTOCOL, "engine", 3, 2, 1, "test"))
    request = scene.keeper.registration(descriptors=[1])
    scene.refused(lambda: scene.rig.ask(peer, request), "request", "not-attached", "attach first")


def test_registering_twice_under_one_name_is_refused(scene: Scene) -> None:
    descriptors = [scene.keeper.offer()]
    scene.refused(
        lambda: scene.keeper.ask(scene.keeper.registration(descriptors=descriptors)),
        "request",
        "registered-twice",
        "'kv'",
    )
    assert isinstance(scene.keeper.ask(scene.keeper.registration(name="kv2", descriptors=descriptors)), Registered)


@pytest.mark.parametrize(
    ("chunk_tokens", "groups"),
    [
        (12, [FULL]),
        (6, [FULL, WINDOW]),
        (6, with_group(block_tokens=3)),
        (6, with_group(kind="window", window_tokens=6)),
        (6, with_group(shards=2)),
    ],
)
def test_geometry_that_differs_from_the_namespace_is_refused(
    scene: Scene, chunk_tokens: int, groups: Sequence[GroupSpec]
) -> None:
    descriptors = [scene.culprit.offer()]
    request = scene.culprit.registration(groups, chunk_tokens=chunk_tokens, descriptors=descriptors)
    scene.refuses(
        request, "request", "geometry", "has Geometry(chunk_tokens=6,", f"says Geometry(chunk_tokens={chunk_tokens},"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"page_bytes": 128},
        {"regions": 1},
        {"regions": 1, "page_bytes": 2 * PAGE_BYTES, "block_stride": 260},  # the same number of bytes
    ],
)
def test_pages_that_differ_from_the_namespace_are_refused(scene: Scene, changes: dict[str, int]) -> None:
    descriptors = [scene.culprit.offer()]
    run = change(RUN, **changes)
    scene.refuses(
        scene.culprit.registration([change(FULL, regions=[run])], descriptors=descriptors),
        "request",
        "geometry",
        "has pages (regions, bytes) ((2, 129),)",
        f"says (({run.regions}, {run.page_bytes}),)",
    )


def test_other_strides_and_other_block_counts_are_the_same_geometry(scene: Scene) -> None:
    scene.culprit.register(
        [change(FULL, blocks=5, regions=[change(RUN, offset=0, region_stride=129, block_stride=300)])]
    )
    found = scene.culprit.lookup(scene.keys)
    assert found.chunks == 3


def big(page_bytes: int) -> list[GroupSpec]:
    return [GroupSpec(2, 3, "full", 0, 1, 0, 1, 0, [RegionRun(0, 0, 1, 0, page_bytes, page_bytes)])]


def test_a_shard_that_no_slab_holds_is_refused(scene: Scene) -> None:
    descriptors = [scene.culprit.offer()]
    page_bytes = SLAB_BYTES // 3 + 1
    scene.refuses(
        scene.culprit.registration(big(page_bytes), namespace=bytes(32), descriptors=descriptors, buffer_bytes=1 << 20),
        "resource",
        "slot-size",
        f"a shard of {3 * page_bytes} bytes does not fit a slab of {SLAB_BYTES} bytes",
    )


def test_a_chunk_that_the_arena_does_not_hold_is_refused_at_its_last_shard(scene: Scene) -> None:
    """Seven ranks with a third of the arena each cannot all register; the one that exceeds it is refused."""
    shards = ARENA_BYTES // SLAB_BYTES + 1
    group = change(big(SLAB_BYTES // 3)[0], shards=shards)
    for shard in range(shards - 1):
        scene.culprit.register([change(group, shard=shard)], name=f"{shard}", namespace=bytes(32), buffer_bytes=1 << 20)
    descriptors = [scene.culprit.offer()]
    last = scene.culprit.registration(
        [change(group, shard=shards - 1)], namespace=bytes(32), descriptors=descriptors, buffer_bytes=1 << 20
    )
    scene.refuses(
        last, "resource", "slot-size", f"a chunk needs {shards} slabs", f"the arena of {ARENA_BYTES} bytes has 16"
    )


def test_shards_that_leave_much_of_their_slabs_empty_are_counted_by_slabs(scene: Scene) -> None:
    """Shards of a bit more than half a slab each fill the slabs, although twice the sum of their bytes would fit."""
    slabs = ARENA_BYTES // SLAB_BYTES
    group = change(big(12_000)[0], shards=slabs + 1)
    for shard in range(slabs):
        scene.culprit.register([change(group, shard=shard)], name=f"{shard}", namespace=bytes(32), buffer_bytes=1 << 20)
    descriptors = [scene.culprit.offer()]
    last = scene.culprit.registration(
        [change(group, shard=slabs)], namespace=bytes(32), descriptors=descriptors, buffer_bytes=1 << 20
    )
    scene.refuses(last, "resource", "slot-size", f"a chunk needs {slabs + 1} slabs of {SLAB_BYTES} bytes", "has 16")


@pytest.mark.parametrize(
    ("groups", "tokens"),
    [
        ((FULL,), 16 * 16 * CHUNK_TOKENS),
        ((change(FULL, shards=3),), 16 * 16 * CHUNK_TOKENS),
        ((FULL, WINDOW), (16 * 16 - 2) * CHUNK_TOKENS),
        ((STATE,), (1 << 40) - CHUNK_TOKENS + 1),
    ],
)
def test_an_arena_that_can_never_hold_the_longest_prompt_is_refused(
    scene: Scene, groups: Sequence[GroupSpec], tokens: int
) -> None:
    """Every slot has 4 KiB, 16 in a slab. FULL takes one per chunk, WINDOW two and STATE one at the end of the prompt.

    The size of shards that are not registered yet is unknown, and is not guessed."""
    just = scene.culprit.registration(groups, namespace=bytes(32), tokens_max=tokens + CHUNK_TOKENS - 1)
    assert isinstance(scene.culprit.ask(just), Registered)
    descriptors = [scene.culprit.offer()]
    more = scene.culprit.registration(
        groups, name="more", namespace=bytes(32), descriptors=descriptors, tokens_max=tokens + CHUNK_TOKENS
    )
    if tokens + CHUNK_TOKENS > 1 << 40:
        scene.refuses(more, "request", "tokens-max", f"tokens_max={tokens + CHUNK_TOKENS} must be in [0, ")
    else:
        scene.refuses(more, "resource", "prompt-size", f"tokens_max={tokens + CHUNK_TOKENS} needs 17 slabs", "has 16")


def test_shapes_that_the_ledger_cannot_keep_are_refused(scene: Scene) -> None:
    runs = [RegionRun(0, 70_000 * position, 60, 600, 0, 513) for position in range(1023)]
    group = GroupSpec(6, 1, "full", 0, SHARDS_MAX, 0, 1, 0, runs)
    client = Client(scene.rig, engine="wide")
    bounds = replace(scene.rig.bounds, slab_bytes=1 << 30, arena_bytes=1 << 40)
    scene.rig.core.bounds = bounds  # a large machine, without the tables for it
    for shard in range(SHARDS_MAX):
        request = client.registration(
            [change(group, shard=shard)], name=f"{shard}", namespace=bytes(32), buffer_bytes=1 << 40
        )
        reply = client.ask(request)
        if isinstance(reply, Error):
            break
    is_refusal(reply, "resource", "namespace-size", f"at most {SHAPES_BYTES_MAX} can be kept")
    assert 1 < shard < 30
    scene.still_serves()


def test_caches_are_bounded() -> None:
    scene = Scene(Rig(caches_max=2))
    scene.culprit.register()
    descriptors = [scene.culprit.offer()]
    scene.refuses(
        scene.culprit.registration(name="third", descriptors=descriptors), "resource", "caches", "2 caches", "at most 2"
    )
    scene.culprit.ask(Unregister(scene.rig.number(), scene.culprit.cache))
    scene.culprit.register(name="third", descriptors=descriptors)


def test_namespaces_are_bounded_and_one_that_is_used_never_goes() -> None:
    scene = Scene(Rig(namespaces_max=2))
    scene.culprit.register(namespace=bytes(32))
    descriptors = [scene.culprit.offer()]
    third = scene.culprit.registration(name="third", namespace=bytes(31) + b"3", descriptors=descriptors)
    scene.refuses(third, "resource", "namespaces", "2 namespaces are in use")
    scene.culprit.ask(Unregister(scene.rig.number(), scene.culprit.cache))
    assert isinstance(scene.culprit.ask(change(third, id=scene.rig.number())), Registered)
    scene.still_serves()


def test_a_cache_that_the_mover_refuses_leaves_no_trace(scene: Scene) -> None:
    scene.rig.movers_map = False
    culprit = scene.culprit
    before = scene.rig.facts()
    request = culprit.registration(namespace=bytes(32))
    assert culprit.ask(request) is None
    scene.refuses(Unregister(scene.rig.number(), 2), "request", "cache-not-mapped", "still being registered")
    scene.refuses(culprit.storing(scene.keys), "request", "cache-unknown")
    culprit.cache = 2
    scene.refuses(culprit.storing(scene.keys), "request", "cache-not-mapped", "cache 2 is mapping")
    scene.rig.report(1, MapFailed(2, "descriptor-size", "5003 bytes were expected, the file has 4096"))
    is_refusal(scene.rig.answers[(culprit.peer, request.id)], "request", "descriptor-size", "5003", "4096")
    assert scene.rig.facts() == before
    scene.rig.movers_map = True
    culprit.register(big(17), namespace=bytes(32))  # the first shape binds nobody
    scene.still_serves()


def test_a_client_that_dies_while_its_bad_cache_is_refused_leaves_no_trace(scene: Scene) -> None:
    before = scene.rig.facts()
    scene.rig.movers_map = False
    assert scene.culprit.ask(scene.culprit.registration(namespace=bytes(32))) is None
    scene.rig.peer_gone(scene.culprit.local)
    scene.rig.report(1, MapFailed(2, "descriptor-seal", "not a memory file"))
    assert scene.rig.facts() == {**before, "sessions": 1}
    assert scene.rig.kills == 0
    assert scene.rig.boards_dropped() == 1


def test_the_board_of_an_ended_session_goes_even_when_its_caches_went_before(scene: Scene) -> None:
    scene.culprit.register()
    assert isinstance(scene.culprit.ask(Unregister(scene.rig.number(), scene.culprit.cache)), Unregistered)
    assert scene.rig.boards_dropped() == 0
    scene.rig.peer_gone(scene.culprit.local)
    assert scene.rig.boards_dropped() == 1


def test_the_board_of_an_ended_session_goes_with_its_last_cache(scene: Scene) -> None:
    rig = scene.rig
    caches = [scene.culprit.register(name=name).cache for name in ("kv", "draft")]
    rig.movers_copy = False
    assert scene.keeper.ask(scene.keeper.storing(chain(9, 1), GroupBlocks(0, 0, ids(0, 1, 2)))) is None
    rig.peer_gone(scene.culprit.local)
    boards = []
    for cache in caches:
        boards.append(rig.boards_dropped())
        rig.report(1, Unmapped(cache))
    assert [*boards, rig.boards_dropped()] == [0, 0, 1]


def test_unregistering_and_watching_are_for_ones_own_caches(scene: Scene) -> None:
    culprit, number = scene.culprit, scene.rig.number
    for cache in (scene.keeper.cache, 77, 0, -1, HUGE):
        scene.refuses(Unregister(number(), cache), "request", "cache-unknown", f"has no cache {cache}")
        watch = Watch(number(), cache)
        scene.refused(
            lambda watch=watch: scene.rig.ask(culprit.local, watch), "request", "cache-unknown", f"has no cache {cache}"
        )
    scene.refused(
        lambda: scene.keeper.ask(Watch(number(), scene.keeper.cache)), "request", "watch", "attached connection"
    )


def test_unregistering_during_a_transfer_ends_the_transfer_first(scene: Scene) -> None:
    """It waits as long as the job's own deadline allows; the mover, which others use too, is not killed for it."""
    culprit, rig = scene.culprit.register(), scene.rig
    rig.movers_copy = False
    store = culprit.storing(chain(2, 1), GroupBlocks(0, 0, ids(0, 1, 2)))
    assert culprit.ask(store) is None
    unregister = Unregister(rig.number(), culprit.cache)
    assert culprit.ask(unregister) is None
    is_refusal(culprit.ask(Unregister(rig.number(), culprit.cache)), "request", "unregistered-twice")
    is_refusal(culprit.ask(change(store, id=rig.number())), "request", "cache-not-mapped", "is unmapping")
    rig.wait_ms(3 * rig.bounds.mover_grace_ms)
    assert rig.kills == 0
    assert rig.answers.get((culprit.peer, unregister.id)) is None
    rig.finish()
    assert rig.answers[(culprit.peer, store.id)] == Stored(store.id, 1, 1, 7, "")
    assert rig.answers[(culprit.peer, unregister.id)] == Unregistered(unregister.id)
    rig.movers_copy = True
    scene.still_serves()


def test_a_mover_that_keeps_a_dead_clients_cache_is_killed(scene: Scene) -> None:
    culprit, rig = scene.culprit.register(), scene.rig
    rig.movers_copy = False
    culprit.ask(culprit.storing(chain(2, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
    culprit.ask(Unregister(rig.number(), culprit.cache))
    rig.peer_gone(culprit.local)
    rig.wait_ms(2 * rig.bounds.mover_grace_ms)
    assert rig.kills == 1
    assert rig.facts()["stores"] == 0


def test_a_layout_has_so_many_buffers_at_most() -> None:
    buffers = [Buffer(1, b"", 9999)] * 257
    request = Register(1, "kv", NAMESPACE, 6, "host", "", "", "direct", "", buffers, [FULL], [], 0, "")
    with pytest.raises(RequestError, match=r"buffers=257 must be in \[1, 256\]"):
        Layout.parse(request)


def test_runs_with_extents_of_their_own_are_not_compared_region_by_region() -> None:
    """Comparing 65,536 regions one by one would keep the server busy for a quarter of a second."""
    runs = [RegionRun(0, number * 16, 16, 1, 65_536, 1) for number in range(4096)]
    group = change(FULL, blocks=1 << 20, regions=runs)
    request = Register(
        1, "kv", NAMESPACE, 6, "host", "", "", "direct", "", [Buffer(1, b"", 1 << 50)], [group], [], 0, ""
    )
    tracemalloc.start()
    assert len(Layout.parse(request).groups[0].pages) == 4096
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3_000_000


def test_regions_of_runs_that_reach_into_each_other_are_bounded_over_all_groups() -> None:
    runs = [RegionRun(0, number, 16, 128, 4096, 1) for number in range(128)]
    group = change(FULL, blocks=3, regions=runs)
    buffers = [Buffer(1, b"", 1 << 40)]
    request = Register(1, "kv", NAMESPACE, 6, "host", "", "", "direct", "", buffers, [group] * 2, [], 0, "")
    assert len(Layout.parse(request).groups) == 2
    more = change(request, groups=[group, group, change(group, regions=runs[:2])])
    with pytest.raises(RequestError, match=r"reach into each other=4128 must be in \[0, 4096\]"):
        Layout.parse(more)


def test_a_layout_is_checked_in_a_moment_however_many_regions_it_has() -> None:
    """The brain checks it on its only thread: 65,536 regions in all, not in each group."""
    runs = [RegionRun(0, 0, 65_536, 4, 400_000, 3)]
    groups = [change(FULL, regions=runs)] * 2
    buffers = [Buffer(1, b"", 1 << 40)]
    request = Register(1, "kv", NAMESPACE, 6, "host", "", "", "direct", "", buffers, groups, [], 0, "")
    with pytest.raises(RequestError, match=r"regions=131072 must be in \[1, 65536\]"):
        Layout.parse(request)
