"""The chunks that another brain finds on disk, and the cleared ones that it must not find."""

from dataclasses import replace

import msgspec
import pytest

from kvserver.service.base.events import ArenaGrew, MoverGone
from kvserver.service.state import clear_notes
from kvserver.wire.messages import (
    KEY_BYTES,
    Await,
    Clear,
    Cleared,
    Drain,
    Error,
    GroupBlocks,
    GroupSpec,
    Pledge,
    RegionRun,
    Retrieved,
    Unregister,
    Unregistered,
)
from kvserver.wire.orders import Note
from tests.rigs.admin_rig import clear_prefix
from tests.rigs.brain_rig import (
    CHUNK_TOKENS,
    FULL,
    NAMESPACE,
    PAGE_BYTES,
    SLAB_BYTES,
    WINDOW,
    Client,
    chain,
    ids,
    is_refusal,
    key,
)
from tests.rigs.disk_quota_rig import WIDE, client_of, quota, rig_with, stored, tier_of
from tests.rigs.disk_rig import CHUNKS, EXTENT_BYTES, SEGMENT_BYTES, DiskRig, cold_prompt, fill, restart


def test_another_brain_finds_what_is_on_disk() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.service = rig.new_service()
    rig.copies.clear()
    rig.wait_ms(100)
    client = Client(rig).register()
    found = client.lookup(keys)
    assert (found.chunks, found.chunks_on_disk) == (CHUNKS, CHUNKS)
    assert rig.service.counters.disk_recovered > CHUNKS


def begin_anew(rig: DiskRig) -> None:
    """Starts another brain, which does not know yet what is on disk."""
    rig.service = rig.new_service()
    rig.copies.clear()
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, ""))


def test_a_pledged_chunk_that_is_found_on_disk_has_come() -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    begin_anew(rig)
    producer = Client(rig, engine="producer", epoch=11).register()
    other = Client(rig, engine="other", epoch=12).register()
    assert producer.ask(Pledge(rig.number(), NAMESPACE, keys, 60_000)).chunks == CHUNKS
    found = other.ask(Await(rig.number(), NAMESPACE, keys, 1))
    assert (found.chunks, found.awaited) == (0, CHUNKS)
    wait = other.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))
    assert other.ask(wait) is None
    rig.wait_ms(100)
    assert isinstance(rig.answers[other.peer, wait.id], Retrieved)
    assert rig.core.counters.pledges_ended["stored"] == 1
    assert rig.core.chunks.pins == 0
    assert other.lookup(keys).chunks == CHUNKS


def test_ranks_that_come_after_the_disk_was_read_find_what_all_stored() -> None:
    halves = [msgspec.structs.replace(FULL, shards=2, shard=shard) for shard in (0, 1)]
    rig = DiskRig()
    keys = chain(1, CHUNKS)
    ranks = [Client(rig, ranks=2, rank=rank).register([half]) for rank, half in enumerate(halves)]
    for rank in ranks:
        rank.ask(rank.storing(keys, GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))))
    assert rig.written
    begin_anew(rig)
    first = Client(rig, ranks=2, rank=0).register(halves[:1])
    rig.wait_ms(100)
    found = first.lookup(keys)
    assert (found.chunks, found.chunks_on_disk) == (CHUNKS, CHUNKS)
    Client(rig, ranks=2, rank=1).register(halves[1:])


ONE_REGION = [RegionRun(0, 13, 1, 0, 2 * 130, 2 * PAGE_BYTES)]
"""A layout with as many bytes per chunk as FULL, in one region instead of two."""


@pytest.mark.parametrize(
    ("group", "chunk_tokens"),
    [
        (msgspec.structs.replace(FULL, block_tokens=4), 12),
        (msgspec.structs.replace(FULL, regions=ONE_REGION), CHUNK_TOKENS),
    ],
    ids=["chunk size", "pages"],
)
@pytest.mark.parametrize("lives", [1, 2])
def test_records_of_another_geometry_are_void_however_early_the_engine_comes(
    group: GroupSpec, chunk_tokens: int, lives: int
) -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    for _ in range(lives):
        begin_anew(rig)
        client = Client(rig).register([group], chunk_tokens=chunk_tokens)
        rig.wait_ms(100)
        assert rig.service.status(rig.now_ns).disk_state == "ready"
        assert client.lookup(keys).chunks == 0
    assert rig.service.counters.disk_recovered == 0
    client.store(keys)
    assert client.lookup(keys).chunks == CHUNKS


