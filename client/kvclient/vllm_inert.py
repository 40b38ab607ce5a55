"""After a bug: the connector does nothing more, for as long as its engine lives, and the engine computes on without it.

What is behind an unexpected exception is unknown, so nothing is looked up, retrieved or stored again. But what the
engine waits for has to end, and what it has lent has to go back: a retrieve that was promised is reported as failed,
and the request is computed; jobs that run end by themselves, and are reported; then their blocks are unpinned.
"""

import itertools
from collections.abc import Iterable, Sequence

from kvclient.offload_ends import Report
from kvclient.offload_guard import WHY
from kvclient.offload_values import Group, RetrieveOrder, Tables
from kvclient.values import Blocks, Lease
from kvclient.vllm_pins import Pins

NO_LEASE = Lease(0, 0, 0, 0.0)


class InertScheduler:
    """Takes the place of Scheduler."""

    def __init__(self, groups: Sequence[Group], pins: Pins, untold: Iterable[RetrieveOrder]) -> None:
        """untold: retrieves that were promised to the engine, and of which no rank knows."""
        self._groups = groups
        self._pins = pins
        self._pins.drop_untold()
        self._untold = [order._replace(refused=WHY) for order in untold]
        self._numbers = itertools.count(-1, -1)
        """Of jobs; none that the decisions have given."""

    def owe(self, request: str, tables: Tables, *, hbm_tokens: int, external_tokens: int) -> None:
        """The engine waits for a retrieve of this request. Owed twice before a step, it still ends once: ranks name
        requests, not jobs."""
        end_tokens = hbm_tokens + external_tokens
        blocks = [
            Blocks(index, first, tables[index][first : -(-end_tokens // group.block_tokens)])
            for index, group in enumerate(self._groups)
            for first in [hbm_tokens // group.block_tokens]
        ]
        number = next(self._numbers)
        self._untold.append(RetrieveOrder(number, request, NO_LEASE, tuple(blocks), hbm_tokens, end_tokens, WHY))

    def step(self) -> tuple[RetrieveOrder, ...]:
        retrieves = tuple(self._untold)
        self._untold.clear()
        return retrieves

    def ended(self, reports: Iterable[Report]) -> None:
        for report in reports:
            self._pins.reported(report.job, report.rank)

    def busy(self) -> bool:
        return bool(self._untold) or len(self._pins) > 0
