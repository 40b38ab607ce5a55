"""The messages between ATOM's scheduler and its workers. Plain values that pickle; needs neither ATOM nor torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvclient.offload.values import RetrieveOrder, StoreOrder


class Seq(Protocol):
    """The attributes of ATOM's Sequence that are used. Only those named offload_* are written, and `status` in
    aborts.py."""

    id: Any
    status: Any
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: list[int]
    block_table: list[int]
    has_per_req_cache: bool
    per_req_cache_group: int
    state_fork_src: int
    last_checkpoint_pos: int
    multimodal_data: Any
    offload_loaded: bool
    offload_load_failed: bool
    offload_loaded_tokens: int
    offload_load_start_tokens: int | None
    offload_handoff_boundary_tokens: int

    @property
    def is_finished(self) -> bool: ...


class Name(NamedTuple):
    """Name of a request in decide.py. ATOM reuses its ids after a sequence has gone; `life` is never reused."""

    id: Any
    """ATOM's id of the request, also used in reports."""
    life: int

    def __str__(self) -> str:
        return str(self.id)


class StateCopy(NamedTuple):
    """The state of a job's request: the row that the server reads or writes, and the slot that ATOM uses."""

    row: int
    slot: int


@dataclass(frozen=True)
class Step:
    """The scheduler's message to every worker of every pipeline stage, once per schedule() and on idle ticks."""

    retrieves: tuple[RetrieveOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    states: Mapping[int, StateCopy] = field(default_factory=dict)
    """Job -> its state, for those of these jobs that have one."""

    @property
    def requests(self) -> Sequence[RetrieveOrder | StoreOrder]:
        """All orders. ATOM looks at this attribute to see whether an idle engine has anything to send."""
        return (*self.retrieves, *self.stores)


STORED = "kvserver.stored"
"""Channel of connector completions that report whether a store left no gap. Pipeline stages do not forward it."""

NAMESPACE = "kvserver.namespace:"
"""Prefix of the name under which each rank reports its namespace, as a save that belongs to no request."""
