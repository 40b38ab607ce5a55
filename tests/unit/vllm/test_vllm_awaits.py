"""Pledges of vLLM's scheduler half: when it makes them, and when it takes them back."""

from tests.rigs.vllm_rig import CHUNK, Bench, request, stored

TOKENS = 3 * CHUNK + 5


def bench() -> Bench:
    return Bench(await_wait_s=5.0)


def test_a_prompt_is_pledged_with_its_first_step_and_once() -> None:
    at = bench()
    asked = request(tokens=TOKENS)
    assert at.admit(asked) == 0
    assert at.server.may_wait
    assert at.server.pledges == {}, "it is not scheduled yet"
    at.step(r=CHUNK)
    (keys,) = at.server.pledges.values()
    assert {keys[place : place + 32] for place in range(0, len(keys), 32)} == at.keys_of(asked)
    at.step(r=2 * CHUNK)
    assert len(at.server.pledges) == 1


def test_without_the_option_nothing_is_pledged_and_no_lookup_may_wait() -> None:
    at = Bench()
    at.admit(request(tokens=TOKENS))
    at.step(r=CHUNK)
    assert at.server.pledges == {}
    assert not at.server.may_wait


def test_an_aborted_request_takes_its_pledge_back_without_another_step() -> None:
    at = bench()
    at.admit(request(tokens=TOKENS))
    at.step(r=CHUNK)
    at.half.finished("r")
    assert at.server.pledges == {}


def test_a_preempted_request_takes_its_pledge_back_with_that_step() -> None:
    at = bench()
    at.admit(request(tokens=TOKENS))
    at.step(r=CHUNK)
    at.half.preempted(["r", "unknown"])
    at.step()
    assert at.server.pledges == {}


def test_a_finished_request_keeps_its_word_while_its_last_store_is_under_way() -> None:
    at = bench()
    at.admit(request(tokens=TOKENS))
    _, (first,) = at.step(r=2 * CHUNK)
    at.half.ended([stored(first, 2)])
    _, (last,) = at.step(r=TOKENS)
    at.half.finished("r")
    assert len(at.server.pledges) == 1
    at.half.ended([stored(last, 1)])
    assert len(at.server.pledges) == 1, "the server ends it with the last chunk"


def test_a_reset_takes_all_pledges_back() -> None:
    at = bench()
    at.admit(request(tokens=TOKENS))
    at.step(r=CHUNK)
    at.half.reset()
    at.step()
    assert at.server.pledges == {}
