"""Requests that are looked up before the engine asks for them: how many, and how long their answers are good."""

from tests.rigs.offload_rig import CHUNK, Desk


def test_few_hold_leases_before_they_are_matched() -> None:
    desk = Desk(ahead_max=1)
    for name in "abcd":
        desk.begin(name, tokens=40)
    desk.offload.ask("a", desk.now_s)
    assert desk.offload.next_to_ask() is None
    desk.answer(0)
    assert desk.offload.next_to_ask() == "b", "a miss holds nothing"
    desk.offload.ask("b", desk.now_s)
    desk.answer(2)
    assert desk.offload.next_to_ask() is None
    desk.offload.finish("c")
    assert desk.match("b", tokens=40) == 2 * CHUNK
    assert desk.offload.next_to_ask() == "d"
    desk.match("d", tokens=40)
    assert desk.offload.next_to_ask() is None


def test_an_answer_that_its_request_has_waited_for_is_believed_however_slow_the_steps_are() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.offload.ask("r", desk.now_s)
    assert desk.match(tokens=40) is None
    desk.now_s += desk.options.lookup_deadline_s / 2
    desk.answer(2)
    desk.now_s += 10 * desk.options.moment_s
    assert desk.match(tokens=40) == 2 * CHUNK


def test_a_whole_prompt_is_believed_for_as_long_as_its_lease_however_long_it_waits() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.offload.ask("r", desk.now_s)
    desk.answer(3, ttl_s=30.0)
    desk.now_s += 28
    assert desk.match(tokens=40) == 3 * CHUNK
    desk.now_s += 1.5
    assert desk.match(tokens=40) is None, "its ranks could not use it any more"