def test_cleared_chunks_do_not_come_back_from_disk() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    assert isinstance(client.ask(Clear(rig.number(), rig.notes[0].namespace)), Cleared)
    rig.service = rig.new_service()
    rig.wait_ms(100)
    assert Client(rig).register().lookup(keys).chunks == 0


def test_chunks_cleared_while_a_device_was_away_do_not_come_back_with_it() -> None:
    rig = DiskRig(disk_devices=2)
    client, keys = cold_prompt(rig)
    namespace = rig.notes[0].namespace
    for at in [at for at in rig.devices if at[0] == 1]:  # as if the newest records lay there
        rig.devices[at] = rig.devices[at]._replace(generation=rig.devices[at].generation + 1000)
    rig.unopened = {1}
    restart(rig)
    assert isinstance(client.ask(Clear(rig.number(), namespace)), Error), "it has another session"
    client = Client(rig).register()
    assert isinstance(client.ask(Clear(rig.number(), namespace)), Cleared)
    rig.unopened = set()
    restart(rig)
    assert Client(rig).register().lookup(keys).chunks == 0
    assert rig.service.counters.disk_recovered == 0


def test_a_device_that_does_not_know_a_namespace_does_not_hide_it() -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    rig.notes.append(Note(rig.notes[0].namespace, b"", 0))
    restart(rig)
    assert Client(rig).register().lookup(keys).chunks == CHUNKS


def test_the_newer_of_two_records_of_a_chunk_counts() -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    newest = {record.key: record for record in rig.devices.values()}[key(keys, 2)]
    older = newest._replace(generation=newest.generation - 1, offset=150 * SEGMENT_BYTES)
    rig.devices = {(0, older.offset): older, **rig.devices}
    restart(rig)
    client = Client(rig).register()
    rig.handle(ArenaGrew(4, ""))
    client.lookup(keys)
    read = [record for records in rig.read for record in records if record.key == newest.key]
    assert [record.generation for record in read] == [newest.generation]
    chunks = {record.key for record in rig.devices.values()}
    assert rig.service.counters.disk_recovered == len(chunks)


def moved_in_part(rig: DiskRig) -> tuple[Client, bytes]:
    """A chunk of two groups that was being written to another place, where only its full group arrived."""
    client, keys = Client(rig).register((FULL, WINDOW)), chain(1, 1)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(0, 1))))
    assert {record.group for record in rig.devices.values()} == {0, 1}
    (full,) = (record for record in rig.devices.values() if not record.group)
    newer = full._replace(generation=full.generation + 1, offset=150 * SEGMENT_BYTES)
    rig.devices[0, newer.offset] = newer
    return client, keys


