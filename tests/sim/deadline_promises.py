"""How long a store or a retrieve may stay without its answer."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvserver.wire.messages import Retrieve, Store

from .memory import Wrong

MS = 1_000_000


@dataclass(eq=False)
class Unanswered:
    """A transfer that has no answer yet."""

    request: Store | Retrieve
    asked_ns: int
    late_ns: int = 0
    """The first tick at which its deadline had passed; 0: it has not. The server cancels it then at the latest."""


class DeadlinePromises:
    """A transfer is answered at its deadline and mover_grace_ms. Else its mover is killed, and answers by its end."""

    def __init__(self, counts: Counter[str], *, job_ttl_ms: int, grace_ms: int) -> None:
        self._counts = counts
        self._job_ttl_ms = job_ttl_ms
        self._grace_ms = grace_ms
        self.mover_of: dict[int, int] = {}
        """Cache -> the mover that was told to map it."""
        self.killed: set[int] = set()
        """Movers that are to be killed, or have been."""

    def check(self, transfers: Iterable[Unanswered], now_ns: int) -> None:
        """Checks what is unanswered after a tick."""
        for transfer in transfers:
            patience_ms = min(max(transfer.request.deadline_ms, 1), self._job_ttl_ms)
            if now_ns < transfer.asked_ns + patience_ms * MS:
                continue
            transfer.late_ns = transfer.late_ns or now_ns
            if now_ns < transfer.late_ns + self._grace_ms * MS:
                continue
            self._counts["transfers that wait for the end of their mover"] += 1
            if self.mover_of[transfer.request.cache] not in self.killed:
                request, waited_ms = transfer.request, (now_ns - transfer.asked_ns) // MS
                which = f"{type(request).__name__} {request.id} with deadline_ms={request.deadline_ms}"
                raise Wrong(f"{which} has no answer after {waited_ms} ms, and its mover is not killed")
