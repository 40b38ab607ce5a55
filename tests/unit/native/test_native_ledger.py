"""The ledger: sealed entries are found, cleared ones are not, and damaged ones are never believed."""

import hashlib
import multiprocessing
import os
import random
import signal
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserver.tiers.records import NO_SUM, RECORD
from kvserver.transfer.native import NO_DIGEST, SLOT_ALIGN, Ledger, create_memfd, payload_digest
from tests.rigs.ledger_format import DIGEST_AT, DOCUMENT_STRIDE, ENTRY_BYTES, HEADER_BYTES, SEAL_AT, entry_at
from tests.rigs.slow_digest import PRIME, ShardName, slow_digest, slow_sum

UNITS = 77
ARENA = UNITS * SLOT_ALIGN
OFFSET = struct.Struct("<q")


@pytest.fixture
def fd() -> Iterator[int]:
    made = create_memfd("ledger", Ledger.file_bytes(ARENA))
    yield made
    os.close(made)


def record(place: int, seed: int, units: int = 1) -> bytes:
    rng = random.Random(seed)
    return RECORD.pack(
        place * SLOT_ALIGN,
        rng.randbytes(32),
        rng.randbytes(32),
        rng.randbytes(32),
        rng.randrange(1 << 16),
        rng.randrange(1 << 16),
        rng.randrange(units * SLOT_ALIGN + 1),
        rng.randrange(1 << 32),
        units,
        rng.randrange(1 << 64),
        NO_SUM if seed % 3 == 0 else rng.randrange(PRIME),
    )


def offsets(*places: int) -> bytes:
    return b"".join(OFFSET.pack(place * SLOT_ALIGN) for place in places)


def test_records_are_packed_as_documented() -> None:
    assert RECORD.size == Ledger.RECORD_BYTES == 136


def test_sealed_records_are_found_by_the_next_process_in_order(fd: int) -> None:
    records = [record(place, place) for place in (70, 3, 0, 76, 12)]
    ledger = Ledger(fd, ARENA)
    ledger.seal(b"".join(records[:2]))
    ledger.seal(b"".join(records[2:]))
    ledger.close()
    again = Ledger(fd, ARENA)
    assert again.scan() == b"".join(sorted(records, key=OFFSET.unpack_from))
    assert again.damaged == 0


def test_cleared_records_are_gone_and_their_places_free(fd: int) -> None:
    ledger = Ledger(fd, ARENA)
    ledger.seal(record(3, 1) + record(5, 2))
    ledger.clear(offsets(3, 4))
    assert ledger.scan() == record(5, 2)
    ledger.seal(record(3, 9, units=2))
    assert ledger.scan() == record(3, 9, units=2) + record(5, 2)


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, UNITS - 1), min_size=1, max_size=9)), max_size=20))
def test_ledger_is_a_dictionary(steps: list[tuple[bool, set[int]]]) -> None:
    fd = create_memfd("ledger", Ledger.file_bytes(ARENA))
    ledger, held = Ledger(fd, ARENA), dict[int, bytes]()
    for seed, (seal, places) in enumerate(steps):
        if seal:
            fresh = {place: record(place, seed * 100 + place) for place in places - held.keys()}
            ledger.seal(b"".join(fresh.values()))
            held |= fresh
        else:
            ledger.clear(offsets(*places))
            held = {place: kept for place, kept in held.items() if place not in places}
        assert ledger.scan() == b"".join(held[place] for place in sorted(held))
    ledger.close()
    os.close(fd)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (record(5, 2), "sealed already"),
        (record(8, 2) + record(8, 3), "sealed already"),
        (record(UNITS, 1), "must be a multiple"),
        (OFFSET.pack(-4096) + record(1, 1)[8:], "must be a multiple"),
        (OFFSET.pack(100) + record(1, 1)[8:], "must be a multiple"),
        (record(UNITS - 1, 1, units=2), "does not fit"),
        (record(8, 1, units=0), "does not fit"),
        (RECORD.pack(4096, b"", b"", b"", 0, 0, 4097, 0, 1, 0, 0), "does not fit"),
        (RECORD.pack(4096, b"", b"", b"", 0, 0, 4096, 0, 1, 0, PRIME), "no sum"),
        (RECORD.pack(4096, b"", b"", b"", 0, 0, 4096, 0, 1, 0, NO_SUM - 1), "no sum"),
        (record(8, 1)[:-1], "records: 135 bytes"),
    ],
)
def test_records_that_cannot_be_are_refused_and_nothing_is_sealed(fd: int, bad: bytes, why: str) -> None:
    ledger = Ledger(fd, ARENA)
    ledger.seal(record(5, 1))
    with pytest.raises(ValueError, match=why):
        ledger.seal((record(9, 9) if len(bad) % RECORD.size == 0 else b"") + bad)
    assert ledger.scan() == record(5, 1)


