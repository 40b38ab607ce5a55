"""Misses that a store is not asked for, as far as that is settled before they come.

Nearly every lookup that misses is for a chunk of which nobody has told, and its reply waits for that to be seen. So
what is the same for all chunks of a namespace is looked at once. It holds until a time, or until something happens to
the namespace's epoch or to the belief in its announcements (NamespaceEpoch drops it then). Meanwhile a miss costs the
chunk's mark and a look at what is known of it.
"""

from dataclasses import dataclass

from kvserver.remote.announcement import WRITTEN
from kvserver.service.state.announcements import Announcements
from kvserver.service.telling.counters import RemoteCounts
from kvserver.transfer.native import Marker, MarkTable


@dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class Passing:
    """Which misses of a namespace a store is not asked for, between two times. Its NamespaceEpoch owns it."""

    from_ns: int
    until_ns: int
    in_store: MarkTable
    """Marks of what was told of chunks in the store."""
    forgotten: int
    """The one of KnownChunks when this was made. This holds no longer when that has changed."""
    announcements: Announcements
    counts: RemoteCounts
    marker: Marker | None
    """Makes the marks that decide. None: no epoch counts, so no chunk of the store may be used."""

    def passes(self, key: bytes) -> bool:
        """The store is not asked for the chunk: no epoch counts, or nobody has told of it and no try is due."""
        if self.marker is None:
            return True
        return self.announcements.untried > 0 and self.in_store.kind_of(self.marker, key) != WRITTEN

    def passed_over(self) -> None:
        """Counts a chunk of which nobody has told: it was looked up, and is not looked for."""
        if self.announcements.untried:  # else the next one is tried, and does not come here
            self.announcements.passed_over()
        self.counts.add("remote_unannounced", 1)
