"""When more users join: the rule of the tester with which the MI300X experiment was made, as published.

Every period, if the mean time to the first token over the last three periods leaves at least a fifth of what is
allowed, one user joins, and another for each 15 % that are left; but no more than whose first prompts fit a budget of
tokens. Arms that answer at different speed therefore get different load. To compare arms, let all users join at once.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PERIODS = 3
HEADROOM_MIN = 0.20
HEADROOM_OF_A_USER = 0.15


@dataclass(frozen=True, slots=True)
class Ramp:
    users_max: int
    period_s: float
    ttft_s_max: float
    first_tokens_max: int
    """Tokens of the first prompts of those who join in one period. One joins whatever its prompt has."""

    def joining(self, users: int, ttfts_s: Sequence[Sequence[float]]) -> int:
        """How many join `users`, after periods with these times to the first token; the last is the newest."""
        seen = [ttft_s for period in ttfts_s[-PERIODS:] for ttft_s in period]
        if not seen:
            return 0  # nothing has been answered yet: nothing is known
        headroom = 1 - statistics.fmean(seen) / self.ttft_s_max
        if headroom < HEADROOM_MIN:
            return 0
        return max(0, min(1 + int(headroom / HEADROOM_OF_A_USER), self.users_max - users))
