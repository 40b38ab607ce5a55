"""Which prompts this engine has pledged at the server, so that other engines wait for them instead of computing them.

A request is pledged in the step in which the engine first computes it, and never while it waits. The pledge is taken
back when the request loses its blocks, is aborted, or stores no more. All that was stored until then stays.
"""

from kvclient.offload.request import Phase, Request
from kvclient.offload.values import Options, PledgeOrder
from kvclient.values import PledgeResult


class Pledging:
    """The pledges of all requests. Orders and pledges to take back collect here until they are taken."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._new: list[PledgeOrder] = []
        self._over: list[PledgeResult] = []

    def computed(self, it: Request) -> None:
        """The engine computes some of the request in this step. The first time, what is not held is pledged."""
        if it.is_pledged or it.stopped or it.lookup is not None:
            return
        it.is_pledged = True
        chunks = min(it.prompt_tokens // self._options.chunk_tokens, it.chunks)
        if (chunks - it.frontier) * self._options.chunk_tokens >= max(1, self._options.retrieve_tokens_min):
            it.pledged_from, it.pledged_until = 0 if it.storing else it.frontier, chunks
            self._new.append(PledgeOrder(it.name, it.key_range(0, chunks)))

    def pledged(self, it: Request | None, result: PledgeResult) -> None:
        """The server's answer. A request that has ended meanwhile gives the pledge back. So does one of which the
        server has lost chunks since it was asked: they are not stored again."""
        if not result.number:
            return
        if it is None or it.phase is not Phase.RUNNING or result.held < it.pledged_from:
            self._over.append(result)
        else:
            it.pledge = result

    def stops(self, it: Request) -> None:
        """The request stores nothing more of its prompt for now. All that it was to store may be under way."""
        it.is_pledged = False
        self._new = [order for order in self._new if order.request != it.name]
        pledge, it.pledge = it.pledge, None
        if pledge is not None and (it.stopped or it.frontier < it.pledged_until):
            self._over.append(pledge)

    def take(self) -> tuple[list[PledgeOrder], list[PledgeResult]]:
        """New pledges, and those to take back, since the last call."""
        taken = self._new, self._over
        self._new, self._over = [], []
        return taken
