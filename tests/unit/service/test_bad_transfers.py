"""Wrong stores and retrieves: one typed error each, and no slot, pin or lease is lost."""

from typing import Any

import pytest

from kvserver.wire.messages import (
    BLOCKS_MAX,
    BOARD_WORDS,
    PLACES_MAX,
    Clear,
    Cleared,
    GroupBlocks,
    RegionRun,
    Retrieved,
    Stored,
)
from kvserver.wire.orders import Cancel
from tests.rigs.bad_scene import HUGE, Scene, change
from tests.rigs.brain_rig import FULL, NAMESPACE, STATE, WINDOW, Rig, chain, ids, is_refusal


@pytest.fixture
def scene() -> Scene:
    return Scene()


STORE_BLOCKS = GroupBlocks(0, 0, ids(*range(6)))

BAD_STORES: list[tuple[dict[str, Any], str, str]] = [
    ({"cache": 77}, "cache-unknown", "has no cache 77"),
    ({"cache": -1}, "cache-unknown", "has no cache -1"),
    ({"word": -1}, "word", f"word=-1 must be in [0, {BOARD_WORDS})"),
    ({"word": BOARD_WORDS}, "word", f"word={BOARD_WORDS} must be in [0, {BOARD_WORDS})"),
    ({"generation": -1}, "word", "generation in [0, 2^55)"),
    ({"generation": 1 << 55}, "word", "generation in [0, 2^55)"),
    ({"first_chunk": -1}, "parent", "first_chunk=-1 with a parent of 0 bytes"),
    ({"first_chunk": 1}, "parent", "first_chunk=1 with a parent of 0 bytes; expected 32 bytes"),
    ({"parent": bytes(32)}, "parent", "first_chunk=0 with a parent of 32 bytes"),
    ({"first_chunk": 1, "parent": bytes(31)}, "parent", "parent of 31 bytes"),
    ({"groups": []}, "block-ids", "no group brings any blocks"),
    ({"groups": [GroupBlocks(1, 0, ids(0))]}, "group", "group 1 must be in [0, 1) and stand once"),
    ({"groups": [GroupBlocks(-1, 0, ids(0))]}, "group", "group -1 must be in [0, 1)"),
    ({"groups": [STORE_BLOCKS, STORE_BLOCKS]}, "group", "stand once"),
    ({"groups": [GroupBlocks(0, 0, b"")]}, "block-ids", "0 bytes of block ids"),
    ({"groups": [GroupBlocks(0, 0, ids(0, 1) + b"\0\0")]}, "block-ids", "10 bytes of block ids"),
    ({"groups": [GroupBlocks(0, 0, bytes(4 * (BLOCKS_MAX + 1)))]}, "block-ids", f"expected 1 to {BLOCKS_MAX} ids"),
    ({"groups": [GroupBlocks(0, -3, ids(*range(6)))]}, "block-range", "first_block=-3 must be in"),
    ({"groups": [GroupBlocks(0, HUGE, ids(*range(6)))]}, "block-range", f"first_block={HUGE} must be in"),
    ({"groups": [GroupBlocks(0, 1, ids(*range(6)))]}, "block-range", "blocks [1, 7) must be whole chunks of 3 blocks"),
    ({"groups": [GroupBlocks(0, 0, ids(*range(5)))]}, "block-range", "blocks [0, 5) must be whole chunks of 3 blocks"),
    ({"groups": [GroupBlocks(0, 0, ids(*range(9)))]}, "block-range", "inside chunks [0, 2)"),
    ({"groups": [GroupBlocks(0, 3, ids(*range(6)))]}, "block-range", "inside chunks [0, 2)"),
    (
        {"groups": [GroupBlocks(0, 0, ids(*range(3)))]},
        "block-range",
        "full group 0 must bring the blocks of all chunks",
    ),
]


@pytest.mark.parametrize(("changes", "code", "says"), BAD_STORES)
def test_a_bad_store_is_refused(scene: Scene, changes: dict[str, Any], code: str, says: str) -> None:
    culprit = scene.culprit.register()
    good = culprit.storing(chain(7, 2), STORE_BLOCKS)
    scene.refuses(change(good, **changes), "request", code, says)
    assert culprit.ask(change(good, id=scene.rig.number())).chunks == 2


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"cache": 77}, "cache-unknown", "has no cache 77"),
        ({"word": BOARD_WORDS}, "word", f"word={BOARD_WORDS}"),
        ({"generation": -1}, "word", "generation in [0, 2^55)"),
        ({"groups": []}, "block-ids", "no group brings any blocks"),
        ({"groups": [GroupBlocks(1, 0, ids(0))]}, "group", "group 1 must be in [0, 1)"),
        ({"groups": [GroupBlocks(0, 0, ids(0)[:3])]}, "block-ids", "3 bytes of block ids"),
        ({"groups": [GroupBlocks(0, -1, ids(0))]}, "block-range", "first_block=-1 must be in"),
        (
            {"groups": [GroupBlocks(0, 9, ids(0))]},
            "beyond-lease",
            "blocks up to 10 reach chunk 3; the lease is on 3 chunks",
        ),
        ({"groups": [GroupBlocks(0, 8, ids(0, 1))]}, "beyond-lease", "the lease is on 3 chunks"),
        ({"groups": [GroupBlocks(0, (1 << 40) - 1, ids(0))]}, "beyond-lease", "the lease is on 3 chunks"),
    ],
)
def test_a_bad_retrieve_is_refused_and_the_lease_stays(
    scene: Scene, changes: dict[str, Any], code: str, says: str
) -> None:
    culprit = scene.culprit.register()
    good = culprit.retrieving(culprit.lookup(scene.keys).lease, GroupBlocks(0, 0, ids(*range(9))))
    scene.refuses(change(good, **changes), "request", code, says)
    assert isinstance(culprit.ask(change(good, id=scene.rig.number())), Retrieved)


