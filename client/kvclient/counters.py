"""What the client has done and what went wrong, for the engine's own metrics."""

import threading
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Counts since the client was made. Every field only grows."""

    lookups: int = 0
    lookups_unserved: int = 0
    """For which the server was not asked or did not answer, or did not know yet what its disks hold."""
    chunks_found: int = 0
    stores: int = 0
    stores_short: int = 0
    """Stores that ended with fewer chunks than asked, whatever the reason."""
    chunks_stored: int = 0
    bytes_stored: int = 0
    retrieves: int = 0
    retrieves_failed: int = 0
    bytes_retrieved: int = 0
    retrieves_overdue: int = 0
    """Retrieves whose blocks were still being written when they were given up."""
    timeouts: int = 0
    trips: int = 0
    """How often the breaker opened."""
    connects: int = 0
    connects_failed: int = 0
    registrations: int = 0
    replies_late: int = 0
    """Replies that came after their request was given up; dropped."""
    bugs: int = 0
    """Unexpected exceptions at the client's edge; each is logged with its trace."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add_lookup(self, chunks: int, *, served: bool) -> None:
        """add() for the hot path."""
        with self._lock:
            self.lookups += 1
            self.chunks_found += chunks
            self.lookups_unserved += not served

    def add(self, name: str, amount: int = 1) -> None:
        """From any thread."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if not name.startswith("_")}
