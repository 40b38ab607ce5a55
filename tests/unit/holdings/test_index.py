"""The index: possible answers to a lookup, ready chunks, and the order of eviction."""

import hashlib
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserver.errors import RequestError
from kvserver.index.coverage import servable_chunks
from kvserver.index.eviction import LeafLru, evictable
from kvserver.index.space import READY, WAITING, Node, Space
from kvserver.transfer.layout import Geometry, GroupGeometry

CHUNK_TOKENS = 6
BLOCK_TOKENS = {"full": 3, "window": 2, "state": 6}
Path = tuple[int, ...]


def key_of(path: Path) -> bytes:
    return hashlib.sha256(bytes(path)).digest()


def keys_of(path: Path) -> bytes:
    return b"".join(key_of(path[: depth + 1]) for depth in range(len(path)))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    kinds = draw(st.lists(st.sampled_from(["full", "window", "state"]), min_size=1, max_size=4))
    groups = [
        GroupGeometry(BLOCK_TOKENS[kind], kind, draw(st.integers(1, 27)) if kind == "window" else 0, 1)
        for kind in kinds
    ]
    return Geometry(CHUNK_TOKENS, tuple(groups))


paths = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


class Forest:
    """A space with chunks that hold some groups each; parents may come after their children."""

    def __init__(self, geometry: Geometry) -> None:
        self.space = Space(bytes(32), 0, geometry)

    def node(self, path: Path) -> Node:
        node = self.space.root
        for depth in range(1, len(path) + 1):
            key = key_of(path[:depth])
            child = self.space.nodes.get(key) or self.space.add(key, node, 0, 0)
            self.space.make_ready(child)
            node = child
        return node

    def hold(self, path: Path, group: int) -> None:
        node = self.node(path)
        node.present |= 1 << group
        self.space.make_ready(node)

    def held(self, path: Path, group: int) -> bool:
        node = self.space.nodes.get(key_of(path))
        return node is not None and bool(node.present >> group & 1)


def is_servable(forest: Forest, path: Path, boundary: int) -> bool:
    """The three rules of coverage.py, token by token."""
    geometry = forest.space.geometry
    for index, group in enumerate(geometry.groups):
        tokens = boundary * geometry.chunk_tokens
        if group.kind == "full":
            chunks = set(range(boundary))
        elif group.kind == "window":
            chunks = {
                token // geometry.chunk_tokens for token in range(tokens) if token >= tokens - group.window_tokens
            }
        else:
            chunks = {boundary - 1}
        if not all(forest.held(path[: chunk + 1], index) for chunk in chunks):
            return False
    return True


@settings(max_examples=150)
@given(st.data(), geometries(), st.lists(paths, min_size=1, max_size=4), paths)
def test_lookup_finds_the_longest_boundary_that_every_group_can_serve(
    data: st.DataObject, geometry: Geometry, chains: list[Path], other: Path
) -> None:
    forest = Forest(geometry)
    groups = range(len(geometry.groups))
    for chain in chains:
        for depth in range(1, len(chain) + 1):
            missing = data.draw(st.sets(st.sampled_from(groups)) if data.draw(st.booleans()) else st.just(set()))
            forest.node(chain[:depth])
            for group in groups:
                if group not in missing:
                    forest.hold(chain[:depth], group)
    for asked in (*chains, other, chains[0] + other):
        wanted = max((b for b in range(1, len(asked) + 1) if is_servable(forest, asked, b)), default=0)
        assert servable_chunks(forest.space, keys_of(asked)) == wanted


@settings(max_examples=100)
@given(st.data(), geometries(), st.lists(paths, min_size=1, max_size=3))
def test_keys_that_are_no_chain_are_refused_or_answered_but_never_break_the_index(
    data: st.DataObject, geometry: Geometry, chains: list[Path]
) -> None:
    forest = Forest(geometry)
    for chain in chains:
        for depth in range(1, len(chain) + 1):
            for group in range(len(geometry.groups)):
                forest.hold(chain[:depth], group)
    known = [key_of(chain[:depth]) for chain in chains for depth in range(1, len(chain) + 1)]
    keys = data.draw(st.lists(st.sampled_from([*known, b"u" * 32]), min_size=1, max_size=9))
    chunks = chunks_or_code(forest.space, b"".join(keys))
    if chunks == "keys-chain":
        return
    assert 0 <= chunks <= len(keys)
    if chunks:
        assert forest.space.nodes[keys[chunks - 1]].depth == chunks


