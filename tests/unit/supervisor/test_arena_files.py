"""Allowed places for arena_path, who may use the files there, and which of them are used again."""

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver.config.config import Config
from kvserver.errors import ConfigError
from kvserver.supervisor import kept_memory
from kvserver.supervisor.arena_files import ARENA, LEDGER, ArenaFiles
from kvserver.supervisor.kept_memory import Held, hold
from kvserver.supervisor.systemd import Manager
from kvserver.transfer.native import ArenaGrower
from kvserver.units import MIB
from tests.rigs.memory_keeper import Keeper

MAPS = """
import mmap, os, sys
descriptor = int(sys.argv[1])
mapped = mmap.mmap(descriptor, 0)
os.close(descriptor)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on tmpfs that is ours alone."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvserver-test-"))
    yield directory
    shutil.rmtree(directory)


def config(memory: Path, **other: object) -> Config:
    keys = {"arena_path": str(memory), "arena_bytes": 3 * MIB, "slab_bytes": MIB, "chunks_max": 700, **other}
    return Config(**keys)  # type: ignore[arg-type]


def life(configured: Config, *, writes: bytes = b"", manager: Manager | None = None) -> bytes:
    """The bytes that one start finds in its arena; `writes` is what it leaves there."""
    files = ArenaFiles(configured)
    try:
        held = hold(configured, manager or Manager({}), files)
    finally:
        files.close()
    found = os.pread(held.arena, 6, 4096)
    if writes:
        os.pwrite(held.arena, writes, 4096)
    close(held)
    return found


def close(held: Held) -> None:
    for descriptor in (held.arena, held.ledger):
        os.close(descriptor)


def refusal(configured: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        life(configured)
    return str(caught.value)


def small_tmpfs(arena_bytes: int, directory: str, size: str) -> str:
    """The message of a start in its own mount namespace, where the directory is a tmpfs of that size."""
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    serve = (
        f"kvserver serve --socket {directory}/s/kv.sock --http-port 0 --arena-path {directory}/own --slab-bytes 1MiB"
    )
    command = f"mount -t tmpfs -o mode=700,size={size} none {directory} && exec {sys.executable} -m {serve}"
    shell = ["unshare", "-rm", "sh", "-c", f"{command} --arena-bytes {arena_bytes} --chunks-max 700"]
    run = subprocess.run(shell, capture_output=True, text=True, check=False, timeout=90)
    assert run.returncode == 2, run.stderr
    return run.stderr


def test_what_one_start_leaves_the_next_one_finds(memory: Path) -> None:
    assert life(config(memory), writes=b"sealed") == bytes(6)
    assert life(config(memory)) == b"sealed"
    modes = [path.stat().st_mode & 0o777 for path in memory.iterdir()]
    assert modes == [0o600, 0o600]


def test_the_directory_is_made_for_its_user_alone(memory: Path) -> None:
    life(config(memory / "own"))
    assert (memory / "own").stat().st_mode & 0o777 == 0o700


def test_the_ledger_has_all_its_memory_from_the_start(memory: Path) -> None:
    """On a full file system a hole would be a SIGBUS in the brain."""
    life(config(memory))
    (ledger,) = memory.glob(f"{LEDGER}.*")
    assert ledger.stat().st_blocks * 512 >= ledger.stat().st_size


def test_a_ledger_may_lie_elsewhere_and_an_arena_without_it_is_dropped(memory: Path) -> None:
    beside, other = str(memory / "ledger"), str(memory / "other")
    place = memory / "arena"
    life(config(place, ledger_path=beside), writes=b"sealed")
    assert life(config(place, ledger_path=beside)) == b"sealed"
    life(config(place, ledger_path=other), writes=b"newest")
    assert life(config(place, ledger_path=beside)) == bytes(6), "the first ledger is not of this arena"


def test_another_arena_size_is_dropped_and_nothing_of_it_stays(memory: Path) -> None:
    life(config(memory), writes=b"sealed")
    assert life(config(memory, arena_bytes=4 * MIB)) == bytes(6)
    assert [path.name.partition(".")[0] for path in sorted(memory.iterdir())] == [ARENA, LEDGER]
    assert life(config(memory)) == bytes(6)


def test_a_start_that_died_between_the_two_files_leaves_nothing_that_is_believed(memory: Path) -> None:
    life(config(memory), writes=b"sealed")
    for path in memory.glob(f"{LEDGER}.*"):
        os.truncate(path, 0)  # as long as it is not whole
    assert life(config(memory)) == bytes(6)


@pytest.mark.parametrize("what", [ARENA, LEDGER])
@pytest.mark.parametrize("changed_bytes", [-4096, 4096])
def test_a_file_that_was_cut_short_or_grew_is_dropped(memory: Path, what: str, changed_bytes: int) -> None:
    life(config(memory), writes=b"sealed")
    (path,) = memory.glob(f"{what}.*")
    os.truncate(path, path.stat().st_size + changed_bytes)
    assert life(config(memory)) == bytes(6)
    assert life(config(memory), writes=b"newest") == bytes(6)
    assert life(config(memory)) == b"newest"


def test_a_file_of_the_right_name_and_size_that_is_no_ledger_is_dropped(memory: Path) -> None:
    life(config(memory), writes=b"sealed")
    (path,) = memory.glob(f"{LEDGER}.*")
    path.write_bytes(os.urandom(4096) + bytes(path.stat().st_size - 4096))
    assert life(config(memory)) == bytes(6)


def test_a_process_that_maps_the_arena_keeps_it_from_being_used(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover that does not end holds the lock by its mapping alone; the directory is free as soon as the server is."""
    monkeypatch.setattr(kept_memory, "END_S", 0.0)
    files = ArenaFiles(config(memory))
    held = hold(config(memory), Manager({}), files)
    os.pwrite(held.arena, b"sealed", 4096)
    command = [sys.executable, "-c", MAPS, str(held.arena)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(held.arena,)) as mover:
        assert mover.stdout is not None
        assert mover.stdin is not None
        assert mover.stdout.readline() == b"mapped\n"
        close(held)
        files.close()
        again = ArenaFiles(config(memory))
        taken = again.take()
        assert "have not ended" in again.undead()
        mover.kill()
        mover.wait(10)
        assert (again.undead(), again.doubt()) == ("", "")
        for descriptor in taken.values():
            os.close(descriptor)
        again.close()
    assert life(config(memory)) == b"sealed"