def test_a_chunk_whose_extents_clash_with_others_takes_none() -> None:
    """A record says that one of the two lies in a segment whose extents have another size."""
    rig = DiskRig()
    client, keys = Client(rig).register((FULL, WIDE), buffer_bytes=20_000), chain(1, 2)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(6))), GroupBlocks(1, 0, ids(*range(6)))))
    records = {(record.key, record.group): record for record in rig.devices.values()}
    assert len(records) == 4
    narrow, wide = records[key(keys, 1), 0], records[key(keys, 1), 1]
    del rig.devices[0, wide.offset]
    moved = wide._replace(offset=narrow.offset // SEGMENT_BYTES * SEGMENT_BYTES + 3 * EXTENT_BYTES)
    rig.devices[0, moved.offset] = moved
    restart(rig)
    assert rig.service.counters.disk_recovered == 1
    (device,) = rig.service.status(rig.now_ns).disks
    assert device.used_bytes == 3 * EXTENT_BYTES
    assert Client(rig).lookup(keys).chunks == 1


def test_a_move_that_ended_half_way_does_not_hide_the_chunk_that_is_whole() -> None:
    rig = DiskRig()
    _, keys = moved_in_part(rig)
    restart(rig)
    client = Client(rig).register((FULL, WINDOW))
    assert client.lookup(keys).chunks == 1
    assert (rig.service.counters.disk_recovered, rig.service.counters.disk_lost) == (1, 0)


def test_a_chunk_that_is_whole_and_void_does_not_hide_what_was_written_since() -> None:
    rig = DiskRig()
    client, keys = moved_in_part(rig)
    (newest,) = (at for at in rig.devices.values() if at.offset == 150 * SEGMENT_BYTES)
    assert clear_prefix(rig, keys) == Cleared(1, 1)
    rig.devices[0, newest.offset] = newest._replace(generation=rig.notes[-1].void + 1)
    restart(rig)
    client = Client(rig).register((FULL, WINDOW))
    assert rig.service.counters.disk_recovered == 1
    assert client.lookup(keys).chunks == 0, "its window group is void"


def test_damaged_records_are_counted() -> None:
    rig = DiskRig()
    rig.damaged = 3
    restart(rig)
    assert rig.service.counters.disk_damaged == 3


def test_nothing_is_written_before_its_generation_is_noted() -> None:
    rig = DiskRig()
    rig.notes_answered = False
    restart(rig)
    rig.handle(ArenaGrew(4, ""))
    cold_prompt(rig)
    assert rig.written == []
    rig.answer_notes()
    fill(Client(rig).register(), first=3000, prompts=1)
    assert rig.written
    assert max(record.generation for records in rig.written for record in records) <= rig.generations


def test_a_clear_is_newer_than_whatever_an_earlier_brain_may_have_written() -> None:
    rig = DiskRig()
    cold_prompt(rig)
    noted = rig.generations
    assert noted > max(record.generation for record in rig.devices.values())
    restart(rig)
    client = Client(rig).register()
    assert isinstance(client.ask(Clear(rig.number(), rig.notes[0].namespace)), Cleared)
    assert rig.notes[-1].void > noted


def test_a_clear_that_no_disk_could_note_says_so() -> None:
    """The clear is done in memory: no chunk of it is served."""
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.notes_kept = False
    answer = client.ask(Clear(rig.number(), rig.notes[0].namespace))
    assert isinstance(answer, Error)
    assert (answer.code, answer.family) == ("disk-clear", "device")
    assert client.lookup(keys).chunks == 0
    rig.notes_kept = True
    assert isinstance(client.ask(Clear(rig.number(), rig.notes[0].namespace)), Cleared)


def test_a_clear_that_no_disk_could_note_is_told_again_until_one_can() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    namespace = rig.notes[0].namespace
    rig.notes_kept, rig.problem = False, "its notes cannot be written: No space left on device"
    rig.tell_devices()
    answer = client.ask(Clear(rig.number(), namespace))
    assert is_refusal(
        answer, "device", "disk-clear", "not durable yet on 0 (its notes cannot be written: No space left"
    )
    assert rig.service.status(rig.now_ns).warnings[0].startswith("1 clears are not durable yet")
    told = len(rig.notes)
    rig.tell_devices()
    rig.wait_ms(100)
    assert len(rig.notes) == told, "it is not well yet"
    rig.notes_kept, rig.problem = True, ""
    rig.tell_devices()
    assert [(note.namespace, note.void) for note in rig.notes[told:]] == [(namespace, rig.notes[told - 1].void)]
    assert rig.service.status(rig.now_ns).warnings == []
    rig.tell_devices()
    assert len(rig.notes) == told + 1
    restart(rig)
    assert Client(rig).register().lookup(keys).chunks == 0


def test_a_clear_that_no_disk_could_note_is_durable_once_all_devices_are_drained() -> None:
    rig = DiskRig()
    client, _ = cold_prompt(rig)
    rig.notes_kept = False
    assert is_refusal(client.ask(Clear(rig.number(), rig.notes[0].namespace)), "device", "disk-clear")
    assert rig.service.status(rig.now_ns).warnings[0].startswith("1 clears are not durable yet")
    client.ask(Drain(rig.number(), 0))
    rig.wait_ms(3_000)
    assert rig.service.status(rig.now_ns).disks[0].drain == "drained"
    assert not [text for text in rig.service.status(rig.now_ns).warnings if "durable" in text]


def test_clears_that_no_disk_could_note_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clear_notes, "CLEARS_MAX", 2)
    rig = DiskRig()
    client, warm = Client(rig).register(namespace=b"w" * 32), chain(77, CHUNKS)
    spare = [Client(rig).register(namespace=name * 32) for name in (b"a", b"b")]
    for engine in (client, *spare):
        engine.store(warm)
    rig.notes_kept = False
    for name in (b"a", b"b"):
        assert is_refusal(client.ask(Clear(rig.number(), name * 32)), "device", "disk-clear")
    assert is_refusal(client.ask(Clear(rig.number(), b"w" * 32)), "resource", "clears")
    assert client.lookup(warm, b"w" * 32).chunks == CHUNKS, "nothing was cleared"


