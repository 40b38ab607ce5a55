"""Tells the other servers of a store what engines of this server compute, if its `pledged` says so.

A pledge is foretold with the held chunks before it that the store lacks: whoever awaits it elsewhere needs them too.
They are written at once. What comes no more is told, and what is still to come is told again and again: a server that
has died is believed no longer than remote_foretold_ms (decision 0025).
"""

from bisect import bisect_left

from kvserver.index.space import Node, Space
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.foretold import FORETELLING_MAX, Foretelling
from kvserver.service.state.pledges import Pledge
from kvserver.service.state.remote_tier import PutJob, RemoteTier, split

TOLD_TIMES = 3
"""So often it is told while it is believed once: two batches may be lost."""


def begins(core: Core, pledge: Pledge, before: bytes, now_ns: int) -> None:
    """An engine has pledged chunks. before: the packed keys of the held chunks before them."""
    for tier in core.remotes:
        epoch = tier.epoch_of(pledge.space, now_ns) if tier.remote.pledged == "write" else None
        if epoch is not None and tier.usable and not tier.is_left_alone:
            _begin(tier, pledge, split(before), epoch, now_ns)


def _begin(tier: RemoteTier, pledge: Pledge, held: list[bytes], epoch: int, now_ns: int) -> None:
    space = pledge.space
    # A store that has a chunk has those before it, or nobody awaits what follows. So few of them need to be hashed.
    lacks = bisect_left(held, True, key=lambda key: not tier.known.is_written(tier.mark(space, epoch, key)))
    lacking = held[lacks:]
    room = FORETELLING_MAX - tier.foretellings.chunks
    if room <= len(lacking):
        return
    tail = space.find(lacking[-1]) if lacking else None
    if tail is not None:
        tier.used.append((space, tail))
    keys = [*lacking, *split(pledge.keys)][:room]
    marks = [tier.mark(space, epoch, key) for key in keys]
    row = Foretelling(
        pledge=pledge, space=space, epoch=epoch, keys=keys, marks=marks, held=len(lacking), moved_ns=now_ns
    )
    tier.foretellings.begin(row)


def tick(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Tells what there is to tell of all that this server has foretold."""
    if rows := list(tier.foretellings.rows.values()):
        going = {job.node for job in tier.jobs.values() if isinstance(job, PutJob)}
        for row in rows:
            _turn(core, tier, row, going, now_ns)
    tier.foretold.forget_old(now_ns)


def _turn(core: Core, tier: RemoteTier, row: Foretelling, going: set[Node], now_ns: int) -> None:
    """going: chunks that are being written."""
    epoch = tier.epoch_of(row.space, now_ns)
    if epoch is not None and epoch != row.epoch:
        tier.foretellings.end(row)  # nobody looks for chunks of that epoch any more
        return
    if core.chunks.spaces.get(row.space.digest) is not row.space:
        _tell(core, tier, row.space, tier.foretellings.end(row), now_ns, comes=False)
        return
    # Marks of others may be wrong, so a chunk that was foretold is not over before it is stored here. Then it is taken
    # back unless this server wrote it: whoever awaits it sees at once whether the store has it.
    most = len(row.keys) if row.told_ns is None else min(row.stored, len(row.keys))
    back: list[int] = []
    while row.written < most and tier.known.is_written(row.marks[row.written]):
        back += tier.foretellings.was_written(row, now_ns)
    if back:
        _tell(core, tier, row.space, back, now_ns, comes=False)
    lives = core.pledges.get(row.pledge.number) is row.pledge
    if not lives and row.stored < len(row.keys):
        rest = tier.foretellings.cut(row, max(row.stored, row.written))
        _tell(core, tier, row.space, rest, now_ns, comes=False)
    if row.written == len(row.keys):
        tier.foretellings.end(row)
        return
    moved_ns = max(row.moved_ns, row.pledge.moved_ns)
    last = len(row.keys) if row.told_ns is None else row.written + 1
    is_late = now_ns - moved_ns >= core.bounds.pledge_patience_ms * MILLISECOND_NS
    if is_late or not all(_comes(tier, row, at, going, lives=lives) for at in range(row.written, last)):
        _tell(core, tier, row.space, tier.foretellings.end(row), now_ns, comes=False)
    elif row.told_ns is None or now_ns - row.told_ns >= core.bounds.remote_foretold_ms * MILLISECOND_NS // TOLD_TIMES:
        if tier.is_behind(row.space) or (tier.used and row.held and row.told_ns is None):
            return  # the store takes nothing, or what was held is not queued to be written yet
        _tell(core, tier, row.space, row.tells(now_ns), now_ns, comes=True)


def _comes(tier: RemoteTier, row: Foretelling, position: int, going: set[Node], *, lives: bool) -> bool:
    """A chunk that is not in the store is being computed, or will be written."""
    if position >= row.stored:
        return lives
    node = row.space.find(row.keys[position])
    if node is None:
        return False
    return node in going or node in tier.queue or bool(tier.used) or tier.known.is_written(row.marks[position])


def _tell(core: Core, tier: RemoteTier, space: Space, marks: list[int], now_ns: int, *, comes: bool) -> None:
    # A batch that is under way may be told as late as its order ends.
    until_ms = core.bounds.remote_foretold_ms + core.bounds.remote_job_ms
    tier.foretellings.told(marks, now_ns, now_ns + until_ms * MILLISECOND_NS, comes=comes)
    tier.foretell(space, marks, comes=comes)
