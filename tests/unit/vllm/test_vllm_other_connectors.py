"""Beside another connector, or with drafts: the engine's chunks are stored once they are known to be right."""

import pytest

from kvclient.offload.job_ends import Report
from kvclient.values import RetrieveResult
from kvclient.vllm.scheduler import Scheduled
from tests.rigs.vllm_rig import BLOCK, Bench, request


def test_what_another_connector_brought_is_stored_when_the_engine_has_looked_at_it() -> None:
    """A load within a step: 36 tokens, and the engine computes 5. Its outcome is known when the step after is over."""
    bench, asked = Bench(), request()
    assert bench.admit(asked) == 0
    tables = [bench.table]
    assert bench.half.step([Scheduled("r", 36, 41)], lambda name: tables) == ((), ())
    assert bench.half.step([Scheduled("r", 41, 42)], lambda name: tables) == ((), ())
    _, (order,) = bench.half.step([Scheduled("r", 42, 43)], lambda name: tables)
    assert (order.first_chunk, order.chunks) == (0, 3)


def test_what_another_connector_failed_to_bring_is_stored_when_it_is_computed() -> None:
    bench, asked = Bench(), request()
    assert bench.admit(asked) == 0
    tables = [bench.table]
    assert bench.half.step([Scheduled("r", 36, 41)], lambda name: tables) == ((), ())
    _, (order,) = bench.half.step([Scheduled("r", 0, 20)], lambda name: tables)
    assert (order.first_chunk, order.chunks) == (0, 1)
    _, (order,) = bench.half.step([Scheduled("r", 20, 41)], lambda name: tables)
    assert (order.first_chunk, order.chunks) == (1, 2)


def test_what_another_connector_brought_between_steps_is_stored_at_once() -> None:
    bench, asked = Bench(), request()
    assert bench.admit(asked) == 0
    _, (order,) = bench.half.step([Scheduled("r", 36, 41, loads_within=False)], lambda name: [bench.table])
    assert (order.first_chunk, order.chunks) == (0, 3)


def test_a_prefix_in_hbm_that_ends_within_a_block_is_no_doubt() -> None:
    bench, asked = Bench(), request()
    assert bench.admit(asked, hbm_tokens=4 * BLOCK) == 0
    assert bench.half.step([Scheduled("r", 5 * BLOCK - 1, 41)], lambda name: [bench.table]) != ((), ())


def test_drafts_that_were_accepted_are_no_doubt() -> None:
    """A step counts without its drafts, and the next begins after the accepted ones."""
    bench, asked = Bench(), request()
    assert bench.admit(asked) == 0
    assert bench.half.step([Scheduled("r", 0, 20)], lambda name: [bench.table]) != ((), ())
    assert bench.half.step([Scheduled("r", 20 + 2 * BLOCK, 41)], lambda name: [bench.table]) != ((), ())


def test_a_step_that_counts_drafts_before_they_are_accepted_stores_no_token_that_is_not_known() -> None:
    """Asynchronous scheduling does so: of three drafts of the previous step none was accepted."""
    bench, asked = Bench(), request(tokens=22)
    assert bench.admit(asked) == 0
    _, (order,) = bench.half.step([Scheduled("r", 0, 22)], lambda name: [bench.table])
    assert (order.first_chunk, order.chunks) == (0, 1)
    assert bench.half.step([Scheduled("r", 26, 27)], lambda name: [bench.table]) == ((), ())
    asked.all_token_ids += [22, 23]
    asked.num_tokens = 24
    _, (order,) = bench.half.step([Scheduled("r", 23, 24)], lambda name: [bench.table])
    assert (order.first_chunk, order.chunks) == (1, 1)
    assert order.parent + order.keys == bench.keyer.keys(asked, extra=b"", parent=b"", first_chunk=0)


# ---------------------------------------------------------------- requests that continue on these blocks


