"""The replay's engine, over a server in a dict that moves real bytes."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay.prefixes import Prefixes
from tests.rigs.replay_standin import BLOCK_TOKENS, BLOCKS_PER_CHUNK, PAGE_BYTES, REGIONS, Rig, Standin

BLOCK_BYTES = REGIONS * PAGE_BYTES
PROMPT = [10, 11, 12, 13, 14, 15, 16, 17]  # 2 chunks and 2 blocks


def test_first_prompt_is_computed_and_its_whole_chunks_are_stored() -> None:
    rig = Rig(Standin())
    outcome = rig.ask(PROMPT, more_tokens=3)
    assert (outcome.hbm_tokens, outcome.retrieved_tokens, outcome.computed_tokens) == (0, 0, 35)
    assert rig.server.stores == [(0, 2)]
    assert outcome.store_bytes == 6 * BLOCK_BYTES


def test_prompt_in_hbm_is_not_retrieved_and_its_lease_not_taken() -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT)
    outcome = rig.ask(PROMPT)
    assert (outcome.hbm_tokens, outcome.retrieved_tokens, outcome.computed_tokens) == (32, 0, 1)
    assert rig.server.retrieves == []
    assert rig.server.stores == [(0, 2)]
    assert outcome.spot_bytes == BLOCK_BYTES
    assert outcome.spot_wrong_bytes == 0


def test_evicted_prompt_comes_back_and_every_byte_is_compared() -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT)
    rig.forget()
    outcome = rig.ask(PROMPT)
    assert (outcome.hbm_tokens, outcome.retrieved_tokens, outcome.computed_tokens) == (0, 24, 9)
    assert rig.server.retrieves == [(0, 6)]
    assert outcome.compared_bytes == 6 * BLOCK_BYTES
    assert outcome.wrong_bytes == 0
    assert rig.server.stores == [(0, 2)]  # the hit is not stored again


def test_retrieve_starts_inside_a_chunk_where_hbm_ends() -> None:
    rig = Rig(Standin(), blocks=13)
    rig.ask(PROMPT)
    taken = rig.pool.allocate(13 - 4)  # evicts all but the first 4 blocks
    assert taken is not None
    rig.pool.release(taken)
    outcome = rig.ask(PROMPT)
    assert rig.server.retrieves == [(4, 2)]
    assert (outcome.hbm_tokens, outcome.retrieved_tokens, outcome.computed_tokens) == (16, 8, 9)
    assert outcome.compared_bytes == 2 * BLOCK_BYTES


def test_retrieve_ends_inside_a_chunk_because_the_last_token_is_computed() -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT[:6])
    rig.forget()
    outcome = rig.ask(PROMPT[:6], more_tokens=0)
    assert rig.server.retrieves == [(0, 5)]
    assert (outcome.retrieved_tokens, outcome.disk_tokens, outcome.computed_tokens) == (20, 0, 4)
    rig.pool.check()


def test_lease_that_is_of_no_use_is_released() -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT[:6])
    rig.ask(PROMPT[:6], more_tokens=0)  # the server has 2 chunks, HBM the 5 blocks that may be served
    assert rig.server.retrieves == []
    assert len(rig.server.released) == 1


def test_longer_prompt_stores_only_its_new_chunks() -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT)
    rig.ask([*PROMPT, 18, 19, 20, 21])
    assert rig.server.stores == [(0, 2), (2, 2)]


def test_chunks_that_the_server_lost_are_stored_again_from_hbm() -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT)
    last = list(rig.server.chunks)[-1]
    del rig.server.chunks[last]
    rig.ask(PROMPT)
    assert rig.server.stores == [(0, 2), (1, 1)]
    rig.forget()
    assert rig.ask(PROMPT).wrong_bytes == 0


def test_chunks_that_are_being_stored_are_not_sent_twice() -> None:
    rig = Rig(Standin())
    tokens = len(PROMPT) * BLOCK_TOKENS + 1
    assert rig.engine.begin(0, tokens, PROMPT)
    assert rig.engine.begin(1, tokens, PROMPT)
    assert rig.server.stores == [(0, 2)]
    rig.server.run_calls()
    assert sorted(o.index for o in rig.outcomes) == [0, 1]


def test_blocks_of_a_store_stay_pinned_until_it_has_ended() -> None:
    rig = Rig(Standin(), blocks=9)
    assert rig.engine.begin(0, 33, PROMPT)
    assert rig.pool.pinned == 6
    assert not rig.engine.begin(1, 13, [50, 51, 52])  # 4 blocks, 3 are unpinned
    assert not rig.engine.begin(1, 25, [10, 50, 51, 52, 53, 54])  # and the attempt must not leave block 10 pinned
    rig.server.run_calls()
    assert rig.pool.pinned == 0
    assert rig.engine.begin(1, 13, [50, 51, 52])
    rig.server.run_calls()
    rig.forget()
    assert rig.ask(PROMPT).wrong_bytes == 0


def test_blocks_of_a_retrieve_stay_pinned_until_it_has_ended() -> None:
    rig = Rig(Standin(), blocks=9)
    rig.ask(PROMPT)
    rig.forget()
    assert rig.engine.begin(1, 33, PROMPT)
    assert rig.pool.pinned == 9
    rig.server.run_calls()
    assert rig.pool.pinned == 0


def test_tokens_from_disk_are_those_of_the_last_chunks_that_hbm_did_not_have() -> None:
    rig = Rig(Standin(), blocks=13)
    rig.ask(PROMPT)
    first, last = rig.server.chunks
    taken = rig.pool.allocate(13 - 4)  # evicts all but the first 4 blocks, so the second chunk is in HBM in part
    assert taken is not None
    rig.pool.release(taken)
    rig.server.on_disk = {first, last}
    outcome = rig.ask(PROMPT)
    assert (outcome.retrieved_tokens, outcome.disk_tokens) == (8, 8)
    rig.forget()
    rig.server.on_disk = {last}
    outcome = rig.ask(PROMPT)
    assert (outcome.retrieved_tokens, outcome.disk_tokens) == (24, 12)
    rig.forget()
    rig.server.on_disk = set()
    assert rig.ask(PROMPT).disk_tokens == 0


def test_failed_retrieve_is_computed_and_counted() -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT)
    rig.forget()
    rig.server.on_disk = set(rig.server.chunks)
    rig.server.refuse_retrieves = "timeout"
    outcome = rig.ask(PROMPT)
    assert (outcome.retrieved_tokens, outcome.disk_tokens, outcome.computed_tokens) == (0, 0, 33)
    assert outcome.retrieve_problem == "timeout"
    assert len(rig.server.released) == 1
    assert outcome.compared_bytes == 0
    again = rig.ask(PROMPT)
    assert again.hbm_tokens == 32
    assert again.spot_wrong_bytes == 0


def test_refused_store_is_counted_and_tried_again_with_the_next_turn() -> None:
    rig = Rig(Standin(refuse_stores="full"))
    outcome = rig.ask(PROMPT)
    assert (outcome.store_chunks_asked, outcome.store_chunks_held, outcome.store_why) == (2, 0, "full")
    rig.server.refuse_stores = ""
    rig.ask(PROMPT)
    assert rig.server.stores == [(0, 2), (0, 2)]


@pytest.mark.parametrize("fault", ["spoil_byte", "move_nothing"])
def test_server_that_returns_other_bytes_is_detected(fault: str) -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT)
    rig.forget()
    setattr(rig.server, fault, True)
    assert rig.ask(PROMPT).wrong_bytes > 0


def test_right_bytes_left_over_from_a_blocks_last_use_do_not_pass_for_retrieved() -> None:
    rig = Rig(Standin(), blocks=9)
    rig.ask(PROMPT)
    taken = rig.pool.allocate(9)
    assert taken is not None
    rig.pool.release(taken[::-1])  # the same blocks will hold the same part of the prompt again
    rig.server.move_nothing = True
    outcome = rig.ask(PROMPT)
    assert outcome.wrong_bytes > outcome.compared_bytes * 0.9


def test_bytes_of_the_wrong_region_are_detected() -> None:
    rig = Rig(Standin(), blocks=5)
    digests = [b"x" * 32]
    rig.pages.compute([3], digests)
    assert rig.pages.wrong([3], digests) == 0
    first = os.pread(rig.pages.fd, PAGE_BYTES, 3 * PAGE_BYTES)
    os.pwrite(rig.pages.fd, first, rig.pages.region_stride + 3 * PAGE_BYTES)
    assert rig.pages.wrong([3], digests) > 0


def test_server_that_mixes_up_chunks_is_detected() -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT)
    rig.forget()
    one, other = rig.server.chunks
    rig.server.chunks[one], rig.server.chunks[other] = rig.server.chunks[other], rig.server.chunks[one]
    assert rig.ask(PROMPT).wrong_bytes > BLOCK_BYTES


def test_bytes_that_change_in_hbm_are_detected_by_a_spot_check() -> None:
    rig = Rig(Standin())
    rig.ask(PROMPT[:1])
    rig.pages.spoil([0], [b"x" * 32])
    assert rig.ask(PROMPT[:1]).spot_wrong_bytes > 0


def test_other_workers_chunks_are_hit_and_counted_as_foreign() -> None:
    server = Standin()
    one, other = Rig(server, worker=0), Rig(server, worker=1)
    one.ask(PROMPT)
    outcome = other.ask([*PROMPT[:6], 90, 91, 92])
    assert (outcome.retrieved_tokens, outcome.foreign_tokens) == (24, 24)
    other.forget()
    outcome = other.ask([*PROMPT[:6], 90, 91, 92])
    assert (outcome.retrieved_tokens, outcome.foreign_tokens) == (36, 24)
    assert outcome.wrong_bytes == 0


def test_prompt_shorter_than_a_chunk_asks_the_server_nothing() -> None:
    rig = Rig(Standin())
    outcome = rig.ask(PROMPT[:2])
    assert outcome.computed_tokens == 9
    assert rig.server.lookups == []
    assert rig.server.stores == []


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_tokens_sum_and_bytes_are_right_in_any_order_of_ends(data: st.DataObject) -> None:
    """Two workers, a small pool, a server that forgets chunks, and jobs that end in any order."""
    server = Standin()
    rigs = [Rig(server, blocks=17, worker=0), Rig(server, blocks=14, worker=1)]
    index = 0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["ask", "ask", "ask", "end", "lose"])):
            case "ask":
                # the first block decides the conversation, so ids are chained over the prefix
                conversation, blocks = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 11))
                prompt = [100 * conversation + i for i in range(blocks)]
                tokens = blocks * BLOCK_TOKENS + data.draw(st.integers(0, BLOCK_TOKENS - 1))
                index += data.draw(st.sampled_from(rigs)).engine.begin(index, tokens, prompt)
            case "end":
                if server.calls:
                    server.calls.pop(data.draw(st.integers(0, len(server.calls) - 1)))()
            case "lose":
                if server.chunks:
                    del server.chunks[data.draw(st.sampled_from(sorted(server.chunks)))]
    server.run_calls()
    outcomes = [outcome for rig in rigs for outcome in rig.outcomes]
    assert sorted(o.index for o in outcomes) == list(range(index))
    for o in outcomes:
        assert o.hbm_tokens + o.retrieved_tokens + o.computed_tokens == o.prompt_tokens
        assert o.computed_tokens >= 1
        assert o.wrong_bytes == 0
        assert o.spot_wrong_bytes == 0
    for rig in rigs:
        rig.pool.check()
        assert rig.pool.pinned == 0


def test_equal_prefixes_have_equal_names_and_namespaces_differ() -> None:
    one = Prefixes(b"a" * 32, block_tokens=BLOCK_TOKENS, blocks_per_chunk=BLOCKS_PER_CHUNK)
    same = Prefixes(b"a" * 32, block_tokens=BLOCK_TOKENS, blocks_per_chunk=BLOCKS_PER_CHUNK)
    other = Prefixes(b"b" * 32, block_tokens=BLOCK_TOKENS, blocks_per_chunk=BLOCKS_PER_CHUNK)
    one.digests([5, 6])
    assert one.digests(PROMPT) == same.digests(PROMPT)
    assert one.keys(PROMPT) == same.keys(PROMPT)
    assert len(one.keys(PROMPT)) == 2
    assert one.digests(PROMPT)[1:] != one.digests([9, *PROMPT[1:]])[1:]
    assert not set(one.digests(PROMPT)) & set(other.digests(PROMPT))
