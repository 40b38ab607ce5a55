"""Room on a device by itself: segments that change their size, and what goes for them."""

import pytest

from kvserver.index.space import READY, Node, Space
from kvserver.service.holdings.accounts import Accounts, ChargedPool, Quota
from kvserver.service.holdings.disk_eviction import SEGMENTS_LOOKED_AT, DiskRoom, Wanted
from kvserver.service.holdings.place_owners import DiskJob, ExtentOwner
from kvserver.tiers.extents import Extents, extents_per_segment, place_of
from kvserver.transfer.layout import Geometry, GroupGeometry
from kvserver.wire.tenants import tag_of

SEGMENT_BYTES = 5 * 4096
SEGMENTS = 7
SMALL, LARGE, LARGEST = 4096, 8192, 16384
SMALL_A_SEGMENT = extents_per_segment(SEGMENT_BYTES, SMALL)


def extents_of(segments: int = SEGMENTS, devices: int = 1) -> Extents[ExtentOwner]:
    return Extents(devices=devices, device_bytes=segments * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)


def drop(space: Space, node: Node) -> None:
    raise AssertionError("nothing goes")


def half_filled(*quotas: Quota) -> DiskRoom:
    """A device whose segments all serve small extents, every other of which is free; nothing may be evicted."""
    extents = extents_of()
    taken = [extents.allocate(0, SMALL, owner()) for _ in range(SEGMENTS * SMALL_A_SEGMENT)]
    for extent in taken[::2]:
        assert extent is not None
        extents.free(extent)
    return DiskRoom(extents, drop, Accounts(quotas, "disk") if quotas else None)


def owner() -> Node:
    root = Node(b"", None, 0, 0)
    return Node(b"k" * 32, root, 1, 0)


def wanted(room: DiskRoom, extent_bytes: int) -> Wanted:
    return room.wanted(0, extent_bytes, 1, tag_of("agents"))


@pytest.mark.parametrize("quotas", [(), (Quota("agents", disk_guaranteed_bytes=5 * LARGE),)])
def test_a_write_is_refused_once_every_segment_was_tried_in_vain(quotas: tuple[Quota, ...]) -> None:
    """It would wait for ever otherwise. The next write tries the segments again."""
    room = half_filled(*quotas)
    for _ in range(2):
        tried = []
        while room.take(wanted(room, LARGE), owner()) is None and room.emptying and len(tried) <= SEGMENTS:
            tried.append(room.emptying[0].segment)
            room.stop_emptying(0, in_vain=True)
        assert sorted(tried) == list(range(SEGMENTS))


def test_an_emptied_segment_serves_more_than_the_first_extent_of_its_new_size() -> None:
    room = half_filled()
    pool = room.extents.pools[0]
    assert room.take(wanted(room, LARGE), owner()) is None
    segment = room.emptying[0].segment
    assert room.empties_for(0, LARGE)
    assert not room.empties_for(0, SMALL)
    for extent, _, _ in list(room.extents.taken()):
        if place_of(extent).offset // SEGMENT_BYTES == segment:
            room.extents.free(extent)
    got = [room.take(wanted(room, LARGE), owner()) for _ in range(extents_per_segment(SEGMENT_BYTES, LARGE))]
    assert None not in got
    assert pool.slab_slot_bytes(segment) == LARGE


def test_small_extents_wait_for_no_segment_that_has_become_theirs() -> None:
    """A segment was emptied for small extents, and taken. The rest of it is free to all of that size."""
    extents = extents_of()
    large = [extents.allocate(0, LARGE, owner()) for _ in range(SEGMENTS * extents_per_segment(SEGMENT_BYTES, LARGE))]
    room = DiskRoom(extents, drop)
    for extent in large[1::2]:
        assert extent is not None
        extents.free(extent)
    assert room.take(wanted(room, SMALL), owner()) is None
    segment = room.emptying[0].segment
    for extent, _, _ in list(extents.taken()):
        if place_of(extent).offset // SEGMENT_BYTES == segment:
            extents.free(extent)
    assert None not in [room.take(wanted(room, SMALL), owner()) for _ in range(SMALL_A_SEGMENT)]


def test_beside_a_segment_that_is_emptied_nothing_goes_while_another_one_is_empty() -> None:
    extents = extents_of(3)
    small = [extents.allocate(0, SMALL, owner()) for _ in range(3 * SMALL_A_SEGMENT)]
    room = DiskRoom(extents, drop)
    for extent in small[1 : SMALL_A_SEGMENT + 1]:
        assert extent is not None
        extents.free(extent)
    assert room.take(wanted(room, LARGE), owner()) is None, "its first segment is emptied"
    for extent in small[SMALL_A_SEGMENT + 1 : 2 * SMALL_A_SEGMENT]:
        assert extent is not None
        extents.free(extent)
    got = [room.take(wanted(room, SMALL), owner()) for _ in range(SMALL_A_SEGMENT - 1)]
    assert None not in got
    assert room.emptying, "the last place of its size is that of the record which moves"


