"""Doubtful blocks, token by token: blocks of 4; another connector has loaded blocks 0 to 4 of "r"'s table."""

import pytest

from kvclient.vllm.other_connectors import UncheckedLoads

BROUGHT = [10, 11, 12, 13, 14]
TABLES = {
    "r": [*BROUGHT, 15, 16],
    "s": [*BROUGHT, 25, 26],
    "t": [*BROUGHT, 25, 36],
    "u": [*BROUGHT, 25, 36, 47],
    "v": [*BROUGHT, 15, 56],
    "w": [*BROUGHT, 15, 56],
}


class Steps:
    def __init__(self, *, steps_ahead: int = 0) -> None:
        self.doubts = UncheckedLoads(4, steps_ahead=steps_ahead)
        self.known: dict[str, int] = {}

    def admit(self, name: str, known: int) -> None:
        self.known[name] = known

    def step(self, **computed: tuple[int, int]) -> set[str]:
        """[begin, end) of each request -> the requests that may be stored."""
        for name, (begin, end) in computed.items():
            known = self.known.pop(name, None)
            self.doubts.notice(name, TABLES[name], begin=begin, end=end, known=known, said_tokens=24)
        return {
            name
            for name, (begin, end) in computed.items()
            if not self.doubts.holds_back(name, TABLES[name], begin=begin, end=end)
        }


def loaded(*, steps_ahead: int = 0) -> Steps:
    """A request with a load under way; it had 24 tokens when it was admitted."""
    steps = Steps(steps_ahead=steps_ahead)
    steps.admit("r", 0)
    assert steps.step(r=(20, 24)) == set()
    return steps


@pytest.fixture
def steps() -> Steps:
    return loaded()


@pytest.fixture
def ahead() -> Steps:
    """The engine schedules each step before the previous one has ended."""
    return loaded(steps_ahead=1)


def test_a_block_that_is_computed_anew_in_two_steps_is_right_after_the_second(steps: Steps) -> None:
    assert steps.step(r=(0, 18)) == {"r"}
    steps.admit("s", 20)
    assert steps.step(s=(20, 22)) == set(), "18 and 19 are wrong"
    assert steps.step(r=(18, 24)) == {"r"}
    steps.admit("t", 20)
    assert steps.step(t=(20, 22)) == {"t"}


def test_what_it_computed_itself_behind_its_load_that_failed_is_wrong_until_it_is_computed_anew(steps: Steps) -> None:
    """The engine keeps it in its prefix cache, where another request may find it if this one is aborted meanwhile."""
    assert steps.step(r=(0, 20)) == {"r"}
    steps.doubts.forget("r", said_tokens=24)
    steps.admit("v", 24)
    assert steps.step(v=(24, 28)) == set()
    steps.admit("w", 0)
    assert steps.step(w=(0, 28)) == {"w"}
    assert not steps.doubts._wrong.keys() & set(TABLES["w"])


@pytest.mark.parametrize(("begin", "end", "is_right"), [(0, 20, True), (0, 23, False), (0, 24, True), (8, 24, False)])
def test_a_block_is_right_once_something_else_was_brought_into_all_of_it(
    steps: Steps, begin: int, end: int, is_right: bool
) -> None:
    steps.doubts.forget("r", said_tokens=24)
    steps.doubts.brought(TABLES["r"], begin=begin, end=end)
    steps.admit("v", end)
    assert steps.step(v=(end, 28)) == ({"v"} if is_right else set())


def test_a_wrong_token_early_in_a_block_makes_the_later_ones_wrong(steps: Steps) -> None:
    """Token 21 was computed on blocks that turned out wrong; computing 22 and 23 anew does not repair it."""
    steps.admit("s", 20)
    assert steps.step(s=(20, 22)) == set()
    assert steps.step(s=(22, 24)) == set()
    assert steps.step(r=(0, 24), s=(22, 24)) == {"r"}
    assert steps.step(s=(24, 25)) == set()
    assert steps.step(s=(20, 24)) == {"s"}, "from where the block begins, it does"


def test_what_was_computed_behind_wrong_blocks_after_their_failure_was_known_is_wrong_as_well(steps: Steps) -> None:
    assert steps.step(r=(0, 8)) == {"r"}
    steps.admit("s", 20)
    assert steps.step(s=(20, 22)) == set()
    assert steps.step(s=(22, 24)) == set()
    assert steps.step(r=(8, 24), s=(22, 24)) == {"r"}
    steps.admit("t", 24)
    assert steps.step(t=(24, 28)) == set(), "it shares 20 to 23"
    steps.admit("u", 28)
    assert steps.step(u=(28, 29)) == set(), "it shares what was computed behind these"