class Beside:
    """Requests of one prompt, 41 tokens. Another connector brings 36 of them to "r"; the engine shares the blocks."""

    def __init__(self, *, steps_ahead: int = 0, recovers: bool = True) -> None:
        self.bench = Bench(steps_ahead=steps_ahead, recovers=recovers)
        self.tables: dict[str, list[int]] = {}
        self.requests = {name: request(name) for name in "rst"}

    def admit(self, name: str, table: list[int], *, hbm: int) -> None:
        self.tables[name] = table
        assert self.bench.admit(self.requests[name], hbm) == 0

    def step(self, **computed: tuple[int, int]) -> list[tuple[object, int, int]]:
        """[begin, end) of each request -> stores as (request, first chunk, end)."""
        items = [Scheduled(name, begin, end) for name, (begin, end) in computed.items()]
        _, stores = self.bench.half.step(items, lambda name: [self.tables[name]])
        return [(order.request, order.first_chunk, order.first_chunk + order.chunks) for order in stores]


SHARED = list(range(10, 19))


def test_blocks_that_another_connector_has_just_brought_are_not_stored_for_who_takes_them_over() -> None:
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    assert beside.step(r=(36, 41)) == []
    beside.admit("s", [*SHARED, 30, 31], hbm=36)
    assert beside.step(r=(41, 42), s=(36, 41)) == []
    assert beside.step(r=(42, 43), s=(41, 42)) == [("r", 0, 3), ("s", 0, 3)], "the load went well"


@pytest.mark.parametrize("order", ["rs", "sr"])
def test_nothing_is_stored_of_a_request_that_continued_after_a_failed_load(order: str) -> None:
    """Request "r" is computed anew in two steps. Chunks that "s" has computed meanwhile stay wrong."""
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    beside.admit("s", [*SHARED, 30, 31], hbm=36)
    steps = [{"r": (36, 41), "s": (36, 41)}, {"r": (0, 20), "s": (41, 42)}, {"r": (20, 41), "s": (42, 43)}]
    stored = [one for step in steps for one in beside.step(**{name: step[name] for name in order})]
    assert stored == [("r", 0, 1), ("r", 1, 3)]
    assert beside.step(r=(41, 42), s=(43, 44)) == []


def test_who_takes_over_what_is_computed_anew_is_stored_when_it_is_whole() -> None:
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    assert beside.step(r=(36, 41)) == []
    assert beside.step(r=(0, 20)) == [("r", 0, 1)]
    beside.admit("s", [*SHARED, 30, 31], hbm=36)
    assert beside.step(r=(20, 24), s=(36, 41)) == [("r", 1, 2)], "12 of its tokens are still wrong"
    assert beside.step(r=(24, 41), s=(41, 42)) == [("r", 2, 3)]
    beside.admit("t", [*SHARED, 40, 41], hbm=36)
    assert beside.step(t=(36, 41)) == [("t", 0, 3)]


def test_what_was_computed_behind_a_load_that_failed_spoils_who_takes_it_over() -> None:
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    beside.admit("s", [*SHARED, 30, 31], hbm=36)
    assert beside.step(r=(36, 41), s=(36, 38)) == []
    assert beside.step(r=(0, 41), s=(38, 41)) == [("r", 0, 3)], "38 and 39 lie behind 36 and 37 of the step before"
    beside.admit("t", [*SHARED, 30, 41], hbm=40)
    assert beside.step(t=(40, 41)) == []
    beside.bench.half.finished("t")
    beside.admit("s", [*range(50, 57), 30, 31, 32, 33], hbm=0)  # preempted, and computed from its first token on
    assert beside.step(s=(0, 41)) == [("s", 0, 3)]


def test_a_load_that_failed_in_its_middle_leaves_what_lies_before() -> None:
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    assert beside.step(r=(36, 41)) == []
    assert beside.step(r=(20, 21)) == [("r", 0, 1)]
    beside.admit("s", [*SHARED[:5], *range(30, 36)], hbm=20)
    assert beside.step(s=(20, 41)) == [("s", 0, 3)]
    beside.admit("t", [*SHARED[:6], *range(40, 45)], hbm=24)
    assert beside.step(t=(24, 41)) == [], "of the sixth block one token is right"


