"""Simulated KV: a slot holds a digest of all tokens up to its own, so misplaced KV never looks right."""

import hashlib
from collections.abc import Iterable, Sequence

from kvserver.wire.messages import KEY_BYTES

BLOCK_TOKENS = 4
VOCABULARY = 5
"""Small, so that prompts share prefixes."""
NULL_BLOCK = 0


class Broken(AssertionError):
    """A promise was broken."""


def require(true: bool, message: str) -> None:
    if not true:
        raise Broken(message)


def kv(weights: int, group: int, tokens: Sequence[int]) -> bytes:
    """KV of the last of these tokens, in one group of layers."""
    return hashlib.blake2b(bytes([weights % 256, group, *tokens]), digest_size=8).digest()


def next_token(tokens: Sequence[int]) -> int:
    """The token that the model generates; it depends on all tokens before it."""
    return (sum(tokens) * 31 + len(tokens) * 7 + tokens[0] + tokens[-1] * 3) % VOCABULARY


def continued(tokens: Sequence[int], count: int) -> list[int]:
    """The tokens followed by `count` generated ones."""
    whole = list(tokens)
    for _ in range(count):
        whole.append(next_token(whole))
    return whole


def cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class Slots:
    """The KV of all blocks, by rank. A block belongs to whichever group holds it."""

    def __init__(self, ranks: int, blocks: int) -> None:
        self._blocks = [[[b""] * BLOCK_TOKENS for _ in range(blocks)] for _ in range(ranks)]

    def block(self, rank: int, block: int) -> list[bytes]:
        return list(self._blocks[rank][block])

    def overwrite(self, rank: int, block: int, held: list[bytes]) -> None:
        self._blocks[rank][block] = list(held)

    def compute(self, ranks: Iterable[int], block: int, slot: int, computed: bytes) -> None:
        for rank in ranks:
            self._blocks[rank][block][slot] = computed

    def hold(self, ranks: Iterable[int], block: int, slot: int, wanted: bytes) -> bool:
        """True if the slot holds `wanted` on each of these ranks."""
        return all(self._blocks[rank][block][slot] == wanted for rank in ranks)


class Meanings:
    """Key -> the weights, and all tokens up to the end of the chunk. A key never has two meanings."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[int, tuple[int, ...]]] = {}

    def tell(self, keys: Sequence[bytes], weights: int, tokens: Sequence[int], chunk_tokens: int) -> None:
        for index, key in enumerate(keys):
            meaning = weights, tuple(tokens[: (index + 1) * chunk_tokens])
            known = self._known.setdefault(key, meaning)
            require(known == meaning, f"a key names {len(meaning[1])} tokens of weights {weights} and of {known[0]}")

    def of(self, key: bytes) -> tuple[int, tuple[int, ...]]:
        require(key in self._known, "a key is stored that names nothing")
        return self._known[key]
