"""How much may be pledged and awaited, by whom, and who may not pledge for a while because it broke its word."""

import pytest

from kvserver.service.state import pledges
from kvserver.wire.messages import Pledge, Release, Retrieved
from tests.rigs.brain_rig import NAMESPACE, Client, chain, is_refusal
from tests.rigs.pledge_scene import CHUNKS, TTL_MS, Scene


def test_pledges_fill_no_more_than_their_share_of_the_arena() -> None:
    scene = Scene(pledged_percent_max=10)
    taken = 0
    for number in range(60):
        taken += scene.pledge(chain(300 + number, 7)).chunks
        if len(scene.rig.core.pledges) >= 250:
            break
    share = scene.rig.bounds.arena_bytes // 10
    assert 0 < scene.rig.core.pledges.taken[()].slot_bytes <= share
    assert scene.pledge(chain(999, 7)).chunks == 0
    scene.unpledge(next(iter(scene.rig.core.pledges)))
    assert scene.pledge(chain(999, 7)).chunks == 7


def test_the_number_of_pledges_is_bounded_for_a_session_and_in_total() -> None:
    scene = Scene(pledges_max=3, pledges_total_max=7)
    for number in range(3):
        scene.pledge(chain(400 + number, 1))
    refused = scene.producer.ask(Pledge(scene.rig.number(), NAMESPACE, chain(500, 1), TTL_MS))
    assert is_refusal(refused, "resource", "pledges", "3 pledges of this session")
    for number in range(3):
        scene.pledge(chain(410 + number, 1), by=scene.other)
    third = Client(scene.rig, engine="third", epoch=13).register()
    refused = third.ask(Pledge(scene.rig.number(), NAMESPACE, chain(500, 1), TTL_MS))
    assert is_refusal(refused, "resource", "pledges", "6 pledges of all engines; at most 7")


@pytest.mark.parametrize(
    "bounds",
    [
        {"pledges_total_max": 16},
        {"pledged_chunks_max": 16},
        {"arena_bytes": 2 * 64 << 10, "pledged_percent_max": 50},  # 16 chunks of 4 KiB
    ],
)
def test_who_pledges_all_that_it_may_leaves_room_to_other_engines_and_to_other_tenants(bounds: dict[str, int]) -> None:
    scene = Scene(**bounds)
    again = Client(scene.rig, engine="producer", epoch=13).register()
    stranger = Client(scene.rig, engine="producer", epoch=14).register(tenant="another")
    seeds = iter(range(700, 900))

    def fill(by: Client) -> int:
        """How many chunks an engine can pledge, one by one."""
        taken = 0
        while getattr(by.ask(Pledge(scene.rig.number(), NAMESPACE, chain(next(seeds), 1), TTL_MS)), "chunks", 0):
            taken += 1
        return taken

    assert [fill(by) for by in (scene.producer, again, scene.other, stranger)] == [12, 0, 2, 1]
    scene.rig.peer_gone(scene.producer.local)
    assert [fill(by) for by in (stranger, scene.other)] == [9, 2], "what one gives back is for all"


def test_a_prompt_that_is_longer_than_the_share_of_its_engine_is_pledged_in_part() -> None:
    scene = Scene(pledged_chunks_max=16)
    assert scene.pledge(chain(8, 20)).chunks == 12


def test_the_number_of_pledged_chunks_is_bounded() -> None:
    scene = Scene(pledged_chunks_max=10)
    first = scene.pledge()
    assert scene.pledge(chain(8, 5)).chunks == 2
    assert scene.pledge(chain(9, 1)).chunks == 0
    scene.store(0, 1)
    assert scene.pledge(chain(9, 3)).chunks == 1, "a chunk that has come makes room"
    scene.unpledge(first.pledge)
    assert scene.pledge(chain(10, 7)).chunks == 4


@pytest.mark.parametrize("how", ["late", "not-stored"])
def test_an_engine_that_did_not_store_what_it_pledged_may_not_pledge_it_again_for_a_while(how: str) -> None:
    scene = Scene(pledge_patience_ms=1_000)
    scene.store(0, 1)
    scene.pledge()
    scene.store(1, 2)
    if how == "late":
        scene.rig.wait_ms(1_100)
    else:
        scene.rig.movers_copy = False
        scene.store(2, 3)
        scene.rig.finish("failed", "io", "planted")
        scene.rig.movers_copy = True
    assert scene.ended() == {how: 1}
    again = scene.pledge()
    assert (again.pledge, again.held, again.chunks) == (0, 2, 0)
    assert scene.pledge(chain(61, 2)).chunks == 2, "another prompt is another matter"
    others = scene.pledge(by=scene.other)
    assert others.chunks == 3, "another engine may"
    scene.unpledge(others.pledge, by=scene.other)
    scene.rig.wait_ms(2_700)
    assert scene.pledge().chunks == 0
    scene.rig.wait_ms(1_300)
    assert scene.pledge().chunks == 3


@pytest.mark.parametrize("epoch", [11, 13])
def test_a_broken_word_outlasts_the_session_that_gave_it(epoch: int) -> None:
    """Another epoch is another life of the engine."""
    scene = Scene(pledge_patience_ms=1_000)
    scene.pledge()
    scene.rig.wait_ms(1_100)
    assert scene.ended() == {"late": 1}
    scene.rig.peer_gone(scene.producer.local)
    again = Client(scene.rig, engine="producer", epoch=epoch).register()
    assert scene.pledge(by=again).chunks == 0
    scene.rig.wait_ms(3_900)
    assert scene.pledge(by=again).chunks == CHUNKS


def test_an_engine_of_another_tenant_breaks_nobody_elses_word() -> None:
    scene = Scene(pledge_patience_ms=1_000)
    namesake = Client(scene.rig, engine="producer", epoch=13).register(tenant="another")
    scene.pledge()
    scene.rig.wait_ms(1_100)
    assert scene.pledge().chunks == 0
    assert scene.pledge(by=namesake).chunks == CHUNKS


def test_an_engine_that_died_has_not_broken_its_word() -> None:
    scene = Scene()
    scene.pledge()
    scene.rig.peer_gone(scene.producer.local)
    assert scene.ended() == {"died": 1}
    again = Client(scene.rig, engine="producer", epoch=13).register()
    assert scene.pledge(by=again).chunks == CHUNKS


def test_broken_words_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pledges, "DISTRUSTED_MAX", 2)
    scene = Scene(pledge_patience_ms=1_000)
    for number in range(3):
        scene.pledge(chain(70 + number, 1))
        scene.rig.wait_ms(1_050)
    assert [scene.pledge(chain(70 + number, 1)).chunks for number in range(3)] == [1, 0, 0]


def test_the_number_of_those_who_await_one_pledge_is_bounded() -> None:
    scene = Scene(pledge_waits_max=3)
    scene.store(0, 1)
    scene.pledge()
    first, second = scene.await_(), scene.await_()
    wait = scene.retrieve(first.lease, 1, 2)
    third = scene.await_()
    assert (third.chunks, third.awaited, third.producer) == (1, 0, "")
    assert third.lease, "what is here is leased as ever"
    assert is_refusal(scene.answer(scene.retrieve(second.lease, 1, 2)), "resource", "waits", "3 leases and retrieves")
    scene.other.ask(Release(scene.rig.number(), second.lease))
    again = scene.retrieve(first.lease, 1, 2)
    scene.store(1, 2)
    assert isinstance(scene.answer(wait), Retrieved)
    assert isinstance(scene.answer(again), Retrieved)
