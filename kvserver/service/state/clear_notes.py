"""Notes on the devices about clears: all records of a namespace, or of a prefix, up to a generation are void.

A note is written when a namespace is cleared or forgotten. Each new mover gets it again until one has confirmed that it
is durable; then the caller of the Clear is answered. docs/disk.md says what a Clear guarantees.
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
"""Takes the place of a namespace in one special note: no record on any device has a generation above that note's
`void`. So generations also grow while a device is away, and its records are older than all that the others were told
meanwhile, above all a Clear."""
GENERATIONS_AHEAD = 1 << 20
"""Generations that one note reserves. A restart skips those that were not used."""
FORGOTTEN_AT_ONCE = 64
"""Notes removed at once: few enough to delay no read, and enough to be rare."""
CLEARS_MAX = 1024
"""Clears that wait for the disks, or that no disk could note yet. Each is an order to the disk mover."""


def check_clears(core: Core, notes: int) -> None:
    """Raises ResourceError when too many clears would wait with this many more notes. Nothing has been cleared then."""
    tier = core.disk
    if tier is not None and sum(map(len, tier.clearing.values())) + len(tier.owed) + notes > CLEARS_MAX:
        raise ResourceError("clears", f"more than {CLEARS_MAX} clears would wait for the disks")


def void(core: Core, digest: bytes) -> None:
    """Makes the records of a cleared namespace void, if the devices may know it."""
    tier = core.disk
    if tier is None or not _is_known(tier, digest):
        return
    if tier.listed:
        make_void(core, tier, digest)
    else:
        tier.void_later.add(digest)


def answer_when_void(core: Core, clearing: Clearing, digests: Iterable[bytes], now_ns: int) -> None:
    """Makes the records under all these notes void, and answers the caller of the clear when the devices have noted it.
    The answer comes at once when the devices know none of them."""
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
    """A device has records under this note, or may have some."""
    return not tier.listed or digest in tier.noted or not tier.all_known


def make_void(core: Core, tier: DiskTier, digest: bytes) -> None:
    """Makes all records written so far void. The next write has a higher generation."""
    tier.noted[digest] = core.chunks.next_generation()
    for clearing in tier.clearing.get(digest, ()):
        clearing.left[digest] = clearing.left[digest] or tier.noted[digest]
    if digest not in core.chunks.spaces:
        tier.described.discard(digest)
    write(core, tier, digest)


def reserve_generations(core: Core, tier: DiskTier) -> None:
    """Has the devices note the next generations before records are written with them."""
    if core.chunks.generation + GENERATIONS_AHEAD // 2 > tier.noted.get(GENERATIONS, 0):
        tier.noted[GENERATIONS] = core.chunks.generation + GENERATIONS_AHEAD
        write(core, tier, GENERATIONS)


def write(core: Core, tier: DiskTier, digest: bytes) -> None:
    """Sends the note now. Each new mover gets it again until one has said that it is durable."""
    tier.unnoted.add(digest)
    if tier.mover is None:
        return
    tier.notes_sent += 1
    core.instruct(tier.mover, Note(digest, _document(core, tier, digest), tier.noted[digest]))


def _document(core: Core, tier: DiskTier, digest: bytes) -> bytes:
    """The document that the note carries; empty: the devices keep the one they know."""
    if (prefix := tier.cleared.get(digest)) is not None:
        return prefix_document(prefix)
    space = core.chunks.spaces.get(digest)
    whole = space is not None and tier.chunks.writable(space)  # also False while a rank's shape is unknown
    return encode_document(document_of(space)) if space is not None and whole else b""


def forget_oldest(core: Core, tier: DiskTier) -> None:
    """Removes the oldest notes of namespaces outside the index when there are too many. All that devices hold of these
    namespaces is void, also on devices that are away. Notes of cleared prefixes stay, because their namespaces may live
    (clear_prefix.py)."""
    if len(tier.noted) - len(tier.cleared) <= core.bounds.namespaces_max + core.bounds.notes_max:
        return
    needed = core.chunks.spaces.keys() | tier.cleared.keys() | {GENERATIONS}
    forget(core, tier, (digest for digest in tier.noted if digest not in needed))


def forget(core: Core, tier: DiskTier, digests: Iterable[bytes]) -> None:
    """Removes some of these notes: durable ones that no clear waits for. Only records written so far, of namespaces
    without a note, may be lost with them."""
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
    """The reason for the client. It names each device that has a problem: its directory, else its number."""
    said = [f"{core.named(device)[-1][1]} ({problem})" for device, problem in enumerate(tier.problems) if problem]
    return f"not durable yet on {' and '.join(said) or 'any device'}; it is tried again until it is"


def end(core: Core, clearing: Clearing) -> None:
    """Ends a clear: all its notes are durable, or it stops waiting. Without a durable note the chunks are gone from
    memory, but they may return if the whole server restarts before the devices could be told."""
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
    """Ends a clear that has waited for the devices as long as a job may run."""
    clearing = next(each for waiting in tier.clearing.values() for each in waiting if each.number == number)
    for digest in clearing.left:
        tier.owed.add(digest)
        tier.clearing[digest].remove(clearing)
        if not tier.clearing[digest]:
            del tier.clearing[digest]
    clearing.why = "the disks have not confirmed it in time"
    end(core, clearing)
