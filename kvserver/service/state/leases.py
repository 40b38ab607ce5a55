"""Leases: promises to engines."""

from dataclasses import dataclass, field

from kvserver.index.space import Node, Space
from kvserver.service.state.chunk_waits import Fetch
from kvserver.service.state.pledges import Wait
from kvserver.service.state.sessions import Engine
from kvserver.service.state.table import Table
from kvserver.wire.messages import KEY_BYTES


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """A promise to an engine that the prefix ending in `tail` stays until `expires_ns`."""

    number: int
    engine: Engine
    space: Space
    tail: Node
    keys: bytes
    """The keys that were found, and those that are awaited. A retrieve compares them with the chain before a byte
    moves."""
    expires_ns: int
    ranks_used: set[int] = field(default_factory=set)
    is_chain: bool = False
    """The keys are those of the chain that ends in `tail`. A lookup looks at some of them only; the first retrieve
    compares all."""
    fetch: Fetch | None = None
    """The read from disk that still fills the prefix; None: nothing is left to read."""
    wait: Wait | None = None
    """The wait for chunks behind `tail` that an engine still computes; None: no more come."""

    @property
    def chunks(self) -> int:
        return self.tail.depth

    @property
    def reach(self) -> int:
        """Chunks that the lease is on when all that is awaited has come."""
        return len(self.keys) // KEY_BYTES

    @property
    def keys_here(self) -> bytes:
        return self.keys[: self.chunks * KEY_BYTES]

    def moves_on(self, tail: Node) -> None:
        """The next chunk that it awaits has come."""
        self.tail = tail

    def awaits(self, wait: Wait) -> None:
        self.wait = wait

    def awaits_no_more(self) -> None:
        """All that it awaited has come, or nothing more comes."""
        self.wait = None

    def extend(self, expires_ns: int) -> None:
        self.expires_ns = expires_ns

    def compared(self) -> None:
        """The keys were compared with the chain."""
        self.is_chain = True

    def await_chunks(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def take_fetch(self) -> Fetch | None:
        """The wait is over."""
        fetch, self.fetch = self.fetch, None
        return fetch

    def used_by(self, rank: int) -> bool:
        """The rank has had its last retrieve. Returns whether all ranks have."""
        self.ranks_used.add(rank)
        return len(self.ranks_used) == self.engine.ranks


class Leases(Table[Lease]):
    """All leases: here, and by number at their engine."""

    def grant(self, lease: Lease) -> None:
        self._rows[lease.number] = lease
        lease.engine.leases.add(lease.number)

    def end(self, lease: Lease) -> None:
        del self._rows[lease.number]
        lease.engine.leases.discard(lease.number)
