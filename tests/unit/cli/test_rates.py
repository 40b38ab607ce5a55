"""Rates between status documents: over the brain's own time, never across two brains."""

import msgspec

from kvserver.cli.rates import Between, History
from kvserver.service.telling.counters import Counters
from kvserver.wire.status import Status
from tests.rigs.status_document import a_status


def at(uptime_s: float, *, lookups: int = 0, dram: int = 0, troubles: dict[str, int] | None = None) -> Status:
    counters = Counters()
    counters.lookups = lookups
    counters.lookup_tokens_of("")["dram"] = dram
    return msgspec.structs.replace(
        a_status(), uptime_s=uptime_s, counters=counters.totals(), troubles=troubles or {}, incarnation=11
    )


def test_a_rate_is_what_has_grown_over_the_brains_own_time() -> None:
    seen = Between(at(10.0, lookups=7, dram=100), at(14.0, lookups=17, dram=356))
    assert (seen.seconds, seen.grown("lookups"), seen.per_s("lookups")) == (4.0, 10, 2.5)
    assert seen.grown("lookup_tokens", "dram") == 256
    assert seen.tokens() == {"dram": 256, "disk": 0, "declined": 0, "unwanted": 0, "miss": 0}
    assert seen.grown("never heard of") == seen.grown("lookup_tokens", "never heard of") == 0


def test_no_time_is_no_rate() -> None:
    assert Between(at(10.0, lookups=7), at(10.0, lookups=7)).per_s("lookups") == 0.0


def test_only_troubles_that_grew_are_told() -> None:
    before, after = at(1.0, troubles={"old": 3, "growing": 4}), at(2.0, troubles={"old": 3, "growing": 9, "new": 2})
    assert Between(before, after).troubles() == {"growing": 5, "new": 2}


def test_lately_reaches_back_so_far_or_to_the_first() -> None:
    history = History(60.0)
    for second in range(20):
        history.add(at(100.0 + second, lookups=second * second))
    assert history.lately(5.0).grown("lookups") == 19**2 - 14**2
    assert history.lately(4.5).seconds == 5.0
    assert history.lately(0.0).seconds == 0.0
    assert history.lately(1000.0).seconds == 19.0


def test_nothing_older_is_kept_than_somebody_looks_back() -> None:
    history = History(7.0)
    for second in range(1000):
        history.add(at(float(second), lookups=second))
    assert history.lately(1000.0).seconds == 7.0
    assert len(history._seen) == 8


def test_another_brain_begins_anew() -> None:
    history = History(60.0)
    history.add(at(100.0, lookups=1000))
    history.add(msgspec.structs.replace(at(2.0, lookups=3), incarnation=12))
    assert history.lately(60.0).seconds == 0.0
    assert history.last is not None
    assert history.last.incarnation == 12
