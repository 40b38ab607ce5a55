"""Fetches: chunks that must be read from disk for a lease (ahead of its use), for a retrieve that came before its
chunks, or for an operator's hold."""

from kvserver.index.coverage import first_needed
from kvserver.index.space import Node, Space
from kvserver.service.base.operator_state import Hold
from kvserver.service.state.core import Core, DiskTier, Fetch, Job, Lease


def missing(space: Space, tail: Node) -> dict[Node, int]:
    """Node -> groups (bits) that the prefix ending in `tail` needs and that are on disk alone, head first."""
    if not space.away:
        return {}
    firsts = [first_needed(space, group, tail.depth) for group in range(len(space.geometry.groups))]
    found: dict[Node, int] = {}
    for position, node in enumerate(space.chain(tail)):
        if node.away:
            wanted = sum(1 << group for group, first in enumerate(firsts) if position >= first)
            if bits := wanted & node.present & ~node.in_dram:
                found[node] = bits
    return found


def may_ever_fit(core: Core, space: Space, needs: dict[Node, int]) -> bool:
    """Each chunk to be read is within its tenant's maximum in DRAM. A larger one would never get a slot."""
    accounts = core.chunks.accounts
    return accounts is None or all(accounts.may_ever_hold(space, space.group_bytes(bits)) for bits in needs.values())


def begin(
    tier: DiskTier,
    space: Space,
    needs: dict[Node, int],
    *,
    lease: Lease | None = None,
    job: Job | None = None,
    hold: Hold | None = None,
) -> Fetch:
    """Registers what a lease, job or hold needs, and queues the reads in this order."""
    fetch = Fetch(lease, job, hold, needs)
    for node, bits in needs.items():
        tier.waiters.setdefault(node, []).append(fetch)
        want(tier, space, node, bits)
    return fetch


def want(tier: DiskTier, space: Space, node: Node, groups: int) -> None:
    """Queues groups (bits) of a node to be read, after those queued before."""
    known = tier.reads.get(node)
    tier.reads[node] = (space, groups | (known[1] if known is not None else 0))


def got(tier: DiskTier, fetch: Fetch, node: Node) -> None:
    """Ends a fetch's wait for this node. The last fetch that waited takes the queued read away."""
    del fetch.needs[node]
    waiting = tier.waiters[node]
    waiting.remove(fetch)
    if not waiting:
        del tier.waiters[node]
        tier.reads.pop(node, None)


def end(tier: DiskTier, fetch: Fetch) -> None:
    """Ends a fetch. A read that is under way still brings its chunk to DRAM."""
    for node in list(fetch.needs):
        got(tier, fetch, node)
