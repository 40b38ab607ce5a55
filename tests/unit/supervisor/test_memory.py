"""The amount of memory: machines and control groups made of files."""

from pathlib import Path

import pytest

from kvserver.supervisor.machine_memory import RESERVE_BYTES, Memory, read_memory

MIB = 1 << 20
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 900 MiB, 700 of them available, and no control group."""
    machine = f"MemTotal: {900 << 10} kB\nMemFree: 5 kB\nMemAvailable: {700 << 10} kB\nHugePages_Total: 0\n"
    write(tmp_path / "proc/meminfo", machine)
    write(tmp_path / "proc/self/cgroup", "")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group_v2(root: Path, path: str, limit: str, used_mib: int, cache_mib: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / path
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used_mib * MIB}\n")
    write(folder / "memory.stat", f"anon 17\ninactive_file {cache_mib * MIB}\nactive_file 3\n")


def group_v1(root: Path, path: str, limit: int, used_mib: int, cache_mib: int = 0) -> None:
    folder = root / "sys/fs/cgroup/memory" / path
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{used_mib * MIB}\n")
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {cache_mib * MIB}\n")


def test_without_a_control_group_the_machine_counts(root: Path) -> None:
    assert read_memory(root) == Memory(900 * MIB, 700 * MIB, None)


def test_a_group_without_a_limit_changes_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "3:cpu,memory:/a\n0::/a/b\n")
    group_v2(root, "a/b", "max", 800)
    group_v1(root, "a", UNLIMITED_V1, 800)
    assert read_memory(root) == Memory(900 * MIB, 700 * MIB, None)


def test_what_a_group_uses_is_not_left_but_for_its_page_cache(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/slice/unit\n")
    group_v2(root, "slice/unit", str(500 * MIB), used_mib=300, cache_mib=120)
    assert read_memory(root) == Memory(900 * MIB, 320 * MIB, 500 * MIB)


def test_a_limit_of_a_group_further_up_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/slice/unit\n")
    group_v2(root, "slice/unit", str(650 * MIB), used_mib=10)
    group_v2(root, "slice", str(600 * MIB), used_mib=400)
    assert read_memory(root) == Memory(900 * MIB, 200 * MIB, 600 * MIB)


def test_a_container_sees_its_own_group_at_the_top(root: Path) -> None:
    """The path is the host's; the mounted tree is the container's."""
    write(root / "proc/self/cgroup", "7:memory:/kubepods/pod7/c0ffee\n2:cpu:/kubepods/pod7/c0ffee\n")
    group_v1(root, "", 400 * MIB, used_mib=90, cache_mib=40)
    assert read_memory(root) == Memory(900 * MIB, 350 * MIB, 400 * MIB)


def test_a_group_that_is_over_its_limit_has_nothing_left(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    group_v2(root, "", str(100 * MIB), used_mib=130)
    assert read_memory(root).available_bytes == 0


@pytest.mark.parametrize(
    ("arena_mib", "now", "ever"), [(100, True, True), (101, False, True), (300, False, True), (301, False, False)]
)
def test_an_arena_needs_the_reserve_beside_it(arena_mib: int, now: bool, ever: bool) -> None:
    available, limit = 100 * MIB + RESERVE_BYTES, 300 * MIB + RESERVE_BYTES
    memory = Memory(900 * MIB, available, limit)
    assert (memory.fits(arena_mib * MIB), memory.can_ever_fit(arena_mib * MIB)) == (now, ever)


def test_this_machine_has_some() -> None:
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
