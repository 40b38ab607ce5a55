"""Rounds: each has its own seed, every arm gets it, and each round begins with another arm.

Answers to equal prompts must be equal, at all arms and wherever the prompt's KV came from. Engines round differently
when other requests share a step, which can tip a choice between two nearly equally likely words. So prompts with
different answers are asked again, one at a time: a difference that remains is not explained by batching.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.vllm_load.asks import Ask, Prompt, Span, Workload, token_ids
from benchmarks.vllm_load.counters import Counters, at_rest, difference
from benchmarks.vllm_load.crowd import Crowd, Outcome
from benchmarks.vllm_load.endpoint import Endpoint
from benchmarks.vllm_load.reply import Reply
from benchmarks.vllm_load.summary import Round

REST_S_MAX = 60.0
REST_S = 0.5
"""Pause after a round, so that a connector's last stores do not disturb the next arm."""
ALONE_MAX = 64
"""Maximum of prompts asked again in one round; further ones count as different."""
WARM_REQUESTS = 3
WARM_TOKENS = 300
WARM_SEED = -1


class Drawn(Protocol):
    """Options of a workload."""

    def draw(self, seed: int) -> Workload: ...


@dataclass
class Agreement:
    """Agreement of answers to equal prompts. differing_alone are errors without an excuse."""

    compared: int = 0
    """Answers to prompts that were answered more than once."""
    differing: int = 0
    """Prompts with unequal answers in traffic."""
    differing_alone: int = 0
    """Those of `differing` that also differ when asked alone, or were not asked again (ALONE_MAX)."""
    examples: list[str] = field(default_factory=list)


@dataclass
class Live:
    """A running arm."""

    name: str
    endpoint: Endpoint
    server: Endpoint | None
    """kvserver's HTTP port; only its metrics are used."""

    async def counters(self) -> Counters:
        counted = await self.endpoint.counters()
        return counted | (await self.server.counters() if self.server else {})


class Rounds:
    """Runs the rounds; on_outcome is called with arm, round number and outcome."""

    def __init__(
        self,
        arms: Sequence[Live],
        drawn: Drawn,
        *,
        vocabulary: int,
        on_outcome: Callable[[str, int, Outcome], None],
    ) -> None:
        self._arms = arms
        self._drawn = drawn
        self._vocabulary = vocabulary
        self._on_outcome = on_outcome
        self.agreement = Agreement()

    async def run(self, *, rounds: int, seed: int) -> list[Round]:
        for arm in self._arms:
            await self._warm(arm)
        done: list[Round] = []
        for number in range(rounds):
            turned = number % len(self._arms)
            order = [*self._arms[turned:], *self._arms[:turned]]
            same_seed = [await self._round(arm, number, seed + number) for arm in order]
            await self._compare(same_seed)
            done += same_seed
        return done

    async def _warm(self, arm: Live) -> None:
        """Warms an engine up: the first requests pay for one-time work."""
        for number in range(WARM_REQUESTS):
            await self._ask(arm, Ask("", "", (Span(f"warm {number}", WARM_TOKENS),), 4), WARM_SEED)
        await _rest(arm)

    async def _ask(self, arm: Live, ask: Ask, seed: int) -> Reply:
        return await arm.endpoint.ask(token_ids(ask.prompt, seed=seed, vocabulary=self._vocabulary), ask.output_tokens)

    async def _round(self, arm: Live, number: int, seed: int) -> Round:
        before = await arm.counters()
        crowd = Crowd(
            lambda ask: self._ask(arm, ask, seed),
            on_outcome=lambda outcome: self._on_outcome(arm.name, number, outcome),
        )
        outcomes = await crowd.run(self._drawn.draw(seed))
        await _rest(arm)
        return Round(arm.name, number, seed, outcomes, difference(before, await arm.counters()))

    async def _compare(self, same_seed: Sequence[Round]) -> None:
        """Compares rounds that have one seed."""
        agreement = self.agreement
        compared, differing = disagreements(outcome for each in same_seed for outcome in each.outcomes)
        agreement.compared += compared
        agreement.differing += len(differing)
        for place, ask in enumerate(differing):
            said = {}
            if place < ALONE_MAX:
                said = {arm.name: (await self._ask(arm, ask, same_seed[0].seed)).said for arm in self._arms}
            if len(set(said.values())) != 1:
                agreement.differing_alone += 1
                agreement.examples.append(f"seed {same_seed[0].seed}, request {ask.name}: {said or 'not asked again'}")


def disagreements(outcomes: Iterable[Outcome]) -> tuple[int, list[Ask]]:
    """The number of comparable answers, and one request for each prompt with unequal answers."""
    by_prompt: dict[tuple[Prompt, int], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if not outcome.reply.problem:
            by_prompt[outcome.ask.prompt, outcome.ask.output_tokens].append(outcome)
    several = [same for same in by_prompt.values() if len(same) > 1]
    unequal = [same[0].ask for same in several if len({outcome.reply.said for outcome in same}) > 1]
    return sum(map(len, several)), unequal


def differing_from(first: Iterable[Outcome], other: Iterable[Outcome]) -> int:
    """Answers of another arm that differ from all that the first gave to the same prompt. Both have one seed."""
    said: dict[tuple[Prompt, int], set[tuple[object, ...]]] = defaultdict(set)
    for outcome in first:
        if not outcome.reply.problem:
            said[outcome.ask.prompt, outcome.ask.output_tokens].add(outcome.reply.said)
    answered = [outcome for outcome in other if not outcome.reply.problem]
    known = [(said.get((outcome.ask.prompt, outcome.ask.output_tokens)), outcome.reply.said) for outcome in answered]
    return sum(answers is not None and answer not in answers for answers, answer in known)


async def _rest(arm: Live) -> None:
    """Waits until the engine says that no request is in flight."""
    for _ in range(int(REST_S_MAX / REST_S)):
        await asyncio.sleep(REST_S)
        if at_rest(await arm.endpoint.counters()):
            return
    raise RuntimeError(f"{arm.name} is not at rest {REST_S_MAX:g} s after its last answer")
