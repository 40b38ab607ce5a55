"""Decides which writes a device may get now.

Flash wears, and a queue that grows faster than the device writes holds DRAM that others need. So a write is refused in
three cases: the device has had its bytes of the day, the queue would take too long at the measured rate, or, if
configured, the chunk was not requested a second time. A refusal costs hits, never correctness.

Time is an argument, in ns. This module knows keys and bytes, and no chunks.
"""

from collections import deque
from typing import Literal

DAY_NS = 86_400 * 1_000_000_000
BURST_SHARE = 24
"""An idle device may write this part of its day at once. The rest is spread evenly, so that no 24 hours exceed the
bytes of a day."""
RATE_AT_FIRST = 500_000_000
"""Bytes per second until a rate was measured."""
GUESS_S = 0.02
"""Busy time for which that guess counts."""
RATE_WINDOW_S = 1.0
"""Busy time after which a measurement counts half as much, or less."""
RATE_BYTES_MIN = 1 << 20
"""Fewer bytes are not enough for a measurement."""
RATE_HOLDS_NS = 60 * 1_000_000_000
"""A rate that was measured longer ago is old, and lets one read through: what is refused is not measured again."""
LOADS_KEPT = 8
"""Copies to devices of which the fastest counts."""

STALLED_NS = 10_000_000_000
"""A device that takes no write for this long, although writes wait, is reported."""
FRESH_NS = 2_000_000_000
"""A write that was refused within this time counts as waiting."""

Refusal = Literal["", "budget", "queue", "second-touch"]
REFUSALS = ("budget", "late", "second-touch", "room", "device", "shape")
"""Why chunks left DRAM and are not on disk. late: the queue had not reached them. room, device and shape come from the
search for a place."""


class Budget:
    """A token bucket of the bytes that a device may still write. daily_bytes=0: no limit.

    It is full when a brain begins, whatever an earlier brain has written."""

    def __init__(self, daily_bytes: int, now_ns: int) -> None:
        self.daily_bytes = daily_bytes
        self._most = daily_bytes / BURST_SHARE
        self._bytes = self._most
        self._bytes_per_ns = daily_bytes * (1 - 1 / BURST_SHARE) / DAY_NS
        self._at_ns = now_ns

    def allows(self, count: int, now_ns: int) -> bool:
        self._refill(now_ns)
        return not self.daily_bytes or count <= self._bytes

    def may_ever_allow(self, count: int) -> bool:
        """Whether a full bucket allows a write of this size."""
        return not self.daily_bytes or count <= self._most

    def charge(self, count: int, now_ns: int) -> None:
        """Charges a write when it is ordered, however it ends."""
        self._refill(now_ns)
        if self.daily_bytes:
            assert count <= self._bytes, "what is not allowed is not written"
            self._bytes -= count

    def left_bytes(self, now_ns: int) -> int:
        """Bytes that may be written now; 0 without a limit."""
        self._refill(now_ns)
        return int(self._bytes)

    def _refill(self, now_ns: int) -> None:
        if now_ns > self._at_ns:
            self._bytes = min(self._most, self._bytes + (now_ns - self._at_ns) * self._bytes_per_ns)
            self._at_ns = now_ns


class Rate:
    """Bytes per second that a busy device moves."""

    def __init__(self) -> None:
        self._recent_bytes, self._recent_s = RATE_AT_FIRST * GUESS_S, GUESS_S
        self.measured = False
        """False: bytes_per_s is a guess. Decisions use it, but it is not shown."""
        self.is_old = False
        """It was measured, but not lately."""
        self._measured_ns = 0
        self._busy_since_ns = 0
        self._bytes = 0
        self._pending = 0

    def began(self, now_ns: int) -> None:
        """Records that a transfer was ordered."""
        if not self._pending:
            self._busy_since_ns, self._bytes = now_ns, 0
        self._pending += 1

    def ended(self, moved_bytes: int, now_ns: int) -> None:
        self._pending -= 1
        assert self._pending >= 0
        self._bytes += moved_bytes
        took_ns = now_ns - self._busy_since_ns
        if self._bytes >= RATE_BYTES_MIN and took_ns > 0:
            if self.is_old:
                self._recent_bytes = self._recent_s = 0.0
            self.measured, self.is_old, self._measured_ns = True, False, now_ns
            # Bytes and times are added up apart: ends are often told in bursts, between which hardly any time passes.
            keeps = RATE_WINDOW_S / (RATE_WINDOW_S + took_ns / 1e9)
            self._recent_bytes = self._recent_bytes * keeps + self._bytes
            self._recent_s = self._recent_s * keeps + took_ns / 1e9
            self._busy_since_ns, self._bytes = now_ns, 0

    @property
    def is_busy(self) -> bool:
        return self._pending > 0

    def tick(self, now_ns: int) -> None:
        self.is_old = self.measured and now_ns - self._measured_ns > RATE_HOLDS_NS

    @property
    def bytes_per_s(self) -> float:
        return self._recent_bytes / self._recent_s

    def seconds_for(self, count: int) -> float:
        return count / self.bytes_per_s


