"""A scheduler's lookups by sequence, remembered so that asking again at every step costs no round trip.

A scheduler asks for a waiting sequence again and again until there is room for it. A prompt that was found whole is
good as long as its lease lives. An incomplete answer is believed only briefly, because somebody may be storing the
rest. Only the server's answers are remembered. While it does not answer, a call costs what Client.lookup() costs then,
which is next to nothing.
"""

import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

from kvclient.client import Client
from kvclient.values import Found, Lease
from kvserver.wire.messages import KEY_BYTES

LEASE_SPARE_S = 1.0
"""A lease that ends sooner is exchanged for a new one, because the ranks still have to submit their retrieves."""
MOMENT_S = 0.25
"""A few steps of a scheduler, and less than a prefill of what might be found next time."""
SEQUENCES_MAX = 2048
"""Most sequences remembered; then the oldest is forgotten. Leases pin chunks, and the server bounds their number."""


class _Answer(NamedTuple):
    namespace: bytes
    keys: bytes
    chunks_wanted_min: int
    found: Found
    good_until_s: float


class Sequences:
    """Answers by sequence. Belongs to one thread, like the scheduler's queue that it follows.

    moment_s: how long an incomplete answer is believed. clock_s: the monotonic clock, for tests.
    """

    def __init__(
        self,
        client: Client,
        *,
        moment_s: float = MOMENT_S,
        sequences_max: int = SEQUENCES_MAX,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._moment_s = moment_s
        self._sequences_max = sequences_max
        self._clock_s = clock_s
        self._answers: dict[Hashable, _Answer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def lookup(self, sequence: Hashable, namespace: bytes, keys: bytes, *, chunks_wanted_min: int = 1) -> Found:
        """As Client.lookup(), or its remembered answer to the same question. The lease stays here until take()."""
        answer = self._answers.get(sequence)
        if answer is not None and answer[:3] == (namespace, keys, chunks_wanted_min) and self._is_good(answer):
            return answer.found
        found = self._client.lookup(namespace, keys, chunks_wanted_min=chunks_wanted_min)
        self.forget(sequence)  # not earlier: until now the old lease has kept the chunks
        if not found.why:
            if len(self._answers) >= self._sequences_max:
                self.forget(next(iter(self._answers)))
            good_until_s = self._good_until_s(found, asked=len(keys) // KEY_BYTES)
            self._answers[sequence] = _Answer(namespace, keys, chunks_wanted_min, found, good_until_s)
        return found

    def take(self, sequence: Hashable) -> Lease | None:
        """Hand over the lease for the ranks' retrieves. The caller uses or releases it."""
        answer = self._answers.pop(sequence, None)
        return answer.found.lease if answer is not None else None

    def forget(self, sequence: Hashable) -> None:
        """The sequence no longer waits. Its lease is released."""
        lease = self.take(sequence)
        if lease is not None:
            self._client.release(lease)

    def _good_until_s(self, found: Found, *, asked: int) -> float:
        lease_end_s = found.lease.expires_monotonic_s - LEASE_SPARE_S if found.lease is not None else float("inf")
        return lease_end_s if found.chunks == asked else min(lease_end_s, self._clock_s() + self._moment_s)

    def _is_good(self, answer: _Answer) -> bool:
        """Whether the answer may still be used. Not while the server is away, because nobody could retrieve the
        chunks."""
        lease = answer.found.lease
        return self._clock_s() < answer.good_until_s and (lease is None or self._client.honours(lease))
