"""How much is known of the records that earlier brains left on disk (disk/recovery.py)."""

from kvserver.index.space import Node
from kvserver.service.state.transitions import RECOVERY, RecoveryState, moved


class Recovery:
    """The state of recovery, and what the mover has told so far."""

    def __init__(self) -> None:
        self.state: RecoveryState = "waiting"
        self._forget()

    def _forget(self) -> None:
        self.documents: dict[bytes, bytes] = {}
        """Namespace -> its document, as noted on the device."""
        self.newest: dict[bytes, int] = {}
        """Namespace -> newest generation of its records."""
        self.records = 0
        self.not_taken = 0
        """Chunks that are whole and not void, and still could not be taken into the index."""
        self.floors: dict[Node, int] = {}
        """Chunk -> generation up to which everything below it is void, because its prefix was cleared."""

    @property
    def complete(self) -> bool:
        """Every record found on disk is in the index, so all other places are free."""
        return self.state == "complete"

    @property
    def listed(self) -> bool:
        """The mover has listed the namespaces on disk and the newest generation of their records."""
        return self.state in ("telling", "complete")

    def begin_anew(self) -> None:
        """The mover ended before it had told everything."""
        if self.state in ("listing", "telling"):
            self.state = moved(RECOVERY, self.state, "waiting")
            self._forget()

    def begin_listing(self) -> None:
        if self.state == "waiting":
            self.state = moved(RECOVERY, self.state, "listing")

    def found_namespace(self, namespace: bytes, document: bytes, newest: int) -> None:
        """document: empty when no device knows it."""
        if document:
            self.documents[namespace] = document
        self.newest[namespace] = newest

    def begin_telling(self, records: int) -> None:
        """All namespaces are listed. records: how many will be told."""
        self.state = moved(RECOVERY, self.state, "telling")
        self.records = records

    def take_not(self, chunks: int) -> None:
        """So many chunks could not be taken in."""
        self.not_taken += chunks

    def end(self) -> None:
        self.state = moved(RECOVERY, self.state, "complete")
        self._forget()