def test_places_outside_of_the_arena_are_not_cleared(fd: int) -> None:
    ledger = Ledger(fd, ARENA)
    ledger.seal(record(5, 1))
    for bad in (offsets(5, UNITS), offsets(5, -1), offsets(5) + OFFSET.pack(1)):
        with pytest.raises(ValueError, match="must be a multiple"):
            ledger.clear(bad)
    assert ledger.scan() == record(5, 1)


@pytest.mark.parametrize("byte", range(ENTRY_BYTES))
def test_a_flipped_byte_loses_its_record_and_no_other(fd: int, byte: int) -> None:
    ledger = Ledger(fd, ARENA)
    ledger.seal(record(5, 1) + record(6, 2) + record(7, 3))
    at = entry_at(6) + byte
    for bit in range(8):
        before = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([before[0] ^ 1 << bit]), at)
        assert ledger.scan() == record(5, 1) + record(7, 3)
        assert ledger.damaged == bit + 1
        ledger.seal(record(6, 2))  # the place was withdrawn
    assert ledger.scan() == record(5, 1) + record(6, 2) + record(7, 3)


def test_an_entry_at_another_place_is_not_believed(fd: int) -> None:
    ledger = Ledger(fd, ARENA)
    ledger.seal(record(6, 2))
    os.pwrite(fd, os.pread(fd, ENTRY_BYTES, entry_at(6)), entry_at(9))
    assert ledger.scan() == record(6, 2)
    assert ledger.damaged == 1


@pytest.mark.parametrize("kept", range(0, ENTRY_BYTES, 8))
def test_a_torn_entry_is_none(fd: int, kept: int) -> None:
    """A mixture of two valid entries of one place."""
    ledger = Ledger(fd, ARENA)
    ledger.seal(record(6, 2))
    first = os.pread(fd, ENTRY_BYTES, entry_at(6))
    ledger.clear(offsets(6))
    ledger.seal(record(6, 3))
    second = os.pread(fd, ENTRY_BYTES, entry_at(6))
    os.pwrite(fd, first[:kept] + second[kept:], entry_at(6))
    assert ledger.scan() == (record(6, 3) if kept == 0 else b"")


