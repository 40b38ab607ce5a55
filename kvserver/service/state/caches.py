"""Registered caches."""

from dataclasses import dataclass, field

from kvserver.service.state.movers import Mover
from kvserver.service.state.sessions import Session
from kvserver.service.state.table import Table
from kvserver.service.state.transitions import CACHE, CacheState, moved
from kvserver.transfer.layout import Layout
from kvserver.wire.messages import Mode


@dataclass(slots=True, eq=False, kw_only=True)
class Cache:
    """One registered cache."""

    number: int
    name: str
    session: Session
    digest: bytes
    layout: Layout
    mover: Mover
    mode: Mode
    tenant: int
    parts: tuple[int, ...]
    """Group -> part of the namespace that this cache reads and writes."""
    state: CacheState = "mapping"
    waiting: tuple[int, int] | None = None
    """(peer, request id) that is answered when mapping or unmapping has ended."""
    jobs: set[int] = field(default_factory=set)

    def become(self, state: CacheState) -> None:
        self.state = moved(CACHE, self.state, state)

    def await_answer(self, peer: int, request_id: int) -> None:
        """This request is answered when unmapping has ended."""
        self.waiting = (peer, request_id)

    def take_waiting(self) -> tuple[int, int] | None:
        """The (peer, request id) that is to be answered now, once."""
        waiting, self.waiting = self.waiting, None
        return waiting


class Caches(Table[Cache]):
    """All caches: by number here, by number at their mover, by name at their session."""

    def add(self, cache: Cache) -> None:
        self._rows[cache.number] = cache.mover.caches[cache.number] = cache.session.caches[cache.name] = cache

    def rename_free(self, cache: Cache) -> None:
        """The session may register another cache of this name."""
        if cache.session.caches.get(cache.name) is cache:
            del cache.session.caches[cache.name]

    def remove(self, cache: Cache) -> None:
        """Removes a cache that its mover no longer maps."""
        del self._rows[cache.number]
        del cache.mover.caches[cache.number]
        self.rename_free(cache)
