"""Descriptors that workers have offered, until a mover gets them."""

from collections import Counter
from collections.abc import Sequence

from kvserver.config.descriptor_limit import OFFERS_EACH


class Offers:
    """Offered descriptors by number. They stay open here until they are taken."""

    def __init__(self, most: int) -> None:
        """most: descriptors that all peers together may have here and on their way to movers."""
        self._most = most
        self._last = 0
        self._descriptors: dict[int, tuple[int, int]] = {}
        """Number -> its descriptor, and the peer that sent it."""
        self._of_peer: Counter[int] = Counter()

    def add(self, peer: int, descriptor: int) -> int:
        """Keeps a descriptor. Returns its number."""
        self._last += 1
        self._descriptors[self._last] = descriptor, peer
        self._of_peer[peer] += 1
        return self._last

    def take(self, numbers: Sequence[int]) -> list[int]:
        """The descriptors, which belong to the caller from now on."""
        taken = [self._descriptors.pop(number) for number in numbers]
        for _, peer in taken:
            self._of_peer[peer] -= 1
            if not self._of_peer[peer]:
                del self._of_peer[peer]
        return [descriptor for descriptor, _ in taken]

    def no_room(self, peer: int, *, with_movers: int) -> str:
        """Why a peer may offer no further descriptor; empty when it may. with_movers: those on their way to movers.

        A peer may have as many as are free, so no peer takes all. OFFERS_EACH are always allowed."""
        own, free = self._of_peer[peer], self._most - len(self._descriptors) - with_movers
        if own < max(free, OFFERS_EACH):
            return ""
        return f"{own} descriptors of this session wait for a register, and there is room for {max(free, 0)} of all"
