"""Orders to compare slots of the arena with the ledger, for movers of all kinds."""

import os
from collections.abc import Iterator

from kvserver.ipc.inheritance import Inheritance
from kvserver.transfer.native import Scrubber
from kvserver.wire.orders import Scrub, Scrubbed

ENDS_PER_TURN = 16


class Scrubbing:
    """A scrubber's orders and reports. Without scrubbing there is no scrubber, and no thread for it."""

    def __init__(self, inherited: Inheritance | None = None) -> None:
        """None: for tests without it."""
        self._scrubber: Scrubber | None = None
        if inherited is not None and inherited.config.scrub_bytes_per_s and inherited.config.digests == "on":
            config = inherited.config
            self._scrubber = Scrubber(inherited.arena, config.arena_bytes, inherited.ledger, config.ledger_span_bytes)

    @property
    def eventfd(self) -> int:
        """Readable when a report may be due; -1 without a scrubber."""
        return self._scrubber.eventfd if self._scrubber is not None else -1

    def begin(self, order: Scrub) -> None:
        assert self._scrubber is not None, "the brain has the same configuration"
        self._scrubber.submit(order.job, order.items)

    def reports(self) -> Iterator[Scrubbed]:
        assert self._scrubber is not None
        os.eventfd_read(self._scrubber.eventfd)
        for job, wrong, count in self._scrubber.ends(ENDS_PER_TURN):
            yield Scrubbed(job, tuple(wrong), count)
