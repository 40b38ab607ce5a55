"""Operators' wishes that are in force: holds, fences, and draining of the server.

None of it outlives the brain. A cleared prefix does, see clear_prefix.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvserver.index.space import Node, Space
from kvserver.service.state.chunk_waits import Fetch
from kvserver.service.state.transitions import SERVER_DRAIN, DrainState, moved


@dataclass(slots=True, eq=False, kw_only=True)
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
    fetch: Fetch | None = None
    """The read from disk that still fills it."""

    def await_chunks(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def take_fetch(self) -> Fetch | None:
        """The wait is over."""
        fetch, self.fetch = self.fetch, None
        return fetch


class OperatorState:
    """The wishes of all operators together."""

    def __init__(self) -> None:
        self.holds: dict[int, Hold] = {}
        self.held: dict[Node, tuple[int, int]] = {}
        """Chunk -> number of holds that keep it, and its bytes when the first of them began."""
        self.held_bytes = 0
        """Bytes of all held chunks, each counted once."""
        self.fences: dict[bytes, int] = {}
        """Namespace -> time (ns) until which nothing is stored there, because its weights have changed."""
        self.drain: DrainState = ""
        """State of the server's drain. A draining server takes no stores, so that it can be stopped without loss."""
        self.drain_waits = ""
        """Why draining waits; empty: it does not."""
        self.drain_left: dict[str, int] = {}
        """Bytes that only DRAM held when the server was drained, by reason."""

    def begin(self, hold: Hold, chunk_bytes: Mapping[Node, int]) -> None:
        """chunk_bytes: bytes of each chunk of the hold that no other hold keeps."""
        self.holds[hold.number] = hold
        for node in hold.chain:
            count, node_bytes = self.held.get(node, (0, chunk_bytes.get(node, 0)))
            self.held[node] = count + 1, node_bytes
        self.held_bytes += sum(chunk_bytes.values())

    def end(self, hold: Hold) -> None:
        del self.holds[hold.number]
        for node in hold.chain:
            count, node_bytes = self.held.pop(node)
            if count > 1:
                self.held[node] = count - 1, node_bytes
            else:
                self.held_bytes -= node_bytes

    def begin_drain(self) -> None:
        self.drain, self.drain_waits = moved(SERVER_DRAIN, self.drain, "draining"), "stores"

    def drain_waits_for(self, what: str) -> None:
        self.drain_waits = what

    def end_drain(self, left: dict[str, int]) -> None:
        """Nothing more can be saved. left: see drain_left."""
        self.drain, self.drain_left = moved(SERVER_DRAIN, self.drain, "drained"), left

    def resume(self) -> None:
        if self.drain:
            self.drain = moved(SERVER_DRAIN, self.drain, "")
        self.drain_waits, self.drain_left = "", {}
