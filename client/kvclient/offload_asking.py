"""What goes back and forth between the decisions of a connector and its server: questions, answers and leases.

The scheduler half of every engine's connector has one. A call costs a send and a receive, waits only where it says so,
and raises nothing for the server's sake.
"""

import logging
import time

from kvclient.client import Client
from kvclient.offload import Offload
from kvclient.offload_worker import CONNECT_S
from kvclient.values import Found
from kvserver.errors import KvError, RequestError


class Asking:
    """Of one Offload at one server. Belongs to the scheduler's thread."""

    def __init__(self, client: Client, offload: Offload, log: logging.Logger) -> None:
        """log: the engine's."""
        self.namespace = b""
        """What the ranks have registered under. Until it is known, whoever owns this asks for nothing."""
        self._client = client
        self._inquiries = client.inquiries()
        self._offload = offload
        self._log = log
        self._connected = False
        self._said: set[str] = set()

    def __len__(self) -> int:
        """Questions without an answer."""
        return len(self._inquiries)

    @property
    def connected(self) -> bool:
        """Whether the server answers, as far as is known: otherwise a question is answered here, and at once."""
        return self._client.connected

    def wait_connected(self) -> None:
        """A moment at the start of an engine, so that its first requests hit."""
        try:
            self._client.wait_connected(CONNECT_S)
        except KvError as problem:
            self._log.error("no cache %s", problem)

    def send(self) -> None:
        """What the decisions want to know."""
        for lookup in self._offload.take_lookups():
            try:
                self._inquiries.ask(
                    lookup.number, self.namespace, lookup.keys, chunks_wanted_min=lookup.chunks_wanted_min
                )
            except RequestError as problem:
                self._say(problem)
                self._offload.found(lookup.number, Found(0, None, problem.code))

    def listen(self) -> bool:
        """Hands on what the server has answered, and what it was to have answered by now; True when that was
        anything."""
        answers = self._inquiries.take()
        for number, found, refusal in answers:
            if refusal is not None:
                self._say(refusal)
            self._offload.found(number, found)
        return bool(answers)

    def wait(self, seconds: float) -> bool:
        """For an answer, no longer than that; then as listen(), if there is one."""
        if seconds > 0:
            self._inquiries.wait(time.monotonic() + seconds)
        return self._inquiries.ready and self.listen()

    def notice_a_loss(self) -> None:
        """A server that is away keeps no promise; to try would bar the request from the cache."""
        connected = self._client.connected
        if self._connected and not connected:
            self._offload.leases_lost()
        self._connected = connected

    def give_back(self) -> None:
        """Leases that nobody needs any more."""
        for lease in self._offload.take_releases():
            self._inquiries.release(lease)

    def close(self) -> None:
        self._client.close()

    def _say(self, problem: RequestError) -> None:
        """What the server will go on refusing is said once, and is no reason for the engine to stop."""
        if problem.code not in self._said:
            self._said.add(problem.code)
            self._log.error("refused by the server %s", problem)