def test_blocks_into_which_another_load_goes_are_in_doubt_for_its_sake_alone() -> None:
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    beside.step(r=(36, 41))
    beside.bench.half.finished("r")
    beside.admit("s", [*SHARED, 30, 31], hbm=0)
    assert beside.step(s=(36, 41)) == []
    assert beside.step(s=(41, 42)) == []
    assert beside.step(s=(42, 43)) == [("s", 0, 3)]
    beside.bench.half.finished("s")
    beside.admit("t", [20, 21, *range(40, 49)], hbm=0)  # blocks that "r" computed after its load are given away
    beside.step(t=(0, 41))
    beside.bench.half.finished("t")
    assert not beside.bench.half._unchecked


def test_blocks_that_turned_out_wrong_are_right_when_this_connector_has_filled_them() -> None:
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    beside.step(r=(36, 41))
    beside.bench.half.finished("r")  # its load's outcome was not heard: it counts as failed
    asked = request("n", 41, first=500)
    beside.bench.hold(asked, 3)
    beside.tables["n"] = [*SHARED, 30, 31, 32]  # given away
    assert beside.bench.half.match(asked, 0) == (36, True)
    beside.bench.half.allocated(asked, [beside.tables["n"]], 36)
    ((order,), _) = beside.bench.step()
    beside.bench.half.ended([Report(order.job, 0, RetrieveResult(True, 1, ""), 0.0)])
    beside.bench.half.allocated(asked, (), 0)
    asked.num_tokens, asked.all_token_ids = 48, [*asked.all_token_ids, *range(900, 907)]
    assert beside.step(n=(36, 48)) == [("n", 3, 4)]


def test_blocks_that_turned_out_wrong_are_right_when_another_connector_has_filled_them_between_steps() -> None:
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    beside.step(r=(36, 41))
    beside.bench.half.finished("r")
    beside.admit("s", [*SHARED, 30, 31], hbm=0)
    items = [Scheduled("s", 36, 41, loads_within=False)]
    _, (order,) = beside.bench.half.step(items, lambda name: [beside.tables[name]])
    assert (order.first_chunk, order.chunks) == (0, 3)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_load_whose_request_ends_first_went_well_only_if_the_step_has_brought_a_token(is_told: bool) -> None:
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    assert beside.step(r=(36, 41)) == []
    beside.requests["r"].num_tokens += is_told
    beside.bench.half.finished("r")
    beside.admit("s", [*SHARED, 30, 31], hbm=36)
    assert beside.step(s=(36, 41)) == ([("s", 0, 3)] if is_told else [])


def test_with_stages_nothing_is_stored_of_a_request_that_its_former_load_sets_back() -> None:
    """It was preempted and admitted anew before vLLM heard of its load, and a token of its is left out."""
    beside = Beside(steps_ahead=2)
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    assert beside.step(r=(36, 38)) == []
    beside.bench.half.preempted(["r"])
    assert beside.step() == []
    beside.admit("r", [*SHARED, 30, 31], hbm=36)
    assert beside.step(r=(36, 41)) == []
    assert beside.step(r=(0, 20)) == []
    assert beside.step(r=(20, 40)) == []
    beside.requests["r"].num_tokens += 1
    assert beside.step(r=(40, 42)) == []
    beside.bench.half.finished("r")
    beside.admit("s", [*range(50, 61)], hbm=0)
    assert beside.step(s=(0, 41)) == [("s", 0, 3)]