def test_a_lease_is_on_one_namespace(scene: Scene) -> None:
    culprit = scene.culprit.register(namespace=bytes(32))
    lease = culprit.lookup(scene.keys).lease
    scene.refuses(
        culprit.retrieving(lease, GroupBlocks(0, 0, ids(0))),
        "request",
        "lease-namespace",
        f"on {NAMESPACE[:6].hex()}, the cache on {bytes(6).hex()}",
    )


def test_a_window_chunk_that_is_not_held_cannot_be_retrieved(scene: Scene) -> None:
    namespace, keys = bytes(32), chain(8, 4)
    culprit = scene.culprit.register([FULL, WINDOW, STATE], namespace=namespace)
    groups = [GroupBlocks(0, 0, ids(*range(12 - 1), 11)), GroupBlocks(1, 4, ids(0, 1, 2, 3)), GroupBlocks(2, 3, ids(4))]
    assert culprit.ask(culprit.storing(keys, *groups)).chunks == 4
    found = culprit.lookup(keys, namespace)
    assert found.chunks == 4
    for group, first_block in ((1, 3), (1, 0), (2, 2)):
        reply = culprit.ask(culprit.retrieving(found.lease, GroupBlocks(group, first_block, ids(0))))
        is_refusal(reply, "request", "not-held", f"group {group} holds nothing of chunk")
    good = culprit.retrieving(found.lease, GroupBlocks(1, 4, ids(0, 1)), GroupBlocks(2, 3, ids(0)))
    assert isinstance(culprit.ask(good), Retrieved)
    scene.still_serves()


def test_a_request_that_no_order_could_carry_is_refused(scene: Scene) -> None:
    """Sixteen groups of one block per chunk would make an order of 786 KB; movers read 400 KB."""
    groups = [change(STATE, kind="full", blocks=9, regions=[RegionRun(0, 10 * at, 1, 0, 1, 1)]) for at in range(16)]
    culprit = scene.culprit.register(groups, namespace=bytes(32))
    chunks = PLACES_MAX // 3 // len(groups) + 1
    request = culprit.storing(chain(9, chunks), *[GroupBlocks(at, 0, bytes(4 * chunks)) for at in range(16)])
    scene.refuses(
        request, "request", "too-large", f"{16 * chunks} block ids", f"{16 * chunks} chunks", f"exceed {PLACES_MAX}"
    )


def test_jobs_of_one_session_are_bounded_and_others_are_not_held_up() -> None:
    scene = Scene(Rig(jobs_max=2))
    culprit = scene.culprit.register()
    scene.rig.movers_copy = False
    for seed in (20, 21):
        assert culprit.ask(culprit.storing(chain(seed, 1), GroupBlocks(0, 0, ids(0, 1, 2)))) is None
    before = scene.rig.facts()
    lease = culprit.lookup(scene.keys)
    for request in (
        culprit.storing(chain(22, 1), GroupBlocks(0, 0, ids(0, 1, 2))),
        culprit.retrieving(lease.lease, GroupBlocks(0, 0, ids(0))),
    ):
        is_refusal(culprit.ask(request), "resource", "jobs", "2 jobs are in flight, at most 2 may be")
    culprit.release(lease)
    assert scene.rig.facts() == before
    scene.keeper.ask(scene.keeper.storing(chain(23, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
    scene.rig.finish()
    scene.rig.movers_copy = True
    scene.still_serves()


@pytest.mark.parametrize(("status", "family"), [("invalid", "request"), ("failed", "device")])
def test_a_store_that_the_mover_refuses_stores_nothing(scene: Scene, status: str, family: str) -> None:
    culprit = scene.culprit.register()
    scene.rig.movers_copy = False
    before = scene.rig.facts()
    store = culprit.storing(chain(10, 2), GroupBlocks(0, 0, ids(0, 1, 2, 3, 4, 11)))
    assert culprit.ask(store) is None
    scene.rig.finish(status, "block-range", "group 0: block id 11 must be in [0, 11)")
    is_refusal(scene.rig.answers[(culprit.peer, store.id)], family, "block-range", "11 must be in [0, 11)")
    assert scene.rig.facts() == before
    scene.rig.movers_copy = True
    scene.still_serves()


def test_a_namespace_that_is_cleared_takes_only_its_own(scene: Scene) -> None:
    scene.culprit.register(namespace=bytes(32))
    assert scene.culprit.ask(Clear(7, bytes(32))) == Cleared(7, 0)
    assert scene.culprit.ask(Clear(8, b"\xff" * 32)) == Cleared(8, 0)
    scene.still_serves()


@pytest.mark.parametrize("deadline_ms", [-(1 << 63), -1, 0, HUGE])
def test_a_deadline_that_makes_no_sense_is_bounded(scene: Scene, deadline_ms: int) -> None:
    """Past: the job is cancelled at the next tick. Far away: at job_ttl_ms. Neither waits for ever."""
    culprit, rig = scene.culprit.register(), scene.rig
    rig.movers_copy = False
    store = change(culprit.storing(chain(30, 1), GroupBlocks(0, 0, ids(0, 1, 2))), deadline_ms=deadline_ms)
    assert culprit.ask(store) is None
    (_, order), *_ = rig.copies
    rig.wait_ms(rig.bounds.job_ttl_ms - 1 if deadline_ms > 0 else 0)
    assert Cancel(order.job) not in rig.orders
    rig.wait_ms(51)
    assert Cancel(order.job) in rig.orders
    rig.finish("abandoned")
    assert rig.answers[(culprit.peer, store.id)] == Stored(store.id, 0, 0, 0, "abandoned")
    rig.movers_copy = True
    scene.still_serves()
