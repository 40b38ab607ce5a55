"""Doubts, token by token: blocks of 4; another connector has brought places 0 to 4 of "r"'s table."""

import pytest

from kvclient.vllm_doubts import Doubts

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
    def __init__(self) -> None:
        self.doubts = Doubts(4)
        self.known: dict[str, int] = {}

    def admit(self, name: str, known: int) -> None:
        self.known[name] = known

    def step(self, **computed: tuple[int, int]) -> set[str]:
        """[begin, end) of each -> those that may be stored."""
        for name, (begin, end) in computed.items():
            known = self.known.pop(name, None)
            self.doubts.notice(name, TABLES[name], begin=begin, end=end, known=known, said_tokens=24)
        return {
            name
            for name, (begin, end) in computed.items()
            if not self.doubts.holds_back(name, TABLES[name], begin=begin, end=end)
        }


@pytest.fixture
def steps() -> Steps:
    steps = Steps()
    steps.admit("r", 0)
    assert steps.step(r=(20, 24)) == set()
    return steps


def test_a_block_that_is_computed_anew_in_two_steps_is_right_after_the_second(steps: Steps) -> None:
    assert steps.step(r=(0, 18)) == {"r"}
    steps.admit("s", 20)
    assert steps.step(s=(20, 22)) == set(), "18 and 19 are wrong"
    assert steps.step(r=(18, 24)) == {"r"}
    steps.admit("t", 20)
    assert steps.step(t=(20, 22)) == {"t"}


def test_what_it_computed_itself_behind_its_load_that_failed_is_wrong_until_it_is_computed_anew(steps: Steps) -> None:
    """The engine has it in its prefix cache, and may take it up from there when the request is aborted meanwhile."""
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


def test_of_a_block_in_two_parts_the_earlier_counts(steps: Steps) -> None:
    """21 was computed behind what turned out wrong; to compute 22 and 23 anew does not mend it."""
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
    """Preempted: vLLM looks for failures among those that run."""
    steps.admit("r", 20)
    assert steps.step(r=(20, 24)) == set()
    steps.admit("s", 20)
    assert steps.step(s=(20, 22)) == set()
    assert steps.step(r=(24, 25), s=(22, 23)) == set()
    assert steps.step(r=(25, 26), s=(23, 24)) == set()
