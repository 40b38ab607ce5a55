"""What operators have asked for and is still in force: holds, fences, and whether the server is being drained.

Data and no decisions, as core.py. None of it outlives the brain; that a prefix was cleared does, see prefixes.py.
"""

from dataclasses import dataclass, field
from typing import Literal

from kvserver.index.space import Node, Space
from kvserver.wire.orders import DrainState


@dataclass(slots=True, eq=False)
class Hold:
    """The prefix that ends in `tail` stays in DRAM until `expires_ns`, or, of kind warm, until it is there."""

    number: int
    kind: Literal["pin", "warm"]
    space: Space
    tail: Node
    expires_ns: int
    chain: list[Node]
    """What it keeps, head first."""


@dataclass(slots=True, eq=False)
class Wishes:
    """Of all operators."""

    holds: dict[int, Hold] = field(default_factory=dict)
    held: dict[Node, tuple[int, int]] = field(default_factory=dict)
    """Chunk -> how many holds keep it, and its bytes when the first of them began."""
    held_bytes: int = 0
    """Of all these chunks, each once."""
    fences: dict[bytes, int] = field(default_factory=dict)
    """Namespace -> until when nothing is stored there (ns), since its weights have changed."""
    drain: DrainState = ""
    """Whether the server takes no stores any more, so that it can be stopped without loss."""
    drain_waits: str = ""
    """What draining waits for."""
    drain_left: dict[str, int] = field(default_factory=dict)
    """Bytes that DRAM alone held when the server was drained, by why."""
