"""Whose request is served next, so that no client keeps the server from the others.

A client is a process. What it costs is the time that the server spends on its requests. A client that has cost little
lately is served at once. The others wait in a line, and whoever of them has cost least is served next. The server takes
a slice of that line and then looks for new requests, so a light client waits for one slice at most. A client that is
alone has nobody to wait for. Nothing here reads a clock: time is an argument.
"""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

LIGHT_NS = 5_000_000
"""A client that has cost less than this lately is served at once. An engine that looks up 200 prompts a second costs a
third of it."""
FORGOTTEN_NS = 1_000
"""Who has cost less lately has no account."""
WATCH_NS = 1_000_000_000
"""Over this time it is looked who costs much."""
MUCH = 0.25
"""Share of the server's time."""
COMPLAINTS_A_NS = 60_000_000_000
"""Between two lines in the log."""

Item = TypeVar("Item")


class Complaint(NamedTuple):
    """A client that takes much of the server's time."""

    client: int
    requests_per_s: float
    refused_per_s: float
    time_percent: float


class Account(Generic[Item]):
    """What one client has cost, and what of it waits in the line."""

    __slots__ = ("recent_ns", "refused", "requests", "waiting", "watched_ns")

    def __init__(self) -> None:
        self.recent_ns = 0
        """Halved at each tick."""
        self.waiting: deque[Item] = deque()
        self.watched_ns = self.requests = self.refused = 0
        """Since complaint() looked."""


class Turns(Generic[Item]):
    """Clients are numbers. There is an account of each that has cost something lately, and of no other."""

    def __init__(self, now_ns: int) -> None:
        self._accounts: dict[int, Account[Item]] = {}
        self._line: dict[int, Account[Item]] = {}
        """Those of them of which something waits."""
        self._watched_since_ns = now_ns
        self._complained_ns = now_ns - COMPLAINTS_A_NS

    def __bool__(self) -> bool:
        """Whether anything waits in the line."""
        return bool(self._line)

    def at_once(self, client: int) -> bool:
        """Whether its next request is served now, and not in the line."""
        account = self._accounts.get(client)
        return account is None or account.recent_ns < LIGHT_NS or len(self._accounts) == 1

    def wait(self, client: int, item: Item) -> None:
        """Puts the client's next request into the line."""
        account = self._line[client] = self._account(client)
        account.waiting.append(item)

    def next(self) -> Item | None:
        """Takes out of the line what is to be served now: of the client that has cost least. None: nobody waits."""
        if not self._line:
            return None
        # The time is the server's own, so only a few clients can have cost much of it lately.
        client, account = min(self._line.items(), key=lambda entry: entry[1].recent_ns)
        item = account.waiting.popleft()
        if not account.waiting:
            del self._line[client]
        return item

    def served(self, client: int, cost_ns: int, *, refused: bool = False) -> None:
        """A request of the client has been answered, and cost so much."""
        account = self._account(client)
        account.recent_ns += cost_ns
        account.watched_ns += cost_ns
        account.requests += 1
        account.refused += refused

    def tick(self) -> None:
        """To be called every 50 ms: what was paid for is forgotten, half of it each time."""
        for client, account in list(self._accounts.items()):
            account.recent_ns >>= 1
            if account.recent_ns < FORGOTTEN_NS and not account.waiting and not account.watched_ns:
                del self._accounts[client]

    def complaint(self, now_ns: int) -> Complaint | None:
        """The client that took much of the last second, where there is one and none was named in the last minute."""
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
