"""Chunks that have left the index: when and why, by namespace and key, in memory that never grows."""

import random
import tracemalloc
from collections.abc import Iterator

from kvserver.index.space import Node
from kvserver.service.telling.evicted_keys import CAUSES, EVICTED_KEYS_MAX, Cause, Departure, EvictedKeys

ONE, OTHER = b"\1" * 32, b"\2" * 32


def nodes(count: int) -> list[Node]:
    """Nodes whose keys are half digests, half numbers."""
    draw = random.Random(5)
    return [Node(draw.randbytes(32) if at % 2 else at.to_bytes(32, "big"), None, 0, 0) for at in range(count)]


def left(node: Node, namespace: bytes = ONE, cause: Cause = "store") -> Iterator[tuple[bytes, Node, Cause]]:
    yield namespace, node, cause


def test_each_namespace_has_its_own_departures_of_a_key() -> None:
    (node,), departed = nodes(1), EvictedKeys(17)
    departed.add(left(node), 3)
    departed.add(left(node, OTHER, "lost"), 5)
    assert departed.get(ONE, node.key) == Departure("store", 3)
    assert departed.get(OTHER, node.key) == Departure("lost", 5)
    assert departed.get(b"\3" * 32, node.key) is None


def test_the_last_departure_of_a_chunk_is_told() -> None:
    (node,), departed = nodes(1), EvictedKeys(17)
    for at_ns, cause in enumerate(CAUSES, 1):
        departed.add(left(node, cause=cause), at_ns)
        assert departed.get(ONE, node.key) == Departure(cause, at_ns)


def test_the_latest_are_remembered_and_the_oldest_forgotten() -> None:
    many, departed = nodes(3_000), EvictedKeys(1_000)
    for at_ns, node in enumerate(many, 1):
        departed.add(left(node), at_ns)
    told = [departed.get(ONE, node.key) == Departure("store", at_ns) for at_ns, node in enumerate(many, 1)]
    assert all(told[-50:])
    assert sum(told[-500:]) > 450
    assert sum(told[:1000]) < 100


def test_an_index_of_one_chunk_remembers_departures() -> None:
    (node, other), departed = nodes(2), EvictedKeys(1)
    departed.add(left(node), 1)
    departed.add(left(other), 2)
    assert departed.get(ONE, other.key) == Departure("store", 2)


def test_memory_does_not_grow_with_departures() -> None:
    many, departed = nodes(20_000), EvictedKeys(EVICTED_KEYS_MAX)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        departed.add(((ONE, node, "store") for node in many), 7)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000