class LoadRate:
    """How fast ranks get their bytes from DRAM: the fastest of the last copies.

    A copy that waited, for example for memory that its driver had not registered yet, does not count.
    """

    def __init__(self) -> None:
        self._s_per_byte: deque[float] = deque(maxlen=LOADS_KEPT)

    def ended(self, count: int, took_ns: int) -> None:
        """Records a copy that ended well."""
        if count >= RATE_BYTES_MIN and took_ns > 0:
            self._s_per_byte.append(took_ns / 1e9 / count)

    def seconds_for(self, count: int) -> float:
        """0 until a copy was measured."""
        return count * min(self._s_per_byte, default=0.0)


class Touched:
    """Keys that were requested, or would have been written. They outlive their chunks; the oldest are forgotten."""

    def __init__(self, keys_max: int) -> None:
        self._keys: dict[bytes, None] = {}
        self._most = keys_max

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]


class Placement:
    """The policy for one device."""

    def __init__(self, *, daily_bytes: int, queue_ms: int, now_ns: int) -> None:
        self.budget = Budget(daily_bytes, now_ns)
        self.writes, self.reads = Rate(), Rate()
        self.queued_bytes = 0
        """Bytes that are ordered and not yet written."""
        self.written_bytes = self.read_bytes = 0
        self.faults = 0
        """Reads and writes in which a record failed."""
        self._queue_s = queue_ms / 1000
        self._refused_since_ns = self._refused_at_ns = 0
        """Times of the first and the last refusal since a write was taken; 0: none."""
        self._why = ""

    def wrote(self, count: int) -> None:
        self.written_bytes += count

    def read(self, count: int) -> None:
        self.read_bytes += count

    def faulted(self) -> None:
        """Records a read or write in which a record failed."""
        self.faults += 1

    def heard(self, refusal: str, now_ns: int) -> None:
        """Records whether a wanted write was ordered (empty refusal), or why not."""
        if refusal not in ("room", "segment", "queue"):  # the others are wished, or reported elsewhere
            self._refused_since_ns = 0
            return
        self._refused_since_ns = self._refused_since_ns or now_ns
        self._refused_at_ns, self._why = now_ns, refusal

    def stalled(self, now_ns: int, *, waits: bool = False) -> tuple[int, str]:
        """How long (ns) no write was taken although writes wait, and why; (0, "") when all is well.

        waits: writes are known to wait, even if none was refused lately."""
        if not self._refused_since_ns or not (waits or now_ns - self._refused_at_ns <= FRESH_NS):
            return 0, ""
        return now_ns - self._refused_since_ns, self._why

    def refusal(self, count: int, now_ns: int) -> Refusal:
        """Why a write of this size is refused now; empty if it is not. An idle device takes one write of any size."""
        if not self.budget.allows(count, now_ns):
            return "budget"
        if self.queued_bytes and self.writes.seconds_for(self.queued_bytes + count) > self._queue_s:
            return "queue"
        return ""

    def ordered(self, count: int, now_ns: int) -> None:
        self.budget.charge(count, now_ns)
        self.queued_bytes += count
        self.writes.began(now_ns)

    def ended(self, count: int, now_ns: int) -> None:
        """Records the end of a write; `count` as in ordered()."""
        self.queued_bytes -= count
        assert self.queued_bytes >= 0
        self.writes.ended(count, now_ns)
