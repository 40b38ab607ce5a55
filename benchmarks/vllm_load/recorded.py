"""Recorded traffic: pauses are replayed, but answers take as long as the endpoint needs.

The trace's files and their meaning are those of `kvserver replay` (kvserver/sizing/data/README.md). Sessions are a
closed loop: each user plays one, then the next unplayed one. When all were played they begin again, with other text.
A session ends at its first prompt that exceeds the context. Requests in arrival order are sent at their recorded
times.

For engines too slow for these prompts, `shrink` divides all numbers of tokens, and time_scale shortens pauses.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count, takewhile

from benchmarks.vllm_load.asks import Ask, Fork, Line, Phase, Prompt, Span, Workload
from benchmarks.vllm_load.ramp import Ramp
from kvserver.errors import ConfigError
from kvserver.sizing.trace import (
    ARRIVAL_BLOCK_TOKENS,
    SESSION_BLOCK_TOKENS,
    Session,
    Trace,
    Turn,
    arrival_prompts,
    load,
)
from kvserver.sizing.workload import global_prompts, warm_prefix_blocks


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Sessions of coding agents, or a trace in arrival order."""

    trace: str = field(default="claude-code", metadata={"help": "claude-code, mooncake, or a file"})
    users: int = field(default=8, metadata={"help": "at the beginning"})
    users_max: int = field(default=0, metadata={"help": "as long as first tokens come early enough; 0: no more join"})
    ttft_s_max: float = field(default=60.0, metadata={"help": "users join while a fifth of it is left"})
    period_s: float = field(default=30.0, metadata={"help": "how often it is decided whether users join"})
    first_tokens_max: int = field(
        default=500_000,
        metadata={"help": "of the first prompts of sessions that begin in one period, as sent; others wait; 0: any"},
    )
    working_set_tokens_max: int = field(
        default=0,
        metadata={"help": "asked about of late, as sent: nobody joins behind 90 %% of it, or beyond it; 0: any"},
    )
    working_set_s: float = field(default=600.0, metadata={"help": "how long what was asked about counts for that"})
    cooldown: bool = field(
        default=False,
        metadata={"help": "behind periods above ttft-s-max, nobody joins until 2 to 5 in a row are below"},
    )
    duration_s: float = field(default=120.0, metadata={"help": "of a round; what runs then is waited for"})
    context_tokens_max: int = field(default=100_000, metadata={"help": "a session ends at its first longer prompt"})
    think_s_max: float = field(default=600.0, metadata={"help": "longer pauses are cut to this"})
    time_scale: float = field(default=1.0, metadata={"help": "of pauses, after they were cut"})
    warm_prefix_ratio: float = field(default=0.5, metadata={"help": "of the longest system prompt: common to all"})
    output_tokens_max: int = field(default=4096, metadata={"help": "longer answers are cut to this"})
    shrink: int = field(default=1, metadata={"help": "divides all tokens; a divisor of 64"})
    recycle: bool = field(default=True, metadata={"help": "sessions begin again when all were played"})

    def __post_init__(self) -> None:
        if self.shrink < 1 or SESSION_BLOCK_TOKENS % self.shrink:
            raise ConfigError("bench-options", f"shrink={self.shrink} must divide {SESSION_BLOCK_TOKENS}")

    def draw(self, seed: int) -> Workload:
        trace = load(self.trace)
        if trace.arrivals:
            lines = list(self._arrivals(trace))
            return Workload("trace", (Phase(lines, max(1, len(lines)), duration_s=self.duration_s),))
        ramp = None
        if self.users_max:
            ramp = Ramp(
                users_max=self.users_max,
                period_s=self.period_s,
                ttft_s_max=self.ttft_s_max,
                first_tokens_max=self.first_tokens_max,
                working_set_tokens_max=self.working_set_tokens_max,
                working_set_s=self.working_set_s,
                cooldown=self.cooldown,
            )
        lines_of_sessions = _Sessions(self, trace.sessions, seed).lines()
        return Workload("trace", (Phase(lines_of_sessions, self.users, ramp, self.duration_s),))

    def output(self, tokens: int) -> int:
        return max(1, min(tokens, self.output_tokens_max) // self.shrink)

    def spans(self, prefix: str, blocks: list[int], tokens: int, block_tokens: int) -> Prompt:
        """Spans of the blocks, the last one cut to the prompt's length; after them text that no other prompt has."""
        spans = [_block(block, block_tokens // self.shrink) for block in blocks]
        rest = tokens - len(blocks) * block_tokens
        if rest < 0:
            spans[-1] = Span(spans[-1].name, max(1, (rest + block_tokens) // self.shrink))
        elif rest // self.shrink or not spans:
            spans.append(Span(f"rest {prefix}", max(1, rest // self.shrink)))
        return tuple(spans)

    def _arrivals(self, trace: Trace) -> Iterator[Line]:
        at_s = 0.0
        for number, (arrival, blocks) in enumerate(zip(trace.arrivals, arrival_prompts(trace.arrivals), strict=True)):
            at_s += arrival.gap_ms / 1000
            if at_s * self.time_scale > self.duration_s:
                return
            if arrival.input_tokens > self.context_tokens_max:
                continue
            prompt = self.spans(str(number), blocks, arrival.input_tokens, ARRIVAL_BLOCK_TOKENS)
            kind = "again" if arrival.shared_blocks > 1 else "first"  # all share the first block
            output_tokens = self.output(arrival.output_tokens)
            yield Line((Ask(str(number), kind, prompt, output_tokens),), start_s=at_s * self.time_scale)


PUBLISHED_MI300X = Recorded(
    users=4,
    users_max=32,
    ttft_s_max=60.0,
    duration_s=1200.0,
    context_tokens_max=100_000,
    think_s_max=600.0,
    warm_prefix_ratio=0.5,
    output_tokens_max=8192,
)
"""Parameters of the published experiment on two MI300X (with seed 42).

kv-cache-tester with --warm-prefix-pct 0.5 --timing-strategy think-only --recycle --max-ttft 60 --test-duration 1200
--max-context 100000 --start-users 4 --max-users 32. The rest are the tester's defaults at that time:
--max-new-tokens-per-period 500000 (first_tokens_max), --max-working-set-tokens 0, --assessment-period 30,
--cache-max-age 600 (working_set_s), and no cooldown (ramp.py).
"""
PRESETS: dict[str, Recorded] = {
    "mi300x": PUBLISHED_MI300X,
    "mi300x-steady": replace(PUBLISHED_MI300X, users=32, users_max=0),
}
"""steady: all users from the beginning, so that all arms carry the same load."""


@lru_cache(maxsize=1 << 16)
def _block(block: int, tokens: int) -> Span:
    """One shared object for all prompts with this block: a long session names each of its blocks hundreds of times."""
    return Span(f"block {block}", tokens)


class _Sessions:
    def __init__(self, options: Recorded, sessions: list[Session], seed: int) -> None:
        self._options = options
        fitting = [session for session in sessions if session.turns[0].input_tokens <= options.context_tokens_max]
        if not fitting:
            raise ConfigError("bench-options", f"no session begins within {options.context_tokens_max} tokens")
        self._sessions = sorted(fitting, key=lambda session: session.id)
        self._warm_blocks = warm_prefix_blocks(self._sessions, options.warm_prefix_ratio)
        random.Random(seed).shuffle(self._sessions)

    def lines(self) -> Iterator[Line]:
        """Endless if sessions are recycled."""
        unused = self._warm_blocks
        for number in count():
            if number >= len(self._sessions) and not self._options.recycle:
                return
            session = self._sessions[number % len(self._sessions)]
            prompts, fresh = global_prompts(session, self._warm_blocks, unused)
            unused += fresh
            if steps := tuple(self._steps(number, session, prompts)):
                yield Line(steps)

    def _steps(self, number: int, session: Session, prompts: list[list[int]]) -> Iterator[Ask | Fork]:
        agents: list[tuple[Ask, ...]] = []
        for step in session.seq:
            if step < 0:
                turns = [index for index, turn in enumerate(session.turns) if turn.agent == -step]
                fitting = takewhile(lambda index: self._fits(session.turns[index]), turns)
                if asks := tuple(self._ask(number, index, session.turns[index], prompts[index]) for index in fitting):
                    agents.append(asks)
                continue
            if agents:
                yield Fork(tuple(agents))
                agents = []
            if not self._fits(session.turns[step]):
                return
            yield self._ask(number, step, session.turns[step], prompts[step])
        if agents:
            yield Fork(tuple(agents))

    def _fits(self, turn: Turn) -> bool:
        return turn.input_tokens <= self._options.context_tokens_max

    def _ask(self, number: int, index: int, turn: Turn, blocks: list[int]) -> Ask:
        name = f"{number}/{index}"
        return Ask(
            name,
            "again" if turn.back and turn.shared_blocks else "first",
            self._options.spans(name, blocks, turn.input_tokens, SESSION_BLOCK_TOKENS),
            self._options.output(turn.output_tokens),
            min(max(turn.think_s, 0.0), self._options.think_s_max) * self._options.time_scale,
        )
