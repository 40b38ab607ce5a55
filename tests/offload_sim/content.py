"""Simulated bytes: a page's content is the tokens up to its end, so misplaced pages never look right."""

import hashlib
from random import Random
from typing import NamedTuple

TOKEN_KINDS = 251


class Broken(AssertionError):
    """A promise was broken."""


def require(true: bool, message: str) -> None:
    if not true:
        raise Broken(message)


class Page(NamedTuple):
    """The bytes of one block on one rank, after `tokens` were computed. For a state only the end matters."""

    rank: int
    group: int
    first: int
    tokens: bytes


GARBAGE = Page(-1, -1, -1, b"garbage")


def page(rank: int, group: int, block_tokens: int, block: int, tokens: bytes | bytearray) -> Page:
    """The right page of block `block`, in a sequence whose `tokens` are computed."""
    return Page(rank, group, block * block_tokens, bytes(tokens[: (block + 1) * block_tokens]))


def keys(tokens: bytes, chunk_tokens: int) -> list[bytes]:
    """Keys of the whole chunks. Each names all tokens up to its end."""
    ends = range(chunk_tokens, len(tokens) + 1, chunk_tokens)
    return [hashlib.blake2b(bytes([255, *tokens[:end]]), digest_size=32).digest() for end in ends]


def next_token(tokens: bytes | bytearray) -> int:
    """The token that the model generates; it depends on all tokens before it."""
    return (sum(tokens) * 31 + len(tokens) * 7 + tokens[0]) % TOKEN_KINDS


class Prompts:
    """Prompts that share prefixes with each other, like those of a conversation and of a system prompt."""

    def __init__(self, rng: Random, tokens_max: int) -> None:
        self._rng = rng
        self._tokens_max = tokens_max
        self._known: list[bytes] = []

    def draw(self) -> bytes:
        rng = self._rng
        base = b""
        if self._known and rng.random() < 0.8:
            base = rng.choice(self._known[-6:])
            if rng.random() < 0.5:
                base = base[: rng.randint(1, len(base))]
        fresh = rng.choice((0, 0, rng.randint(1, self._tokens_max // 2)))
        prompt = (base + bytes(rng.randrange(TOKEN_KINDS) for _ in range(fresh)))[: self._tokens_max]
        prompt = prompt or bytes([rng.randrange(TOKEN_KINDS)])
        self._known.append(prompt)
        return prompt

    def seen_elsewhere(self) -> bytes:
        """A known prompt, or a new one that will also be asked here."""
        return self._rng.choice(self._known[-6:]) if self._known and self._rng.random() < 0.7 else self.draw()

    def remember(self, tokens: bytes | bytearray) -> None:
        """Remembers a whole conversation, including output: its next turn begins with it."""
        self._known.append(bytes(tokens[: self._tokens_max]))
