"""Of a prefix that is on disk and cannot be read as a whole, what enters DRAM."""

import pytest
from brain_rig import ids, is_refusal, key
from disk_rig import CHUNKS, EXTENT_BYTES, DiskRig, cold_prompt

from kvserver.wire.messages import GroupBlocks, Retrieved


@pytest.mark.parametrize("last_first", [False, True], ids=["first read first", "last read first"])
@pytest.mark.parametrize("middle", range(CHUNKS))
def test_of_a_prefix_with_an_unreadable_chunk_only_what_is_before_it_enters_dram(middle: int, last_first: bool) -> None:
    """What was read behind it is of no use to anybody, and takes no room."""
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.disk_works = False
    found = client.lookup(keys)
    used_bytes = rig.service.status(rig.now_ns).arena.used_bytes
    request = client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))
    assert client.ask(request) is None
    assert [records[0].key for records in rig.read] == [key(keys, chunk) for chunk in range(CHUNKS)]
    if last_first:
        rig.moving.reverse()
    rig.finish_disk(unreadable=key(keys, middle))
    assert is_refusal(rig.answers[client.peer, request.id], "device", "disk-io")
    again = client.lookup(keys)
    assert (again.chunks, again.chunks_on_disk) == (middle, 0)
    status = rig.service.status(rig.now_ns)
    assert status.arena.used_bytes == used_bytes - (CHUNKS - middle) * EXTENT_BYTES
    assert status.counters["disk_lost"] == 1
    if middle:
        head = client.retrieving(again.lease, GroupBlocks(0, 0, ids(*range(3 * middle))))
        assert isinstance(client.ask(head), Retrieved)