def test_the_later_void_of_two_notes_of_a_namespace_counts() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    (first, *_) = rig.notes
    assert isinstance(client.ask(Clear(rig.number(), first.namespace)), Cleared)
    rig.notes.append(first)  # an older one comes last
    restart(rig)
    assert Client(rig).register().lookup(keys).chunks == 0


def test_clears_that_wait_for_the_disks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an order to a mover that may not read it."""
    monkeypatch.setattr(clear_notes, "CLEARS_MAX", 2)
    rig = DiskRig(disk_restart_ms=5_000)
    client, keys = cold_prompt(rig)
    (mover,) = (mover.mover for mover in rig.service.status(rig.now_ns).movers if mover.device == "disk")
    rig.handle(MoverGone(mover, "signal 9"))
    warm = chain(77, CHUNKS)
    waiting = []
    for _ in range(2):
        waiting.append(Clear(rig.number(), rig.notes[0].namespace))
        assert client.ask(waiting[-1]) is None
        client.store(warm)
    assert is_refusal(client.ask(Clear(rig.number(), rig.notes[0].namespace)), "resource", "clears")
    assert client.lookup(warm).chunks == CHUNKS, "nothing was cleared"
    rig.wait_ms(6_000)
    assert all(isinstance(rig.answers[client.peer, request.id], Cleared) for request in waiting)
    assert isinstance(client.ask(Clear(rig.number(), rig.notes[0].namespace)), Cleared)
    assert client.lookup(keys).chunks == 0


def test_a_namespace_that_was_cleared_does_not_take_the_place_of_one_with_chunks() -> None:
    rig = DiskRig(namespaces_max=1)
    old = Client(rig).register(namespace=b"o" * 32)
    old.store(chain(7, CHUNKS))
    assert isinstance(old.ask(Unregister(rig.number(), old.cache)), Unregistered)
    _, keys = cold_prompt(rig)
    assert rig.notes[0].namespace == b"o" * 32
    rig.service = rig.new_service()
    rig.copies.clear()
    rig.wait_ms(100)
    assert Client(rig).register().lookup(keys).chunks == CHUNKS


@pytest.mark.parametrize(("name", "newcomer", "chunks"), [("x", "", 3), ("z", "", 3), ("y", "", 0), ("x", "n", 3)])
def test_the_namespaces_on_disk_written_last_get_the_places(name: str, newcomer: str, chunks: int) -> None:
    rig, keys = DiskRig(namespaces_max=3), chain(1, CHUNKS)
    for which in "yzx":
        Client(rig).register(namespace=which.encode() * 32).store(keys)
    rig.bounds = replace(rig.bounds, namespaces_max=2)
    rig.service = rig.new_service()
    rig.copies.clear()
    rig.wait_ms(100)
    if newcomer:
        Client(rig).register(namespace=newcomer.encode() * 32)
    namespace = name.encode() * 32
    assert Client(rig).register(namespace=namespace).lookup(keys, namespace).chunks == chunks


def test_a_clear_before_everything_is_known_counts_for_what_is_found_later() -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    namespace = rig.notes[0].namespace
    rig.service = rig.new_service()
    client = Client(rig)
    request = Clear(rig.number(), namespace)
    assert client.ask(request) is None
    rig.wait_ms(100)
    assert isinstance(rig.answers[client.peer, request.id], Cleared)
    assert client.register().lookup(keys).chunks == 0


# ---------------------------------------------------------------- lookups meanwhile


def test_a_lookup_says_so_while_nobody_knows_what_is_on_disk() -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    begin_anew(rig)
    assert Client(rig).lookup(keys, b"?" * 32).why == "recovering", "a namespace that nobody has registered yet"
    client = Client(rig).register()
    found = client.lookup(keys)
    assert (found.chunks, found.lease, found.why) == (0, 0, "recovering")
    client.store(keys[: 2 * KEY_BYTES])
    found = client.lookup(keys)
    assert (found.chunks, found.why) == (2, "recovering")
    assert found.lease
    assert client.lookup(keys[: 2 * KEY_BYTES]).why == "", "all that was asked is held"
    rig.wait_ms(100)
    found = client.lookup(keys)
    assert (found.chunks, found.why) == (CHUNKS, "")
    assert client.lookup(chain(2, CHUNKS)).why == ""
    assert rig.service.counters.lookup_ends["recovering"] == 3


def test_once_it_is_known_which_namespaces_are_on_disk_only_those_may_hold_more() -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    begin_anew(rig)
    rig.tells = False
    rig.wait_ms(100)
    client = Client(rig).register()
    assert client.lookup(keys).why == "recovering"
    other = Client(rig).register(namespace=b"o" * 32)
    assert other.lookup(keys, b"o" * 32).why == ""
    assert other.lookup(keys, b"?" * 32).why == ""


@pytest.mark.parametrize("is_listed", [False, True])
def test_cleared_chunks_are_no_reason_to_wait_for_the_disks(is_listed: bool) -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    namespace = rig.notes[0].namespace
    begin_anew(rig)
    rig.tells = False
    if is_listed:
        rig.wait_ms(100)
    client = Client(rig).register()
    assert client.lookup(keys).why == "recovering"
    client.ask(Clear(rig.number(), namespace))
    assert client.lookup(keys).why == ""


def test_records_a_dead_mover_reported_are_not_served_until_the_next_one_has_reported_all() -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    begin_anew(rig)
    rig.wait_ms(100)
    tier_of(rig).recovery.state = "telling"  # it dies after the last chunk, before it has said that this was all
    (mover,) = (mover.mover for mover in rig.service.status(rig.now_ns).movers if mover.device == "disk")
    rig.handle(MoverGone(mover, "signal 9"))
    client = Client(rig).register()
    found = client.lookup(keys)
    assert (found.chunks, found.why) == (0, "recovering")


def test_with_quotas_a_client_that_may_not_see_a_namespace_hears_only_that_disks_are_being_read() -> None:
    rig = rig_with(quota("a", 1, 20))
    stored(client_of(rig, "a", NAMESPACE), 1, seed=1)
    begin_anew(rig)
    rig.tells = False
    other = client_of(rig, "b", b"b" * 32)
    heard = []
    for listed in (False, True):
        rig.wait_ms(100 * listed)
        assert tier_of(rig).recovery.listed == listed
        heard += [other.lookup(chain(1, CHUNKS), namespace).why for namespace in (NAMESPACE, b"?" * 32)]
    rig.tells = True
    rig.another_mover()
    assert tier_of(rig).recovered
    heard += [other.lookup(chain(1, CHUNKS), namespace).why for namespace in (NAMESPACE, b"?" * 32)]
    assert heard == ["recovering"] * 4 + [""] * 2


@pytest.mark.parametrize("is_listed", [False, True])
def test_with_quotas_a_lookup_in_ones_own_namespace_is_recovering_also_without_a_cache(is_listed: bool) -> None:
    """The namespace's movers have died, or its engine has not yet returned to a brain that just started."""
    rig = rig_with(quota("a", 1, 20))
    stored(client_of(rig, "a", NAMESPACE), 1, seed=1)
    begin_anew(rig)
    rig.tells = False
    if is_listed:
        rig.wait_ms(100)
    client = Client(rig)
    assert client.lookup(chain(1, CHUNKS)).why == "recovering"
    client.register(tenant="a")
    assert client.lookup(chain(1, CHUNKS)).why == "recovering"
    assert isinstance(client.ask(Unregister(rig.number(), client.cache)), Unregistered)
    assert client.lookup(chain(1, CHUNKS)).why == "recovering"
