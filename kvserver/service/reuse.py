"""What an infinite cache would have hit, so that "why is my hit rate low" has an answer.

Of the chunks that lookups ask for in a window of time, an infinite cache hits all but the first of each kind: its hit
rate is 1 - distinct / asked. What is hit beside that rate tells whether more DRAM or disk would help, or whether
prompts simply do not come back.

Distinct chunks are counted by HyperLogLog (Flajolet et al. 2007) with the estimator of Ertl (arXiv:1702.01284), which
needs no table of corrections. Two things keep it cheap on the thread that decides: of all chunks only those are looked
at whose key's first byte is a multiple of SAMPLED, which is as random as the key and the same for every lookup; and a
prompt that was asked for before in the window is known by its last key, since a key names the whole prefix.
Standard error: REGISTERS alone make 2.3 %, the sample sqrt(SAMPLED / distinct) more.
"""

from math import inf, log, sqrt

from kvserver.wire.messages import KEY_BYTES

SAMPLED = 32
REGISTER_BITS = 11
REGISTERS = 1 << REGISTER_BITS
RANK_BITS = 56 - REGISTER_BITS
"""Of a key's 7 bytes behind the first, those that do not choose the register."""
ASKED_MIN = 32 * SAMPLED
"""Chunks; of fewer too few are looked at to say anything."""
TAILS_MAX = 4096
WINDOWS_S = {"1h": 3600, "1d": 86_400}
"""The shortest first: it is the one that forgets the tails."""
SECOND_NS = 1_000_000_000

_UNSAMPLED = bytes(byte % SAMPLED != 0 for byte in range(256))
"""Turns first bytes into 0 for those that are looked at."""


class Sketch:
    """HyperLogLog: about how many distinct things were added, in 2 KiB."""

    def __init__(self) -> None:
        self._registers = bytearray(REGISTERS)
        self._held = [REGISTERS] + [0] * (RANK_BITS + 1)
        """How many registers hold each rank."""

    def add(self, bits: int) -> None:
        """bits: 56 random bits of the thing."""
        register = bits & (REGISTERS - 1)
        rank = RANK_BITS + 1 - (bits >> REGISTER_BITS).bit_length()
        before = self._registers[register]
        if rank > before:
            self._registers[register] = rank
            self._held[before] -= 1
            self._held[rank] += 1

    def distinct(self) -> float:
        held = self._held
        z = REGISTERS * _tau(1 - held[-1] / REGISTERS)
        for rank in range(RANK_BITS, 0, -1):
            z = 0.5 * (z + held[rank])
        z += REGISTERS * _sigma(held[0] / REGISTERS)
        return REGISTERS * REGISTERS / (2 * log(2) * z)


class Window:
    """What was asked in one window of time, and in the whole one before it."""

    def __init__(self, window_s: int, now_ns: int) -> None:
        self._window_ns = window_s * SECOND_NS
        self._ends_ns = now_ns + self._window_ns
        self._sketch = Sketch()
        self._asked = 0
        self._before: float | None = None

    def add(self, asked: int, bits: list[int]) -> None:
        self._asked += asked
        for each in bits:
            self._sketch.add(each)

    def turn(self, now_ns: int) -> bool:
        """Begins the next window when this one is over; whether it did. One in which little was asked is no news."""
        if now_ns < self._ends_ns:
            return False
        if self._asked >= ASKED_MIN:
            self._before = self._ratio()
        if self._asked:
            self._asked, self._sketch = 0, Sketch()
        self._ends_ns = now_ns + self._window_ns
        return True

    @property
    def hit_ratio(self) -> float | None:
        """Of the last whole window in which enough was asked; of the running one as long as there is none. None:
        not enough was asked yet."""
        if self._before is not None:
            return self._before
        return self._ratio() if self._asked >= ASKED_MIN else None

    def _ratio(self) -> float:
        return max(0.0, 1 - self._sketch.distinct() * SAMPLED / self._asked)


class Reuse:
    """The windows, and what is left out of them."""

    def __init__(self, now_ns: int) -> None:
        self._windows = {name: Window(window_s, now_ns) for name, window_s in WINDOWS_S.items()}
        self._tails: set[bytes] = set()
        """Last keys of prompts whose chunks are in all windows."""

    def asked(self, namespace: bytes, keys: bytes) -> None:
        """Somebody asked for these packed keys, which chain."""
        tail = keys[-KEY_BYTES:] + namespace
        bits: list[int] = []
        if tail not in self._tails:
            if len(self._tails) == TAILS_MAX:
                self._tails.clear()
            self._tails.add(tail)
            bits = _sampled(namespace, keys)
        for window in self._windows.values():
            window.add(len(keys) // KEY_BYTES, bits)

    def turn(self, now_ns: int) -> None:
        """To be called now and then: windows end."""
        turned = [window.turn(now_ns) for window in self._windows.values()]
        if any(turned):
            self._tails.clear()

    def hit_ratios(self) -> dict[str, float]:
        """By the window's name; those of which something is known."""
        ratios = {name: window.hit_ratio for name, window in self._windows.items()}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _sampled(namespace: bytes, keys: bytes) -> list[int]:
    """56 bits of each key that is looked at. The same key in another namespace is another chunk."""
    marks = keys[::KEY_BYTES].translate(_UNSAMPLED)
    salt = int.from_bytes(namespace[:7], "little")
    found: list[int] = []
    at = marks.find(0)
    while at >= 0:
        found.append(int.from_bytes(keys[at * KEY_BYTES + 1 : at * KEY_BYTES + 8], "little") ^ salt)
        at = marks.find(0, at + 1)
    return found


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
