"""Notes on the devices of what was cleared: records of a namespace, or of a prefix, up to a generation are void.

A note is written when a namespace is cleared or forgotten, and again by each mover that comes until one has confirmed
that it is durable. Who asked for a Clear is answered then. docs/disk.md says what a Clear guarantees.
"""

import logging
from collections.abc import Iterable
from hashlib import sha256
from itertools import islice

from kvserver.errors import DeviceError, ResourceError
from kvserver.service.holdings.namespace_documents import document_of
from kvserver.service.state.core import MILLISECOND_NS, Clearing, Core, DiskTier
from kvserver.tiers.prefix_notes import prefix_document
from kvserver.tiers.records import encode_document
from kvserver.wire.orders import ForgetNotes, Note, Noted

GENERATIONS = sha256(b"kvserver generations").digest()
"""In place of a namespace, in a note: no record on any device has a generation beyond this note's `void`. So they grow
also while a device is away: what it holds is older than whatever the others heard meanwhile, a Clear above all."""
GENERATIONS_AHEAD = 1 << 20
"""That are noted at once. A restart skips what is left of them."""
FORGOTTEN_AT_ONCE = 64
"""Notes: few enough to hold up no read, and enough to be seldom."""
CLEARS_MAX = 1024
"""Clears that wait for the disks to note them, or that no disk could note yet; each is an order to their mover."""


def check_clears(core: Core, notes: int) -> None:
    """ResourceError when too many notes are waited for, with these. Nothing was cleared then."""
    tier = core.disk
    if tier is not None and sum(map(len, tier.clearing.values())) + len(tier.owed) + notes > CLEARS_MAX:
        raise ResourceError("clears", f"more than {CLEARS_MAX} clears would wait for the disks")


def void(core: Core, digest: bytes) -> None:
    """A namespace was cleared: its records are void, where the devices know anything of it."""
    tier = core.disk
    if tier is None or not _is_known(tier, digest):
        return
    if tier.listed:
        make_void(core, tier, digest)
    else:
        tier.void_later.add(digest)


def answer_when_void(core: Core, clearing: Clearing, digests: Iterable[bytes], now_ns: int) -> None:
    """The same of all these, and whoever cleared them is answered when the devices have noted it; at once where they
    know nothing of them."""
    tier = core.disk
    known = [digest for digest in digests if tier is not None and _is_known(tier, digest)]
    if tier is None or not known:
        end(core, clearing)
        return
    clearing.left = dict.fromkeys(known, 0)
    core.timers.set(now_ns + core.bounds.job_ttl_ms * MILLISECOND_NS, "clear", clearing.number)
    for digest in known:
        tier.clearing.setdefault(digest, []).append(clearing)
        void(core, digest)


def _is_known(tier: DiskTier, digest: bytes) -> bool:
    """A device knows something of it, or may."""
    return not tier.listed or digest in tier.noted or not tier.all_known


def make_void(core: Core, tier: DiskTier, digest: bytes) -> None:
    """Whatever was written until now. The next write has a higher generation."""
    tier.noted[digest] = core.chunks.generation = core.chunks.generation + 1
    for clearing in tier.clearing.get(digest, ()):
        clearing.left[digest] = clearing.left[digest] or tier.noted[digest]
    if digest not in core.chunks.spaces:
        tier.described.discard(digest)
    write(core, tier, digest)


def reserve_generations(core: Core, tier: DiskTier) -> None:
    """Notes the next generations before records are written with them."""
    if core.chunks.generation + GENERATIONS_AHEAD // 2 > tier.noted.get(GENERATIONS, 0):
        tier.noted[GENERATIONS] = core.chunks.generation + GENERATIONS_AHEAD
        write(core, tier, GENERATIONS)


def write(core: Core, tier: DiskTier, digest: bytes) -> None:
    """Now, and again by whichever mover comes, until one has said that it is durable."""
    tier.unnoted.add(digest)
    if tier.mover is None:
        return
    tier.notes_sent += 1
    core.instruct(tier.mover, Note(digest, _document(core, tier, digest), tier.noted[digest]))


