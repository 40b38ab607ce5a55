"""What routers are told: blocks of chunks that the server holds with all before them, in the best tier, each once."""

import pytest

from kvclient.offload import announced
from kvclient.offload.announced import Announced, Removed, Stored
from kvserver.wire.kv_events import Begun, ChunksRemoved, ChunksStored, KvEvent, Missed, NamespaceCleared, Tier

SPACE, OTHER = bytes([1]) * 32, bytes([2]) * 32
A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))
BLOCKS = {A: ["a1", "a2", "a3"], B: ["b1", "b2", "b3"], C: ["c1", "c2", "c3"]}


def stored(tier: Tier, *keys: bytes, space: bytes = SPACE) -> ChunksStored:
    return ChunksStored(space, tier, b"", list(keys), 12)


def removed(tier: Tier, *keys: bytes) -> ChunksRemoved:
    return ChunksRemoved(SPACE, tier, list(keys))


def teller(*, chunks_max: int = 100, held_max: int = 100) -> Announced:
    made = Announced(chunks_max=chunks_max, held_max=held_max)
    made.follow(SPACE)
    return made


def learn(made: Announced, *keys: bytes) -> None:
    """Learn one prompt."""
    parent = b""
    for key in keys:
        assert made.learn(key, parent, BLOCKS[key], None)
        parent = key


def said(made: Announced, *events: KvEvent) -> list[object]:
    """What routers are told after these events, in a readable form."""
    made.server_said(events)
    found: list[object] = []
    while made.pending:
        for told in made.take(50):
            match told:
                case Stored(tier, chunk, first):
                    found.append((tier, "has", list(chunk.blocks[first:])))
                case Removed(tier, blocks):
                    found.append((tier, "lost", blocks))
    return found


def test_a_chunk_is_told_when_it_is_known_and_held() -> None:
    made = teller()
    learn(made, A, B)
    assert said(made, stored("dram", A)) == [("dram", "has", BLOCKS[A])]
    assert said(made, stored("dram", A)) == [], "each once"


def test_what_was_held_before_it_was_seen_is_told_when_it_is_seen() -> None:
    made = teller()
    assert said(made, stored("dram", A), stored("disk", B)) == []
    learn(made, A, B, C)
    assert said(made) == [("dram", "has", BLOCKS[A]), ("disk", "has", BLOCKS[B])]


def test_a_chunk_whose_head_is_not_held_is_not_told() -> None:
    made = teller()
    learn(made, A, B, C)
    assert said(made, stored("dram", B, C)) == []
    assert said(made, stored("disk", A)) == [("disk", "has", BLOCKS[A]), *(("dram", "has", BLOCKS[k]) for k in (B, C))]


def test_with_its_head_a_chunk_goes() -> None:
    made = teller()
    learn(made, A, B, C)
    said(made, stored("dram", A, B, C))
    assert said(made, removed("dram", A)) == [("dram", "lost", BLOCKS[key]) for key in (A, B, C)]


def test_from_dram_to_disk_it_is_told_there_before_it_leaves_here() -> None:
    made = teller()
    learn(made, A)
    assert said(made, stored("dram", A), stored("disk", A)) == [("dram", "has", BLOCKS[A])]
    assert said(made, removed("dram", A)) == [("disk", "has", BLOCKS[A]), ("dram", "lost", BLOCKS[A])]
    assert said(made, stored("dram", A)) == [("dram", "has", BLOCKS[A]), ("disk", "lost", BLOCKS[A])]
    assert said(made, removed("dram", A), removed("disk", A)) == [("dram", "lost", BLOCKS[A])]


def test_what_came_and_went_between_two_steps_is_not_told() -> None:
    made = teller()
    learn(made, A)
    assert said(made, stored("dram", A), removed("dram", A)) == []


def test_chunks_of_other_namespaces_are_not_told() -> None:
    made = teller()
    learn(made, A)
    assert said(made, stored("dram", A, space=OTHER), NamespaceCleared(OTHER)) == []


def test_a_block_of_two_chunks_is_told_once_and_goes_with_the_last() -> None:
    made = teller()
    made.learn(A, b"", ["same", "a2"], None)
    made.learn(B, b"", ["same", "b2"], None)
    assert said(made, stored("dram", A, B)) == [("dram", "has", ["same", "a2"]), ("dram", "has", ["b2"])]
    assert said(made, removed("dram", A)) == [("dram", "lost", ["a2"])]
    assert said(made, removed("dram", B)) == [("dram", "lost", ["same", "b2"])]


def test_a_block_of_two_chunks_in_two_tiers_is_told_in_both() -> None:
    made = teller()
    made.learn(A, b"", ["same", "a2"], None)
    made.learn(B, b"", ["same", "b2"], None)
    told = said(made, stored("dram", A), stored("disk", B))
    assert told == [("dram", "has", ["same", "a2"]), ("disk", "has", ["same", "b2"])]


