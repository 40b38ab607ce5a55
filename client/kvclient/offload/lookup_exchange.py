"""The exchange between a connector's decisions and the server: lookups, answers and leases.

The scheduler half of every connector has one. A call costs a send and a receive. It waits only if documented, and never
raises because of the server.
"""

import logging
import time
from typing import Protocol

from kvclient.client import Client
from kvclient.offload.decide import Offload
from kvclient.offload.worker import CONNECT_S
from kvclient.values import Found
from kvserver.errors import KvError, RequestError
from kvserver.wire.messages import KEY_BYTES


class Witness(Protocol):
    """Who wants to know what lookups find."""

    def asked(self) -> int:
        """A lookup is asked. What it returns goes with the answer."""

    def found(self, keys: bytes, asked: int) -> None:
        """All these chunks were found in DRAM."""


class LookupExchange:
    """The lookups of one Offload at one server. Belongs to the scheduler's thread."""

    def __init__(
        self, client: Client, offload: Offload, log: logging.Logger, *, witness: Witness | None = None
    ) -> None:
        """log: the engine's logger."""
        self._witness = witness
        self._witnessed: dict[int, tuple[bytes, int]] = {}
        """Lookup without an answer -> its keys, and what the witness said."""
        self._client = client
        self._inquiries = client.inquiries()
        self._offload = offload
        self._log = log
        self._connected = False
        self._said: set[str] = set()
        self.namespace = b""
        """The namespace that the ranks registered. While it is empty, the server is asked for nothing."""
        self.use_namespace(b"")

    def __len__(self) -> int:
        """Number of lookups without an answer."""
        return len(self._inquiries)

    def use_namespace(self, namespace: bytes) -> None:
        self.namespace = namespace
        self._offload.set_unavailable("" if namespace else "no-namespace")

    @property
    def connected(self) -> bool:
        """Whether the server answers, as far as known. If not, every lookup is answered at once as a miss."""
        return self._client.connected

    def wait_connected(self) -> None:
        """Wait up to CONNECT_S at engine start, so that the first requests hit."""
        try:
            self._client.wait_connected(CONNECT_S)
        except KvError as problem:
            self._log.error("no cache %s", problem)

    def send(self) -> None:
        """Send the new lookups of the decisions."""
        for lookup in self._offload.take_lookups():
            if self._witness is not None:
                self._witnessed[lookup.number] = lookup.keys, self._witness.asked()
            try:
                self._inquiries.ask(
                    lookup.number,
                    self.namespace,
                    lookup.keys,
                    chunks_wanted_min=lookup.chunks_wanted_min,
                    may_wait=lookup.may_wait,
                )
            except RequestError as problem:
                self._say(problem)
                self._take(lookup.number, Found(0, None, problem.code))

    def listen(self) -> bool:
        """Hand on the server's answers, and misses for overdue lookups. Returns whether there were any."""
        answers = self._inquiries.take()
        for number, found, refusal in answers:
            if refusal is not None:
                self._say(refusal)
            self._take(number, found)
        return bool(answers)

    def _take(self, number: int, found: Found) -> None:
        keys, asked = self._witnessed.pop(number, (b"", 0))
        if self._witness is not None and found.lease is not None and not found.lease.chunks_on_disk:
            self._witness.found(keys[: found.chunks * KEY_BYTES], asked)
        self._offload.found(number, found)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for an answer, then do as listen()."""
        if seconds > 0:
            self._inquiries.wait(time.monotonic() + seconds)
        return self._inquiries.ready and self.listen()

    def notice_a_loss(self) -> None:
        """Drop all leases if the connection was lost: a retrieve by a lost lease fails, which bars the request from the
        cache."""
        connected = self._client.connected
        if self._connected and not connected:
            self._offload.leases_lost()
        self._connected = connected

    def pledge(self) -> None:
        """Tell the server which prompts the engine has begun to compute, and which it computes no more. Each takes a
        round trip of some 100 us."""
        new, over = self._offload.take_pledges()
        for pledge in over:
            self._client.unpledge(pledge)
        for order in new:
            try:
                result = self._client.pledge(self.namespace, order.keys)
            except RequestError as problem:
                self._say(problem)
            else:
                self._offload.pledged(order.request, result)

    def tidy(self) -> None:
        """Release leases that nobody needs any more, and log the requests that have ended."""
        for lease in self._offload.take_releases():
            self._inquiries.release(lease)
        for summary in self._offload.take_summaries():
            self._log.info("%s", summary)

    def close(self) -> None:
        self._client.close()

    def _say(self, problem: RequestError) -> None:
        """Log a lasting refusal of the server once. It does not stop the engine."""
        if problem.code not in self._said:
            self._said.add(problem.code)
            self._log.error("refused by the server %s", problem)
