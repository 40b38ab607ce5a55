"""Chunks that a lookup misses and that a remote store may have: they are looked for, and read.

No lookup waits for a store. It is answered with what is here. If more may come, its answer says how much (`coming`),
and an engine that can wait asks again. One probe tells which of the chunks are there. The leading ones are read,
parents first, and each is an ordinary chunk of DRAM as soon as its bytes were compared with its digests.

Among several stores one is asked at a time: of those that are said to have the first chunk the one that will bring it
first. The next lookup asks another one for what this one did not bring, and for what it does not bring in time.
"""

from kvserver.index.eviction import STORED
from kvserver.index.space import Node, Space
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.passing import Passing
from kvserver.service.state.pledges import Pledge
from kvserver.service.state.remote_tier import (
    PURSUITS_MAX,
    WANTED_MAX,
    FetchJob,
    ProbeJob,
    Pursuit,
    RemoteTier,
    split,
)
from kvserver.service.state.sessions import Session
from kvserver.service.telling.lookup_counts import LookupResult
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import PROBED_MAX, Cancel, ProbeRemote

LEFT_MS = 2_000
"""A store that has not brought a chunk in time is not asked for it again before."""


def coming(core: Core, session: Session, found: LookupResult, *, wanted_min: int, now_ns: int) -> int:
    """How many chunks after those that a lookup has found may come soon. Begins to look for them."""
    space, asked = found.space, len(found.keys) // KEY_BYTES
    if space is None or not found.chunks == found.held < asked >= wanted_min:
        return 0
    key = found.keys[found.held * KEY_BYTES : (found.held + 1) * KEY_BYTES]
    if _is_passed_over(core, space, key, (asked - found.held) * space.geometry.chunk_tokens, now_ns):
        return 0
    pursuit, position = _wanted(core, space, key)
    if pursuit is None or (len(core.remotes) > 1 and _is_stalled(core, pursuit, now_ns)):
        slow, position = pursuit, 0
        pursuit = _begin(core, session, space, keys=found.keys, held=found.held, now_ns=now_ns, instead_of=slow)
    if pursuit is None or _is_stalled(core, pursuit, now_ns):
        return 0
    return min(asked - found.held, len(pursuit.keys) - position)


def _wanted(core: Core, space: Space, key: bytes) -> tuple[Pursuit | None, int]:
    """The pursuit that looks for a chunk, and its position there."""
    for tier in core.remotes:
        if (space.digest, key) in tier.wanted:
            return tier.wanted[space.digest, key]
    return None, 0


def _is_passed_over(core: Core, space: Space, key: bytes, tokens: int, now_ns: int) -> bool:
    """No store is asked for a chunk, because nobody has told of it, none may be used now, or too few tokens could come.
    Nearly all lookups that miss end here."""
    passed: list[Passing] = []
    for tier in core.remotes:
        if tier.wanted and (space.digest, key) in tier.wanted:
            return False
        if tokens < tier.remote.tokens_min:
            continue
        passing = tier.passing(space.digest, now_ns)
        if passing is None or not passing.passes(key):
            return False
        if passing.marker is not None:
            passed.append(passing)
    if passed:
        core.lookup_counts.passed_over(passed)
    return True


def _is_stalled(core: Core, pursuit: Pursuit, now_ns: int) -> bool:
    return now_ns - pursuit.moved_ns >= core.bounds.remote_patience_ms * MILLISECOND_NS


def _begin(
    core: Core,
    session: Session,
    space: Space,
    *,
    keys: bytes,
    held: int,
    now_ns: int,
    instead_of: Pursuit | None,
) -> Pursuit | None:
    """Asks a store for the chunks after those that are held, unless that is of no use. instead_of: what makes no
    progress in another store, which is given up if one can be asked."""
    key = keys[held * KEY_BYTES : (held + 1) * KEY_BYTES]
    if not space.complete or core.operators.drain:
        return None
    chunks = len(keys) // KEY_BYTES - held
    tokens = chunks * space.geometry.chunk_tokens
    open_to = [tier for tier in core.remotes if _may_be_asked(tier, space, key, tokens=tokens, now_ns=now_ns)]
    if instead_of is not None:
        open_to = [
            tier for tier in open_to if instead_of not in tier.pursuits and not tier.is_unannounced(space, key, now_ns)
        ]
    if not open_to or (instead_of is None and space.find(key) is not None):
        return None
    tier, is_try = _choose(core, open_to, space, key, chunks=min(chunks, PROBED_MAX), now_ns=now_ns)
    if tier is None or (tenant := tenant_of(core, session, space)) is None:
        return None
    if instead_of is not None:
        _leave(core, instead_of, key, now_ns)
        if space.find(key) is not None:
            return None  # some of it is stored by an engine, or is here
    epoch = tier.epoch_of(space, now_ns)
    assert epoch is not None
    wanted = split(keys[held * KEY_BYTES :][: PROBED_MAX * KEY_BYTES])
    parent = keys[(held - 1) * KEY_BYTES : held * KEY_BYTES] if held else b""
    pursuit = Pursuit(
        space=space, epoch=epoch, parent=parent, keys=wanted, tenant=tenant, moved_ns=now_ns, is_try=is_try
    )
    _probe(core, tier, pursuit, now_ns)
    return pursuit


