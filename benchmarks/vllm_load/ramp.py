"""When more users join: the rule of the tester with which the MI300X experiment was made (callanjfox/kv-cache-tester).

Every period, if the mean over the last three periods' means of the time to the first token leaves at least a fifth of
what is allowed, one user joins, and another for each 15 % that are left; but no more than whose first prompts fit a
budget of tokens, and the working set. Arms that answer at different speed therefore get different load. To compare
arms, let all users join at once.

The tester's documentation tells of a cooldown; its code had that from 2026-03-12 to 04-01, when the mean of three
periods took its place. Here it comes on top of that mean, if it is wanted: behind periods whose mean was too long
nobody joins until so many in a row were good, and the first two times one user does.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PERIODS = 3
HEADROOM_MIN = 0.20
HEADROOM_OF_A_USER = 0.15
WORKING_SET_SHARE_MAX = 0.9
"""Of the largest working set: behind it nobody joins, however short his prompt."""
COOLDOWN_PERIODS = ((10, 5), (3, 3), (1, 2))
"""Behind at least so many bad periods in a row, so many good ones."""
COOLDOWN_SINGLE_JOINS = 2


@dataclass(frozen=True, slots=True)
class Ramp:
    users_max: int
    period_s: float
    ttft_s_max: float
    first_tokens_max: int = 0
    """Tokens of the first prompts of the lines that begin in one period, those of users who go on to another line
    included. One user joins whatever his prompt has. 0: no limit."""
    working_set_tokens_max: int = 0
    """Tokens that are asked about (WorkingSet), and of the first prompt of whoever joins. 0: no limit."""
    working_set_s: float = 600.0
    cooldown: bool = False

    def joining(self, users: int, ttfts_s: Sequence[Sequence[float]], working_set_tokens: int = 0) -> int:
        """How many join `users`, after periods with these times to the first token; the last is the newest."""
        means_s = [statistics.fmean(period) if period else None for period in ttfts_s]
        more = self._by_headroom(means_s)
        if self.working_set_tokens_max and working_set_tokens > WORKING_SET_SHARE_MAX * self.working_set_tokens_max:
            return 0
        if self.cooldown:
            more = min(more, self._by_cooldown(means_s))
        return max(0, min(more, self.users_max - users))

    def admits(self, first_tokens: int, *, begun_tokens: int, working_set_tokens: int) -> bool:
        """Whether a line may begin with such a prompt, in a period in which lines with begun_tokens have begun."""
        if self.working_set_tokens_max and working_set_tokens + first_tokens > self.working_set_tokens_max:
            return False
        return not self.first_tokens_max or not begun_tokens or begun_tokens + first_tokens <= self.first_tokens_max

    def _by_headroom(self, means_s: Sequence[float | None]) -> int:
        seen = [mean_s for mean_s in means_s[-PERIODS:] if mean_s is not None]
        if not seen:
            return 0  # nothing has been answered yet: nothing is known
        headroom = 1 - statistics.fmean(seen) / self.ttft_s_max
        return 0 if headroom < HEADROOM_MIN else 1 + int(headroom / HEADROOM_OF_A_USER)

    def _by_cooldown(self, means_s: Sequence[float | None]) -> int:
        """The most that may join; periods without an answer change nothing."""
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