def test_what_an_undead_process_has_is_dropped_when_it_does_not_end(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_memory, "END_S", 0.0)
    files = ArenaFiles(config(memory))
    held = hold(config(memory), Manager({}), files)
    files.close()
    os.pwrite(held.arena, b"sealed", 4096)
    assert life(config(memory)) == bytes(6)
    close(held)


def test_a_second_server_is_refused_and_told_who_is_there(memory: Path) -> None:
    files = ArenaFiles(config(memory))
    said = refusal(config(memory))
    assert said.startswith(f"arena-in-use: {memory} belongs to another server that lives (process {os.getpid()})")
    files.close()
    life(config(memory))


def test_a_second_server_is_refused_at_the_ledger_alone(memory: Path) -> None:
    shared = str(memory / "ledger")
    files = ArenaFiles(config(memory / "first", ledger_path=shared))
    assert refusal(config(memory / "second", ledger_path=shared)).startswith(f"arena-in-use: {shared} ")
    files.close()


def test_a_file_system_that_is_no_memory_is_refused() -> None:
    said = refusal(config(Path("/proc/self")))
    assert "is on proc; expected one of tmpfs, hugetlbfs, ext4, xfs" in said


def test_pages_that_the_file_system_does_not_have_are_refused(memory: Path) -> None:
    said = refusal(config(memory, huge_page_bytes=2 * MIB, slab_bytes=2 * MIB, arena_bytes=4 * MIB))
    assert "is on tmpfs with pages of 4096 bytes; expected 2097152" in said