def chunks_or_code(space: Space, keys: bytes) -> int | str:
    try:
        return servable_chunks(space, keys)
    except RequestError as refusal:
        return refusal.code


def test_a_mixed_chain_is_refused_where_every_key_is_looked_at() -> None:
    forest = Forest(Geometry(CHUNK_TOKENS, (GroupGeometry(6, "state", 0, 1),)))
    for depth in range(1, 5):
        forest.hold((0, 0, 0, 0)[:depth], 0)
        forest.hold((1, 1, 1, 1)[:depth], 0)
    mixed = keys_of((0, 0, 0, 0))[:32] + keys_of((1, 1, 1, 1))[32:]
    with pytest.raises(RequestError, match="keys-chain"):
        servable_chunks(forest.space, key_of((1,)) + mixed[32:96] + key_of((0, 0, 0, 0)))


@settings(max_examples=150)
@given(st.data(), geometries(), st.lists(paths, min_size=1, max_size=5))
def test_a_chunk_is_ready_when_it_and_all_before_it_have_every_full_group(
    data: st.DataObject, geometry: Geometry, chains: list[Path]
) -> None:
    """Holds for any order in which groups are sealed; each ready chunk is reported once."""
    forest = Forest(geometry)
    for chain in chains:
        forest.node(chain)
    steps = [(path, group) for path in _prefixes(chains) for group in range(len(geometry.groups))]
    steps = data.draw(st.permutations(steps))[: data.draw(st.integers(0, len(steps)))]
    told: list[Node] = []
    for path, group in steps:
        node = forest.node(path)
        node.present |= 1 << group
        ready = forest.space.make_ready(node)
        assert all(node.parent not in ready[place:] for place, node in enumerate(ready)), "parents first"
        told.extend(ready)
        assert forest.space.make_ready(node) == []
    full = [index for index, group in enumerate(geometry.groups) if group.kind == "full"]
    for path in _prefixes(chains):
        whole = all(forest.held(path[:depth], group) for depth in range(1, len(path) + 1) for group in full)
        node = forest.node(path)
        assert node.state == (READY if whole else WAITING)
        assert told.count(node) == (whole and bool(full))


def _prefixes(chains: list[Path]) -> list[Path]:
    return sorted({chain[:depth] for chain in chains for depth in range(1, len(chain) + 1)})


operations = st.lists(
    st.tuples(st.sampled_from(["add", "add", "touch", "pin", "unpin", "evict", "evict"]), st.integers(0, 1 << 16)),
    max_size=60,
)


@settings(max_examples=150)
@given(operations)
def test_eviction_names_the_leaf_that_was_used_longest_ago(steps: list[tuple[str, int]]) -> None:
    """Compared with a list of all nodes; using a child also counts as a use of its parent."""
    space = Space(bytes(32), 0, Geometry(CHUNK_TOKENS, (GroupGeometry(3, "full", 0, 1),)))
    order, serial = LeafLru(), count()
    nodes: list[Node] = []
    for now, (step, dice) in enumerate(steps, 1):
        node = nodes[dice % len(nodes)] if nodes else None
        if step == "add" or node is None:
            parent = node if node is not None and dice % 3 else space.root
            fresh = space.add(next(serial).to_bytes(32, "big"), parent, now, 0)
            fresh.present = space.needed
            space.make_ready(fresh)
            nodes.append(fresh)
            order.offer(fresh)
        elif step == "touch":
            node.used = now
        elif step == "pin":
            node.pins += 1
        elif step == "unpin":
            node.pins = 0
            if evictable(node):
                order.offer(node)
        else:
            victim = order.coldest()
            if victim is not None:
                nodes.remove(victim)
                parent = space.remove(victim)
                if evictable(parent):
                    order.offer(parent)
        may_go = [node for node in nodes if node.children is None and not node.pins]
        coldest = order.coldest()
        assert (coldest is None) == (not may_go)
        if coldest is not None:
            assert coldest in may_go
            assert coldest.used == min(node.used for node in may_go)