def space_in(room: DiskRoom) -> Space:
    space = Space(b"n" * 32, 0, Geometry(6, (GroupGeometry(2, "full", 0, 1),)))
    space.fix_part(0, ((1, 4000),), 4000, SMALL)
    room.add_space(space)
    return space


def on_disk(room: DiskRoom, space: Space, parent: Node, used: int, *, device: int = 0, size: int = SMALL) -> Node:
    node = space.add(bytes([used]) * 32, parent, used=used, tenant=0)
    extent = room.extents.allocate(device, size, node)
    assert extent is not None
    node.state, node.present = READY, 1
    space.put_on_disk(node, 1, (extent,), used)
    return node


def chain_on_disk(room: DiskRoom, chunks: int) -> tuple[Space, list[Node]]:
    space = space_in(room)
    nodes = [space.root]
    for number in range(chunks):
        nodes.append(on_disk(room, space, nodes[-1], used=number))
    return space, nodes[1:]


def test_a_leaf_that_is_not_the_coldest_of_its_device_goes_for_room_on_another() -> None:
    """The head of its chain has the room, in none of the emptiest segments; a third device holds nothing."""
    room = DiskRoom(extents_of(SEGMENTS_LOOKED_AT + 1, devices=3), drop)
    for _ in range(SEGMENTS_LOOKED_AT * SMALL_A_SEGMENT):
        room.extents.allocate(0, SMALL, owner())
    space = space_in(room)
    head = on_disk(room, space, space.root, used=1, size=LARGEST)
    coldest, tail = (on_disk(room, space, parent, used, device=2) for parent, used in ((space.root, 2), (head, 3)))
    room.offer(space, tail)
    wants = Wanted(device=0, extent_bytes=LARGEST, used=4)
    assert room.has(wants)
    room.offer(space, coldest)
    assert room.has(wants)
    assert not room.has(wants._replace(used=3)), "the tail of the chain is as warm"


def test_a_segment_is_not_emptied_of_what_a_large_tree_hangs_on() -> None:
    """All descendants would be lost with it, in one event."""
    room = DiskRoom(extents_of(), drop)
    _, (head, *_) = chain_on_disk(room, 5)
    wants = Wanted(device=0, extent_bytes=LARGE, used=5)
    assert len(room.closure([head], wants, chunks_max=5) or ()) == 5
    assert room.closure([head], wants, chunks_max=4) is None
    assert room.closure([head], wants._replace(used=4), chunks_max=5) is None, "the last of them is as warm"


def test_a_chunk_goes_with_all_below_it_or_not_at_all() -> None:
    gone: list[bytes] = []
    room = DiskRoom(extents_of(), lambda space, node: gone.append(node.key))
    _, (head, *_) = chain_on_disk(room, 5)
    wants = Wanted(device=0, extent_bytes=LARGE, used=5)
    assert room.drop_with_all_below(head, wants, 5 * SMALL - 1) == 0
    assert room.drop_with_all_below(head, wants._replace(used=4), 5 * SMALL) == 0
    assert not gone


def test_a_tenant_is_charged_once_for_a_record_that_moves() -> None:
    accounts = Accounts([Quota("agents", disk_max_bytes=3 * SMALL)], "disk")
    account, tenant = accounts.of(tag_of("agents")), tag_of("agents")
    pool: ChargedPool[ExtentOwner] = ChargedPool(SEGMENTS * SEGMENT_BYTES, SEGMENT_BYTES, accounts=accounts)
    pool.grow(SEGMENTS)
    space, node = Space(b"n" * 32, 0, Geometry(6, ())), Node(b"k" * 32, Node(b"", None, 0, 0), 1, tenant)
    old = [pool.allocate(SMALL, node) for _ in range(3)]
    job = DiskJob(
        number=1, kind="write", space=space, node=node, device=0, groups=1, generation=2, began_ns=0, moves=True
    )
    new = [pool.allocate(SMALL, job) for _ in range(3)]
    assert not account.lacks(0)
    for before, after in zip(old, new, strict=True):
        assert before is not None
        assert after is not None
        pool.free(before)
        pool.hand_over(after, node)
    assert (account.held_bytes, account.reserved_bytes) == (3 * SMALL, 0)