def test_a_directory_that_others_may_write_to_is_refused(memory: Path) -> None:
    memory.chmod(0o1777)
    assert "has mode 1777; expected" in refusal(config(memory))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_of_somebody_else_is_refused(memory: Path) -> None:
    os.chown(memory, 65534, 65534)
    assert "belongs to user 65534" in refusal(config(memory))


def test_a_file_that_others_may_read_is_refused_and_left_alone(memory: Path) -> None:
    life(config(memory))
    (ledger,) = memory.glob(f"{LEDGER}.*")
    ledger.chmod(0o644)
    assert f"{ledger} belongs to user {os.geteuid()} and has mode 0644" in refusal(config(memory))
    assert ledger.exists()


def test_a_link_in_the_place_of_a_file_is_refused(memory: Path, tmp_path: Path) -> None:
    (memory / f"{ARENA}.0").symlink_to(tmp_path / "elsewhere")
    assert refusal(config(memory)).startswith(f"arena-path: {memory}/{ARENA}.0: ")


def test_a_path_that_is_a_file_is_refused(memory: Path) -> None:
    (memory / "file").touch()
    assert refusal(config(memory / "file")).startswith("arena-path: ")


@pytest.mark.parametrize("path", ["here", "/", "/dev/..", "/a\0b"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="config-path: arena_path="):
        Config(arena_path=path)


def test_a_ledger_path_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="config-path: ledger_path='/dev/shm/kv' needs an arena_path"):
        Config(ledger_path="/dev/shm/kv")


def test_an_arena_that_the_file_system_cannot_hold_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    said = small_tmpfs(8 * MIB, str(tmp_path), "4m")
    assert f"arena-memory: the tmpfs at {tmp_path}/own has " in said
    assert "bytes free" in said


def test_an_arena_stops_growing_with_a_reason_where_others_filled_its_file_system() -> None:
    """In its own mount namespace: a tmpfs of 5 MiB, of which another file takes 2."""
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    with tempfile.TemporaryDirectory() as directory:
        grow = [sys.executable, "-m", "tests.unit.supervisor.test_arena_files", directory]
        mount = [
            "unshare",
            "-rm",
            "sh",
            "-c",
            f'mount -t tmpfs -o mode=700,size=5m none {directory} && exec "$@"',
            "sh",
        ]
        run = subprocess.run([*mount, *grow], capture_output=True, text=True, check=False, timeout=90)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "3 the arena stopped growing at 3 of 4 MiB: 1 MiB more are needed, its file system has 0 MiB\n"


def test_what_systemd_kept_is_given_back_where_files_are_used(memory: Path) -> None:
    held = hold(config(memory, arena_path=""), Manager({}))
    os.pwrite(held.arena, b"memfds", 4096)
    keeper = Keeper({ARENA: os.dup(held.arena), LEDGER: os.dup(held.ledger)})
    assert life(config(memory), manager=keeper) == bytes(6)
    assert set(keeper.forgotten) == {ARENA, LEDGER}
    assert keeper.keeps == []
    assert os.fstat(held.arena).st_blocks == 0
    close(held)


def _grow_beside_another(directory: str) -> None:
    Path(directory, "other").write_bytes(bytes(2 * MIB))
    descriptor = os.open(f"{directory}/arena", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 4 * MIB)
    grower = ArenaGrower(descriptor, 4 * MIB, MIB, 1)
    while not grower.problem:
        readable, _, _ = select.select([grower.eventfd], [], [], 20)
        assert readable, f"it neither grew nor said why at {grower.slabs_ready} slabs"
        os.eventfd_read(grower.eventfd)
    print(grower.slabs_ready, grower.problem)
    grower.close()


if __name__ == "__main__":
    _grow_beside_another(sys.argv[1])
