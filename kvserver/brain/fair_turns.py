"""The order in which clients' requests are served, so that no client keeps the server from the others.

A client is a process. Its cost is the time that the server spends on its requests. A client that has cost little lately
is served at once. The others wait in a line, and the cheapest of them is served next. The server takes a slice of that
line and then looks for new requests, so a light client waits for one slice at most. A client that is alone never waits.
Turns reads no clock: time is an argument. Line is the same in the brain's loop, for both doors.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kvserver import logs

LIGHT_NS = 5_000_000
"""A client with a lower recent cost is served at once. An engine that looks up 200 prompts a second costs a third of
this."""
FORGOTTEN_NS = 1_000
"""An account with a lower recent cost is deleted."""
WATCH_NS = 1_000_000_000
"""Period over which complaint() measures each client's cost."""
MUCH = 0.25
"""Share of the server's time above which complaint() names a client."""
COMPLAINTS_A_NS = 60_000_000_000
"""Shortest time between two complaints."""
SLICE_NS = 1_000_000
"""Time that one slice of the line takes. A light client waits for at most one slice and one more request."""

Item = TypeVar("Item")


class Complaint(NamedTuple):
    """A client that takes much of the server's time."""

    client: int
    requests_per_s: float
    refused_per_s: float
    time_percent: float


class Account(Generic[Item]):
    """The cost of one client, and its requests that wait in the line."""

    __slots__ = ("recent_ns", "refused", "requests", "waiting", "watched_ns")

    def __init__(self) -> None:
        self.recent_ns = 0
        """Cost, halved at each tick."""
        self.waiting: deque[Item] = deque()
        self.watched_ns = self.requests = self.refused = 0
        """Cost (ns), requests and refused requests since the last period of complaint() ended."""


class Turns(Generic[Item]):
    """The accounts of all clients that have cost something lately, and the line. Clients are numbers."""

    def __init__(self, now_ns: int) -> None:
        self._accounts: dict[int, Account[Item]] = {}
        self._line: dict[int, Account[Item]] = {}
        """The accounts with waiting requests."""
        self._watched_since_ns = now_ns
        self._complained_ns = now_ns - COMPLAINTS_A_NS

    def __bool__(self) -> bool:
        """Whether anything waits in the line."""
        return bool(self._line)

    def at_once(self, client: int) -> bool:
        """Whether the client's next request is served now, and not in the line."""
        account = self._accounts.get(client)
        return account is None or account.recent_ns < LIGHT_NS or len(self._accounts) == 1

    def wait(self, client: int, item: Item) -> None:
        """Puts the client's next request into the line."""
        account = self._line[client] = self._account(client)
        account.waiting.append(item)

    def next(self) -> Item | None:
        """Takes the first request of the cheapest waiting client out of the line. None: nobody waits."""
        if not self._line:
            return None
        # The line is short: cost is the server's own time, so only a few clients can be expensive at once.
        client, account = min(self._line.items(), key=lambda entry: entry[1].recent_ns)
        item = account.waiting.popleft()
        if not account.waiting:
            del self._line[client]
        return item

    def served(self, client: int, cost_ns: int, *, refused: bool = False) -> None:
        """Charges the client for a request that was answered."""
        account = self._account(client)
        account.recent_ns += cost_ns
        account.watched_ns += cost_ns
        account.requests += 1
        account.refused += refused

    def tick(self) -> None:
        """Halves every recent cost. To be called every 50 ms."""
        for client, account in list(self._accounts.items()):
            account.recent_ns >>= 1
            if account.recent_ns < FORGOTTEN_NS and not account.waiting and not account.watched_ns:
                del self._accounts[client]

    def complaint(self, now_ns: int) -> Complaint | None:
        """The most expensive client of the last period, if it took more than MUCH of it.

        None while the period is not over, and for COMPLAINTS_A_NS after the last complaint."""
        passed_ns = now_ns - self._watched_since_ns
        if passed_ns < WATCH_NS:
            return None
        self._watched_since_ns = now_ns
        found = None
        if self._accounts and now_ns - self._complained_ns >= COMPLAINTS_A_NS:
            client, most = max(self._accounts.items(), key=lambda item: item[1].watched_ns)
            if most.watched_ns > MUCH * passed_ns:
                self._complained_ns = now_ns
                seconds = passed_ns / 1e9
                share = 100 * most.watched_ns / passed_ns
                found = Complaint(client, most.requests / seconds, most.refused / seconds, share)
        for account in self._accounts.values():
            account.watched_ns = account.requests = account.refused = 0
        return found

    def _account(self, client: int) -> Account[Item]:
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = Account()
        return account


class Line:
    """The line of waiting requests. Both doors share one.

    While a client has to wait for its turn, its connection is not read: what it sends meanwhile waits in the kernel's
    buffer, which is bounded.
    """

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