@pytest.mark.parametrize(("empty_steps", "begin"), [(0, 40), (0, 20), (4, 20)])
def test_with_stages_a_request_that_got_the_blocks_of_a_load_may_be_set_back_by_it(
    empty_steps: int, begin: int
) -> None:
    """All blocks have been computed anew, and yet vLLM does not know the load's outcome."""
    beside = Beside(steps_ahead=2)
    beside.admit("r", [*SHARED, 20], hbm=0)
    assert beside.step(r=(36, 40)) == []
    beside.bench.half.finished("r")
    beside.requests["n"] = request("n", 60, first=500)
    beside.admit("n", [*SHARED, 20, *range(30, 35)], hbm=0)
    assert beside.step(n=(0, 40)) == [("n", 0, 3)]
    for _ in range(empty_steps):
        beside.step()
    assert beside.step(n=(begin, 60)) == ([("n", 3, 5)] if begin == 40 else [])


def test_nothing_is_kept_of_doubts_that_are_over() -> None:
    beside = Beside()
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    beside.admit("s", [*SHARED, 30, 31], hbm=36)
    beside.step(r=(36, 41), s=(36, 41))
    beside.step(r=(0, 41), s=(41, 42))
    assert beside.bench.half._unchecked
    beside.bench.half.finished("s")
    beside.admit("t", [30, 31, 20, 21, *range(34, 41)], hbm=0)  # blocks of both are given away
    beside.step(t=(0, 41))
    beside.bench.half.finished("r")
    beside.bench.half.finished("t")
    assert not beside.bench.half._unchecked


def test_with_stages_nothing_is_kept_of_a_load_whose_outcome_is_known() -> None:
    beside = Beside(steps_ahead=2)
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    assert beside.step(r=(36, 41)) == []
    beside.requests["r"].num_tokens += 3
    beside.bench.half.finished("r")
    for _ in range(2):
        assert beside.bench.half._unchecked
        beside.step()
    beside.step()
    assert not beside.bench.half._unchecked


# ---------------------------------------------------------------- engines that compute wrong KV after a failure

ENGINE = "vllm.kvserver.scheduler"


@pytest.mark.parametrize("block", [SHARED[0], SHARED[-1]])
def test_an_engine_that_does_not_recover_stores_nothing_more_after_a_failure(
    block: int, caplog: pytest.LogCaptureFixture
) -> None:
    beside = Beside(steps_ahead=1, recovers=False)
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    assert beside.step(r=(36, 41)) == []
    assert beside.step(r=(41, 42)) == []
    beside.bench.half.failed([block])
    beside.bench.half.failed([block])
    assert [record.levelname for record in caplog.records if record.name == ENGINE] == ["WARNING"]
    assert [beside.step(r=(begin, begin + 1)) for begin in range(42, 48)] == [[]] * 6
    beside.admit("s", list(range(30, 41)), hbm=0)
    assert beside.step(s=(0, 41)) == []
    assert beside.step(s=(41, 42)) == []


@pytest.mark.parametrize(
    ("steps_ahead", "recovers", "blocks"),
    [(1, False, [77]), (1, False, []), (1, True, SHARED), (0, False, SHARED)],
    ids=["failed between steps", "none failed", "recovers", "is not ahead"],
)
def test_other_failures_and_engines_that_recover_stop_no_stores(
    steps_ahead: int, recovers: bool, blocks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    beside = Beside(steps_ahead=steps_ahead, recovers=recovers)
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    assert beside.step(r=(36, 41)) == []
    beside.bench.half.failed(blocks)
    beside.admit("s", list(range(30, 41)), hbm=0)
    assert beside.step(s=(0, 41)) == [("s", 0, 3)]
    assert caplog.records == []


def test_a_failure_that_comes_when_the_load_is_known_to_have_gone_well_is_of_another_load() -> None:
    beside = Beside(steps_ahead=1, recovers=False)
    beside.admit("r", [*SHARED, 20, 21], hbm=0)
    assert beside.step(r=(36, 41)) == []
    for begin in (41, 42, 43):
        beside.step(r=(begin, begin + 1))
    beside.bench.half.failed(SHARED)
    beside.admit("s", list(range(30, 41)), hbm=0)
    assert beside.step(s=(0, 41)) == [("s", 0, 3)]
