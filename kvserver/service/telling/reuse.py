"""What an infinite cache would have hit, so that "why is my hit rate low" has an answer.

Of the chunks that lookups ask for in a window of time, an infinite cache hits all but the first of each kind: its hit
rate is 1 - distinct / asked. What is hit beside that rate tells whether more DRAM or disk would help, or whether
prompts simply do not come back.

Distinct chunks are counted by HyperLogLog (Flajolet et al. 2007) with the estimator of Ertl (arXiv:1702.01284), which
needs no table of corrections. Two things keep it cheap on the thread that decides: of all chunks only those are looked
at whose key's first byte is a multiple of SAMPLED, which is as random as the key and the same for every lookup; and a
prompt that was asked for before in the hour is known by its last key, since a key names the whole prefix. It is called
when nobody waits (lookup_counts.py).
Standard error: REGISTERS alone make 2.3 %, the sample sqrt(SAMPLED / distinct) more.
"""

from collections import Counter
from math import inf, log, sqrt

from kvserver.wire.messages import KEY_BYTES

SAMPLED = 128
REGISTER_BITS = 11
REGISTERS = 1 << REGISTER_BITS
RANK_BITS = 56 - REGISTER_BITS
"""Of a key's 7 bytes behind the first, those that do not choose the register."""
ASKED_MIN = 16 * SAMPLED
"""Chunks; of fewer too few are looked at to say anything."""
TAILS_MAX = 4096
WINDOWS_HOURS = {"1h": 1, "1d": 24}
HOUR_NS = 3600 * 1_000_000_000

_UNSAMPLED = bytes(byte % SAMPLED != 0 for byte in range(256))
"""Turns first bytes into 0 for those that are looked at."""


class Sketch:
    """HyperLogLog: about how many distinct things were added, in 2 KiB."""

    def __init__(self) -> None:
        self._registers = bytearray(REGISTERS)

    def add(self, bits: int) -> None:
        """bits: 56 random bits of the thing."""
        register = bits & (REGISTERS - 1)
        rank = RANK_BITS + 1 - (bits >> REGISTER_BITS).bit_length()
        self._registers[register] = max(rank, self._registers[register])

    def merge(self, other: "Sketch") -> None:
        """As if all that was added to the other had been added here."""
        self._registers = bytearray(map(max, self._registers, other._registers))

    def distinct(self) -> float:
        held = [0] * (RANK_BITS + 2)
        for rank, registers in Counter(self._registers).items():
            held[rank] = registers
        z = REGISTERS * _tau(1 - held[-1] / REGISTERS)
        for rank in range(RANK_BITS, 0, -1):
            z = 0.5 * (z + held[rank])
        z += REGISTERS * _sigma(held[0] / REGISTERS)
        return REGISTERS * REGISTERS / (2 * log(2) * z)


class Window:
    """What was asked in one window of time, and what that says of the last one in which enough was asked."""

    def __init__(self, hours: int) -> None:
        self._hours = hours
        self._left = hours
        self._sketch = Sketch()
        self._asked = 0
        self._whole = False
        self.hit_ratio: float | None = None
        """Of the last whole window; of the running one as long as there is none. None: not enough was asked yet."""

    def add(self, sketch: Sketch, asked: int) -> None:
        """An hour is over."""
        self._sketch.merge(sketch)
        self._asked += asked
        self._left -= 1
        is_over = self._left == 0
        if self._asked >= ASKED_MIN and (is_over or not self._whole):
            self.hit_ratio = max(0.0, 1 - self._sketch.distinct() * SAMPLED / self._asked)
            self._whole |= is_over
        if is_over:
            self._left, self._asked, self._sketch = self._hours, 0, Sketch()


class Reuse:
    """The running hour, and the windows that are made of hours."""

    def __init__(self, now_ns: int) -> None:
        self._windows = {name: Window(hours) for name, hours in WINDOWS_HOURS.items()}
        self._sketch = Sketch()
        self._asked = 0
        self._ends_ns = now_ns + HOUR_NS
        self._tails: dict[bytes, bytes] = {}
        """Last keys of prompts that were asked for in this hour, and in which namespace the last time."""

    def asked(self, namespace: bytes, keys: bytes) -> None:
        """Somebody asked for these packed keys, which chain. Of 512 that are new: some 6 us."""
        self._asked += len(keys) // KEY_BYTES
        tail = keys[-KEY_BYTES:]
        if self._tails.get(tail) == namespace:
            return
        if len(self._tails) >= TAILS_MAX:
            self._tails.clear()
        self._tails[tail] = namespace
        marks = keys[::KEY_BYTES].translate(_UNSAMPLED)
        salt = int.from_bytes(namespace[:7], "little")  # the same key in another namespace is another chunk
        at = marks.find(0)
        while at >= 0:
            self._sketch.add(int.from_bytes(keys[at * KEY_BYTES + 1 : at * KEY_BYTES + 8], "little") ^ salt)
            at = marks.find(0, at + 1)

    def turn(self, now_ns: int) -> None:
        """To be called at each tick: hours end."""
        if now_ns < self._ends_ns:
            return
        self._ends_ns = now_ns + HOUR_NS
        for window in self._windows.values():
            window.add(self._sketch, self._asked)
        self._sketch, self._asked = Sketch(), 0
        self._tails.clear()

    def hit_ratios(self) -> dict[str, float]:
        """By the window's name; those of which something is known. Before the first hour is over: what it says now."""
        ratios = {name: window.hit_ratio for name, window in self._windows.items()}
        if None in ratios.values() and self._asked >= ASKED_MIN:
            now = max(0.0, 1 - self._sketch.distinct() * SAMPLED / self._asked)
            return {name: now if ratio is None else ratio for name, ratio in ratios.items()}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _sigma(x: float) -> float:
    """Ertl's correction for registers that are still empty."""
    if x == 1:
        return inf
    y, z, before = 1.0, x, -1.0
    while z != before:
        x *= x
        before = z
        z += x * y
        y += y
    return z


def _tau(x: float) -> float:
    """Ertl's correction for registers that are full."""
    if x in (0, 1):
        return 0.0
    y, z, before = 1.0, 1 - x, -1.0
    while z != before:
        x = sqrt(x)
        before = z
        y *= 0.5
        z -= (1 - x) ** 2 * y
    return z / 3
