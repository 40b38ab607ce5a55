"""Chunks that engines of other servers compute now, and that come by a store.

Another server has foretold them. Its word becomes a pledge of this server's table when an engine may wait for it, so
leases and retrieves wait as they do for an engine of this server. Each chunk is read when it is announced to be in the
store. The word ends when it is taken back, when that server is not heard for remote_foretold_ms, when the store cannot
be used, and when no chunk has come for pledge_patience_ms (decision 0025).
"""

import logging
from bisect import bisect_left
from itertools import takewhile

from kvserver.index.space import Space
from kvserver.service.requests import pursuits
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.pledges import Pledge, PledgeEnd, Pledger
from kvserver.service.state.remote_tier import RemoteTier, split
from kvserver.service.state.sessions import Session
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import PROBED_MAX

AHEAD_MAX = PROBED_MAX
"""Chunks of one prompt that are looked at, and looked for, at a time."""
NOBODY = ""
"""The engine of another server in the books of who has taken how much room. No engine here has that name."""


def offered(core: Core, session: Session, space: Space, keys: bytes, *, held: int, now_ns: int) -> Pledge | None:
    """The word of another server on what follows the held chunks of a prompt, as a pledge that has not begun. The
    chunks before those that are foretold are in the store."""
    rest = keys[held * KEY_BYTES :]
    if not rest or not any(tier.foretold for tier in core.remotes):
        return None
    if not space.only_full or not space.complete or core.operators.drain:
        return None
    first = rest[:KEY_BYTES]
    if core.pledges.of(space, first) is not None or (tenant := pursuits.tenant_of(core, session, space)) is None:
        return None
    pledger = Pledger(tenant, NOBODY)
    room = core.pledges.room(pledger)
    most = min(room.chunks, room.slot_bytes // space.group_bytes(space.needed)) if room.pledges else 0
    if most <= 0 or core.pledges.is_distrusted(pledger, space, first, now_ns):
        return None
    for tier in core.remotes:
        chunks = _coming(core, tier, space, rest[: most * KEY_BYTES], now_ns)
        epoch = tier.epoch_of(space, now_ns)
        if chunks and epoch is not None and not _is_useless(core, tier, space, chunks):
            return Pledge(
                number=core.number("pledge"),
                session=None,
                pledger=pledger,
                space=space,
                after=keys[: held * KEY_BYTES][-KEY_BYTES:],
                keys=rest[: chunks * KEY_BYTES],
                slot_bytes=chunks * space.group_bytes(space.needed),
                expires_ns=now_ns + core.bounds.pledge_ttl_ms * MILLISECOND_NS,
                moved_ns=now_ns,
                store=tier.device,
                epoch=epoch,
            )
        if tier.foretold:
            _listen_soon(core, tier, space, now_ns)  # whoever may wait asks again
    return None


def _listen_soon(core: Core, tier: RemoteTier, space: Space, now_ns: int) -> None:
    known = tier.epochs.get(space.digest)
    if known is not None and not tier.remote.bucket:
        known.announcements.listens_soon(now_ns, core.bounds.remote_listen_ms * MILLISECOND_NS)


def _coming(core: Core, tier: RemoteTier, space: Space, keys: bytes, now_ns: int) -> int:
    """How many leading chunks are in the store or foretold. 0 if none of them is foretold."""
    epoch = tier.epoch_of(space, now_ns)
    if epoch is None or not tier.foretold or not tier.usable or tier.is_left_alone:
        return 0
    if not _may_come(tier, space, epoch, keys, now_ns):
        return 0
    found, is_foretold = 0, False
    seen: set[bytes] = set()
    for at in range(0, len(keys), KEY_BYTES):
        key = keys[at : at + KEY_BYTES]
        mark = tier.mark(space, epoch, key)
        is_written = tier.known.is_written(mark)
        if key in seen or core.pledges.of(space, key) is not None:
            break  # a key that comes twice is of no chain; a chunk has one pledge
        if is_written and tier.aside_ns(space, key, now_ns):
            break
        if not is_written and not tier.comes(mark, now_ns):
            break
        seen.add(key)
        is_foretold = is_foretold or not is_written
        found += 1
    return found if is_foretold else 0


def _may_come(tier: RemoteTier, space: Space, epoch: int, keys: bytes, now_ns: int) -> bool:
    """The first chunk that the store lacks is foretold. Few keys are hashed: engines ask again and again while a store
    brings what it has."""

    def lacks(at: int) -> bool:
        return not tier.known.is_written(tier.mark(space, epoch, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]))

    count = len(keys) // KEY_BYTES
    at = bisect_left(range(count), True, key=lacks) if not lacks(0) else 0
    return at < count and tier.comes(tier.mark(space, epoch, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]), now_ns)


