"""Long prompts in the scheduler half: copied in pieces, named in another thread, without delaying other work."""

import pytest

from kvclient.keys import LONG_TOKENS, PIECE_TOKENS
from kvclient.vllm.scheduler import ASKED_EACH_STEP
from tests.rigs.vllm_rig import BLOCK, CHUNK, Bench, request


def test_a_long_prompt_has_its_keys_from_elsewhere_and_is_asked_for_at_the_next_step() -> None:
    bench, asked = Bench(), request(tokens=LONG_TOKENS + 5)
    bench.hold(asked, 7)
    bench.half.new(asked)
    assert bench.server.asked == 0
    assert bench.half._unnamed["r"].wait(10)
    bench.step()
    assert bench.server.asked == 1
    bench.table = list(range(1, 90))
    assert bench.admit(asked) == 7 * CHUNK


def test_a_step_that_has_other_work_waits_for_no_keys() -> None:
    bench, asked = busy(), request(tokens=3 * PIECE_TOKENS)
    bench.half.new(asked)
    assert bench.half.match(asked, 0) == (None, False)
    assert bench.server.asked == 0
    bench.half.finished("other")
    assert bench.half.match(asked, 0) == (0, False)


def test_a_long_prompt_gets_on_with_each_step_and_each_time_that_it_is_wanted() -> None:
    bench, asked = busy(), request(tokens=4 * PIECE_TOKENS)
    bench.hold(asked, 7)
    bench.half.new(asked)
    assert bench.half.match(asked, 0) == (None, False)
    bench.step(other=41)
    naming = bench.half._unnamed["r"]
    assert not naming.ready
    assert naming.go_on()  # the fourth and last piece
    assert naming.wait(10)
    bench.step(other=42)
    assert bench.server.asked == 1
    assert bench.half.match(asked, 0) == (7 * CHUNK, True)


@pytest.mark.parametrize("hashes", [False, True])
def test_what_a_step_that_waits_for_nobody_asks_of_a_long_prompt_is_sent_in_another_call(hashes: bool) -> None:
    bench, asked = busy(hashes=hashes), request(tokens=LONG_TOKENS)
    bench.hold(asked, 7)
    bench.half.new(asked)
    if not hashes:
        assert bench.half._unnamed["r"].wait(10)
    assert bench.half.match(asked, 2 * BLOCK) == (None, False)
    assert bench.half._unnamed == {}
    assert bench.server.asked == 0
    bench.step(other=CHUNK - 1)
    assert bench.server.asked == 1
    assert bench.half.match(asked, 2 * BLOCK) == (7 * CHUNK - 2 * BLOCK, True)


@pytest.mark.parametrize("retrieves", [False, True])
@pytest.mark.parametrize("hashes", [False, True])
def test_a_step_that_waits_for_nobody_starts_a_long_prompt_at_once_if_the_server_is_away(
    hashes: bool, retrieves: bool
) -> None:
    bench, asked = busy(hashes=hashes, retrieves=retrieves), request(tokens=LONG_TOKENS)
    bench.server.connected = False
    bench.half.new(asked)
    assert hashes or bench.half._unnamed["r"].wait(10)
    assert bench.half.match(asked, 0) == (0, False)


@pytest.mark.parametrize("hashes", [False, True])
def test_a_long_prompt_that_nobody_matches_is_asked_for_by_a_step(hashes: bool) -> None:
    bench, asked = busy(hashes=hashes), request(tokens=LONG_TOKENS)
    bench.half.new(asked)
    assert hashes or bench.half._unnamed["r"].wait(10)
    assert bench.server.asked == 0
    bench.step(other=CHUNK - 1)
    assert bench.server.asked == 1


def test_each_call_sends_what_the_one_before_has_asked() -> None:
    """Otherwise one step would have to send for all waiting requests."""
    bench = busy(hashes=True)
    prompts = [request(f"r{number}", tokens=LONG_TOKENS) for number in range(5)]
    for prompt in prompts:
        bench.half.new(prompt)
    for sent, prompt in enumerate(prompts):
        assert bench.half.match(prompt, 0) == (None, False)
        assert bench.server.asked == sent
    bench.step(other=CHUNK - 1)
    assert bench.server.asked == 5


