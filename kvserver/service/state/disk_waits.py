"""What somebody needs from disk: leases, whose bytes are read ahead of their use, retrieves that came before them, and
holds of operators."""

from kvserver.index.coverage import first_needed
from kvserver.index.space import Node, Space
from kvserver.service.base.operator_state import Hold
from kvserver.service.state.core import Core, DiskTier, Fetch, Job, Lease


def missing(space: Space, tail: Node) -> dict[Node, int]:
    """What a prefix that ends in `tail` needs and is on disk alone: node -> groups (bits), head first."""
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
    """No chunk of what is to be read is more than its tenant may have in DRAM: for such a one there is never a slot."""
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
    """Registers what somebody needs, and has it read in this order."""
    fetch = Fetch(lease, job, hold, needs)
    for node, bits in needs.items():
        tier.waiters.setdefault(node, []).append(fetch)
        want(tier, space, node, bits)
    return fetch


def want(tier: DiskTier, space: Space, node: Node, groups: int) -> None:
    """Has groups (bits) of a node read, after what was wanted before."""
    known = tier.reads.get(node)
    tier.reads[node] = (space, groups | (known[1] if known is not None else 0))


def got(tier: DiskTier, fetch: Fetch, node: Node) -> None:
    """The fetch needs nothing of this node any more."""
    del fetch.needs[node]
    waiting = tier.waiters[node]
    waiting.remove(fetch)
    if not waiting:
        del tier.waiters[node]
        tier.reads.pop(node, None)


def end(tier: DiskTier, fetch: Fetch) -> None:
    """Nobody waits any more. What is being read will be in DRAM all the same."""
    for node in list(fetch.needs):
        got(tier, fetch, node)
