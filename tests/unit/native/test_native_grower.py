"""The arena grows from the front, keeps its content, and stops with a reason."""

import os
import select
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserver.transfer.native import ArenaGrower, Pattern, create_memfd
from tests.rigs.full_disk import fill, mounted

SLAB = 3 << 20
SLABS = 7
ARENA = SLAB * SLABS


def grown(grower: ArenaGrower, slabs: int) -> list[int]:
    """Every announced value of slabs_ready, up to `slabs`."""
    seen = [grower.slabs_ready]
    poll = select.poll()
    poll.register(grower.eventfd, select.POLLIN)
    while seen[-1] < slabs:
        assert poll.poll(30_000), f"{seen} slabs came: {grower.problem}"
        os.eventfd_read(grower.eventfd)
        assert grower.problem == ""
        seen.append(grower.slabs_ready)
    return seen


def real_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_slab_becomes_real_in_order(threads: int) -> None:
    fd = create_memfd("arena", ARENA)
    grower = ArenaGrower(fd, ARENA, SLAB, threads)
    seen = grown(grower, SLABS)
    assert seen == sorted(seen)
    assert real_bytes(fd) == ARENA
    grower.close()
    grower.close()
    with pytest.raises(ValueError, match="already closed"):
        _ = grower.slabs_ready
    os.close(fd)


def test_a_slab_of_several_steps_is_announced_when_all_of_it_is_real() -> None:
    slab, slabs = 33 << 20, 2
    fd = create_memfd("arena", slabs * slab)
    grower = ArenaGrower(fd, slabs * slab, slab, 1)
    ready = 0
    while ready < slabs:
        assert select.select([grower.eventfd], [], [], 30)[0], grower.problem
        os.eventfd_read(grower.eventfd)
        ready = grower.slabs_ready
        assert real_bytes(fd) >= ready * slab
    grower.close()
    os.close(fd)