def test_looking_makes_no_memory_real() -> None:
    arena = 1 << 40
    fd = create_memfd("ledger", Ledger.file_bytes(arena))
    ledger = Ledger(fd, arena)
    far = record((arena - (1 << 20)) // SLOT_ALIGN, 4)
    ledger.seal(far + record(1, 5))
    assert ledger.scan() == record(1, 5) + far
    assert ledger.namespaces() == []
    assert os.fstat(fd).st_blocks * 512 < 1 << 20
    ledger.close()
    os.close(fd)


def test_a_ledger_of_another_arena_is_refused_and_unchanged(fd: int) -> None:
    ledger = Ledger(fd, ARENA)
    ledger.seal(record(6, 2))
    with pytest.raises(ValueError, match="this file"):
        Ledger(fd, ARENA * 2)
    whole = os.pread(fd, 4096, 0)
    # The same file size, another arena: the last page has room for more entries.
    near = ARENA + SLOT_ALIGN
    assert Ledger.file_bytes(near) == Ledger.file_bytes(ARENA)
    with pytest.raises(ValueError, match=f"arena of {ARENA} bytes, the arena has {near}"):
        Ledger(fd, near)
    assert os.pread(fd, 4096, 0) == whole
    assert Ledger(fd, ARENA).scan() == record(6, 2)


@pytest.mark.parametrize("byte", range(HEADER_BYTES))
def test_a_damaged_header_is_refused(fd: int, byte: int) -> None:
    Ledger(fd, ARENA).close()
    before = os.pread(fd, 1, byte)
    os.pwrite(fd, bytes([before[0] ^ 0x40]), byte)
    damaged = os.pread(fd, 4096, 0)
    with pytest.raises(ValueError, match="header is damaged"):
        Ledger(fd, ARENA)
    assert os.pread(fd, 4096, 0) == damaged


def test_a_header_that_was_begun_is_written_anew(fd: int) -> None:
    Ledger(fd, ARENA).close()
    right = os.pread(fd, HEADER_BYTES, 0)
    os.pwrite(fd, bytes(8) + os.urandom(24), 0)
    Ledger(fd, ARENA).close()
    assert os.pread(fd, HEADER_BYTES, 0) == right


def test_documents_are_kept_replaced_and_dropped(fd: int) -> None:
    ledger = Ledger(fd, ARENA)
    large = os.urandom(Ledger.DOCUMENT_BYTES_MAX)
    ledger.put_namespace(255, large)
    ledger.put_namespace(0, b"x")
    ledger.put_namespace(7, b"first, and longer")
    ledger.put_namespace(7, b"second")
    ledger.drop_namespace(9)
    assert Ledger(fd, ARENA).namespaces() == [(0, b"x"), (7, b"second"), (255, large)]
    ledger.drop_namespace(0)
    assert ledger.namespaces() == [(7, b"second"), (255, large)]
    assert ledger.damaged == 0


def test_impossible_documents_are_refused(fd: int) -> None:
    ledger = Ledger(fd, ARENA)
    for document in (b"", bytes(Ledger.DOCUMENT_BYTES_MAX + 1)):
        with pytest.raises(ValueError, match=f"document of {len(document)} bytes"):
            ledger.put_namespace(1, document)
    for call in (lambda: ledger.put_namespace(256, b"x"), lambda: ledger.drop_namespace(256)):
        with pytest.raises(ValueError, match="index=256"):
            call()
    assert ledger.namespaces() == []


@pytest.mark.parametrize("byte", [*range(16), 4096, 4100, 4096 + 12])
def test_a_damaged_document_is_dropped(fd: int, byte: int) -> None:
    ledger = Ledger(fd, ARENA)
    ledger.put_namespace(3, b"thirteen byte")
    ledger.put_namespace(4, b"another")
    at = 4096 + 3 * DOCUMENT_STRIDE + byte
    before = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([before[0] ^ 0x10]), at)
    assert ledger.namespaces() == [(4, b"another")]
    assert ledger.damaged == 1
    assert ledger.namespaces() == [(4, b"another")]
    assert ledger.damaged == 1, "it is counted once"


def test_documents_do_not_move_between_indices(fd: int) -> None:
    ledger = Ledger(fd, ARENA)
    ledger.put_namespace(3, b"thirteen byte")
    moved = os.pread(fd, 4096 + 13, 4096 + 3 * DOCUMENT_STRIDE)
    os.pwrite(fd, moved, 4096 + 5 * DOCUMENT_STRIDE)
    assert ledger.namespaces() == [(3, b"thirteen byte")]


