"""When more users join: the rule of the MI300X experiment's load generator (callanjfox/kv-cache-tester).

At the end of every period, take the mean over the last three periods' means of the time to first token. If at least
a fifth of the allowed time is left, one user joins, and another for each 15 % left. Their first prompts must fit a
token budget and the working set. Arms that answer at different speed therefore get different load. To compare arms,
let all users join at once.

The tester's documentation mentions a cooldown; its code had one from 2026-03-12 to 04-01, when the mean of three
periods replaced it. Here it is optional, in addition to that mean: after periods whose mean was too long nobody
joins until enough good ones in a row, and then one user joins in each of the first two periods.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PERIODS = 3
HEADROOM_MIN = 0.20
HEADROOM_OF_A_USER = 0.15
WORKING_SET_SHARE_MAX = 0.9
"""Share of the largest working set: above it nobody joins, however short the first prompt."""
COOLDOWN_PERIODS = ((10, 5), (3, 3), (1, 2))
"""(minimum of bad periods in a row, good periods then required)."""
COOLDOWN_SINGLE_JOINS = 2


@dataclass(frozen=True, slots=True)
class Ramp:
    users_max: int
    period_s: float
    ttft_s_max: float
    first_tokens_max: int = 0
    """Tokens of the first prompts of the lines that begin in one period, including users who go on to another line.

    One user always joins, whatever his prompt's length. 0: no limit.
    """
    working_set_tokens_max: int = 0
    """Limit for the working set (WorkingSet) plus the first prompt of a joining user, in tokens. 0: no limit."""
    working_set_s: float = 600.0
    cooldown: bool = False

    def joining(self, users: int, ttfts_s: Sequence[Sequence[float]], working_set_tokens: int = 0) -> int:
        """How many users join `users`, given the times to first token of past periods; the last is the newest."""
        means_s = [statistics.fmean(period) if period else None for period in ttfts_s]
        more = self._by_headroom(means_s)
        if self.working_set_tokens_max and working_set_tokens > WORKING_SET_SHARE_MAX * self.working_set_tokens_max:
            return 0
        if self.cooldown:
            more = min(more, self._by_cooldown(means_s))
        return max(0, min(more, self.users_max - users))

    def admits(self, first_tokens: int, *, begun_tokens: int, working_set_tokens: int) -> bool:
        """True if a line with such a first prompt may begin; begun_tokens were begun in this period."""
        if self.working_set_tokens_max and working_set_tokens + first_tokens > self.working_set_tokens_max:
            return False
        return not self.first_tokens_max or not begun_tokens or begun_tokens + first_tokens <= self.first_tokens_max

    def _by_headroom(self, means_s: Sequence[float | None]) -> int:
        seen = [mean_s for mean_s in means_s[-PERIODS:] if mean_s is not None]
        if not seen:
            return 0  # nothing has been answered yet
        headroom = 1 - statistics.fmean(seen) / self.ttft_s_max
        return 0 if headroom < HEADROOM_MIN else 1 + int(headroom / HEADROOM_OF_A_USER)

    def _by_cooldown(self, means_s: Sequence[float | None]) -> int:
        """The maximum that may join; periods without an answer change nothing."""
        bad = good = needed = joins = 0
        for index, mean_s in enumerate(means_s):
            if mean_s is None:
                continue
            if mean_s >= self.ttft_s_max:
                bad, good, joins = bad + 1, 0, 0
                needed = next(periods for least, periods in COOLDOWN_PERIODS if bad >= least)
                continue
            bad, good = 0, good + 1
            if good >= needed:
                needed = 0
                joins += bool(self._by_headroom(means_s[: index + 1]))
        if needed:
            return 0
        return 1 if joins <= COOLDOWN_SINGLE_JOINS else self.users_max
