"""A request in the stand-in scheduler: the attributes that a connector reads and writes."""

from enum import Enum, auto
from itertools import count
from typing import Any


class Status(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    ABORTED = auto()
    FINISHED = auto()


class Sequence:
    counter = count(1)

    def __init__(
        self,
        token_ids: list[int],
        *,
        max_tokens: int = 1,
        id: Any = None,
        multimodal_data: Any = None,
        has_per_req_cache: bool = False,
    ) -> None:
        self.id = next(Sequence.counter) if id is None else id
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.max_tokens = max_tokens
        self.status = Status.WAITING
        self.num_cached_tokens = 0
        self.num_hashed_tokens = 0
        self.block_table: list[int] = []
        self.is_partial_prefill = False
        self.has_per_req_cache = has_per_req_cache
        self.per_req_cache_group = -1
        self.state_fork_src = -1
        self.last_checkpoint_pos = 0
        self.multimodal_data = multimodal_data
        self.is_prefill = True

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED
