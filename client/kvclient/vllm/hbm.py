"""A guess of how much of a new prompt the engine has in its own cache.

The engine gives the exact number only when it schedules the request. A lookup before that without a guess would take
leases for prompts that HBM holds, and read them from disk for nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvclient.offload.values import Group
from kvclient.vllm.keys import Request


class Holdings:
    """Guesses for an engine with one group of full attention. For other engines the guess is 0."""

    def __init__(self, groups: Sequence[Group]) -> None:
        is_plain = len(groups) == 1 and groups[0].kind == "full"
        self._block_tokens = groups[0].block_tokens if is_plain else 0
        self._cached: Callable[[bytes, list[int]], Any] | None = None

    def use_pool(self, pool: object) -> None:
        """Use vLLM's BlockPool. Only read, never changed."""
        self._cached = getattr(pool, "get_cached_block", None)

    def tokens_of(self, request: Request) -> int:
        """Leading tokens of the prompt that the engine's cache holds, found by bisection.

        Bisection assumes that the cache holds whole prefixes. This is nearly true, because vLLM evicts sequence ends
        first.
        """
        hashes = request.block_hashes
        if self._cached is None or len(hashes) != request.num_tokens // (self._block_tokens or 1):
            return 0
        held, end = 0, len(hashes)
        probe = 0  # most prompts are held from the beginning or not at all
        while held < end:
            if self._cached(hashes[probe], [0]):
                held = probe + 1
            else:
                end = probe
            probe = (held + end) // 2
        return held * self._block_tokens
