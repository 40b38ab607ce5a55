"""The connector after a bug: it does nothing more for the engine's life, and the engine computes without it.

After an unexpected exception our state is unknown, so nothing is looked up, retrieved or stored again. Everything that
the engine waits for or has lent still has to end. A promised retrieve is reported as failed, and the engine computes
the request. Running jobs end by themselves and are reported, and then their blocks are unpinned.
"""

import itertools
from collections.abc import Iterable, Sequence

from kvclient.offload.ends import Report
from kvclient.offload.guard import WHY
from kvclient.offload.values import Group, RetrieveOrder, Tables
from kvclient.values import Blocks, Lease
from kvclient.vllm.pins import Pins

NO_LEASE = Lease(0, 0, 0, 0.0)


class InertScheduler:
    """The replacement of Scheduler after a bug."""

    def __init__(self, groups: Sequence[Group], pins: Pins, untold: Iterable[RetrieveOrder]) -> None:
        """untold: retrieves that were promised to the engine and that no rank has received yet."""
        self._groups = groups
        self._pins = pins
        self._pins.drop_untold()
        self._untold = [order._replace(refused=WHY) for order in untold]
        self._numbers = itertools.count(-1, -1)
        """Job numbers; negative, so that they differ from those of Offload."""

    def owe(self, request: str, tables: Tables, *, hbm_tokens: int, external_tokens: int) -> None:
        """Note that the engine waits for a retrieve of this request, which the next step fails.

        A request that is noted twice before a step still ends once, because ranks name requests, not jobs.
        """
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
