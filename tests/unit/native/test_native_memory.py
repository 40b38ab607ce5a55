"""memfds and their seals; patterns that find every wrong byte."""

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserver.transfer.native import BUILD, Pattern, copy_seconds, create_memfd, fill_pattern, free_huge_pages
from tests.gpu.table import ROOT, build_program

TOUCHING = ("base/prefault", "base/sigbus", "base/shared_memory", "base/check")
SIZE = 20_011


@pytest.fixture
def fd() -> Iterator[int]:
    made = create_memfd("memory", SIZE)
    yield made
    os.close(made)


def test_a_sealed_memfd_has_its_size_for_ever(fd: int) -> None:
    assert os.fstat(fd).st_size == SIZE
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, size)
    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_an_unsealed_memfd_may_change() -> None:
    fd = create_memfd("memory", 100, sealed=False)
    os.ftruncate(fd, 50)
    os.close(fd)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        create_memfd("memory", 0)
    with pytest.raises(ValueError, match="huge_page_bytes=2097152"):
        create_memfd("memory", 4096, huge_page_bytes=2 << 20)
    with pytest.raises(ValueError, match="huge_page_bytes=12288"):
        create_memfd("memory", 24576, huge_page_bytes=12288)
    with pytest.raises(OSError, match="memfd_create"):
        create_memfd("memory", 1 << 40, huge_page_bytes=1 << 40)


def test_free_huge_pages_of_an_unknown_size_are_none() -> None:
    assert free_huge_pages(12288) == 0
    assert free_huge_pages(2 << 20) >= 0


def test_touching_page_by_page_keeps_the_bytes_and_survives_a_file_that_was_cut() -> None:
    """Only kernels before 5.14 take this path, so a C++ program calls it directly and compares the bytes."""
    sources = [ROOT / "tests/rigs/touch_pages.cpp", *(ROOT / "csrc" / f"{room}.cpp" for room in TOUCHING)]
    done = subprocess.run([build_program("touch_pages", sources)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_build_names_the_compiler_and_the_copies() -> None:
    assert len(BUILD.split()) >= 3


def ranges(*triples: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("<QQQ", *triple) for triple in triples)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 2**64 - 1), st.data())
def test_every_flipped_byte_is_counted_and_nothing_outside_is_written(
    offset: int, count: int, seed: int, data: st.DataObject
) -> None:
    fd = create_memfd("memory", 700)
    pattern = Pattern(fd, 700)
    pattern.fill(ranges((offset, count, seed)))
    whole = os.pread(fd, 700, 0)
    assert whole[:offset] == bytes(offset)
    assert whole[offset + count :] == bytes(700 - offset - count)
    assert pattern.wrong(ranges((offset, count, seed))) == 0
    flipped = data.draw(st.sets(st.integers(0, count - 1)) if count else st.just(set()))
    for index in flipped:
        os.pwrite(fd, bytes([whole[offset + index] ^ (1 << index % 8)]), offset + index)
    assert pattern.wrong(ranges((offset, count, seed))) == len(flipped)
    pattern.close()
    os.close(fd)


def test_streams_of_other_seeds_and_places_differ() -> None:
    fd = create_memfd("memory", 8192)
    pattern = Pattern(fd, 8192)
    pattern.fill(ranges((0, 4096, 7)))
    for other in ((0, 4096, 8), (0, 4096, 7 + 2**63), (8, 4088, 7), (1, 4095, 7)):
        assert pattern.wrong(ranges(other)) > 0.98 * other[1]
    pattern.close()
    os.close(fd)


def test_fill_pattern_is_fill_for_one_range(fd: int) -> None:
    fill_pattern(fd, 4099, 777, 13)
    pattern = Pattern(fd, SIZE)
    assert pattern.wrong(ranges((4099, 777, 13))) == 0
    assert os.pread(fd, SIZE, 0).strip(b"\0") != b""
    assert os.pread(fd, 4099, 0) == bytes(4099)


@pytest.mark.parametrize("triple", [(0, SIZE + 1, 1), (SIZE, 1, 1), (2**64 - 1, 2, 1), (1, 2**64 - 1, 1)])
def test_ranges_outside_of_the_file_are_refused_before_a_byte_is_written(fd: int, triple: tuple[int, int, int]) -> None:
    pattern = Pattern(fd, SIZE)
    for call in (pattern.fill, pattern.wrong):
        with pytest.raises(ValueError, match="leaves the mapping"):
            call(ranges((0, 10, 3), triple))
    assert os.pread(fd, SIZE, 0) == bytes(SIZE)
    with pytest.raises(ValueError, match="file=20011"):
        Pattern(fd, SIZE + 1)
    with pytest.raises(ValueError, match="ranges: 23 bytes"):
        pattern.wrong(bytes(23))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("non_temporal", [False, True])
def test_the_ceiling_really_copies(threads: int, non_temporal: bool) -> None:
    size = 1 << 20 | 77
    source, target = create_memfd("source", size), create_memfd("target", size)
    fill_pattern(source, 0, size, 5)
    assert copy_seconds(source, target, size, threads, non_temporal) > 0
    assert os.pread(target, size, 0) == os.pread(source, size, 0)
    with pytest.raises(ValueError, match="holds less than"):
        copy_seconds(source, target, size + 1, threads, non_temporal)
    with pytest.raises(ValueError, match="threads=0"):
        copy_seconds(source, target, size, 0, non_temporal)
    os.close(source)
    os.close(target)


def test_patterns_are_the_same_on_every_machine(fd: int) -> None:
    """Recorded results depend on the streams: seed 1 begins with the first two outputs of SplitMix64(1)."""
    fill_pattern(fd, 0, 16, 1)
    assert os.pread(fd, 16, 0).hex() == "c15c0289ec2d0a9167ec8e65a18debbe"
