"""Frames that no client should send, from a seed: noise, requests with changed bytes, arrays that resemble requests."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from kvserver.wire.codec import encode
from kvserver.wire.messages import Request

TAGS = [kind.__struct_config__.tag for kind in get_args(Request)]
ODD_INTS = (
    0,
    1,
    -1,
    127,
    128,
    -129,
    65_535,
    1 << 31,
    -(1 << 31) - 1,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    (1 << 64) - 1,
)


class BadFrames:
    """Random frames. Some of them are valid requests by chance."""

    def __init__(self, seed: int, good: Sequence[bytes]) -> None:
        self._random = random.Random(seed)
        self._good = good
        self._kinds: list[Callable[[], bytes]] = [self._noise, self._mutated, self._mutated, self._resembling]

    def take(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield self._random.choice(self._kinds)()

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 2, 5, 17, 63, 300, 4099)))

    def _mutated(self) -> bytes:
        rng, frame = self._random, bytearray(self._random.choice(self._good))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(frame) + 1)
            match rng.randrange(5):
                case 0:
                    frame[at : at + 1] = rng.randbytes(1)
                case 1:
                    del frame[at : at + rng.randint(1, 9)]
                case 2:
                    frame[at:at] = rng.randbytes(rng.randint(1, 9))
                case 3:
                    frame[at:at] = frame[: rng.randint(1, 40)]
                case _:
                    del frame[at:]
        return bytes(frame)

    def _resembling(self) -> bytes:
        fields = [self._value(3) for _ in range(self._random.randrange(12))]
        return encode([self._random.choice(TAGS), self._random.choice(ODD_INTS), *fields])

    def _value(self, depth: int) -> object:
        rng = self._random
        match rng.randrange(9 if depth else 6):
            case 0 | 1:
                return rng.choice(ODD_INTS)
            case 2:
                return rng.choice((None, True, False, 0.5, float("nan"), float("inf")))
            case 3:
                return rng.randbytes(rng.choice((0, 1, 15, 16, 31, 32, 33, 64)))
            case 4:
                return rng.choice(("", "host", "direct", "full", "state", "gpu", "\0", "é" * 70, *TAGS))
            case 5:
                return rng.getrandbits(rng.randint(1, 63))
            case 6:
                return {str(key): self._value(depth - 1) for key in range(rng.randrange(3))}
            case _:
                return [self._value(depth - 1) for _ in range(rng.randrange(9))]
