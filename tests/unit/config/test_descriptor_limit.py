"""The shares of the process's descriptors: together they are no more than the limit."""

import pytest

from kvserver.brain.http.server import ANSWERED_MAX
from kvserver.config.config import Config
from kvserver.config.descriptor_limit import (
    EVENTS,
    MOVERS,
    OFFERS_MIN,
    OTHERS,
    SESSION,
    SILENT_MAX,
    SILENT_MIN,
    STRANGERS_MAX,
    STRANGERS_MIN,
    Share,
    share,
)
from kvserver.errors import ConfigError

DOORS = 2
ENOUGH = 1 << 20


def taken(shared: Share, fixed: int) -> int:
    return fixed + shared.sessions * SESSION + shared.offers + DOORS * shared.strangers + shared.silent


@pytest.mark.parametrize("sessions_max", [1, 24, 1024])
@pytest.mark.parametrize("events", ["", "ipc:///tmp/events"])
def test_all_shares_together_fit_into_every_limit(sessions_max: int, events: str) -> None:
    config = Config(sessions_max=sessions_max, events_endpoint=events)
    fixed = OTHERS + MOVERS + (EVENTS if events else 0)
    assert ANSWERED_MAX < OTHERS / 2, "they have no share of their own"
    least = fixed + SESSION + OFFERS_MIN + DOORS * STRANGERS_MIN + SILENT_MIN
    for limit in range(least, least + 20_000, 7):
        shared = share(config, limit)
        assert taken(shared, fixed) <= limit
        assert shared.sessions >= 1
        assert STRANGERS_MIN <= shared.strangers <= STRANGERS_MAX
        assert SILENT_MIN <= shared.silent <= SILENT_MAX
    with pytest.raises(ConfigError, match=f"at least {least}"):
        share(config, least - 1)


def test_with_many_descriptors_every_bound_is_the_highest() -> None:
    shared = share(Config(), ENOUGH)
    assert shared.sessions == Config().sessions_max
    assert (shared.strangers, shared.silent) == (STRANGERS_MAX, SILENT_MAX)