def _probe(core: Core, tier: RemoteTier, pursuit: Pursuit, now_ns: int) -> None:
    space = pursuit.space
    job = ProbeJob(number=core.number("job"), pursuit=pursuit, began_ns=now_ns)
    tier.pursue(pursuit)
    tier.begin(job, ProbeRemote(job.number, space.digest, pursuit.epoch, b"".join(pursuit.keys), len(space.parts)))
    core.timers.set(now_ns + core.bounds.remote_job_ms * MILLISECOND_NS, "remote", job.number)
    tier.count("remote_probed", len(pursuit.keys))


def pursue_awaited(
    core: Core, tier: RemoteTier, pledge: Pledge, *, parent: bytes, keys: list[bytes], now_ns: int
) -> bool:
    """Looks for pledged chunks that another server has written, if there is room for what is looked for."""
    if len(tier.pursuits) >= PURSUITS_MAX or len(tier.wanted) + len(keys) > WANTED_MAX:
        return False
    tenant = pledge.pledger.tenant
    pursuit = Pursuit(
        space=pledge.space,
        epoch=pledge.epoch,
        parent=parent,
        keys=keys,
        tenant=tenant,
        moved_ns=now_ns,
        is_try=False,
        is_awaited=True,
    )
    _probe(core, tier, pursuit, now_ns)
    return True


def _leave(core: Core, pursuit: Pursuit, key: bytes, now_ns: int) -> None:
    """Gives up what a store does not bring in time, so that another one may. Its reads keep their slots until they end,
    and bring nothing. key: what is missing."""
    tier = next(tier for tier in core.remotes if pursuit in tier.pursuits)
    tier.set_aside(pursuit.space.digest, key, now_ns + LEFT_MS * MILLISECOND_NS)
    for job in tier.jobs.values():
        if not isinstance(job, ProbeJob | FetchJob) or job.pursuit is not pursuit:
            continue
        if isinstance(job, FetchJob):
            core.chunks.give_up_running(job.node, job.number, "failed")
        assert tier.mover is not None
        core.instruct(tier.mover, Cancel(job.number))
    tier.leave(pursuit, now_ns)


def _may_be_asked(tier: RemoteTier, space: Space, key: bytes, *, tokens: int, now_ns: int) -> bool:
    if tier.epoch_of(space, now_ns) is None or not tier.usable or tokens < tier.remote.tokens_min:
        return False
    if tier.is_left_alone or len(tier.pursuits) >= PURSUITS_MAX or len(tier.wanted) + PROBED_MAX > WANTED_MAX:
        return False
    return not tier.is_put_aside(space, key, now_ns)


def _choose(
    core: Core, open_to: list[RemoteTier], space: Space, key: bytes, *, chunks: int, now_ns: int
) -> tuple[RemoteTier | None, bool]:
    """The store that is asked for a chunk and those after it, and whether nobody has told that it has the chunk."""
    if len(open_to) > 1:
        count = chunks * space.group_bytes(space.needed)
        open_to = sorted(
            open_to,
            key=lambda tier: (_doubts(tier, space, key, now_ns), tier.seconds_for(count, now_ns)),
        )
    for tier in open_to:
        if not tier.is_unannounced(space, key, now_ns):
            return tier, False
    for tier in open_to:
        if (announcements := tier.epochs[space.digest].announcements).is_try_due(now_ns):
            announcements.tries(now_ns)
            return tier, True
        tier.passed_over(space)
    core.counters.add("remote_unannounced")
    return None, False


def _doubts(tier: RemoteTier, space: Space, key: bytes, now_ns: int) -> int:
    """How little a store is expected to bring a chunk in time. One that has it and was left lately comes after those
    that may have it: when they lack it, it is not left for them again."""
    if tier.is_announced(space, key, now_ns):
        return 2 if tier.was_left(now_ns) else 0
    return 3 if tier.is_unannounced(space, key, now_ns) else 1


def tenant_of(core: Core, session: Session, space: Space) -> int | None:
    """The tenant for which the engine has registered this namespace; None if it has not."""
    caches = core.caches.values()
    mine = (cache for cache in caches if cache.digest == space.digest and cache.session.engine is session.engine)
    return next((cache.tenant for cache in mine), None)


def offer_used(core: Core, space: Space, tail: Node) -> None:
    """A prefix was used again: its chunks are to be written, if the policy of a store says so."""
    for tier in core.remotes:
        if tier.remote.write != "never":
            tier.used.append((space, tail))


def offer_stored(core: Core, space: Space, tail: Node, new: list[Node], now_ns: int) -> None:
    """A prefix was stored: other servers are told of its new chunks, and they are to be written, if the policy of a
    store says so. A chunk that any server has stored before is used a second time, and one that was foretold is
    awaited."""
    for node in new:
        node.mark(STORED)
    for tier in core.remotes:
        again: Node | None = None
        epoch = tier.epoch_of(space, now_ns)
        for node in new if epoch is not None else ():
            assert epoch is not None
            if tier.has_stored(space, epoch, node) or tier.foretells(space, epoch, node):
                again = node
        match tier.remote.write:
            case "through":
                tier.used.append((space, tail))
            case "reuse" if again is not None:
                tier.used.append((space, again))