@pytest.mark.parametrize("step_wait_s", [0.0, 10.0])
@pytest.mark.parametrize("hashes", [False, True])
def test_a_long_prompt_of_a_producer_starts_when_its_answer_is_there(hashes: bool, step_wait_s: float) -> None:
    """It may end in its first step: its chunks can be stored then only if the server's answer is known."""
    bench = busy(hashes=hashes, step_wait_s=step_wait_s, retrieves=False)
    asked = request(tokens=LONG_TOKENS)
    bench.half.new(asked)
    assert hashes or bench.half._unnamed["r"].wait(10)
    if not step_wait_s:
        assert bench.half.match(asked, 0) == (None, False)
        bench.step(other=CHUNK - 1)
    bench.table = [1 + block % 90 for block in range(LONG_TOKENS // BLOCK)]
    assert bench.admit(asked) == 0
    _, (order,) = bench.step(r=LONG_TOKENS)
    assert order.chunks == LONG_TOKENS // CHUNK


def test_a_step_asks_for_a_few_prompts_that_nobody_matches() -> None:
    bench = busy(hashes=True)
    for number in range(ASKED_EACH_STEP + 2):
        bench.half.new(request(f"r{number}", tokens=LONG_TOKENS))
    bench.step(other=CHUNK - 1)
    assert bench.server.asked == ASKED_EACH_STEP
    bench.step(other=CHUNK - 1)
    assert bench.server.asked == ASKED_EACH_STEP + 2


def test_a_long_prompt_that_finds_no_room_is_told_the_same_while_it_is_asked_for_anew() -> None:
    """If told to ask again, vLLM schedules other requests first, and they take the blocks that come free."""
    bench, asked = busy(hashes=True), request(tokens=LONG_TOKENS)
    bench.half.new(asked)
    assert bench.half.match(asked, 0) == (None, False)
    bench.step(other=CHUNK - 1)
    assert bench.half.match(asked, 0) == (0, False)
    it = bench.half._offload._requests["r"]
    for _ in range(3):
        assert it.answer is not None
        it.answer.believed_until_s = 0.0
        assert bench.half.match(asked, 0) == (0, False)
        bench.step(other=CHUNK - 1)
        assert bench.half.match(asked, 0) == (0, False)
    assert bench.server.asked == 4


def test_a_short_prompt_does_not_ask_for_the_long_ones_before_it() -> None:
    bench = busy(hashes=True)
    bench.half.new(request("long", tokens=LONG_TOKENS))
    bench.half.new(request("short", tokens=41))
    assert bench.server.asked == 1
    bench.step(other=CHUNK - 1)
    assert bench.server.asked == 2


def test_an_idle_engine_asks_for_a_long_prompt_with_block_hashes_when_it_matches() -> None:
    bench, asked = Bench(hashes=True), request(tokens=LONG_TOKENS)
    bench.hold(asked, 7)
    bench.half.new(asked)
    assert bench.server.asked == 0
    assert bench.half.match(asked, 2 * BLOCK) == (7 * CHUNK - 2 * BLOCK, True)


@pytest.mark.parametrize("tokens", [LONG_TOKENS, 5 * PIECE_TOKENS])
def test_a_step_that_may_wait_a_little_does_so_for_keys_as_well(tokens: int) -> None:
    bench, asked = busy(step_wait_s=10.0), request(tokens=tokens)
    bench.hold(asked, 7)
    bench.half.new(asked)
    assert bench.half.match(asked, 0) == (7 * CHUNK, True)


def test_a_long_prompt_that_turns_out_to_have_no_names_is_left_alone() -> None:
    asked = request(tokens=3 * PIECE_TOKENS)
    asked.prompt_token_ids[-1] = 2**32
    for bench in (busy(), Bench()):
        bench.half.new(asked)
        while bench.half.match(asked, 0) == (None, False):
            bench.step(other=41)
        assert bench.half.match(asked, 0) == (0, False)
        assert bench.half.take_counts()["requests_unkeyed"] == 1
        assert bench.server.asked <= 1  # for the other
        bench.half.finished("r")


def busy(*, step_wait_s: float = 0.0, hashes: bool = False, retrieves: bool = True) -> Bench:
    """An engine that computes another request, about which no question is open any more."""
    bench = Bench(step_wait_s=step_wait_s, hashes=hashes, retrieves=retrieves)
    other = request("other", tokens=CHUNK - 1)
    assert bench.admit(other) == 0
    bench.step(other=CHUNK - 1)
    return bench


@pytest.mark.parametrize("end", ["match", "finish", "reset"])
def test_a_long_prompt_may_be_wanted_before_it_is_named(end: str) -> None:
    bench, asked = Bench(), request(tokens=3 * PIECE_TOKENS)
    bench.hold(asked, 7)
    bench.half.new(asked)
    if end == "match":
        assert bench.half.match(asked, 0) == (7 * CHUNK, True)
    if end == "reset":
        bench.half.reset()
        assert bench.half.match(asked, 0) == (0, False)
    bench.half.finished("r")
    bench.step()
    assert not bench.half.busy()
    assert bench.half._unnamed == {}
