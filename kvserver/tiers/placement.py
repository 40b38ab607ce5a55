"""Decides what may be written to a device now, and what is left alone instead.

Flash wears, and a queue of writes that grows faster than the device drains holds DRAM that others need. So a write is
refused when its device has had its bytes of the day, when what is queued would take too long at the rate that was
measured, or, by choice, when nobody has asked for the chunk a second time. A refusal costs hits, never correctness.

Time is an argument, in ns. Nothing here knows of chunks: keys and bytes are all that is said.
"""

from typing import Literal

DAY_NS = 86_400 * 1_000_000_000
BURST_SHARE = 24
"""A device that was idle may write this part of its day at once. The rest comes evenly, so that no 24 hours have more
than the day's bytes."""
RATE_AT_FIRST = 500_000_000
"""Bytes per second, until something was measured."""
RATE_WEIGHT = 0.2
RATE_BYTES_MIN = 1 << 20
"""Fewer bytes say little about a rate."""

STALLED_NS = 10_000_000_000
"""Somebody is told when a device takes nothing for so long although writes wait for it."""
FRESH_NS = 2_000_000_000
"""A write that was refused within this time still waits."""

Refusal = Literal["", "budget", "queue", "second-touch"]
REFUSALS = ("budget", "late", "second-touch", "room", "device", "shape")
"""Why chunks left DRAM and are not on disk. late: the queue was not so far yet. room, device and shape are found by
those who look for a place."""


class Budget:
    """A token bucket: the bytes that a device may still write. 0 a day: as many as it likes. It is full when a brain
    begins, whatever another one has written before."""

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
        """So many bytes may be written at once when the bucket is full."""
        return not self.daily_bytes or count <= self._most

    def charge(self, count: int, now_ns: int) -> None:
        """The bytes are written. They are charged when the write is ordered, whatever becomes of it."""
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
    """Bytes per second that a device moves while it has something to do."""

    def __init__(self) -> None:
        self.bytes_per_s = float(RATE_AT_FIRST)
        self.measured = False
        """Until then it is a guess, by which is decided and which nobody is shown."""
        self._busy_since_ns = 0
        self._bytes = 0
        self._pending = 0

    def began(self, now_ns: int) -> None:
        """A transfer was ordered."""
        if not self._pending:
            self._busy_since_ns, self._bytes = now_ns, 0
        self._pending += 1

    def ended(self, moved_bytes: int, now_ns: int) -> None:
        self._pending -= 1
        assert self._pending >= 0
        self._bytes += moved_bytes
        took_ns = now_ns - self._busy_since_ns
        if self._bytes >= RATE_BYTES_MIN and took_ns > 0:
            self.measured = True
            self.bytes_per_s += RATE_WEIGHT * (self._bytes * 1e9 / took_ns - self.bytes_per_s)
            self._busy_since_ns, self._bytes = now_ns, 0

    def seconds_for(self, count: int) -> float:
        return count / self.bytes_per_s


class Touched:
    """Keys that were asked for, or would have been written, remembered beyond their chunks; the oldest are
    forgotten."""

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
        """Ordered and not yet written."""
        self.written_bytes = self.read_bytes = 0
        self.faults = 0
        """Reads and writes with a record that did not go well."""
        self._queue_s = queue_ms / 1000
        self._refused_since_ns = self._refused_at_ns = 0
        """The first and the last refusal since something was taken; 0: none."""
        self._why = ""

    def wrote(self, count: int) -> None:
        self.written_bytes += count

    def read(self, count: int) -> None:
        self.read_bytes += count

    def faulted(self) -> None:
        """A read or write ended with a record that did not go well."""
        self.faults += 1

    def heard(self, refusal: str, now_ns: int) -> None:
        """How a write ended that somebody wanted: it was ordered (empty), or why not."""
        if refusal not in ("room", "segment", "queue"):  # of the others everybody is told, or has wished them
            self._refused_since_ns = 0
            return
        self._refused_since_ns = self._refused_since_ns or now_ns
        self._refused_at_ns, self._why = now_ns, refusal

    def stalled(self, now_ns: int, *, waits: bool = False) -> tuple[int, str]:
        """For how long (ns) nothing was taken although writes wait, and why; (0, "") when all is well. waits: writes
        are known to wait, also where none was refused lately."""
        if not self._refused_since_ns or not (waits or now_ns - self._refused_at_ns <= FRESH_NS):
            return 0, ""
        return now_ns - self._refused_since_ns, self._why

    def refusal(self, count: int, now_ns: int) -> Refusal:
        """Why so many bytes must not be written now; empty when they may. An idle device takes one write of any
        size."""
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
        """The write is over; `count` as when it was ordered."""
        self.queued_bytes -= count
        assert self.queued_bytes >= 0
        self.writes.ended(count, now_ns)
