"""The engine's own share of a prompt, estimated with few looks into its cache."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.offload.values import Group
from kvclient.vllm.hbm import Holdings

BLOCK = 4
BLOCKS = 21
TOKENS = BLOCKS * BLOCK + 3
HASHES = [block.to_bytes(32, "big") for block in range(BLOCKS)]


class Pool:
    """Holds the first blocks of the prompt."""

    def __init__(self, held: int) -> None:
        self._held = set(HASHES[:held])
        self.looks = 0

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[object] | None:
        assert groups == [0]
        self.looks += 1
        return [object()] if block_hash in self._held else None


def asked(hashes: list[bytes] = HASHES, tokens: int = TOKENS) -> Any:
    return SimpleNamespace(block_hashes=hashes, num_tokens=tokens)


@pytest.mark.parametrize("held", range(BLOCKS + 1))
def test_what_is_held_from_the_begin_is_counted_exactly(held: int) -> None:
    holdings, pool = Holdings([Group(BLOCK)]), Pool(held)
    holdings.use_pool(pool)
    assert holdings.tokens_of(asked()) == held * BLOCK
    assert pool.looks <= 1 + BLOCKS.bit_length()
    assert held or pool.looks == 1, "most prompts are not held at all"


@pytest.mark.parametrize(
    "groups", [[Group(BLOCK), Group(BLOCK)], [Group(BLOCK, "window", 9)]], ids=["two groups", "a window"]
)
def test_nothing_is_guessed_of_an_engine_with_other_groups(groups: list[Group]) -> None:
    holdings, pool = Holdings(groups), Pool(BLOCKS)
    holdings.use_pool(pool)
    assert (holdings.tokens_of(asked()), pool.looks) == (0, 0)


@pytest.mark.parametrize(
    ("hashes", "tokens"), [(HASHES, TOKENS * 2), (HASHES[:-1], TOKENS), ([], TOKENS)], ids=["larger", "fewer", "none"]
)
def test_nothing_is_guessed_from_hashes_of_other_blocks(hashes: list[bytes], tokens: int) -> None:
    holdings = Holdings([Group(BLOCK)])
    holdings.use_pool(Pool(BLOCKS))
    assert holdings.tokens_of(asked(hashes, tokens)) == 0


def test_nothing_is_guessed_before_there_is_a_pool_or_of_one_that_says_nothing() -> None:
    holdings = Holdings([Group(BLOCK)])
    assert holdings.tokens_of(asked()) == 0
    holdings.use_pool(object())
    assert holdings.tokens_of(asked()) == 0
