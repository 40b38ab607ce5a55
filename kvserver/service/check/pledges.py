"""Invariants of pledges and of those who await them."""

from collections import Counter
from operator import add

from kvserver.index.space import READY
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.pledges import NOTHING, SHARES, Size, Wait
from kvserver.wire.messages import KEY_BYTES


def check_pledges(core: Core) -> None:
    """Pledges, their keys, their sessions and their waits refer to each other, and each has its time."""
    pledges, deadlines = core.pledges, core.timers.deadlines()
    patience_ns = core.bounds.pledge_patience_ms * MILLISECOND_NS
    assert not pledges.has_news, "who waits was told"
    keys: Counter[tuple[bytes, bytes]] = Counter()
    sizes: dict[tuple[int | str, ...], Size] = {}
    waits: list[Wait] = []
    for number, pledge in pledges.items():
        assert pledge.number == number
        if pledge.session is not None:
            assert core.sessions[pledge.session.number] is pledge.session, "no pledge outlives its session"
            assert number in pledge.session.pledges
        assert core.chunks.spaces.get(pledge.space.digest) is pledge.space, "no pledge on a cleared namespace"
        assert deadlines["pledge", number] == pledge.due_ns(patience_ns), "no pledge lives without a bound"
        assert pledge.to_come, "a pledge ends with its last chunk"
        left = pledge.to_come
        for depth in range(len(SHARES)):
            by, size = pledge.pledger[:depth], Size(1, len(left) // KEY_BYTES, pledge.slot_bytes)
            sizes[by] = Size(*map(add, sizes.get(by, NOTHING), size))
        keys.update((pledge.space.digest, left[at : at + KEY_BYTES]) for at in range(0, len(left), KEY_BYTES))
        waits += pledge.waits
        assert len(pledge.waits) <= core.bounds.pledge_waits_max
        for wait in pledge.waits:
            assert wait.pledge is pledge
            assert wait.holder.tail is not None
            assert wait.holder.tail.state == READY
            assert wait.holder.tail.key == pledge.after, "who waits pins the chunk before the next one"
            assert wait.holder.tail.depth < wait.until <= wait.holder.tail.depth + len(left) // KEY_BYTES
    assert keys == Counter(dict.fromkeys(pledges.by_key, 1)), "a chunk is pledged once, until it comes"
    assert pledges.taken == sizes, "what is taken is counted, and nobody is remembered who has taken nothing"
    bounds = core.bounds
    most = bounds.pledges_total_max, bounds.pledged_chunks_max, bounds.arena_bytes * bounds.pledged_percent_max // 100
    for by, size in sizes.items():
        part, whole = SHARES[len(by)]
        assert all(taken * whole <= bound * part for taken, bound in zip(size, most, strict=True))
    assert all(len(session.pledges) <= core.bounds.pledges_max for session in core.sessions.values())
    of_others = {number for tier in core.remotes for number in tier.awaited}
    assert of_others == {number for number, pledge in pledges.items() if pledge.session is None}
    assert sum(len(session.pledges) for session in core.sessions.values()) == len(pledges) - len(of_others)
    known = [lease.wait for lease in core.leases.values() if lease.wait is not None]
    known += [job.awaiting.wait for job in core.jobs.values() if job.awaiting is not None]
    assert Counter(map(id, known)) == Counter(map(id, waits)), "each wait has somebody who waits"
    for lease in core.leases.values():
        assert lease.chunks <= lease.reach, "a lease pins nothing that it is not on"
        assert lease.wait is None or not lease.wait.pledge.is_of(lease.engine), "nobody awaits itself"
    for job in core.jobs.values():
        assert (job.state == "awaiting") == (job.awaiting is not None)
        assert job.state != "awaiting" or ("job", job.number) in deadlines, "no retrieve waits without a bound"
