"""Sessions that were never recorded, made to match figures published about 739 recorded sessions of coding agents.

    python -m benchmarks.replay.synthetic [SEED] > FILE.jsonl        # then: --trace FILE.jsonl

Their requests: input tokens on average 42 to 45 K, median 34 to 38 K, from 9.8 to 98.9 K; output tokens on average
450 to 500, median 240, up to 6 K; 93 to 97 % of each input repeats the turn before. A session begins with its tools
and its system prompt; each turn adds the answer and a tool's output. About pauses and service times nothing was
published; they have the medians of the recorded sample. One seed is one trace, on any machine.
"""

import math
import random
import sys
from collections.abc import Iterator

import msgspec

from kvserver.sizing.trace import SESSION_BLOCK_TOKENS, Session, Turn

SESSIONS = 739
INPUT_TOKENS_MIN, INPUT_TOKENS_MAX = 9_800, 98_900
FIRST_QUESTION_TOKENS = 2_000.0
"""Mean tokens of the first question, in addition to the shortest input."""
CONTINUED_RATIO = 0.2
"""Share of sessions that continue an earlier session's context, however long that is."""
GROWTH_TOKENS, GROWTH_SPREAD = 1_600.0, 0.5
"""Growth per turn: mean of a session, which is log-normal among sessions."""
TURNS = 27
"""Mean number of turns, unless the session reaches the largest input first."""
EDITED_RATIO = 0.01
"""Share of turns that replace something in the middle of the context, as when a session is compacted."""
OUTPUT_TOKENS_MEDIAN, OUTPUT_SPREAD, OUTPUT_TOKENS_MAX = 240, 1.2, 6_000
THINK_S_MEDIAN, THINK_SPREAD = 9.0, 1.6
SERVICE_S_MEDIAN, SERVICE_SPREAD = 5.6, 0.8


def synthetic_sessions(seed: int = 0) -> list[Session]:
    """The sessions, without sub-agents."""
    draw = random.Random(seed)
    return [_session(f"synthetic-{number}", draw) for number in range(SESSIONS)]


def _session(name: str, draw: random.Random) -> Session:
    turns = list(_turns(draw))
    system_tokens = min(turns[0].input_tokens, INPUT_TOKENS_MIN)
    return Session(id=name, tool_tokens=0, system_tokens=system_tokens, seq=list(range(len(turns))), turns=turns)


def _turns(draw: random.Random) -> Iterator[Turn]:
    input_tokens = INPUT_TOKENS_MIN + int(draw.expovariate(1 / FIRST_QUESTION_TOKENS))
    if draw.random() < CONTINUED_RATIO:
        input_tokens = draw.randint(input_tokens, INPUT_TOKENS_MAX)
    start_s = 0.0
    back = shared_blocks = 0
    growth_tokens = _spread(draw, GROWTH_TOKENS, GROWTH_SPREAD)
    while input_tokens <= INPUT_TOKENS_MAX:
        think_s = _spread(draw, THINK_S_MEDIAN, THINK_SPREAD) if back else 0.0
        service_s = _spread(draw, SERVICE_S_MEDIAN, SERVICE_SPREAD)
        output_tokens = int(_spread(draw, OUTPUT_TOKENS_MEDIAN, OUTPUT_SPREAD))
        output_tokens = max(1, min(output_tokens, OUTPUT_TOKENS_MAX))
        yield Turn(0, start_s + think_s, think_s, service_s, input_tokens, output_tokens, back, shared_blocks, 0)
        if draw.random() < 1 / TURNS:
            return
        start_s += think_s + service_s
        is_edited = draw.random() < EDITED_RATIO
        back, shared_blocks = 1, int(input_tokens // SESSION_BLOCK_TOKENS * (draw.random() if is_edited else 1))
        input_tokens += 1 + int(draw.expovariate(1 / growth_tokens))


def _spread(draw: random.Random, median: float, spread: float) -> float:
    """A log-normal random number."""
    return draw.lognormvariate(math.log(median), spread)


if __name__ == "__main__":
    for session in synthetic_sessions(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
        sys.stdout.buffer.write(msgspec.json.encode(session) + b"\n")
