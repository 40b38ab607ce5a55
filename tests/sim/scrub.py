"""The simulated reader of sealed slots, the same in movers of all kinds (kvserver._native.Scrubber)."""

from typing import TYPE_CHECKING

from kvserver.tiers.records import NO_SUM, SCRUB_ITEM, Record
from kvserver.wire.orders import Scrub, Scrubbed

from .sums import sum_of

if TYPE_CHECKING:
    from .world import World


def scrubbed(world: "World", order: Scrub) -> Scrubbed:
    """Compares the slots with the ledger. The end of the order."""
    wrong: dict[int, Record] = {}
    compared = 0
    for index, (offset, payload_bytes, names) in enumerate(SCRUB_ITEM.iter_unpack(order.items)):
        (entry,) = world.ledger.named([offset], names)
        if entry.sum == NO_SUM:
            continue
        compared += payload_bytes
        if sum_of(world.arena.slot(offset)) != entry.sum:
            wrong[index] = entry
    world.counts["scrubs"] += 1
    world.counts["scrubs that found something"] += bool(wrong)
    world.promises.digests.found_by_scrub(order.job, list(wrong.values()))
    return Scrubbed(order.job, tuple(wrong), compared)