def test_the_ledger_keeps_its_own_descriptor(fd: int) -> None:
    copy = os.dup(fd)
    ledger = Ledger(copy, ARENA)
    os.close(copy)
    ledger.seal(record(2, 2))
    assert ledger.scan() == record(2, 2)
    ledger.close()
    ledger.close()
    with pytest.raises(ValueError, match="already closed"):
        ledger.scan()


# ---------------------------------------------------------------- sums and digests

NAMES = ShardName(b"n" * 32, b"k" * 32, 3, 65_535)


def summed(place: int, total: int, *, name: ShardName = NAMES, payload_bytes: int = 4097) -> bytes:
    names = name.namespace, name.key, b"p" * 32
    return RECORD.pack(place * SLOT_ALIGN, *names, name.group, name.shard, payload_bytes, 7, 2, 1, total)


def names_hash(keys: list[bytes], *, namespace: bytes = NAMES.namespace, group: int = 3, shard: int = 65_535) -> bytes:
    return hashlib.sha256(namespace + struct.pack("<HH", group, shard) + b"".join(keys)).digest()[:8]


@pytest.mark.parametrize("payload_bytes", [0, 1, 4095, 8192])
@pytest.mark.parametrize("total", [0, 1, 12345678901234567, PRIME - 1, NO_DIGEST])
def test_a_sum_comes_back_as_it_was_sealed(fd: int, total: int, payload_bytes: int) -> None:
    ledger = Ledger(fd, ARENA)
    packed = summed(7, total, payload_bytes=payload_bytes)
    ledger.seal(packed)
    assert ledger.scan() == packed
    assert Ledger(fd, ARENA).scan() == packed
    assert ledger.sums(offsets(7), names_hash([NAMES.key])) == struct.pack("<Q", total)


def test_the_file_has_the_digest(fd: int) -> None:
    payload = random.Random(1).randbytes(4097)
    ledger = Ledger(fd, ARENA)
    ledger.seal(summed(31, slow_sum(payload)) + summed(41, NO_DIGEST))
    digest, none = (struct.unpack("<Q", os.pread(fd, 8, entry_at(place) + DIGEST_AT))[0] for place in (31, 41))
    assert digest == payload_digest((slow_sum(payload), 4097), *NAMES, 4097) == slow_digest(payload, NAMES)
    assert none == NO_DIGEST == NO_SUM


CHAIN = {70: b"a" * 32, 3: b"b" * 32, 29: b"c" * 32, 30: b"d" * 32}
"""Key by place. One page of the file ends behind place 29."""


@pytest.fixture
def chain(fd: int) -> Ledger:
    ledger = Ledger(fd, ARENA)
    ledger.seal(b"".join(summed(place, place, name=NAMES._replace(key=key)) for place, key in CHAIN.items()))
    return ledger


def test_the_sums_of_slots_are_told_to_who_knows_their_names(chain: Ledger) -> None:
    keys = list(CHAIN.values())
    assert chain.sums(offsets(*CHAIN), names_hash(keys)) == struct.pack("<4Q", *CHAIN)
    assert chain.sums(offsets(29), names_hash([b"c" * 32])) == struct.pack("<Q", 29)
    assert chain.sums(b"", bytes(8)) == b""


def test_they_are_told_to_nobody_else(chain: Ledger) -> None:
    places, keys = offsets(*CHAIN), list(CHAIN.values())
    for wrong in (
        names_hash([*keys[:3], b"e" * 32]),
        names_hash(keys[::-1]),
        names_hash(keys[:3]),
        names_hash([*keys, keys[0]]),
        names_hash(keys, namespace=b"m" * 32),
        names_hash(keys, group=4),
        names_hash(keys, shard=0),
        names_hash(keys, group=65_535, shard=3),
        bytes(8),
    ):
        assert chain.sums(places, wrong) is None
    assert chain.sums(offsets(*reversed(CHAIN)), names_hash(keys)) is None
    assert chain.sums(offsets(70, 3, 29, 31), names_hash(keys)) is None, "nothing was ever sealed at 31"