def _is_useless(core: Core, tier: RemoteTier, space: Space, chunks: int) -> bool:
    """Too little comes, or an engine computes it sooner than it can be read."""
    tokens = chunks * space.geometry.chunk_tokens
    reads = [(tier.reads, tier.fetching_bytes + chunks * space.group_bytes(space.needed))]
    is_slow = core.computes_faster(tokens, reads, chunks * space.rank_bytes(space.needed))
    return tokens < tier.remote.tokens_min or is_slow


def begin(core: Core, pledge: Pledge, now_ns: int) -> None:
    """An engine relies on the word of another server."""
    core.pledges.begin(pledge)
    patience_ns = core.bounds.pledge_patience_ms * MILLISECOND_NS
    core.timers.set(pledge.due_ns(patience_ns), "pledge", pledge.number)
    tier = next(tier for tier in core.remotes if tier.device == pledge.store)
    tier.awaits(pledge)
    _listen_soon(core, tier, pledge.space, now_ns)
    core.log(
        "chunks awaited from a store",
        ("pledge", pledge.number),
        ("remote", pledge.store),
        ("chunks", pledge.chunks),
        level=logging.DEBUG,
    )


def ended(core: Core, pledge: Pledge) -> None:
    for tier in core.remotes:
        tier.awaits_no_more(pledge)


def turn(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Has those chunks read that were written, and ends the words that will not be kept."""
    for pledge in list(tier.awaited.values()):
        if pledge.to_come and (how := _go_on(core, tier, pledge, now_ns)):
            core.pledges.breaks(pledge, how)


def _go_on(core: Core, tier: RemoteTier, pledge: Pledge, now_ns: int) -> PledgeEnd | None:
    """Begins to read what can be read. Returns how the word ends, if it does."""
    space, epoch = pledge.space, pledge.epoch
    if not pledge.waits:
        return "withdrawn"  # nobody here waits for it any more
    if not tier.usable or tier.is_left_alone or tier.epoch_of(space, now_ns) != epoch:
        return "silent"
    if core.operators.drain:
        return "not-stored"
    keys = split(pledge.to_come[: AHEAD_MAX * KEY_BYTES])
    first = next((at for at, key in enumerate(keys) if (space.digest, key) not in tier.wanted), len(keys))
    if first == len(keys):
        return None
    key, parent = keys[first], keys[first - 1] if first else pledge.after
    mark = tier.mark(space, epoch, key)
    if not tier.known.is_written(mark):
        return None if first or tier.comes(mark, now_ns) else _why_not(tier, mark)
    if tier.aside_ns(space, key, now_ns):
        return None if first else "not-stored"
    if space.find(key) is not None or (parent and space.find(parent) is None):
        return None  # it is being stored here, or the chunk before is not read yet
    run = list(takewhile(lambda key: _is_to_read(tier, pledge, key), keys[first:]))
    pursuits.pursue_awaited(core, tier, pledge, parent=parent, keys=run, now_ns=now_ns)
    return None


def _is_to_read(tier: RemoteTier, pledge: Pledge, key: bytes) -> bool:
    """The chunk was written, and is not looked for yet."""
    is_written = tier.known.is_written(tier.mark(pledge.space, pledge.epoch, key))
    return is_written and (pledge.space.digest, key) not in tier.wanted


def _why_not(tier: RemoteTier, mark: int) -> PledgeEnd:
    return "silent" if tier.foretold.was_told(mark) else "withdrawn"
