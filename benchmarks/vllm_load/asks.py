"""The requests of each user, in order, as plain values: the same seed is the same workload for every endpoint.

A prompt is a row of spans, and a span's text follows from its name alone. So prompts share exactly their common
leading spans, and a prompt of 100,000 tokens is a few names until it is sent.
"""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.vllm_load.ramp import Ramp

RESERVED_TOKENS = 3
"""The lowest token ids are special tokens in many vocabularies; prompts do not use them."""
DRAWN_BYTES = 4


class Span(NamedTuple):
    """A piece of text. If two spans have one name, the shorter is a prefix of the longer."""

    name: str
    tokens: int


Prompt = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    name: str
    """Unique within a workload."""
    kind: str
    """Requests of one kind are summed up together.

    "first": at most a common beginning was asked before; "again": most of the prompt was asked before.
    """
    prompt: Prompt
    output_tokens: int
    think_s: float = 0.0
    """Pause between the end of the previous request in its line and the start of this one."""

    @property
    def prompt_tokens(self) -> int:
        return sum(span.tokens for span in self.prompt)


@dataclass(frozen=True, slots=True)
class Fork:
    """Lines that begin together; the next step waits for all of them."""

    lines: tuple[tuple[Ask, ...], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """The requests of one user, one after another."""

    steps: tuple[Ask | Fork, ...]
    start_s: float = 0.0
    """Earliest start, from the beginning of the phase."""

    def first_tokens(self) -> int:
        """Tokens of the line's first prompt, or of all first prompts of a fork."""
        step = self.steps[0]
        return step.prompt_tokens if isinstance(step, Ask) else sum(line[0].prompt_tokens for line in step.lines)


@dataclass(frozen=True, slots=True)
class Phase:
    """Lines taken in order by `users` users at a time. The next phase begins when all have ended."""

    lines: Iterable[Line]
    """Iterated once."""
    users: int
    ramp: Ramp | None = None
    """`users` join at once, these later."""
    duration_s: float | None = None
    """After this no request begins."""


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
