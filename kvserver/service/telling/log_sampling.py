"""The choice of requests that get a log line: at level debug as many as a reader can take, at level info one now and
then."""

import logging
from typing import Literal

Wanted = Literal["none", "sampled", "all"]

REQUEST_LINES: dict[str, Wanted] = {"debug": "all", "info": "sampled", "warning": "none", "error": "none"}
"""Least level that is logged -> which requests get a line."""
LINES_PER_S = 100
"""Lines a second at debug, all kinds together."""
SAMPLE_S = 10
"""Seconds between two lines of one kind at info: enough to see what requests look like, at no noticeable cost."""
SECOND_NS = 1_000_000_000


class RequestLines:
    """Decides whether a request gets a line, before the line is made: a line that nobody reads then costs nothing."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._until_ns = dict.fromkeys(("lookup", "store", "retrieve"), 0)
        """Kind -> no line before this time."""
        self._left, self._second_ns = LINES_PER_S, 0

    def level(self, event: Literal["lookup", "store", "retrieve"], now_ns: int) -> int:
        """The level of this request's log line; 0: none."""
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
