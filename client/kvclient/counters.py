"""Counts of the client's work and failures, for the engine's own metrics."""

import threading
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Counts since the client was made. Every field only grows."""

    lookups: int = 0
    lookups_unserved: int = 0
    """Lookups for which the server was not asked, did not answer, or did not know yet what its disks hold."""
    chunks_found: int = 0
    stores: int = 0
    stores_short: int = 0
    """Stores that ended with fewer chunks than asked, for any reason."""
    chunks_stored: int = 0
    bytes_stored: int = 0
    retrieves: int = 0
    retrieves_failed: int = 0
    bytes_retrieved: int = 0
    retrieves_overdue: int = 0
    """Retrieves whose blocks were still being written at their deadline."""
    timeouts: int = 0
    trips: int = 0
    """Times that the circuit breaker opened, so that the server was not asked (gate.py)."""
    connects: int = 0
    connects_failed: int = 0
    registrations: int = 0
    replies_late: int = 0
    """Replies that came after their request was given up. They are dropped."""
    bugs: int = 0
    """Unexpected exceptions at the client's edge. Each is logged with its trace."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add_lookup(self, chunks: int, *, served: bool) -> None:
        """As add(), for a lookup on the hot path."""
        with self._lock:
            self.lookups += 1
            self.chunks_found += chunks
            self.lookups_unserved += not served

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a count. Callable from any thread."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if not name.startswith("_")}
