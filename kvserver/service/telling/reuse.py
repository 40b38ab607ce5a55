"""Estimates the hit rate of an infinite cache, so that "why is my hit rate low" has an answer.

An infinite cache misses each distinct chunk once in a window of time and hits all further lookups of it. Its hit rate
is 1 - distinct / asked. It also has what this server holds from before the window, so it never hits less than that.

Beside each estimate stands the share of the same chunks, in the same window, that this server held. Both count chunks,
also those that it did not serve because engines had them already. So the difference is what more DRAM or disk would
bring. The hit rate itself counts tokens that were served, and may be far below both.

Distinct chunks are counted by HyperLogLog (Flajolet et al. 2007) with the estimator of Ertl (arXiv:1702.01284), which
needs no table of corrections. Two things keep it cheap on the thread that decides. Only chunks whose key's first byte
is a multiple of SAMPLED are looked at: that choice is as random as the key and the same for every lookup. And a prompt
that was asked for earlier in the hour is recognised by its last key, since a key names the whole prefix. The code runs
when nobody waits (lookup_counts.py). Standard error: REGISTERS alone cause 2.3 %; the sample adds sqrt(SAMPLED /
distinct).
"""

from collections import Counter
from math import inf, log, sqrt
from typing import NamedTuple

from kvserver.wire.messages import KEY_BYTES

SAMPLED = 128
REGISTER_BITS = 11
REGISTERS = 1 << REGISTER_BITS
RANK_BITS = 56 - REGISTER_BITS
"""Bits that a rank is taken from: 7 bytes of a key after the first, less those that choose the register."""
ASKED_MIN = 16 * SAMPLED
"""Chunks that must have been asked for. With fewer, the sample is too small for an estimate."""
TAILS_MAX = 4096
WINDOWS_HOURS = {"1h": 1, "1d": 24}
HOUR_NS = 3600 * 1_000_000_000

_UNSAMPLED = bytes(byte % SAMPLED != 0 for byte in range(256))
"""Translation of first bytes to 0 for chunks that are sampled, and to 1 for all others."""


class Sketch:
    """HyperLogLog sketch: estimates how many distinct things were added, in 2 KiB."""

    def __init__(self) -> None:
        self._registers = bytearray(REGISTERS)

    def add(self, bits: int) -> None:
        """bits: 56 random bits of the thing."""
        register = bits & (REGISTERS - 1)
        rank = RANK_BITS + 1 - (bits >> REGISTER_BITS).bit_length()
        self._registers[register] = max(rank, self._registers[register])

    def merge(self, other: "Sketch") -> None:
        """Adds all that was added to the other sketch."""
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


class Ratios(NamedTuple):
    """Shares of the chunks that were asked for in one window of time. held <= infinite."""

    held: float
    """In DRAM or on disk when they were asked for."""
    infinite: float
    """Estimate of what an infinite cache would have held."""


class Window:
    """One window of time, and the ratios of the last window in which enough was asked."""

    def __init__(self, hours: int) -> None:
        self._hours = hours
        self._left = hours
        self._sketch = Sketch()
        self._asked = self._held = 0
        self._whole = False
        self.ratios: Ratios | None = None
        """The last whole window's, or the running one's as long as there is none. None: not enough was asked yet."""

    def add(self, sketch: Sketch, asked: int, held: int) -> None:
        """Adds an hour that is over."""
        self._sketch.merge(sketch)
        self._asked += asked
        self._held += held
        self._left -= 1
        is_over = self._left == 0
        if self._asked >= ASKED_MIN and (is_over or not self._whole):
            self.ratios = _ratios(self._sketch, self._asked, self._held)
            self._whole |= is_over
        if is_over:
            self._left, self._asked, self._held, self._sketch = self._hours, 0, 0, Sketch()


class Reuse:
    """The running hour, and the windows made of hours."""

    def __init__(self, now_ns: int) -> None:
        self._windows = {name: Window(hours) for name, hours in WINDOWS_HOURS.items()}
        self._sketch = Sketch()
        self._asked = self._held = 0
        self._ends_ns = now_ns + HOUR_NS
        self._tails: dict[bytes, bytes] = {}
        """Last keys of prompts asked for in this hour -> the namespace in which each was last asked for."""

    def asked(self, namespace: bytes, keys: bytes, held: int) -> None:
        """Counts one lookup's packed keys, which form a chain, and how many of them were held. 512 new keys take about
        6 us."""
        self._asked += len(keys) // KEY_BYTES
        self._held += held
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
        """Ends the hour when it is over. Called at each tick."""
        if now_ns < self._ends_ns:
            return
        self._ends_ns = now_ns + HOUR_NS
        for window in self._windows.values():
            window.add(self._sketch, self._asked, self._held)
        self._sketch, self._asked, self._held = Sketch(), 0, 0
        self._tails.clear()

    def ratios(self) -> dict[str, Ratios]:
        """Window name -> ratios, for windows that have them. Before the first hour is over, the running hour stands
        in."""
        ratios = {name: window.ratios for name, window in self._windows.items()}
        if None in ratios.values() and self._asked >= ASKED_MIN:
            now = _ratios(self._sketch, self._asked, self._held)
            return {name: now if each is None else each for name, each in ratios.items()}
        return {name: each for name, each in ratios.items() if each is not None}


def _ratios(sketch: Sketch, asked: int, held: int) -> Ratios:
    share = held / asked
    return Ratios(held=share, infinite=max(share, 1 - sketch.distinct() * SAMPLED / asked))


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