@settings(max_examples=10)
@given(st.sets(st.integers(0, ARENA // 4096 - 1), max_size=40))
def test_content_that_is_there_is_kept(pages: set[int]) -> None:
    fd = create_memfd("arena", ARENA)
    pattern = Pattern(fd, ARENA)
    ranges = b"".join(struct.pack("<QQQ", page * 4096 + 5, 77, page) for page in pages)
    pattern.fill(ranges)
    grower = ArenaGrower(fd, ARENA, SLAB, 2)
    grown(grower, SLABS)
    assert pattern.wrong(ranges) == 0
    grower.close()
    pattern.close()
    os.close(fd)


def test_writes_while_it_grows_are_kept() -> None:
    fd = create_memfd("arena", ARENA)
    pattern = Pattern(fd, ARENA)
    everything = struct.pack("<QQQ", 0, ARENA, 3)
    grower = ArenaGrower(fd, ARENA, SLAB, 2)
    pattern.fill(everything)
    grown(grower, SLABS)
    assert pattern.wrong(everything) == 0
    grower.close()
    pattern.close()
    os.close(fd)


def test_closing_early_stops_growth() -> None:
    for _ in range(20):
        fd = create_memfd("arena", 1 << 30)
        grower = ArenaGrower(fd, 1 << 30, 1 << 20, 1)
        grown(grower, 1)
        grower.close()
        left = real_bytes(fd)
        assert 1 << 20 <= left <= 1 << 30
        assert real_bytes(fd) == left
        os.close(fd)
        if left < 1 << 30:  # otherwise it was done before
            return
    pytest.fail("it always grew to its end")


def test_a_slab_that_does_not_fit_into_memory_is_not_begun() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    slab = (machine // SLAB + 1) * SLAB
    fd = create_memfd("arena", 2 * slab)
    grower = ArenaGrower(fd, 2 * slab, slab, 3)
    assert select.select([grower.eventfd], [], [], 30)[0]
    assert grower.problem.startswith(f"the arena stopped growing at 0 of {2 * slab >> 20} MiB: {slab >> 20} MiB more")
    assert grower.slabs_ready == 0
    grower.close()
    assert real_bytes(fd) == 0
    os.close(fd)


def test_slabs_that_other_threads_are_making_still_count_when_growth_stops(tmp_path: Path) -> None:
    """The file system has room for two slabs of three: one thread is refused the third while another makes the second.
    Whether the refusal comes first is a race, hence the rounds."""
    slab = 16 << 20  # one step, so that two threads make two slabs
    for number in range(15):
        folder = tmp_path / str(number)
        folder.mkdir()
        with mounted("tmpfs", folder, 2 * slab) as root:
            fd = os.open(root / "arena", os.O_RDWR | os.O_CREAT)
            os.ftruncate(fd, 3 * slab)
            grower = ArenaGrower(fd, 3 * slab, slab, 2)
            while grower.slabs_ready < 2 or not grower.problem:
                assert select.select([grower.eventfd], [], [], 20)[0], f"{grower.slabs_ready} slabs: {grower.problem}"
                os.eventfd_read(grower.eventfd)
            assert "its file system has" in grower.problem
            grower.close()
            os.close(fd)


@pytest.mark.parametrize("reserved", [True, False])
def test_what_a_file_has_already_needs_no_room_that_others_left(tmp_path: Path, reserved: bool) -> None:
    with mounted("ext4", tmp_path, 3 * ARENA) as root:
        fd = os.open(root / "arena", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, ARENA)
        if reserved:
            os.posix_fallocate(fd, 0, ARENA)
        fill(root)
        grower = ArenaGrower(fd, ARENA, SLAB, 2)
        if reserved:
            grown(grower, SLABS)
            assert grower.problem == ""
        else:
            assert select.select([grower.eventfd], [], [], 30)[0]
            assert grower.problem.endswith("its file system has 0 MiB")
        grower.close()
        os.close(fd)


def test_a_device_grows_to_its_end_though_it_has_no_size() -> None:
    """/dev/zero stands in for a device DAX: each mapping of it has memory of its own."""
    fd = os.open("/dev/zero", os.O_RDWR)
    assert os.fstat(fd).st_size == 0
    grower = ArenaGrower(fd, ARENA, SLAB, 2)
    grown(grower, SLABS)
    grower.close()
    os.close(fd)


def available_bytes() -> int:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo["MemAvailable"].split()[0]) << 10


def test_memory_for_other_processes_stays_free() -> None:
    """A slab that fits, but leaves almost nothing, is not begun. Others may give memory back meanwhile, so it tries
    again."""
    for _ in range(9):
        slab = (available_bytes() - (64 << 20)) // SLAB * SLAB
        fd = create_memfd("arena", slab)
        grower = ArenaGrower(fd, slab, slab, 1)
        select.select([grower.eventfd], [], [], 0.2)
        problem = grower.problem
        grower.close()
        taken = real_bytes(fd)
        os.close(fd)
        if problem:
            assert "of them stay free" in problem
            assert taken == 0
            return
    pytest.fail(f"it began slabs of {slab >> 20} MiB")


@pytest.mark.parametrize(
    ("arena", "slab", "threads", "nodes", "why"),
    [
        (ARENA, 0, 1, [], "slab_bytes=0"),
        (ARENA, SLAB + 4096, 1, [], "multiple of slab_bytes"),
        (ARENA, 1000, 1, [], "slab_bytes=1000"),
        (0, SLAB, 1, [], "arena_bytes=0"),
        (2 * ARENA, SLAB, 1, [], f"file={ARENA}"),
        (ARENA, SLAB, 0, [], "threads=0"),
        (ARENA, SLAB, 65, [], "threads=65"),
        (ARENA, SLAB, 1, [0, -2], "numa_node=-2"),
        (ARENA, SLAB, 1, [1024], "numa_node=1024"),
    ],
)
def test_impossible_options_are_refused(arena: int, slab: int, threads: int, nodes: list[int], why: str) -> None:
    fd = create_memfd("arena", ARENA)
    with pytest.raises(ValueError, match=why):
        ArenaGrower(fd, arena, slab, threads, nodes)
    assert real_bytes(fd) == 0
    os.close(fd)


def test_a_numa_node_that_does_not_exist_is_an_error() -> None:
    fd = create_memfd("arena", ARENA)
    with pytest.raises(OSError, match="NUMA node 1000"):
        ArenaGrower(fd, ARENA, SLAB, 1, [1000])
    os.close(fd)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
@pytest.mark.parametrize(("nodes", "policy"), [([], "default"), ([0], "prefer:0"), ([0, 1000], "interleave:0")])
def test_one_node_is_preferred_and_several_have_the_pages_in_turn(nodes: list[int], policy: str) -> None:
    """Linux silently drops an absent node that is given together with a present one."""
    fd = create_memfd("arena-on-nodes", ARENA)
    grower = ArenaGrower(fd, ARENA, SLAB, 1, nodes)
    (line,) = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "arena-on-nodes" in line]
    assert line.split()[1] == policy
    grower.close()
    os.close(fd)
