"""Users of a load take turns correctly, on a clock that jumps to the next event."""

import asyncio
import heapq
from itertools import count

import pytest

from benchmarks.vllm_load.asks import Ask, Fork, Line, Phase, Span, Workload
from benchmarks.vllm_load.crowd import Crowd, Outcome
from benchmarks.vllm_load.ramp import Ramp
from benchmarks.vllm_load.reply import Reply
from benchmarks.vllm_load.working_set import WorkingSet
from benchmarks.vllm_load.workloads import Chat


class JumpingClock:
    """Jumps to the next sleeper's time when nobody has anything left to do now."""

    def __init__(self) -> None:
        self._now_s = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = count()

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._numbers), woken))
        await woken

    async def jump(self, until: "asyncio.Task[list[Outcome]]") -> list[Outcome]:
        while not until.done():
            for _ in range(50):
                await asyncio.sleep(0)
            if self._sleepers and not until.done():
                self._now_s, _, woken = heapq.heappop(self._sleepers)
                woken.set_result(None)
        return until.result()


def ask(name: str, *, tokens: int = 10, think_s: float = 0.0) -> Ask:
    return Ask(name, "first", (Span(name, tokens),), 1, think_s)


def play(*phases: Phase, answer_s: float = 2.0, late: str = "") -> dict[str, Outcome]:
    """Runs the phases; returns the outcomes. Each answer takes `answer_s`, with its first token after half of that.

    The answer to `late` reports that it took much longer."""

    async def run() -> list[Outcome]:
        clock = JumpingClock()

        async def answer(asked: Ask) -> Reply:
            await clock.sleep(answer_s)
            return Reply(ttft_s=50.0 if asked.name == late else answer_s / 2, total_s=answer_s)

        return await clock.jump(asyncio.create_task(Crowd(answer, clock=clock).run(Workload("", phases))))

    return {outcome.ask.name: outcome for outcome in asyncio.run(asyncio.wait_for(run(), 30))}


def times(found: dict[str, Outcome]) -> dict[str, float]:
    return {name: outcome.began_s for name, outcome in found.items()}


def test_so_many_users_at_a_time_take_lines_in_order() -> None:
    lines = [Line((ask(name),)) for name in "abcde"]
    assert times(play(Phase(lines, 2))) == {"a": 0.0, "b": 0.0, "c": 2.0, "d": 2.0, "e": 4.0}


def test_a_user_waits_for_each_answer_and_then_thinks() -> None:
    line = Line((ask("a"), ask("b", think_s=3.0), ask("c", think_s=0.5)))
    assert times(play(Phase([line], 1))) == {"a": 0.0, "b": 5.0, "c": 7.5}


def test_a_phase_begins_when_the_one_before_has_ended() -> None:
    first = [Line((ask("a"), ask("b"))), Line((ask("c"),))]
    assert times(play(Phase(first, 2), Phase([Line((ask("d"),))], 1)))["d"] == 4.0


def test_lines_do_not_start_before_their_time() -> None:
    lines = [Line((ask("a"),), start_s=1.0), Line((ask("b"),), start_s=1.5), Line((ask("c"),))]
    assert times(play(Phase(lines, 3))) == {"a": 1.0, "b": 1.5, "c": 0.0}


def test_a_fork_runs_side_by_side_and_what_follows_waits_for_all() -> None:
    fork = Fork(((ask("b"),), (ask("c", think_s=4.0), ask("d"))))
    assert times(play(Phase([Line((ask("a"), fork, ask("e")))], 1))) == {"a": 0, "b": 2, "c": 6, "d": 8, "e": 10}


def test_nothing_begins_when_the_time_is_over_and_what_runs_is_waited_for() -> None:
    line = Line((ask("a"), ask("b", think_s=1.5), ask("c"), ask("d")))
    assert times(play(Phase([line, Line((ask("e"),))], 1, duration_s=5.0))) == {"a": 0.0, "b": 3.5}


def test_a_pause_that_outlasts_the_time_ends_its_user_and_no_other() -> None:
    lines = [Line((ask("a"), ask("b", think_s=9.0))), Line((ask("c"), ask("d")))]
    assert set(play(Phase(lines, 2, duration_s=5.0))) == {"a", "c", "d"}


def test_nobody_goes_on_behind_a_fork_that_the_time_cut_short() -> None:
    fork = Fork(((ask("b"),), (ask("c", think_s=9.0),)))
    assert set(play(Phase([Line((ask("a"), fork, ask("d")))], 1, duration_s=5.0))) == {"a", "b"}


def test_conversations_take_each_others_place_so_that_there_are_always_as_many_users() -> None:
    (phase,) = Chat(users=3, conversations=7, turns=2, think_s=0.0, join_s=0.0).draw(1).phases
    began = times(play(phase))
    assert [began[f"{talk}.0"] for talk in range(7)] == [0.0, 0.0, 0.0, 4.0, 4.0, 4.0, 8.0]
    assert [began[f"{talk}.1"] for talk in range(7)] == [2.0, 2.0, 2.0, 6.0, 6.0, 6.0, 10.0]


def endless(tokens: int = 10) -> list[Line]:
    return [Line(tuple(ask(f"{user}.{turn}", tokens=tokens) for turn in range(50))) for user in range(20)]


def test_users_join_every_period_up_to_the_most() -> None:
    ramp = Ramp(users_max=6, period_s=5.0, ttft_s_max=1.7, first_tokens_max=10_000)  # headroom 41 %: 3 users at a time
    found = play(Phase(endless(), 1, ramp, duration_s=21.0))
    began = {name: outcome.began_s for name, outcome in found.items() if name.endswith(".0")}
    assert began == {"0.0": 0.0, "1.0": 5.0, "2.0": 5.0, "3.0": 5.0, "4.0": 10.0, "5.0": 10.0}


def test_who_would_exceed_the_budget_of_first_prompts_joins_a_period_later() -> None:
    ramp = Ramp(users_max=4, period_s=5.0, ttft_s_max=1.7, first_tokens_max=25)
    found = play(Phase(endless(tokens=10), 1, ramp, duration_s=21.0))
    began = {name: outcome.began_s for name, outcome in found.items() if name.endswith(".0")}
    assert began == {"0.0": 0.0, "1.0": 5.0, "2.0": 5.0, "3.0": 10.0}


def test_a_working_set_counts_each_piece_once_and_for_a_while() -> None:
    used = WorkingSet(10.0)
    used.asked((Span("a", 64), Span("b", 20)), 1.0)
    used.asked((Span("a", 64), Span("b", 64), Span("c", 5)), 3.0)
    used.asked((Span("a", 30),), 8.0)
    assert used.tokens(13.0) == 64 + 64 + 5
    assert used.tokens(13.1) == 64
    assert used.tokens(18.1) == 0


@pytest.mark.parametrize(
    ("ttfts_s", "joining"),
    [
        ([[]], 0),  # nothing is known
        ([[6.0]], 3),  # 40 % left
        ([[7.9]], 2),  # just more than the fifth
        ([[8.1]], 0),
        ([[0.0]], 7),
        ([[60.0], [6.0], [6.0], [6.0]], 3),  # only the last three periods
        ([[9.5] * 9, [1.0]], 4),  # a mean over periods, not over requests: 47.5 % left
        ([[1.0], []], 7),
    ],
)
def test_the_ramp_follows_the_headroom(ttfts_s: list[list[float]], joining: int) -> None:
    assert Ramp(users_max=99, period_s=1.0, ttft_s_max=10.0, first_tokens_max=1).joining(9, ttfts_s) == joining
