"""Users who take lines and send their requests, each waiting for its answers. Knows no HTTP and no engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from benchmarks.vllm_load.asks import Ask, Fork, Line, Phase, Workload
from benchmarks.vllm_load.ramp import Ramp
from benchmarks.vllm_load.reply import Reply
from benchmarks.vllm_load.working_set import WorkingSet

Answerer = Callable[[Ask], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request and its reply."""

    ask: Ask
    reply: Reply
    began_s: float
    """Start, since the beginning of the workload."""
    users: int
    """Number of users when it began."""


class Clock(Protocol):
    """The time of a crowd; the tests' clock advances by itself."""

    def now_s(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    def now_s(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Crowd:
    """Runs one workload once. `on_outcome` is called with each outcome."""

    def __init__(
        self, answerer: Answerer, *, on_outcome: Callable[[Outcome], None] = lambda _: None, clock: Clock | None = None
    ) -> None:
        self._answerer = answerer
        self._on_outcome = on_outcome
        self._clock = clock or RealClock()
        self._began_s = self._clock.now_s()
        self._outcomes: list[Outcome] = []
        self._users = 0

    async def run(self, workload: Workload) -> list[Outcome]:
        """Outcomes, in the order in which they ended."""
        self._began_s = self._clock.now_s()
        for phase in workload.phases:
            await _Running(self, phase).run()
        return self._outcomes

    # ---------------------------------------------------------------- used by phases

    def now_s(self) -> float:
        return self._clock.now_s() - self._began_s

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            await self._clock.sleep(seconds)

    def joined(self, users: int) -> None:
        self._users += users

    async def ask(self, ask: Ask) -> Outcome:
        began_s, users = self.now_s(), self._users
        outcome = Outcome(ask, await self._answerer(ask), began_s, users)
        self._outcomes.append(outcome)
        self._on_outcome(outcome)
        return outcome


class _Running:
    """A running phase."""

    def __init__(self, crowd: Crowd, phase: Phase) -> None:
        self._crowd = crowd
        self._phase = phase
        self._lines: Iterator[Line] = iter(phase.lines)
        self._began_s = crowd.now_s()
        self._users = 0
        self._ttfts_s: list[list[float]] = [[]]
        """Times to first token by period, the newest last."""
        self._begun_tokens = 0
        """Tokens of the first prompts of lines begun in this period, except those of the initial users."""
        ramp = phase.ramp
        self._working_set = WorkingSet(ramp.working_set_s) if ramp and ramp.working_set_tokens_max else None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._phase.users):
                self._join(group, None)
            if self._phase.ramp is not None:
                group.create_task(self._let_join(group, self._phase.ramp))

    def _join(self, group: asyncio.TaskGroup, line: Line | None) -> None:
        self._users += 1
        self._crowd.joined(1)
        group.create_task(self._user(line))

    async def _user(self, line: Line | None) -> None:
        """Plays lines until none are left or the time is over. line: the one to begin with, if not the next."""
        line = line or next(self._lines, None)
        while line is not None:
            if not await self._wait(line.start_s - self._elapsed_s()):
                break
            if not await self._play(line.steps):
                break
            if (line := next(self._lines, None)) is not None:
                self._begun_tokens += line.first_tokens()
        self._users -= 1
        self._crowd.joined(-1)

    async def _play(self, steps: tuple[Ask | Fork, ...]) -> bool:
        """Plays the steps. Returns False if the time was over before the end."""
        for step in steps:
            if isinstance(step, Fork):
                played = await asyncio.gather(*(self._play(line) for line in step.lines))
                if not all(played):
                    return False
            elif not await self._wait(step.think_s):
                return False
            else:
                if self._working_set is not None:
                    self._working_set.asked(step.prompt, self._elapsed_s())
                outcome = await self._crowd.ask(step)
                if outcome.reply.ttft_s is not None:
                    self._ttfts_s[-1].append(outcome.reply.ttft_s)
        return True

    async def _wait(self, seconds: float) -> bool:
        """Sleeps. Returns False at once if the time would be over before."""
        if seconds >= self._left_s():
            return False
        await self._crowd.sleep(seconds)
        return self._left_s() > 0

    async def _let_join(self, group: asyncio.TaskGroup, ramp: Ramp) -> None:
        """Lets users join each period: as many as the ramp allows and admits with their first prompts."""
        held: Line | None = None
        while 0 < self._users < ramp.users_max and await self._wait(ramp.period_s):
            in_use = self._working_set.tokens(self._elapsed_s()) if self._working_set else 0
            for _ in range(ramp.joining(self._users, self._ttfts_s, in_use)):
                line = held or next(self._lines, None)
                if line is None:
                    return
                held = line
                tokens = line.first_tokens()
                if not ramp.admits(tokens, begun_tokens=self._begun_tokens, working_set_tokens=in_use):
                    break  # it joins in a later period
                self._begun_tokens += tokens
                in_use += tokens
                held = None
                self._join(group, line)
            self._ttfts_s.append([])
            self._begun_tokens = 0

    def _elapsed_s(self) -> float:
        return self._crowd.now_s() - self._began_s

    def _left_s(self) -> float:
        duration_s = self._phase.duration_s
        return float("inf") if duration_s is None else duration_s - self._elapsed_s()
