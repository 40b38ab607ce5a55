"""What the pipeline stages of an engine tell each other before any of them registers anything."""

from collections.abc import Sequence
from threading import Barrier, Thread
from typing import Any

from kvclient.vllm.stages import Stage, told_by_all
from kvserver.errors import RequestError
from tests.rigs.vllm_namespace import namespace

FIRST = Stage([["a", "b"], ["w"]], ["F", "F", "W"], ["one"], 6)
LAST = Stage([["c"], ["x"]], ["F", "W"], [], 4)


def all_told(*looks: Stage | Exception) -> list[list[Stage] | Exception]:
    """What each stage hears when all speak at once."""
    told: list[Any] = [None] * len(looks)
    heard: list[Any] = [None] * len(looks)
    everybody = Barrier(len(looks), timeout=10)

    def stage(number: int) -> None:
        def look() -> Stage:
            seen = looks[number]
            if isinstance(seen, Exception):
                raise seen
            return seen

        def gather(mine: object) -> Sequence[Any]:
            told[number] = mine
            everybody.wait()
            return told

        try:
            heard[number] = told_by_all(look, gather)
        except Exception as problem:
            heard[number] = problem

    threads = [Thread(target=stage, args=[number]) for number in range(len(looks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_every_stage_hears_the_same_of_all_in_their_order() -> None:
    (one, other) = all_told(FIRST, LAST)
    assert one == other
    assert [stage.layers for stage in one] == [FIRST.layers, LAST.layers]  # type: ignore[union-attr]


def test_ranks_share_kv_only_as_far_as_on_every_stage() -> None:
    (one, _) = all_told(FIRST, LAST)
    assert {stage.replicas for stage in one} == {2}  # type: ignore[union-attr]


def test_a_stage_that_cannot_be_cached_stops_all_of_them() -> None:
    """The others would wait for it for ever."""
    own = RequestError("layout", "a kind of its own")
    (first, last) = all_told(FIRST, own)
    assert last is own
    assert isinstance(first, RequestError)
    assert "stage 1" in str(first)
    assert "a kind of its own" in str(first)


def test_a_bug_on_one_stage_stops_all_of_them_as_well() -> None:
    (first, last) = all_told(AttributeError("no such field"), LAST)
    assert isinstance(first, AttributeError)
    assert isinstance(last, RequestError)
    assert "stage 0" in str(last)


def test_a_stage_that_lacks_the_layers_of_a_group_is_refused_on_all() -> None:
    for problem in all_told(FIRST, Stage([["c", "d"], []], ["F", "F"], [], 1)):
        assert isinstance(problem, RequestError)
        assert "stage 1" in str(problem)
        assert "[1]" in str(problem)


SPLITS: list[list[list[list[str]]]] = [
    [[["a", "b", "c", "d"]]],
    [[["a"]], [["b", "c", "d"]]],
    [[["a", "b"]], [["c", "d"]]],
    [[["a"]], [["b"]], [["c", "d"]]],
    [[["a"]], [["b", "c"]], [["d"]]],
    [[["a"]], [["c", "b"]], [["d"]]],
    [[["b", "c", "d"]], [["a"]]],
]
"""Layers by stage and group."""


def test_each_split_of_the_layers_is_a_namespace_of_its_own() -> None:
    found = {namespace(stages=[Stage(names, ["F"] * len(names[0]), [], 1) for names in split]) for split in SPLITS}
    assert len(found) == len(SPLITS)


def test_which_stage_has_which_backend_is_in_the_namespace() -> None:
    def of(first: str, last: str) -> bytes:
        return namespace(stages=[Stage([["a"]], [first], [], 1), Stage([["b"]], [last], [], 1)])

    assert len({of("F", "G"), of("G", "F"), of("F", "F"), of("G", "G")}) == 4


def test_how_the_tokens_of_a_block_are_dealt_out_is_in_the_namespace() -> None:
    found = {namespace(contexts=contexts, interleave=interleave) for contexts in (1, 2, 3) for interleave in (1, 16)}
    assert len(found) == 5, "without a context there is nothing to deal out"
