"""What travels between ATOM's scheduler and its workers for us. Plain values that pickle; no ATOM, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvclient.offload_values import RetrieveOrder, StoreOrder


class Seq(Protocol):
    """What is read of ATOM's Sequence, and what is written: the attributes that begin with offload_; status in
    atom_aborts.py."""

    id: Any
    status: Any
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: list[int]
    block_table: list[int]
    has_per_req_cache: bool
    multimodal_data: Any
    offload_loaded: bool
    offload_load_failed: bool
    offload_loaded_tokens: int
    offload_load_start_tokens: int | None
    offload_handoff_boundary_tokens: int

    @property
    def is_finished(self) -> bool: ...


class Name(NamedTuple):
    """A request for offload.py. ATOM's ids come back when their sequence has gone; lives never do."""

    id: Any
    """What ATOM knows it by, in terminals too."""
    life: int


@dataclass(frozen=True)
class Step:
    """From the scheduler to every worker of every pipeline stage, once a schedule() and on idle ticks."""

    retrieves: tuple[RetrieveOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()

    @property
    def requests(self) -> Sequence[RetrieveOrder | StoreOrder]:
        """By this name ATOM tells whether an idle engine has anything to send."""
        return (*self.retrieves, *self.stores)


STORED = "kvserver.stored"
"""Channel of connector completions that says whether a store left no gap. Pipeline stages do not forward it."""

NAMESPACE = "kvserver.namespace:"
"""Begin of the name under which each rank reports, as a save of nobody, the namespace that it has registered."""
