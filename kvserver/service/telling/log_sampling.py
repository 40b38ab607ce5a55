"""Which requests get a line in the log: at level debug as many as a reader can take, at level info one now and then."""

import logging
from typing import Literal

Wanted = Literal["none", "sampled", "all"]

REQUEST_LINES: dict[str, Wanted] = {"debug": "all", "info": "sampled", "warning": "none", "error": "none"}
"""By the least level that is logged."""
LINES_PER_S = 100
"""At debug, of all kinds together."""
SAMPLE_S = 10
"""At info, one of each kind in this time: enough to see what requests look like, and nothing to pay for."""
SECOND_NS = 1_000_000_000


class RequestLines:
    """Asked before a line is made, so that one that nobody reads costs nothing."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._until_ns = dict.fromkeys(("lookup", "store", "retrieve"), 0)
        """No line of that kind before."""
        self._left, self._second_ns = LINES_PER_S, 0

    def level(self, event: Literal["lookup", "store", "retrieve"], now_ns: int) -> int:
        """The level of the line that is to be made of this request; 0: none."""
        if self._wanted == "none" or now_ns < self._until_ns[event]:
            return 0
        if self._wanted == "sampled":
            self._until_ns[event] = now_ns + SAMPLE_S * SECOND_NS
            return logging.INFO
        if now_ns >= self._second_ns:
            self._left, self._second_ns = LINES_PER_S, now_ns + SECOND_NS
        self._left -= 1
        if not self._left:
            self._until_ns = dict.fromkeys(self._until_ns, self._second_ns)
        return logging.DEBUG
