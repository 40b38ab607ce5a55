"""The order in which records found on disk are told: whole chunks, parents first, nothing left out."""

import random
from collections.abc import Iterator
from itertools import groupby, pairwise

import pytest

from kvserver.tiers.records import NO_PARENT, NO_SUM, DiskRecord, pack_disk, unpack_disk
from kvserver.transfer.native import RecoveryOrder

MANY = 1000
"""More records than any chunk here has."""


def key_of(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def record(name: str, parent: str = "", *, namespace: str = "x", generation: int = 1, shard: int = 0) -> DiskRecord:
    above = key_of(parent) if parent else NO_PARENT
    shape = (0, shard, 257, 3, 4096, generation, NO_SUM, 0, 0, 0)
    return DiskRecord(-1, key_of(namespace), key_of(name), above, *shape)


def telling(*devices: list[DiskRecord], chunk_most: int = MANY) -> RecoveryOrder:
    return RecoveryOrder([b"".join(map(pack_disk, records)) for records in devices], chunk_most=chunk_most)


def reports(told: RecoveryOrder, most: int) -> Iterator[list[DiskRecord]]:
    while records := told.next(most):
        yield list(unpack_disk(records))


def tree(rng: random.Random, chunks: int, namespace: str) -> list[DiskRecord]:
    """Chains that fork, two shards per chunk, some of them written twice."""
    records: list[DiskRecord] = []
    for number in range(chunks):
        parent = str(rng.randrange(number)) if number and rng.random() < 0.9 else ""
        for generation in rng.sample(range(1, 9), rng.choice((1, 1, 1, 2))):
            for shard in range(2):
                records.append(record(str(number), parent, namespace=namespace, generation=generation, shard=shard))
    return records


@pytest.mark.parametrize("seed", range(20))
def test_each_chunk_comes_whole_and_after_its_parent(seed: int) -> None:
    rng = random.Random(seed)
    records = tree(rng, 61, "x") + tree(rng, 43, "y")
    rng.shuffle(records)
    told = list(reports(telling(records[:71], [], records[71:]), most=rng.choice((1, 3, 7, MANY))))
    flat = [one for report in told for one in report]
    assert sorted(flat) == sorted(records)
    chunks = [list(chunk) for _, chunk in groupby(flat, key=lambda one: (one.namespace, one.key))]
    seen: set[tuple[bytes, bytes]] = set()
    for chunk in chunks:
        generations = [one.generation for one in chunk]
        assert generations == sorted(generations, reverse=True)
        name = chunk[0].namespace, chunk[0].key
        assert name not in seen
        assert chunk[0].parent == NO_PARENT or (chunk[0].namespace, chunk[0].parent) in seen
        seen.add(name)
    for report, following in pairwise(told):
        assert report[-1].key != following[0].key or report[-1].namespace != following[0].namespace


def test_a_chain_is_told_before_the_next_one_begins() -> None:
    chains = [record(f"{chain}{at}", f"{chain}{at - 1}" if at else "") for at in range(5) for chain in "abc"]
    (told,) = reports(telling(chains), MANY)
    assert [len(list(chain)) for _, chain in groupby(told, key=lambda one: one.key[:1])] == [5, 5, 5]


def test_a_report_has_what_fits_and_one_chunk_at_least() -> None:
    records = [record(name, shard=shard) for name, shards in (("a", 2), ("b", 7), ("c", 1)) for shard in range(shards)]
    sizes = [len(report) for report in reports(telling(records), 3)]
    assert sorted(sizes) in ([1, 2, 7], [3, 7])
    assert max(sizes) == 7


def test_a_report_that_fits_exactly_is_not_cut() -> None:
    records = [record(name) for name in "abcdefg"]
    assert [len(report) for report in reports(telling(records), 3)] == [3, 3, 1]


def test_the_newest_records_of_a_chunk_with_too_many_are_told() -> None:
    records = [record("a", generation=generation) for generation in (3, 9, 1, 7, 5)]
    (told,) = reports(telling(records, chunk_most=3), MANY)
    assert [one.generation for one in told] == [9, 7, 5]


def test_chunks_whose_parents_have_no_record_are_told_as_heads() -> None:
    records = [record("b", "a"), record("c", "b"), record("z", "y")]
    (told,) = reports(telling(records), MANY)
    assert {one.key for one in told} == {key_of(name) for name in "bcz"}
    assert [one.key for one in told].index(key_of("b")) < [one.key for one in told].index(key_of("c"))


def test_a_parent_of_another_namespace_is_none() -> None:
    records = [record("b", "a", namespace="x"), record("a", namespace="y"), record("c", "b", namespace="y")]
    (told,) = reports(telling(records), MANY)
    assert sorted(told) == sorted(records)


def test_a_chain_that_bites_its_tail_is_told_once() -> None:
    records = [record("a", "c"), record("b", "a"), record("c", "b"), record("d", "b"), record("e", "e"), record("f")]
    (told,) = reports(telling(records), MANY)
    assert sorted(told) == sorted(records)
    assert told[0].key == key_of("f"), "what can be reached comes first"


def test_each_namespace_is_named_with_its_newest_generation() -> None:
    records = [record("a", namespace="y", generation=3), record("b", namespace="x", generation=8)]
    more = [record("c", namespace="y", generation=5), record("d", namespace="y", generation=4)]
    told = telling(records, more)
    assert list(told.namespaces.items()) == [(key_of("x"), 8), (key_of("y"), 5)]
    assert told.records == 4


def test_nothing_found_is_nothing_told() -> None:
    told = RecoveryOrder([], chunk_most=1)
    assert (told.records, told.namespaces, told.next(1), told.next(1)) == (0, {}, b"", b"")


def test_what_are_no_records_is_refused() -> None:
    with pytest.raises(ValueError, match="found: 153 bytes"):
        RecoveryOrder([bytes(153)], chunk_most=1)
    with pytest.raises(ValueError, match="chunk_most=0"):
        RecoveryOrder([], chunk_most=0)
