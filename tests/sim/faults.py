"""Faults that only a digest shows: blocks of the arena that change by themselves or on their way, and wrong sums.

Each one is written down where it happens, so that the simulator knows which mismatches may be reported.
"""

from typing import TYPE_CHECKING

from kvserver.tiers.records import NO_SUM

from .content import Block

if TYPE_CHECKING:
    from .world import World

ROTS = ("flip", "swap", "other chunk")
WAY_STORE, WAY_RETRIEVE = "way of a store", "way of a retrieve"
SUM_STORE, SUM_RETRIEVE = "sum of a store", "sum of a retrieve"
DISK = ("disk rot", "disk torn")
KINDS = (*ROTS, WAY_STORE, WAY_RETRIEVE, SUM_STORE, SUM_RETRIEVE, *DISK)


def planted(world: "World", kind: str) -> None:
    world.counts[f"planted {kind}"] += 1


def any_planted(world: "World") -> bool:
    in_store = world.counts["remote spoil"]
    return bool(in_store) or any(world.counts[f"planted {kind}"] for kind in KINDS)


def on_the_way(world: "World", content: Block, kind: str) -> tuple[Block, str]:
    """(content behind the way, kind of the fault or "")."""
    if world.verifies and world.chance("bytes-on-way"):
        planted(world, kind)
        return world.garbage(), kind
    return content, ""


def false_share(world: "World", kind: str) -> int:
    """What is added wrongly to the sum of a shard, mostly 0."""
    if world.verifies and world.chance(kind):
        planted(world, kind)
        return 1 + int(world.rng.random() * 1000)
    return 0


def dram_rot(world: "World") -> None:
    """Changes a random block of a slot, mostly of a sealed one. Slots that nobody summed are spared."""
    arena, rng = world.arena, world.rng
    sealed = sorted(world.ledger.slots)
    offsets = sealed if sealed and rng.random() < 0.8 else arena.offsets()
    if not offsets or not world.verifies:
        return
    offset = rng.choice(offsets)
    entry = world.ledger.entries.get(offset)
    blocks = arena.slot(offset)
    written = [place for place, content in enumerate(blocks) if content is not None]
    if not written or (entry is not None and entry.sum == NO_SUM):
        return
    place, kind = rng.choice(written), rng.choice(ROTS)
    before = list(blocks)
    match kind:
        case "swap":
            other = rng.choice(written)
            arena.spoil(offset, place, before[other], kind)
            arena.spoil(offset, other, before[place], kind)
        case "flip":
            arena.spoil(offset, place, world.garbage(), kind)
        case _:
            donor = arena.slot(rng.choice(arena.offsets()))
            arena.spoil(offset, place, rng.choice(donor) or before[place], kind)
    if arena.slot(offset) != before:
        planted(world, kind)
