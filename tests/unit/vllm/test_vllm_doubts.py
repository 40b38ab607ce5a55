"""Doubtful blocks, token by token: blocks of 4; another connector has loaded blocks 0 to 4 of "r"'s table."""

import pytest

from kvclient.vllm.other_connectors import UncheckedLoads

SAID = 24
BROUGHT = [10, 11, 12, 13, 14]
TABLES = {
    "r": [*BROUGHT, 15, 16],
    "s": [*BROUGHT, 25, 26],
    "t": [*BROUGHT, 25, 36],
    "u": [*BROUGHT, 25, 36, 47],
    "v": [*BROUGHT, 15, 56],
    "w": [*BROUGHT, 15, 56],
    "n": [10, *range(70, 79)],
    "o": [*range(80, 90)],
    "p": [*range(90, 99)],
    "x": [*range(60, 65), 15, 66],
}


class Steps:
    def __init__(self, *, steps_ahead: int = 0, workers_go_back: bool = True) -> None:
        self.doubts = UncheckedLoads(4, steps_ahead=steps_ahead, workers_go_back=workers_go_back)
        self.known: dict[str, int] = {}

    def admit(self, name: str, known: int) -> None:
        self.known[name] = known

    def step(self, **computed: tuple[int, int]) -> set[str]:
        """[begin, end) of each request -> the requests that may be stored."""
        self.doubts.begin_step()
        for name, (begin, end) in computed.items():
            known = self.known.pop(name, None)
            self.doubts.notice(name, TABLES[name], begin=begin, end=end, known=known, said_tokens=SAID)
        return {
            name
            for name, (begin, end) in computed.items()
            if not self.doubts.holds_back(name, TABLES[name], begin=begin, end=end, said_tokens=SAID)
        }


def loaded(*, steps_ahead: int = 0, workers_go_back: bool = True) -> Steps:
    """A request with a load under way; it had 24 tokens when it was admitted."""
    steps = Steps(steps_ahead=steps_ahead, workers_go_back=workers_go_back)
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


def test_one_that_finds_only_what_was_computed_behind_a_doubtful_load_waits_for_its_outcome() -> None:
    """It has its own copy of the tokens before. The engine found the block behind them in its prefix cache."""
    steps = loaded()
    steps.admit("x", 24)
    assert steps.step(x=(24, 25), r=(24, 25)) == set()
    assert steps.step(r=(0, 24)) == {"r"}
    steps.admit("x", 24)
    assert steps.step(x=(24, 25)) == {"x"}


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


def test_where_workers_count_nothing_of_a_request_is_right_after_it_is_set_back() -> None:
    """It is set back to 0, and the workers go on at 24."""
    steps = loaded(workers_go_back=False)
    steps.admit("s", 20)
    assert steps.step(s=(20, 22), r=(0, 18)) == set()
    assert steps.step(s=(22, 24), r=(18, 24)) == set()
    assert steps.step(r=(24, 25)) == set()
    steps.admit("w", 0)
    assert steps.step(w=(0, 28)) == {"w"}
    steps.admit("r", 0)
    assert steps.step(r=(0, 24)) == {"r"}


# ---------------------------------------------------------------- set back by a load that somebody else has left


@pytest.fixture
def staged() -> Steps:
    """The engine schedules three steps before it knows the outcome of the first."""
    return loaded(steps_ahead=2)


def test_with_stages_one_that_is_admitted_anew_is_set_back_by_its_former_load(staged: Steps) -> None:
    """It has found the block that it brought in the prefix cache. A token that it says meanwhile is left out."""
    staged.admit("r", 20)
    assert staged.step(r=(20, 24)) == set()
    assert staged.step(r=(0, 8)) == set()
    assert staged.step(r=(8, 23)) == set()
    assert staged.step(r=(23, 25)) == set()
    staged.admit("w", 0)
    assert staged.step(w=(0, 28)) == {"w"}
    staged.admit("r", 0)
    assert staged.step(r=(0, 24)) == {"r"}


def test_with_stages_one_that_comes_when_the_load_has_no_request_any_more_is_set_back(staged: Steps) -> None:
    staged.doubts.forget("r", said_tokens=SAID)
    staged.admit("s", 20)
    assert staged.step(s=(20, 24)) == set()
    assert staged.step(s=(0, 25)) == set()


@pytest.mark.parametrize("begin", [0, 16])
def test_with_stages_one_that_got_a_block_of_the_load_is_set_back(staged: Steps, begin: int) -> None:
    """The engine looks for the blocks of the failed load, and not for the requests that wanted it."""
    staged.doubts.forget("r", said_tokens=SAID)
    staged.admit("n", 0)
    assert staged.step(n=(0, 18)) == {"n"}
    assert staged.step(n=(begin, 24)) == set()
    assert staged.step(n=(24, 25)) == set()


def test_with_stages_one_that_stands_before_the_load_in_its_step_is_set_back() -> None:
    steps = Steps(steps_ahead=2)
    steps.admit("r", 0)
    steps.admit("v", 24)
    assert steps.step(v=(24, 28), r=(20, 24)) == set()
    assert steps.step(v=(0, 28)) == set()
    assert "v" in steps.doubts._lost


@pytest.mark.parametrize("waits", [0, 4])
def test_with_stages_a_step_that_is_the_last_before_the_outcome_is_set_back_whenever_the_next_comes(
    staged: Steps, waits: int
) -> None:
    staged.doubts.forget("r", said_tokens=SAID)
    staged.step()
    staged.admit("n", 0)
    assert staged.step(n=(0, 20)) == {"n"}
    for _ in range(waits):
        staged.step()
    assert staged.doubts
    assert staged.step(n=(0, 24)) == set()


def test_with_stages_one_that_is_set_back_to_the_end_of_its_load_has_wrong_blocks(staged: Steps) -> None:
    """Another request computes the loaded blocks anew, and vLLM sets this one back only to its first step."""
    assert staged.step(r=(24, 25)) == set()
    assert staged.step(r=(24, 25)) == set()
    for begin in (25, 26, 27):
        assert staged.step(r=(begin, begin + 1)) == set()
    staged.doubts.forget("r", said_tokens=28)
    staged.admit("s", 20)
    assert staged.step(s=(20, 24)) == set(), "nobody has computed 0 to 19 anew"


def test_with_stages_one_that_starts_over_is_not_set_back(staged: Steps) -> None:
    staged.admit("o", 0)
    assert staged.step(o=(0, 20)) == {"o"}
    staged.admit("o", 0)
    assert staged.step(o=(0, 18)) == {"o"}
    assert staged.step(o=(18, 24)) == {"o"}


def test_with_stages_drafts_that_are_not_accepted_set_nobody_back(staged: Steps) -> None:
    staged.admit("o", 0)
    assert staged.step(o=(0, 28)) == {"o"}
    assert staged.step(o=(25, 31)) == {"o"}
    assert staged.step(o=(26, 32)) == {"o"}


def test_with_stages_nothing_is_kept_of_who_was_not_set_back(staged: Steps) -> None:
    staged.admit("o", 0)
    staged.admit("p", 0)
    assert staged.step(o=(0, 8), p=(0, 28)) == {"o", "p"}
    assert staged.step(r=(24, 25)) == set()
    staged.doubts.forget("p", said_tokens=SAID)
    assert staged.step(o=(8, 18), r=(25, 26)) == {"o"}
    assert staged.step(r=(26, 27)) == {"r"}
    assert not staged.doubts


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
