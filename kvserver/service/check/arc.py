"""The invariants of ARC (index/arc.py)."""

from collections.abc import Iterable

from kvserver.index.arc import FREQUENT, Arc
from kvserver.index.space import Space
from kvserver.service.holdings.chunks import Chunks


def check_arc(chunks: Chunks, arc: Arc) -> None:
    """Raises AssertionError at the first violated invariant."""
    _check_halves([*chunks.spaces.values(), *chunks.retired], arc)
    _check_ghosts(chunks, arc)


def _check_halves(spaces: Iterable[Space], arc: Arc) -> None:
    """Every chunk in DRAM is in one half and counted there. Frequent chunks are closed under prefixes."""
    held_bytes = {arc.recent: 0, arc.frequent: 0}
    for space in spaces:
        for node in space.all_nodes():
            frequent = node.queued & FREQUENT
            held_bytes[arc.frequent if frequent else arc.recent] += space.group_bytes(node.present & node.in_dram)
            above = node.parent
            assert above is not None
            asked = above.parent is None or above.queued & FREQUENT
            assert asked or not frequent, "who asks for a chunk asks for its prefix"
    for half, expected in held_bytes.items():
        assert half.held_bytes == expected, "a half is what its chunks hold"


def _check_ghosts(chunks: Chunks, arc: Arc) -> None:
    """Every ghost belongs to a living namespace, is in no tree, and is counted. ARC remembers no more ghosts than its
    bound."""
    assert list(arc.orders) == list(chunks.spaces.values()), "a cleared namespace leaves no ghosts"
    for half in (arc.recent, arc.frequent):
        remembered = [ghost for order in arc.orders.values() for ghost in order.ghosts[half].values()]
        assert half.ghosts == len(remembered)
        assert half.ghost_bytes == sum(ghost.slot_bytes for ghost in remembered)
    for space, order in arc.orders.items():
        recent, frequent = order.ghosts[arc.recent], order.ghosts[arc.frequent]
        assert not recent.keys() & frequent.keys(), "a chunk leaves one half"
        assert not (recent.keys() | frequent.keys()) & space.nodes.keys(), "what is there is no ghost"
        for ghosts in (recent, frequent):
            serials = [ghost.serial for ghost in ghosts.values()]
            assert serials == sorted(serials), "the first ghost is the oldest"
    most = arc.capacity_bytes
    assert 0 <= arc.target_bytes <= most
    assert arc.recent.held_bytes + arc.recent.ghost_bytes <= most
    held_bytes = arc.recent.held_bytes + arc.frequent.held_bytes
    assert held_bytes + arc.recent.ghost_bytes + arc.frequent.ghost_bytes <= 2 * most
    assert arc.recent.ghosts + arc.frequent.ghosts <= arc.ghosts_max
