"""Fair turns (fair_turns.py) in the brain's loop: reads the clock, and serves the line in slices.

Both doors use it. While a client has to wait for its turn, its connection is not read: what it sends meanwhile waits in
the kernel's buffer, which is bounded.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from kvserver import logs
from kvserver.brain.fair_turns import Turns

SLICE_NS = 1_000_000
"""Time that one slice of the line takes. A light client waits for at most one slice and one more request."""


class Line:
    """The line of waiting requests. Both doors share one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, refused: Callable[[], int]) -> None:
        """refused: returns how many requests were refused so far."""
        self._loop = loop
        self._refused = refused
        self._turns: Turns[Callable[[], None]] = Turns(time.monotonic_ns())
        self._planned = False
        """The loop has a call to _serve_slice() scheduled."""

    def at_once(self, client: int) -> bool:
        """Whether the client's next request is served now. Otherwise it has to wait()."""
        return self._turns.at_once(client)

    def serve(self, client: int, serve: Callable[[], None]) -> None:
        """Serves one request and charges the client its thread time: wall time would include other processes."""
        refused, began_ns = self._refused(), time.thread_time_ns()
        serve()
        self._turns.served(client, time.thread_time_ns() - began_ns, refused=self._refused() > refused)

    def wait(self, client: int, serve: Callable[[], None]) -> None:
        """Calls serve() when the client's turn has come."""
        self._turns.wait(client, lambda: self.serve(client, serve))
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._serve_slice)

    def tick(self) -> None:
        """Ages the accounts, and logs a client that takes much of the brain's time. To be called every 50 ms."""
        self._turns.tick()
        complaint = self._turns.complaint(time.monotonic_ns())
        if complaint is not None:
            logs.event(
                logging.WARNING,
                "client takes much time",
                ("pid", complaint.client if complaint.client > 0 else "unknown"),
                ("requests_per_s", round(complaint.requests_per_s)),
                ("refused_per_s", round(complaint.refused_per_s)),
                ("time_percent", round(complaint.time_percent)),
            )

    def _serve_slice(self) -> None:
        until_ns = time.monotonic_ns() + SLICE_NS
        while (serve := self._turns.next()) is not None:
            serve()
            if time.monotonic_ns() >= until_ns:
                break
        self._planned = bool(self._turns)
        if self._planned:
            self._loop.call_soon(self._serve_slice)
