"""Doubts, token by token: blocks of 4; another connector has brought places 0 to 4 of "r"'s table."""

import pytest

from kvclient.vllm_doubts import Doubts

BROUGHT = [10, 11, 12, 13, 14]
TABLES = {
    "r": [*BROUGHT, 15, 16],
    "s": [*BROUGHT, 25, 26],
    "t": [*BROUGHT, 25, 36],
    "u": [*BROUGHT, 25, 36, 47],
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
