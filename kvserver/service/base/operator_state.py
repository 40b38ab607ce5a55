"""Operators' wishes that are in force: holds, fences, and draining of the server.

Data and no decisions, as core.py. None of it outlives the brain. A cleared prefix does, see clear_prefix.py.
"""

from dataclasses import dataclass, field
from typing import Literal

from kvserver.index.space import Node, Space
from kvserver.wire.orders import DrainState


@dataclass(slots=True, eq=False)
class Hold:
    """A hold: the prefix that ends in `tail` stays in DRAM until `expires_ns`, or, if of kind warm, until it is
    there."""

    number: int
    kind: Literal["pin", "warm"]
    space: Space
    tail: Node
    expires_ns: int
    chain: list[Node]
    """The chunks that the hold keeps, head first."""


@dataclass(slots=True, eq=False)
class Wishes:
    """The wishes of all operators together."""

    holds: dict[int, Hold] = field(default_factory=dict)
    held: dict[Node, tuple[int, int]] = field(default_factory=dict)
    """Chunk -> number of holds that keep it, and its bytes when the first of them began."""
    held_bytes: int = 0
    """Bytes of all held chunks, each counted once."""
    fences: dict[bytes, int] = field(default_factory=dict)
    """Namespace -> time (ns) until which nothing is stored there, because its weights have changed."""
    drain: DrainState = ""
    """State of the server's drain. A draining server takes no stores, so that it can be stopped without loss."""
    drain_waits: str = ""
    """Why draining waits; empty: it does not."""
    drain_left: dict[str, int] = field(default_factory=dict)
    """Bytes that only DRAM held when the server was drained, by reason."""
