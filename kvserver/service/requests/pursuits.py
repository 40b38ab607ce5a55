"""Chunks that a lookup misses and that the remote store may have: they are looked for, and read.

No lookup waits for a store. It is answered with what is here. If more may come, its answer says how much (`coming`),
and an engine that can wait asks again. One probe tells which of the chunks are there. The leading ones are read,
parents first, and each is an ordinary chunk of DRAM as soon as its bytes were compared with its digests.
"""

from collections.abc import Iterable

from kvserver.index.space import Node, Space
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.remote_tier import PURSUITS_MAX, WANTED_MAX, ProbeJob, Pursuit, RemoteTier, split
from kvserver.service.state.sessions import Session
from kvserver.service.telling.lookup_counts import LookupResult
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import PROBED_MAX, ProbeRemote


def coming(core: Core, tier: RemoteTier, session: Session, found: LookupResult, *, wanted_min: int, now_ns: int) -> int:
    """How many chunks after those that a lookup has found may come soon. Begins to look for them."""
    space, asked = found.space, len(found.keys) // KEY_BYTES
    if space is None or not found.chunks == found.held < asked >= wanted_min:
        return 0
    key = found.keys[found.held * KEY_BYTES : (found.held + 1) * KEY_BYTES]
    if (space.digest, key) not in tier.wanted:
        _begin(core, tier, session, space, keys=found.keys, held=found.held, now_ns=now_ns)
    pursuit, position = tier.wanted.get((space.digest, key), (None, 0))
    if pursuit is None or now_ns - pursuit.moved_ns >= core.bounds.remote_patience_ms * MILLISECOND_NS:
        return 0
    return min(asked - found.held, len(pursuit.keys) - position)


def _begin(
    core: Core, tier: RemoteTier, session: Session, space: Space, *, keys: bytes, held: int, now_ns: int
) -> None:
    """Asks the store for the chunks after those that are held, unless that is of no use."""
    key = keys[held * KEY_BYTES : (held + 1) * KEY_BYTES]
    epoch = tier.epoch_of(space, now_ns)
    tokens = (len(keys) // KEY_BYTES - held) * space.geometry.chunk_tokens
    if epoch is None or not tier.usable or not space.complete or tokens < tier.remote.tokens_min:
        return
    if tier.is_left_alone or core.operators.drain:
        return
    if len(tier.pursuits) >= PURSUITS_MAX or len(tier.wanted) + PROBED_MAX > WANTED_MAX:
        return
    if tier.is_put_aside(space.digest, key, now_ns) or space.find(key) is not None:
        return
    is_try = tier.is_unannounced(space, key, now_ns)
    if is_try and not tier.epochs[space.digest].announcements.try_it(now_ns):
        core.counters.add("remote_unannounced")
        return
    wanted = split(keys[held * KEY_BYTES :][: PROBED_MAX * KEY_BYTES])
    tenant = _tenant(core, session, space)
    if tenant is None:
        return
    parent = keys[(held - 1) * KEY_BYTES : held * KEY_BYTES] if held else b""
    pursuit = Pursuit(
        space=space, epoch=epoch, parent=parent, keys=wanted, tenant=tenant, moved_ns=now_ns, is_try=is_try
    )
    job = ProbeJob(number=core.number("job"), pursuit=pursuit, began_ns=now_ns)
    tier.pursue(pursuit)
    tier.begin(job, ProbeRemote(job.number, space.digest, epoch, b"".join(wanted), len(space.parts)))
    core.timers.set(now_ns + core.bounds.remote_job_ms * MILLISECOND_NS, "remote", job.number)
    core.counters.add("remote_probed", len(wanted))


def _tenant(core: Core, session: Session, space: Space) -> int | None:
    """The tenant for which the engine has registered this namespace; None if it has not."""
    caches = core.caches.values()
    mine = (cache for cache in caches if cache.digest == space.digest and cache.session.engine is session.engine)
    return next((cache.tenant for cache in mine), None)


def offer_used(tier: RemoteTier, space: Space, tail: Node) -> None:
    """A prefix was used again: its chunks are to be written, if the policy says so."""
    if tier.remote.write != "never":
        tier.used.append((space, tail))


def offer_stored(tier: RemoteTier, space: Space, tail: Node, new: Iterable[Node], now_ns: int) -> None:
    """A prefix was stored: other servers are told of its new chunks, and they are to be written, if the policy says so.
    A chunk that any server has stored before is used a second time."""
    again: Node | None = None
    epoch = tier.epoch_of(space, now_ns)
    for node in new if epoch is not None else ():
        assert epoch is not None
        if tier.has_stored(space, epoch, node):
            again = node
    match tier.remote.write:
        case "through":
            tier.used.append((space, tail))
        case "reuse" if again is not None:
            tier.used.append((space, again))