@pytest.mark.parametrize("field", ["namespace", "group", "shard"])
def test_slots_of_different_kinds_have_no_sums_together(fd: int, field: str) -> None:
    ledger = Ledger(fd, ARENA)
    other = {"namespace": b"m" * 32, "group": 4, "shard": 0}
    odd = NAMES._replace(key=b"b" * 32, **{field: other[field]})
    ledger.seal(summed(1, 5) + summed(3, 6, name=odd))
    assert ledger.sums(offsets(1, 3), names_hash([NAMES.key, odd.key])) is None
    assert ledger.sums(offsets(1), names_hash([NAMES.key])) == struct.pack("<Q", 5)


def test_withdrawn_entries_still_answer(chain: Ledger) -> None:
    chain.clear(offsets(*CHAIN))
    assert chain.scan() == b""
    assert chain.sums(offsets(*CHAIN), names_hash(list(CHAIN.values()))) == struct.pack("<4Q", *CHAIN)
    chain.seal(summed(3, 99, name=NAMES._replace(key=b"z" * 32)))
    assert chain.sums(offsets(*CHAIN), names_hash(list(CHAIN.values()))) is None


def test_sums_are_read_beside_the_writer(fd: int, chain: Ledger) -> None:
    assert Ledger(fd, ARENA).sums(offsets(30), names_hash([CHAIN[30]])) == struct.pack("<Q", 30)
    chain.clear(offsets(30))
    assert os.pread(fd, 8, entry_at(30) + SEAL_AT) == bytes(8)


@pytest.mark.parametrize(
    ("places", "names", "why"),
    [
        (offsets(UNITS), bytes(8), "must be a multiple"),
        (OFFSET.pack(-4096), bytes(8), "must be a multiple"),
        (OFFSET.pack(100), bytes(8), "must be a multiple"),
        (bytes(7), bytes(8), "arena_offsets: 7 bytes"),
        (offsets(1), bytes(7), "names: 7 bytes"),
    ],
)
def test_sums_of_what_is_no_slot_are_refused(fd: int, places: bytes, names: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Ledger(fd, ARENA).sums(places, names)


VARIANTS = [[record(place, 1000 * variant + place) for place in range(UNITS)] for variant in range(9)]


def write_without_end(fd: int) -> None:
    """Seals and clears for ever, with little Python in between, so that a kill is likely to hit the ledger's code."""
    ledger, rng = Ledger(fd, ARENA), random.Random(1)
    everything = offsets(*range(UNITS))
    batches = [b"".join(rng.choice(VARIANTS)[place] for place in range(UNITS)) for _ in range(9)]
    documents = [bytes([n]) * 40_000 for n in range(9)]
    while True:
        for batch, document in zip(batches, documents, strict=True):
            ledger.seal(batch)
            ledger.put_namespace(2, document)
            ledger.clear(everything)


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_writer_leaves_only_what_it_wrote(fd: int, seed: int) -> None:
    context = multiprocessing.get_context("fork")
    writer = context.Process(target=write_without_end, args=(fd,))
    Ledger(fd, ARENA).close()
    writer.start()
    while not os.pread(fd, 8, 4096 + 2 * DOCUMENT_STRIDE).strip(b"\0"):
        assert writer.is_alive()
    for _ in range(random.Random(seed).randrange(20_000)):  # a random moment
        pass
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(30)
    after = Ledger(fd, ARENA)
    found = after.scan()
    for at in range(0, len(found), RECORD.size):
        place = OFFSET.unpack_from(found, at)[0] // SLOT_ALIGN
        assert found[at : at + RECORD.size] in {variant[place] for variant in VARIANTS}
    for _, document in after.namespaces():
        assert (len(document), len(set(document))) == (40_000, 1)
    assert after.damaged == 0
