"""How much of a prompt the engine has in its own cache, guessed when the prompt comes.

The engine says so itself when it schedules the request; to ask the server before that without a guess would take leases
for prompts that HBM holds, and fetch them from disk for nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvclient.offload_values import Group
from kvclient.vllm_keys import Request


class Holdings:
    """Of an engine with one group of full attention; of others nothing is guessed."""

    def __init__(self, groups: Sequence[Group]) -> None:
        is_plain = len(groups) == 1 and groups[0].kind == "full"
        self._block_tokens = groups[0].block_tokens if is_plain else 0
        self._cached: Callable[[bytes, list[int]], Any] | None = None

    def use_pool(self, pool: object) -> None:
        """vLLM's BlockPool; a look into it changes nothing there."""
        self._cached = getattr(pool, "get_cached_block", None)

    def tokens_of(self, request: Request) -> int:
        """By bisection, as if the cache held whole prefixes. It nearly does: it gives ends of sequences away first."""
        hashes = request.block_hashes
        if self._cached is None or len(hashes) != request.num_tokens // (self._block_tokens or 1):
            return 0
        held, end = 0, len(hashes)
        probe = 0  # most prompts are held from the begin, or not at all
        while held < end:
            if self._cached(hashes[probe], [0]):
                held = probe + 1
            else:
                end = probe
            probe = (held + end) // 2
        return held * self._block_tokens
