"""What is asked, by whom and after what. Plain values: the same seed is the same workload, whoever answers it.

A prompt is a row of spans, and the text of a span follows from its name alone. So prompts share exactly the spans with
which they begin alike, and a prompt of 100,000 tokens is a few names until it is sent.
"""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.vllm_load.ramp import Ramp

RESERVED_TOKENS = 3
"""The lowest token ids stand for beginnings, ends and unknown words in many vocabularies; prompts have none of them."""
DRAWN_BYTES = 4


class Span(NamedTuple):
    """A piece of text. Of two spans with one name the shorter begins the longer."""

    name: str
    tokens: int


Prompt = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    name: str
    """Unique within a workload."""
    kind: str
    """Requests of a kind are summed up together. "first": nothing but a common beginning was asked before; "again":
    most of the prompt was."""
    prompt: Prompt
    output_tokens: int
    think_s: float = 0.0
    """Between the end of what came before it in its line and its beginning."""

    @property
    def prompt_tokens(self) -> int:
        return sum(span.tokens for span in self.prompt)


@dataclass(frozen=True, slots=True)
class Fork:
    """Lines that begin together; what follows waits for all of them."""

    lines: tuple[tuple[Ask, ...], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """What one user sends, one after another."""

    steps: tuple[Ask | Fork, ...]
    start_s: float = 0.0
    """Not before, counted from the beginning of the phase."""

    def first_tokens(self) -> int:
        """Of the prompt that it begins with."""
        step = self.steps[0]
        return step.prompt_tokens if isinstance(step, Ask) else sum(line[0].prompt_tokens for line in step.lines)


@dataclass(frozen=True, slots=True)
class Phase:
    """Lines, taken in order by so many users at a time. The next phase begins when all have ended."""

    lines: Iterable[Line]
    """Iterated once."""
    users: int
    ramp: Ramp | None = None
    """`users` join at once, these later."""
    duration_s: float | None = None
    """Afterwards nothing is begun any more."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    phases: tuple[Phase, ...]


def token_ids(prompt: Prompt, *, seed: int, vocabulary: int) -> list[int]:
    """The prompt's text, in [RESERVED_TOKENS, vocabulary)."""
    assert vocabulary > RESERVED_TOKENS, vocabulary
    choice = vocabulary - RESERVED_TOKENS
    ids: list[int] = []
    for span in prompt:
        drawn = hashlib.shake_128(f"{seed}/{span.name}".encode()).digest(DRAWN_BYTES * span.tokens)
        ids.extend([RESERVED_TOKENS + value % choice for value in array("I", drawn)])
    return ids