def _document(core: Core, tier: DiskTier, digest: bytes) -> bytes:
    """What the note is of; empty: the devices keep what they know."""
    if (prefix := tier.cleared.get(digest)) is not None:
        return prefix_document(prefix)
    space = core.chunks.spaces.get(digest)
    whole = space is not None and tier.chunks.writable(space)  # some rank's shape may be missing
    return encode_document(document_of(space)) if space is not None and whole else b""


def forget_oldest(core: Core, tier: DiskTier) -> None:
    """The oldest ones of namespaces that are not in the index, when they are too many. Whatever devices hold of them,
    here or where they are away, is void. Not those of cleared prefixes: their namespaces may live (prefixes.py)."""
    if len(tier.noted) - len(tier.cleared) <= core.bounds.namespaces_max + core.bounds.notes_max:
        return
    needed = core.chunks.spaces.keys() | tier.cleared.keys() | {GENERATIONS}
    forget(core, tier, (digest for digest in tier.noted if digest not in needed))


def forget(core: Core, tier: DiskTier, digests: Iterable[bytes]) -> None:
    """Removes some of these notes, those that are durable and for which nobody waits. Nothing may be lost with them but
    records up to now of namespaces without a note."""
    assert tier.mover is not None
    over = (digest for digest in digests if digest not in tier.clearing and digest not in tier.unnoted)
    old = list(islice(over, FORGOTTEN_AT_ONCE))
    for digest in old:
        del tier.noted[digest]
        tier.described.discard(digest)
        tier.left_out.pop(digest, None)
        tier.cleared.pop(digest, None)
    if old:
        core.instruct(tier.mover, ForgetNotes(old, core.chunks.generation))
        core.log("notes forgotten", ("notes", len(old)))


def heed(core: Core, tier: DiskTier, noted: Noted) -> None:
    tier.notes_sent -= 1
    tier.silent_from_ns = 0
    if noted.kept and noted.void == tier.noted.get(noted.namespace):
        tier.unnoted.discard(noted.namespace)
        if noted.namespace in tier.owed:
            tier.owed.discard(noted.namespace)
            core.log("clear durable", ("namespace", noted.namespace[:6].hex()), ("left", len(tier.owed)))
    if noted.namespace == GENERATIONS and noted.kept:
        tier.generation_max = max(noted.void, tier.generation_max)
    waiting = tier.clearing.pop(noted.namespace, [])
    later = [clearing for clearing in waiting if not 0 < clearing.left[noted.namespace] <= noted.void]
    if later:
        tier.clearing[noted.namespace] = later
    for clearing in waiting:
        if clearing not in later:
            del clearing.left[noted.namespace]
            if not noted.kept:
                tier.owed.add(noted.namespace)
                clearing.why = _why_not_noted(core, tier)
            if not clearing.left:
                end(core, clearing)


def _why_not_noted(core: Core, tier: DiskTier) -> str:
    """With each device that has a problem: its directory, else its number."""
    said = [f"{core.named(device)[-1][1]} ({problem})" for device, problem in enumerate(tier.problems) if problem]
    return f"not durable yet on {' and '.join(said) or 'any device'}; it is tried again until it is"


def end(core: Core, clearing: Clearing) -> None:
    """All is noted, or nothing more is waited for. What is not durable is gone from memory, but after a restart of the
    whole server it may be back, if that comes before the devices could be told."""
    core.timers.cancel("clear", clearing.number)
    if any(space in core.chunks.emptying for space in clearing.spaces):
        core.clears_going.append(clearing)
        return
    done, why = clearing.done, clearing.why
    if not why:
        core.answer(clearing.peer, done)
        return
    core.log("clear not durable", ("chunks", done.chunks), ("why", why), level=logging.WARNING)
    core.refuse(clearing.peer, done.id, DeviceError("disk-clear", f"cleared in memory; {why}"))


def overdue(core: Core, tier: DiskTier, number: int) -> None:
    """Nobody waits longer for the devices than for a job."""
    clearing = next(each for waiting in tier.clearing.values() for each in waiting if each.number == number)
    for digest in clearing.left:
        tier.owed.add(digest)
        tier.clearing[digest].remove(clearing)
        if not tier.clearing[digest]:
            del tier.clearing[digest]
    clearing.why = "the disks have not confirmed it in time"
    end(core, clearing)
