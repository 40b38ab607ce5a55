"""Timers: each deadline fires once, at its time, and expired ones are not held for long."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserver.service.base.timers import DEAD_SPARE, Timer, Timers
from kvserver.service.service import TIMERS_PER_TICK_MAX
from kvserver.wire.messages import GroupBlocks, Unregister
from kvserver.wire.orders import Done
from tests.rigs.brain_rig import Client, Rig, chain, ids

steps = st.lists(
    st.tuples(st.sampled_from(["set", "set", "cancel", "due"]), st.sampled_from("ab"), st.integers(0, 9)), max_size=300
)


def held(timers: Timers) -> int:
    return len(timers._heap)


@given(steps, st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_a_deadline_fires_when_it_was_last_set_to_and_never_when_cancelled(
    steps: list[tuple[str, str, int]], times: list[int]
) -> None:
    """Compared with a dict that is searched."""
    timers, right, now_ns = Timers(), dict[Timer, int](), 0
    for index, (verb, kind, number) in enumerate(steps):
        at_ns = times[index % len(times)]
        match verb:
            case "set":
                timers.set(now_ns + at_ns, kind, number)
                right[kind, number] = now_ns + at_ns
            case "cancel":
                timers.cancel(kind, number)
                right.pop((kind, number), None)
            case "due":
                now_ns += at_ns
                first = min(((at, timer) for timer, at in right.items() if at <= now_ns), default=None)
                assert timers.due(now_ns) == (first[1] if first else None)
                if first:
                    del right[first[1]]
        timers.check()
        assert timers.deadlines() == right


def test_deadlines_that_come_and_go_leave_nothing_behind() -> None:
    timers = Timers()
    for number in range(50):
        timers.set(10**9, "stays", number)
    for number in range(20_000):
        timers.set(10**9 + number, "goes", number)
        timers.cancel("goes", number)
        assert held(timers) <= 2 * 51 + DEAD_SPARE


def test_a_deadline_that_moves_all_the_time_is_held_once() -> None:
    timers = Timers()
    for at_ns in range(20_000):
        timers.set(at_ns, "moves", 1)
        assert held(timers) <= 2 + DEAD_SPARE
    assert timers.due(19_998) is None
    assert timers.due(19_999) == ("moves", 1)
    assert timers.due(10**12) is None


def test_deadlines_that_fire_leave_no_dead_ones_behind_them() -> None:
    """Many cancelled deadlines come after many that fire."""
    timers = Timers()
    for number in range(500):
        timers.set(1, "fires", number)
        timers.set(2, "goes", number)
        timers.cancel("goes", number)
    while timers.due(1):
        timers.check()
    assert held(timers) <= DEAD_SPARE


def test_leases_that_are_given_back_leave_no_timers() -> None:
    rig = Rig()
    client = Client(rig).register()
    keys = chain(1, 3)
    client.store(keys)
    for _ in range(3 * TIMERS_PER_TICK_MAX):
        client.release(client.lookup(keys))
    assert held(rig.core.timers) <= 2 + DEAD_SPARE
    found = client.lookup(keys)
    rig.wait_ms(rig.bounds.lease_ttl_ms)
    assert rig.facts()["leases"] == 0
    assert found.lease


@pytest.mark.parametrize("status", ["done", "failed", "abandoned"])
def test_jobs_and_reservations_that_are_over_leave_no_timers(status: str) -> None:
    rig = Rig(chunks_max=40)
    client = Client(rig).register()
    for seed in range(200):
        client.store(chain(seed, 2))
        rig.movers_copy = False
        found = client.lookup(chain(seed, 2))
        client.ask(client.retrieving(found.lease, GroupBlocks(0, 0, ids(5, 3, 7))))
        rig.finish(status, "x" * (status == "failed"))
        rig.movers_copy = True
    assert held(rig.core.timers) <= 2 + DEAD_SPARE


def test_sessions_that_come_and_go_leave_no_timers() -> None:
    rig = Rig()
    for epoch in range(300):
        client = Client(rig, epoch=epoch).register()
        rig.peer_gone(client.local)
    assert rig.facts()["caches"] == rig.facts()["sessions"] == 0
    assert held(rig.core.timers) <= DEAD_SPARE


@pytest.mark.parametrize("deadline_ms", [1, 60_000])
def test_a_job_that_is_cancelled_has_the_movers_grace_to_end_whatever_its_own_deadline_was(deadline_ms: int) -> None:
    """Its worker has died. Killing the mover at the job's own deadline would cost all other clients their caches."""
    rig = Rig(mover_grace_ms=2_000)
    rig.movers_copy = False
    client = Client(rig).register()
    request = client.storing(chain(1, 1), GroupBlocks(0, 0, ids(0, 1, 2)))
    assert client.ask(msgspec.structs.replace(request, deadline_ms=deadline_ms)) is None
    rig.peer_gone(client.local)
    rig.wait_ms(1_900)
    assert rig.kills == 0
    rig.wait_ms(200)
    assert rig.kills == 1


@pytest.mark.parametrize("dies", [False, True])
def test_a_cache_has_the_movers_grace_to_be_let_go_once_its_last_job_has_ended_or_was_cancelled(dies: bool) -> None:
    rig = Rig(mover_grace_ms=2_000)
    rig.movers_copy = False
    client = Client(rig).register()
    client.ask(client.storing(chain(1, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
    assert client.ask(Unregister(rig.number(), client.cache)) is None
    rig.wait_ms(1_950)
    if dies:
        rig.peer_gone(client.local)
    else:
        ((mover, order),) = rig.copies
        rig.report(mover, Done(order.job, "done", 7, 11, "", "", order.mode))
    rig.wait_ms(1_900)
    assert rig.kills == 0
    rig.wait_ms(200)
    assert rig.kills == 1
