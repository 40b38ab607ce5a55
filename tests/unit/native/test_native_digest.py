"""The digest of a payload: equal to its formula at every length, place and cut, and changed by every planted error."""

import mmap
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvserver.transfer.native import DIGEST_PAYLOAD_BYTES_MAX, add_digest_sums, digest_copy, digest_sum, payload_digest
from tests.rigs.slow_digest import PRIME, ROW_BYTES, ShardName, entry, slow_digest, slow_name, slow_sum

if TYPE_CHECKING:
    from kvserver._native import DigestPath

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "digest.md").read_text()
NAME = ShardName(bytes(range(32)), bytes(range(255, 223, -1)), 3, 5)
PATTERNS: dict[str, Callable[[int], bytes]] = {
    "mixed": lambda length: bytes((181 * t + 59 * (t // 251) + 7) % 256 for t in range(length)),
    "zeros": bytes,
    "ones": lambda length: bytes([255]) * length,
}
"""The byte patterns of the page's vectors."""
PATHS: tuple["DigestPath", ...] = ("best", "avx2", "portable")
LAST_ROW = DIGEST_PAYLOAD_BYTES_MAX // ROW_BYTES - 1


def whole(payload: bytes, path: "DigestPath" = "best") -> tuple[int, int]:
    return digest_sum(payload, 0, len(payload), 0, path)


def digest(payload: bytes, name: ShardName = NAME) -> int:
    made = payload_digest(whole(payload), *name, len(payload))
    assert made is not None
    return made


def randoms(length: int) -> bytes:
    return random.Random(length).randbytes(length)


# ---------------------------------------------------------------- the formula


LENGTHS = [*range(302), *range(1020, 1030), *(4096 * rows + more for rows in (1, 2, 3) for more in (-1, 0, 1)), 18432]


@pytest.mark.parametrize("path", PATHS)
def test_every_length_sums_to_what_the_formula_says(path: "DigestPath") -> None:
    for length in LENGTHS:
        payload = randoms(length)
        assert whole(payload, path) == (slow_sum(payload), length), length
        assert payload_digest(whole(payload), *NAME, length) == slow_digest(payload, NAME)


@pytest.mark.parametrize("path", PATHS)
def test_each_byte_has_its_own_weight(path: "DigestPath") -> None:
    """Bytes of one, each alone, at every place of two rows and of the last one."""
    for place in (*range(2 * ROW_BYTES), *range(LAST_ROW * ROW_BYTES, DIGEST_PAYLOAD_BYTES_MAX, 5)):
        expected = 2 ** (8 * (place % 4)) * entry("B", place // 4 % 1024) * entry("A", place // ROW_BYTES) % PRIME
        assert digest_sum(b"\1", 0, 1, place, path) == (expected, 1), place


@pytest.mark.parametrize("path", PATHS)
def test_the_largest_words_of_whole_rows_do_not_overflow(path: "DigestPath") -> None:
    payload = b"\xff" * (3 * ROW_BYTES)
    assert whole(payload, path) == (slow_sum(payload), len(payload))


def test_all_paths_agree_on_long_payloads() -> None:
    payload = randoms((5 << 20) + 3)
    assert whole(payload, "best") == whole(payload, "avx2") == whole(payload, "portable")


def test_a_path_that_does_not_exist_is_refused() -> None:
    for call in (partial(digest_sum, b"", 0, 0, 0), partial(digest_copy, b"", memoryview(bytearray()), 0)):
        with pytest.raises(ValueError, match="path=sse must be best, avx2 or portable"):
            call("sse")


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(0, 3 * ROW_BYTES + 70),
    shift=st.integers(0, 70),
    place=st.one_of(
        st.integers(0, 3 * ROW_BYTES),
        st.integers(0, DIGEST_PAYLOAD_BYTES_MAX - 4 * ROW_BYTES),
        st.just((16 << 20) - 100),
    ),
    seed=st.integers(0, 9),
)
@example(length=ROW_BYTES, shift=1, place=DIGEST_PAYLOAD_BYTES_MAX - 4 * ROW_BYTES, seed=0)
def test_any_stretch_at_any_address_and_place(length: int, shift: int, place: int, seed: int) -> None:
    memory = random.Random(seed).randbytes(shift + length + 3)
    expected = slow_sum(memory[shift : shift + length], place), length
    for path in PATHS:
        assert digest_sum(memory, shift, shift + length, place, path) == expected, path


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 5 * ROW_BYTES),
    cuts=st.lists(st.integers(0, 5 * ROW_BYTES), max_size=12),
    shuffle=st.randoms(use_true_random=False),
)
def test_the_parts_of_any_cut_add_up_in_any_order(length: int, cuts: list[int], shuffle: random.Random) -> None:
    payload = randoms(length)
    ends = [0, *sorted(cut for cut in cuts if cut <= length), length]
    parts = [digest_sum(payload, begin, end, begin, shuffle.choice(PATHS)) for begin, end in pairwise(ends)]
    shuffle.shuffle(parts)
    assert added(parts) == whole(payload)


def added(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    total = (0, 0)
    for part in parts:
        total = add_digest_sums(total, part)
    return total


def test_sums_stay_below_the_prime() -> None:
    assert add_digest_sums((PRIME - 1, 1), (1, 2)) == (0, 3)
    assert add_digest_sums((PRIME - 1, 1), (PRIME - 1, 2)) == (PRIME - 2, 3)
    name = slow_name(NAME, 7)
    assert payload_digest((PRIME - name, 7), *NAME, 7) == 0
    assert payload_digest((PRIME - name - 1, 7), *NAME, 7) == PRIME - 1


def test_a_payload_ends_at_4_gib() -> None:
    assert digest_sum(b"abc", 0, 3, DIGEST_PAYLOAD_BYTES_MAX - 3)[1] == 3
    assert digest_sum(b"abc", 1, 1, DIGEST_PAYLOAD_BYTES_MAX) == (0, 0)
    for begin, end, offset in ((0, 3, DIGEST_PAYLOAD_BYTES_MAX - 2), (0, 0, DIGEST_PAYLOAD_BYTES_MAX + 1)):
        with pytest.raises(ValueError, match="must end at 4294967296 or before"):
            digest_sum(b"abc", begin, end, offset)
    for begin, end in ((2, 1), (0, 4)):
        with pytest.raises(ValueError, match="of 3 bytes"):
            digest_sum(b"abc", begin, end, 0)


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(0, 3 * ROW_BYTES + 70),
    source_shift=st.integers(0, 70),
    target_shift=st.integers(0, 70),
    place=st.integers(0, 3 * ROW_BYTES),
    path=st.sampled_from(PATHS),
)
@example(length=3 * ROW_BYTES, source_shift=1, target_shift=0, place=0, path="best")
@example(length=3 * ROW_BYTES, source_shift=1, target_shift=0, place=0, path="avx2")
def test_a_copy_has_the_sum_of_its_bytes_and_writes_no_others(
    length: int, source_shift: int, target_shift: int, place: int, path: "DigestPath"
) -> None:
    source = randoms(source_shift + length)
    memory = memoryview(mmap.mmap(-1, 5 * ROW_BYTES))
    memory[:] = b"\xee" * len(memory)
    end = target_shift + length
    copied = digest_copy(memoryview(source)[source_shift:], memory[target_shift:end], place, path)
    assert copied == (slow_sum(source[source_shift:], place), length)
    rest = len(memory) - end
    assert memory == b"\xee" * target_shift + source[source_shift:] + b"\xee" * rest


def test_a_copy_into_memory_of_another_size_or_of_a_constant_is_refused() -> None:
    target = memoryview(bytearray(3))
    for source in (b"ab", b"abcd"):
        with pytest.raises(ValueError, match=r"bytes of the target"):
            digest_copy(source, target, 0)
    for offset in (DIGEST_PAYLOAD_BYTES_MAX - 2, 1 << 63):
        with pytest.raises(ValueError, match="offset"):
            digest_copy(b"abc", target, offset)
    with pytest.raises(BufferError):
        digest_copy(b"abc", memoryview(b"abc"), 0)
    assert target == bytes(3)
    assert digest_copy(b"abc", target, DIGEST_PAYLOAD_BYTES_MAX - 3)[1] == 3


# ---------------------------------------------------------------- the page


def rows(title: str) -> list[list[str]]:
    """The body of the table below that title, without its marks of code."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    return [[cell.strip(" `") for cell in line.split("|")] for line in lines[1:]]


def test_vectors_of_the_page_are_right() -> None:
    vectors = rows("Test vectors")
    assert len(vectors) >= 12
    for pattern, length_text, group, shard, sum_text, name_text, digest_text in vectors:
        payload = PATTERNS[pattern](int(length_text))
        name = NAME._replace(group=int(group), shard=int(shard))
        assert whole(payload) == whole(payload, "portable") == (int(sum_text, 16), len(payload))
        assert slow_name(name, len(payload)) == int(name_text, 16)
        assert digest(payload, name) == int(digest_text, 16)
        if len(payload) < 20_000:
            assert slow_digest(payload, name) == int(digest_text, 16)


def test_entries_of_the_tables_on_the_page_are_right() -> None:
    shown = rows("Entries of the tables")
    assert len(shown) >= 6
    for table, index_text, value in shown:
        index = int(index_text)
        assert entry(table, index) == int(value, 16)
        place = 4 * index if table == "B" else ROW_BYTES * index
        product = entry("B", index) * entry("A", 0) if table == "B" else entry("A", index) * entry("B", 0)
        assert digest_sum(b"\1", 0, 1, place) == (product % PRIME, 1)


# ---------------------------------------------------------------- planted errors


def test_a_missing_part_is_noticed_even_where_its_bytes_are_zero() -> None:
    payload = bytes(2 * ROW_BYTES)
    part = digest_sum(payload, 0, ROW_BYTES, 0)
    assert part == (0, ROW_BYTES)
    assert payload_digest(part, *NAME, len(payload)) is None
    assert payload_digest(add_digest_sums(part, part), *NAME, ROW_BYTES) is None
    assert payload_digest(add_digest_sums(part, part), *NAME, len(payload)) == digest(payload)


def test_every_flipped_bit_of_two_rows_changes_the_digest() -> None:
    payload = randoms(2 * ROW_BYTES + 3)
    seen = {digest(payload)}
    for bit in range(0, 8 * len(payload), 3):
        changed = bytearray(payload)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(digest(bytes(changed)))
    assert len(seen) == 1 + len(range(0, 8 * len(payload), 3))


@pytest.mark.parametrize("page_bytes", [1, 2, 4, 8, 132, 528, 2048, 2112, 4096, 4099, 18432, 32768])
def test_any_two_pages_that_changed_places_change_the_digest(page_bytes: int) -> None:
    pages = [randoms(3 * page_bytes + number)[:page_bytes] for number in range(5)]
    if page_bytes == 1:
        pages = [bytes([number]) for number in range(5)]
    seen = {digest(b"".join(pages))}
    swaps = [(one, other) for one in range(5) for other in range(one)]
    for one, other in swaps:
        swapped = list(pages)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        seen.add(digest(b"".join(swapped)))
    assert len(seen) == 1 + len(swaps)


@settings(max_examples=200, deadline=None)
@given(length=st.integers(2, 3 * ROW_BYTES), at=st.integers(0, 3 * ROW_BYTES), count=st.integers(1, ROW_BYTES + 1))
def test_bytes_that_were_zeroed_cut_off_or_taken_from_elsewhere_change_the_digest(
    length: int, at: int, count: int
) -> None:
    payload = bytes(byte | 1 for byte in randoms(length))
    at %= length
    count = min(count, length - at)
    zeroed = payload[:at] + bytes(count) + payload[at + count :]
    older = payload[:at] + bytes(255 - byte for byte in payload[at : at + count]) + payload[at + count :]
    moved = payload[at + count :] + payload[: at + count]
    different = {payload, zeroed, older, moved, payload[:at], payload[at + count :]}
    assert len({digest(changed) for changed in different}) == len(different)


def test_zeros_at_the_end_count() -> None:
    assert len({digest(b"abc" + bytes(zeros)) for zeros in range(9)}) == 9
    assert len({digest(bytes(zeros)) for zeros in range(9)}) == 9


def test_another_name_is_another_digest() -> None:
    payload = randoms(100)
    other = bytes([1]) + NAME.namespace[1:]
    names = [
        NAME,
        NAME._replace(namespace=other),
        NAME._replace(namespace=NAME.key, key=NAME.namespace),
        NAME._replace(key=NAME.key[:-1] + b"\0"),
        NAME._replace(group=0),
        NAME._replace(shard=0),
        NAME._replace(group=NAME.shard, shard=NAME.group),
        NAME._replace(group=NAME.group << 8),
    ]
    assert len({digest(payload, name) for name in names}) == len(names)
    assert [digest(payload, name) for name in names] == [slow_digest(payload, name) for name in names]


@pytest.mark.parametrize("wrong", [{"namespace": bytes(31)}, {"key": bytes(33)}])
def test_names_have_32_bytes(wrong: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="expected 32"):
        digest(b"abc", NAME._replace(**wrong))