def test_a_cleared_namespace_leaves_nothing() -> None:
    made = teller()
    learn(made, A, B)
    said(made, stored("dram", A), stored("disk", B))
    told = said(made, NamespaceCleared(SPACE))
    assert told == [("dram", "lost", BLOCKS[A]), ("disk", "lost", BLOCKS[B])]


def test_after_a_new_life_only_what_it_tells_stays() -> None:
    made = teller()
    learn(made, A, B)
    said(made, stored("dram", A, B))
    assert said(made, Begun(1), stored("dram", A)) == [("dram", "lost", BLOCKS[B])]
    assert said(made, Missed(3, 5)) == [("dram", "lost", BLOCKS[A])]


def test_after_routers_were_told_that_all_is_gone_they_are_told_anew() -> None:
    made = teller()
    learn(made, A, B)
    told = said(made, stored("dram", A), stored("disk", B))
    made.cleared()
    assert said(made) == told
    assert said(made, removed("dram", A)) == [("dram", "lost", BLOCKS[A]), ("disk", "lost", BLOCKS[B])]


def test_what_waits_to_be_told_when_routers_forget_is_told_once() -> None:
    made = teller()
    learn(made, A)
    made.server_said([stored("dram", A)])
    made.cleared()
    assert said(made) == [("dram", "has", BLOCKS[A])]


def test_keys_that_mean_nothing_any_more_are_taken_back() -> None:
    made = teller()
    learn(made, A, B)
    said(made, stored("dram", A, B))
    made.forget()
    assert sorted(map(str, said(made))) == sorted(str(("dram", "lost", BLOCKS[key])) for key in (A, B))
    assert said(made, stored("disk", A)) == []


def test_chunks_seen_longest_ago_are_taken_back_when_the_table_is_full() -> None:
    made = teller(chunks_max=2)
    learn(made, A, B)
    said(made, stored("dram", A, B, C))
    made.seen([A, B])
    made.learn(C, b"", BLOCKS[C], None)
    assert said(made) == [("dram", "lost", BLOCKS[B]), ("dram", "has", BLOCKS[C])], "the tail goes before its head"
    assert not made.learn(D, B, ["d1"], None), "its head is not known"


def test_keys_over_the_bound_are_not_remembered() -> None:
    made = teller(held_max=1)
    made.server_said([stored("dram", A, B)])
    learn(made, A, B)
    assert said(made) == [("dram", "has", BLOCKS[A])]
    assert said(made, stored("dram", B)) == [("dram", "has", BLOCKS[B])], "chunks that are known always are"


def test_a_step_looks_at_no_more_chunks_than_it_may() -> None:
    made = teller()
    learn(made, A, B, C)
    made.server_said([stored("dram", A, B, C)])
    assert [len(made.take(2)), len(made.take(2))] == [2, 1]
    made.server_said([Begun(0)])
    steps = [len(made.take(2)) for _ in range(9)]
    assert max(steps) <= 2
    assert sum(steps) == 3
    assert not made.pending


def test_what_a_lookup_finds_is_told_though_the_server_told_it_too_long_ago() -> None:
    made = teller()
    learn(made, A, B, C)
    made.found([A, B], made.now)
    assert said(made) == [("dram", "has", BLOCKS[A]), ("dram", "has", BLOCKS[B])]
    assert said(made, removed("dram", B)) == [("dram", "lost", BLOCKS[B])]


def test_an_answer_that_may_be_older_than_a_removal_says_nothing() -> None:
    made = teller()
    learn(made, A, B, C)
    asked = made.now
    made.server_said([removed("dram", B)])
    made.found([A, B, C], asked)
    assert said(made) == [("dram", "has", BLOCKS[A])]
    made.found([A, B, C], made.now)
    assert said(made) == [("dram", "has", BLOCKS[B]), ("dram", "has", BLOCKS[C])]


def test_an_answer_of_an_earlier_life_says_nothing() -> None:
    made = teller()
    learn(made, A)
    asked = made.now
    made.server_said([Begun(0)])
    made.found([A], asked)
    assert said(made) == []


def test_an_answer_older_than_all_removals_that_are_remembered_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced, "REMOVALS_MAX", 2)
    made = teller()
    learn(made, A)
    asked = made.now
    made.server_said([removed("dram", A, B, C)])
    made.found([A], asked)
    assert said(made) == []
    made.found([A], made.now)
    assert said(made) == [("dram", "has", BLOCKS[A])]


def test_a_lookup_does_not_say_that_a_chunk_on_disk_is_in_dram() -> None:
    made = teller()
    learn(made, A)
    said(made, stored("disk", A))
    made.found([A], made.now)
    assert said(made) == []
