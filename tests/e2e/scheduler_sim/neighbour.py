"""Another connector beside ours, in vLLM's own MultiConnector. It loads random parts of prompts, and sometimes fails.

Loads happen within a step or between steps. vLLM learns of a failure within a step when that step is over.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1 import base as interface

from tests.e2e.other_connector import LoadsOnly

from .content import BLOCK_TOKENS, Slots, kv
from .jobs import GARBAGE
from .shapes import Day

BETWEEN = 0.3
"""Share of its loads that happen between steps."""
ENDS = 0.3
"""Chance in each step that such a load ends."""


@dataclass
class Played:
    """Context for Neighbour, which vLLM constructs without it."""

    rng: Random
    day: Day
    slots: Slots
    weights: Callable[[], int]
    """The engine's weights now."""
    counts: Counter[str]


@dataclass
class Gift:
    """A load to do: whole blocks of a prompt."""

    request: str
    is_between: bool
    """Loaded between steps, not within one."""
    first_block: int
    blocks: list[int]
    """Block ids in the engine's pool."""
    tokens: Sequence[int]
    """Tokens of the prompt, from its start."""
    rank_that_fails: int
    """Rank whose load fails; -1: none."""
    good_blocks: int
    """Blocks loaded before the failure."""


@dataclass
class Gifts(interface.KVConnectorMetadata):
    gifts: list[Gift] = field(default_factory=list)


class Neighbour(LoadsOnly):
    played: ClassVar[Played]
    """The context of the running seed; only one seed runs at a time."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.rank = 0
        parallel = vllm_config.parallel_config
        self._ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._offers: dict[str, tuple[int, bool]] = {}
        """Request -> (tokens before the offer, loaded between steps)."""
        self._gifts: list[Gift] = []
        self._under_way: list[Gift] = []
        self._failed: set[int] = set()

    # ---------------------------------------------------------------- the scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        blocks_max = (request.num_prompt_tokens - 1 - num_computed_tokens) // BLOCK_TOKENS
        if num_computed_tokens % BLOCK_TOKENS or blocks_max < 1 or self.played.rng.random() > self.played.day.gives:
            return 0, False
        is_between = self.played.rng.random() < BETWEEN
        self._offers[request.request_id] = num_computed_tokens, is_between
        return self.played.rng.randint(1, blocks_max) * BLOCK_TOKENS, is_between

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        begin, is_between = self._offers.pop(request.request_id)
        first = begin // BLOCK_TOKENS
        count = num_external_tokens // BLOCK_TOKENS
        fails = self.played.rng.random() < self.played.day.gift_fails
        self.played.counts["brought by another"] += not fails
        self.played.counts["not brought by another"] += fails
        self.played.counts["between steps"] += is_between
        self._gifts.append(
            Gift(
                request.request_id,
                is_between,
                first,
                list(blocks.get_block_ids()[0][first : first + count]),
                tuple(request.all_token_ids[: (first + count) * BLOCK_TOKENS]),
                self.played.rng.randrange(self._ranks) if fails else -1,
                self.played.rng.randrange(count),
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> Gifts:
        gifts, self._gifts = self._gifts, []
        return Gifts(gifts)

    # ---------------------------------------------------------------- a worker's half

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        for gift in connector_metadata.gifts:
            if not gift.is_between:
                self._bring(gift)
        self._under_way += [gift for gift in connector_metadata.gifts if gift.is_between]

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Already done: the simulated runner calls this after the forward, as vLLM's for CPUs does."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = [gift for gift in self._under_way if self.played.rng.random() < ENDS]
        for gift in ended:
            self._bring(gift)
            self._under_way.remove(gift)
        return None, {gift.request for gift in ended}

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def _bring(self, gift: Gift) -> None:
        good = len(gift.blocks) if gift.rank_that_fails != self.rank else gift.good_blocks
        for index, block in enumerate(gift.blocks):
            first = (gift.first_block + index) * BLOCK_TOKENS
            held = [kv(self.played.weights(), 0, gift.tokens[: first + slot + 1]) for slot in range(BLOCK_TOKENS)]
            self.played.slots.overwrite(self.rank, block, held if index < good else GARBAGE)
        self._failed.update(gift.blocks[good:])