def test_a_request_that_is_admitted_anew_has_not_heard_of_its_load(steps: Steps) -> None:
    """The request was preempted, and vLLM looks for failures only among running ones."""
    steps.admit("r", 20)
    assert steps.step(r=(20, 24)) == set()
    steps.admit("s", 20)
    assert steps.step(s=(20, 22)) == set()
    assert steps.step(r=(24, 25), s=(22, 23)) == set()
    assert steps.step(r=(25, 26), s=(23, 24)) == set()


def test_async_nothing_that_a_request_computes_behind_its_failed_load_is_right(ahead: Steps) -> None:
    """vLLM leaves out a token of it, so the workers are one token ahead of the scheduler."""
    assert ahead.step(r=(24, 25)) == set(), "scheduled before anybody has heard"
    assert ahead.step(r=(0, 26)) == set()
    assert ahead.step(r=(26, 27)) == set()
    ahead.doubts.forget("r", said_tokens=27)
    ahead.admit("v", 24)
    assert ahead.step(v=(24, 28)) == set(), "its blocks are in the engine's prefix cache"
    ahead.admit("w", 0)
    assert ahead.step(w=(0, 28)) == {"w"}


def test_async_what_it_computes_anew_is_no_better_for_one_that_comes_before_it_in_the_step(ahead: Steps) -> None:
    assert ahead.step(r=(24, 25)) == set()
    ahead.admit("v", 24)
    assert ahead.step(v=(24, 28), r=(0, 26)) == set()


def test_async_those_behind_it_are_set_back_as_well(ahead: Steps) -> None:
    ahead.admit("s", 20)
    assert ahead.step(s=(20, 22), r=(24, 25)) == set()
    assert ahead.step(s=(20, 22), r=(0, 24)) == set()
    ahead.admit("w", 0)
    assert ahead.step(s=(22, 24), w=(0, 28)) == {"w"}


def test_async_those_behind_one_that_is_gone_are_set_back_as_well(ahead: Steps) -> None:
    """Request "r" was aborted before vLLM heard of its load, so "s" recomputes the missing blocks, one token ahead."""
    ahead.admit("s", 20)
    assert ahead.step(s=(20, 24)) == set()
    ahead.doubts.forget("r", said_tokens=24)
    assert ahead.step(s=(0, 25)) == set()
    assert ahead.step(s=(25, 26)) == set()
    ahead.admit("s", 0)
    assert ahead.step(s=(0, 26)) == {"s"}


def test_async_one_that_has_finished_behind_a_load_is_forgotten(ahead: Steps) -> None:
    ahead.admit("s", 20)
    assert ahead.step(s=(20, 24)) == set()
    ahead.doubts.forget("s", said_tokens=25)
    assert ahead.step(r=(0, 24)) == set()
    ahead.doubts.forget("r", said_tokens=24)
    assert not ahead.doubts._lost


def test_async_a_request_that_is_admitted_anew_counts_like_its_workers(ahead: Steps) -> None:
    assert ahead.step(r=(24, 25)) == set()
    assert ahead.step(r=(0, 26)) == set()
    ahead.admit("r", 0)
    assert ahead.step(r=(0, 26)) == {"r"}
    assert ahead.step(r=(26, 27)) == {"r"}


def test_async_a_load_that_went_well_is_known_two_steps_later(ahead: Steps) -> None:
    assert ahead.step(r=(24, 25)) == set()
    assert ahead.step(r=(25, 26)) == {"r"}


def test_with_stages_a_load_that_went_well_is_known_when_as_many_steps_have_ended() -> None:
    """Three steps are scheduled before the outcome of one is known."""
    staged = loaded(steps_ahead=2)
    assert staged.step(r=(24, 25)) == set()
    assert staged.step(r=(25, 26)) == set()
    assert staged.step(r=(26, 27)) == {"r"}


@pytest.mark.parametrize(("said_tokens", "is_right"), [(26, False), (27, True)])
def test_with_stages_as_many_tokens_do_not_say_that_the_load_went_well(said_tokens: int, is_right: bool) -> None:
    staged = loaded(steps_ahead=2)
    staged.doubts.forget("r", said_tokens=said_tokens)
    staged.admit("v", 24)
    assert staged.step(v=(24, 28)) == ({"v"} if is_right else set())


@pytest.mark.parametrize(("said_tokens", "is_right"), [(25, False), (26, True)])
def test_async_one_token_does_not_say_that_the_load_went_well(ahead: Steps, said_tokens: int, is_right: bool) -> None:
    """The token may be the next step's."""
    assert ahead.step(r=(24, 25)) == set()
    ahead.doubts.forget("r", said_tokens=said_tokens)
    ahead.admit("v", 24)
    assert ahead.step(v=(24, 28)) == ({"v"} if is_right else set())


def test_a_token_says_that_the_load_went_well(steps: Steps) -> None:
    steps.doubts.forget("r", said_tokens=25)
    steps.admit("v", 24)
    assert steps.step(v=(24, 28)) == {"v"}
