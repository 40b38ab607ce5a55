"""KV events for subscribers: chunks that come, move between tiers, and go."""

import pytest

from kvserver.index.space import Space
from kvserver.service.base.effects import Tell
from kvserver.service.base.events import Event
from kvserver.service.requests import kv_events
from kvserver.service.requests.kv_events import holds
from kvserver.service.service import Service
from kvserver.transfer.layout import Geometry, GroupGeometry
from kvserver.wire.kv_events import Begun, ChunksRemoved, ChunksStored, KvEvent, NamespaceCleared
from kvserver.wire.messages import Clear, GroupBlocks
from tests.rigs.admin_rig import clear_prefix
from tests.rigs.brain_rig import CHUNK_TOKENS, NAMESPACE, Client, Rig, chain, ids, key
from tests.rigs.disk_quota_rig import account, client_of, quota, rig_with
from tests.rigs.disk_rig import CHUNKS, EXTENT_BYTES, DiskRig, fill


class Listening:
    """Collects the events of a rig's service."""

    def __init__(self, rig: Rig) -> None:
        self.told: list[KvEvent] = []
        self._rig = rig
        self._handle = Service.handle
        rig.service.handle = self._hear  # type: ignore[method-assign]

    def _hear(self, event: Event, now_ns: int) -> list:  # type: ignore[type-arg]
        effects = self._handle(self._rig.service, event, now_ns)
        self.told += [told for effect in effects if isinstance(effect, Tell) for told in effect.events]
        return [effect for effect in effects if not isinstance(effect, Tell)]

    def take(self) -> list[KvEvent]:
        told, self.told = self.told, []
        return told


def split(keys: bytes) -> list[bytes]:
    return [key(keys, chunk) for chunk in range(len(keys) // 32)]


def test_a_prompt_is_told_as_one_chain_and_what_continues_it_under_its_parent() -> None:
    rig = Rig(kv_events=True)
    ear, client, keys = Listening(rig), Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    assert ear.take() == [ChunksStored(NAMESPACE, "dram", b"", split(keys), CHUNK_TOKENS)]
    branch = key(keys, 0) + chain(2, 2)
    client.store(branch)
    assert ear.take() == [ChunksStored(NAMESPACE, "dram", key(keys, 0), split(branch)[1:], CHUNK_TOKENS)]
    client.store(keys)
    assert ear.take() == [], "nothing has changed"


def test_what_goes_is_told_and_a_clear_in_one_word() -> None:
    rig = Rig(kv_events=True)
    ear, client, keys = Listening(rig), Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    ear.take()
    clear_prefix(rig, key(keys, 1))
    (removed,) = ear.take()
    assert isinstance(removed, ChunksRemoved)
    assert (removed.tier, sorted(removed.keys)) == ("dram", sorted(split(keys)[1:]))
    clear_prefix(rig, key(keys, 0))
    ear.take()
    client.store(keys)
    ear.take()
    client.ask(client_clear(rig))
    assert ear.take() == [NamespaceCleared(NAMESPACE)]


def client_clear(rig: Rig) -> Clear:
    return Clear(rig.number(), NAMESPACE)


def test_tiers_are_told_apart_and_a_later_brain_tells_what_it_found() -> None:
    rig = DiskRig(kv_events=True)
    ear, client, keys = Listening(rig), Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    told = ear.take()
    assert [event.tier for event in told if isinstance(event, ChunksStored)] == ["dram", *["disk"] * CHUNKS]
    fill(client)
    gone = [event for event in ear.take() if isinstance(event, ChunksRemoved)]
    assert {event.tier for event in gone} == {"dram"}
    assert set(split(keys)) <= {name for event in gone for name in event.keys}
    rig.service = rig.new_service()
    ear = Listening(rig)
    rig.copies.clear()
    rig.wait_ms(100)
    found = {name for event in ear.take() if isinstance(event, ChunksStored) for name in event.keys}
    assert set(split(keys)) <= found


def test_a_removal_is_told_also_of_a_chunk_that_waits_to_be_told_as_an_earlier_brains() -> None:
    """The chunk was told as stored before.

    Without its removal a subscriber would believe for ever that the tier has it."""
    rig = rig_with(quota("chat", most=CHUNKS), kv_events=True)
    ear, client, keys = Listening(rig), client_of(rig, "chat", NAMESPACE), chain(1, CHUNKS)
    client.store(keys)
    ear.take()
    core, leaf = rig.core, key(keys, CHUNKS - 1)
    space = core.chunks.spaces[NAMESPACE]
    core.untold.append((space, [space.nodes[leaf]]))
    account(rig, "chat").max_bytes -= EXTENT_BYTES
    rig.wait_ms(50)
    assert ear.take() == [
        ChunksStored(NAMESPACE, "dram", key(keys, CHUNKS - 2), [leaf], CHUNK_TOKENS),
        ChunksRemoved(NAMESPACE, "disk", [leaf]),
    ]


def test_a_brain_begins_by_saying_so_and_only_where_somebody_listens() -> None:
    quiet, loud = Rig(), Rig(kv_events=True)
    assert not any(isinstance(effect, Tell) for effect in quiet.new_service().effects())
    assert Tell([Begun(0)]) in loud.new_service().effects()
    client, ear = Client(quiet).register(), Listening(quiet)
    client.store(chain(1, CHUNKS))
    assert ear.take() == []


def test_no_message_grows_with_what_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "CHUNKS_PER_BATCH", 2)
    rig = Rig(kv_events=True)
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    rig.effects.clear()
    clear_prefix(rig, key(keys, 0))
    told = [effect.events for effect in rig.effects if isinstance(effect, Tell)]
    assert [len(event.keys) for (event,) in told if isinstance(event, ChunksRemoved)] == [2, 1]


def test_what_is_cut_off_is_told_also_while_it_is_still_read() -> None:
    rig = Rig(kv_events=True)
    ear, client, keys = Listening(rig), Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    found = client.lookup(keys)
    rig.movers_copy = False
    client.ask(client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))))
    ear.take()
    clear_prefix(rig, key(keys, 1))
    (removed,) = ear.take()
    assert isinstance(removed, ChunksRemoved)
    assert sorted(removed.keys) == sorted(split(keys)[1:])
    rig.finish()
    assert ear.take() == []


def test_prompts_that_are_told_at_once_are_told_as_chains_of_their_own() -> None:
    rig = DiskRig(kv_events=True)
    client = Client(rig).register()
    prompts = [chain(seed, CHUNKS) for seed in (1, 2)]
    for keys in prompts:
        client.store(keys)
    rig.service = rig.new_service()
    ear = Listening(rig)
    rig.wait_ms(100)
    told = [event for event in ear.take() if isinstance(event, ChunksStored)]
    parents = {name: above for keys in prompts for name, above in zip(split(keys), [b"", *split(keys)], strict=False)}
    assert {name for event in told for name in event.keys} == parents.keys()
    for event in told:
        chained = zip(event.keys, [event.parent, *event.keys], strict=False)
        assert all(parents[name] == above for name, above in chained)


def test_a_chunk_is_held_by_a_tier_that_has_all_that_a_prefix_needs_of_it() -> None:
    full, state = GroupGeometry(2, "full", 0, 1), GroupGeometry(6, "state", 0, 1)
    both = Space(NAMESPACE, 0, Geometry(6, (full, full, state)))
    assert [holds(both, groups) for groups in (0b000, 0b001, 0b011, 0b100, 0b111)] == [False, False, True, False, True]
    alone = Space(NAMESPACE, 0, Geometry(6, (state,)))
    assert [holds(alone, groups) for groups in (0, 1)] == [False, True]
