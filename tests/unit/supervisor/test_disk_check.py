"""Directories on which a server refuses to start, and its messages about them."""

import errno
import fcntl
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver.cli.doctor import doctor
from kvserver.config.config import Config
from kvserver.errors import ConfigError
from kvserver.movers import disk_retire
from kvserver.supervisor import disk_paths
from kvserver.transfer.disk import open_store
from kvserver.units import show_bytes


def found(*directories: Path, disk_bytes: int = 1 << 20, disk_segment_bytes: int = 64 << 10) -> list[tuple[str, str]]:
    paths = ",".join(map(str, directories))
    config = Config(disk_paths=paths, disk_bytes=disk_bytes, disk_segment_bytes=disk_segment_bytes)
    return [tuple(problem) for problem in disk_paths.problems(config)]  # type: ignore[misc]


def made(tmp_path: Path, *names: str) -> list[Path]:
    for name in names:
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in names]


def free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def test_good_directories_are_not_mentioned(tmp_path: Path) -> None:
    assert found(*made(tmp_path, "a", "b")) == []


def test_each_bad_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    good, locked = made(tmp_path, "good", "locked")
    descriptor = os.open(locked, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    codes = found(tmp_path / "absent", tmp_path / "file", good, locked)
    os.close(descriptor)
    assert [code for code, _ in codes] == ["disk-path", "disk-path", "disk-locked"]
    for (_, message), says in zip(codes, ("is missing", "no directory", f"(process {os.getpid()})"), strict=True):
        assert says in message


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """They could replace our files with other bytes or with links."""
    for mode in (0o770, 0o702, 0o1777):
        (directory,) = made(tmp_path, f"{mode:o}")
        directory.chmod(mode)
        says = f"{directory} belongs to user {os.geteuid()} and has mode {mode:04o}; expected user {os.geteuid()} and "
        ((code, message),) = found(directory)
        assert (code, message[: len(says)]) == ("disk-owner", says)
        directory.chmod(0o755)
        assert found(directory) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [".", "kvserver.store", "kvserver.notes/", "kvserver.hits", "kvserver.drained"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, name: str) -> None:
    (directory,) = made(tmp_path, "a")
    path = directory / name
    path.mkdir(exist_ok=True) if name.endswith("/") else path.touch(0o600)
    assert found(directory) == []
    os.chown(path, 65_534, 65_534)
    ((code, message),) = found(directory)
    assert code == "disk-owner"
    assert message.startswith(f"{path} belongs to user 65534 (nobody, or a user that this container does not know)")


@pytest.mark.parametrize("name", ["kvserver.store", "kvserver.headers", "kvserver.store.new", "kvserver.headers.new"])
def test_a_store_that_others_may_read_is_refused(tmp_path: Path, name: str) -> None:
    """It holds the content of users' prompts."""
    (directory,) = made(tmp_path, "a")
    (directory / name).touch()
    (directory / name).chmod(0o640)
    ((code, message),) = found(directory)
    assert code == "disk-owner"
    assert message.endswith(f"has mode 0640; expected a file of user {os.geteuid()} with mode 0600")


@pytest.mark.parametrize("name", ["kvserver.store", "kvserver.hits", "kvserver.hits.new", "kvserver.notes"])
def test_a_link_under_a_name_of_ours_is_refused(tmp_path: Path, name: str) -> None:
    (directory,) = made(tmp_path, "a")
    (tmp_path / "precious").write_text("years of work")
    (directory / name).symlink_to(tmp_path / "precious")
    ((code, message),) = found(directory)
    assert code == "disk-owner"
    assert message.startswith(f"{directory / name} is ")


def test_memory_that_is_named_as_a_disk_is_warned_of(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        here, to_be_made = Path(name), Path("/dev/shm/kvserver-to-be-made")
        config = Config(disk_paths=f"{here},{to_be_made}", disk_bytes=1 << 20, disk_segment_bytes=64 << 10)
        warned = dict(disk_paths.warnings(config))
        assert list(warned) == [str(here), str(to_be_made)]
        assert all(why.startswith("it lies on tmpfs: what is on this disk takes memory") for why in warned.values())
        verdict, text = doctor.disks(config)
        assert (verdict, str(here) in text) == ("warn", True)


@pytest.fixture
def mount() -> Iterator[Path]:
    """A directory that is a mount point."""
    memory = Path("/dev/shm")
    if not memory.is_mount():
        pytest.skip("/dev/shm is no mount of its own here")
    yield memory
    for left in memory.glob(f"kv-{os.getpid()}-*"):
        left.rmdir()


def test_what_is_missing_right_below_a_mount_point_is_made_for_its_user_alone(mount: Path) -> None:
    directory = mount / f"kv-{os.getpid()}-a"
    assert found(directory) == []
    assert not directory.exists(), "who only asks makes nothing"
    config = Config(disk_paths=str(directory))
    assert list(disk_paths.make_missing(config)) == [(str(directory), "tmpfs")]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(disk_paths.make_missing(config)) == [], "it is there now"


def test_what_is_missing_elsewhere_is_refused_with_a_command_that_makes_it(tmp_path: Path) -> None:
    """For example the directory of a missing mount: the tier would fill the system's disk."""
    for directory in (tmp_path / "nvme 0", tmp_path / "absent" / "kv", Path("/kv-absent")):
        ((code, message),) = found(directory)
        assert code == "disk-path"
        assert f"{directory} is missing, and is made only right below a mount point" in message
    command = found(tmp_path / "nvme 0" / "kv")[0][1].split("`")[1]
    subprocess.run(command, shell=True, check=True)
    assert found(tmp_path / "nvme 0" / "kv") == []


def test_a_link_that_leads_nowhere_is_not_made(tmp_path: Path, mount: Path) -> None:
    (tmp_path / "link").symlink_to(mount / f"kv-{os.getpid()}-b")
    assert found(tmp_path / "link") == [("disk-path", f"{tmp_path}/link: No such file or directory")]


def test_two_names_of_what_will_be_one_directory_are_refused(tmp_path: Path, mount: Path) -> None:
    (tmp_path / "memory").symlink_to(mount)
    name = f"kv-{os.getpid()}-c"
    says = f"{tmp_path}/memory/{name} and {mount}/{name} are one directory"
    assert found(mount / name, tmp_path / "memory" / name) == [("disk-path", says)]


def test_what_will_be_made_needs_its_room_as_well(mount: Path) -> None:
    names = [mount / f"kv-{os.getpid()}-{letter}" for letter in "de"]
    disk_bytes = free_bytes(mount) * 2 // 3 // 4096 * 4096
    assert found(names[0], disk_bytes=disk_bytes) == []
    ((code, message),) = found(*names, disk_bytes=disk_bytes)
    assert code == "disk-space"
    assert f"the file system of {names[0]}, {names[1]} has" in message


def test_what_cannot_be_made_after_all_is_refused(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks before may have passed: the file system may have become read-only since."""

    def refuse(path: str, mode: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"disk-path.*cannot be made: Read-only file system"):
        list(disk_paths.make_missing(Config(disk_paths=str(mount / "kv"))))


def test_who_only_asks_is_in_nobodys_way(tmp_path: Path) -> None:
    (directory,) = made(tmp_path, "a")
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    assert found(directory) == []
    os.close(descriptor)


def test_two_names_of_one_directory_are_refused(tmp_path: Path) -> None:
    (directory,) = made(tmp_path, "a")
    (tmp_path / "b").symlink_to(directory)
    assert found(directory, tmp_path / "b") == [("disk-path", f"{tmp_path}/b and {directory} are one directory")]


def test_devices_on_one_file_system_have_to_fit_together(tmp_path: Path) -> None:
    """Each alone would fit; the second would be set aside once the first has taken its bytes."""
    directories = made(tmp_path, "a", "b")
    disk_bytes = free_bytes(tmp_path) * 2 // 3 // 4096 * 4096
    assert found(directories[0], disk_bytes=disk_bytes) == []
    ((code, message),) = found(*directories, disk_bytes=disk_bytes)
    assert code == "disk-space"
    assert f"the file system of {directories[0]}, {directories[1]} has" in message
    assert f"2 x disk_bytes={show_bytes(disk_bytes)} do not fit with 16MiB for notes beside" in message


def test_a_new_device_leaves_room_for_its_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its notes a device would take no writes."""
    (directory,) = made(tmp_path, "a")
    real = os.statvfs(directory)
    blocks = (20 << 20) // real.f_frsize
    space = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, blocks, blocks, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: space)
    assert found(directory, disk_bytes=12 << 20) == []
    ((code, message),) = found(directory, disk_bytes=(12 << 20) + (64 << 10))
    assert code == "disk-space"
    assert message.endswith("do not fit with 8MiB for notes beside")


@pytest.mark.parametrize("name", ["kvserver.store", "kvserver.store.new", "kvserver.headers.new"])
def test_what_a_store_has_already_counts_as_room(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the remains of a server that died while it made a store: the next start removes them."""
    (directory,) = made(tmp_path, "a")
    (directory / name).write_bytes(bytes(1 << 20))
    (directory / name).chmod(0o600)
    taken = (directory / name).stat().st_blocks * 512
    real = os.statvfs(directory)
    no_room = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 0, 0, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: no_room)
    assert found(directory, disk_bytes=1 << 20) == []
    assert f"0 bytes free and {taken:,} in stores" in found(directory, disk_bytes=2 << 20)[0][1]


def test_a_store_that_is_there_fits_where_the_rest_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It consists of whole segments, and takes less than it might."""
    (directory,) = made(tmp_path, "a")
    sizes = {"capacity_bytes": 1 << 20, "segment_bytes": 96 << 10}
    open_store(str(directory), device=0, **sizes)
    real = os.statvfs(directory)
    no_room = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 0, 0, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: no_room)
    assert found(directory, disk_bytes=1 << 20, disk_segment_bytes=96 << 10) == []


def test_a_drained_directory_needs_no_room(tmp_path: Path) -> None:
    (directory,) = made(tmp_path, "a")
    disk_retire.mark(str(directory))
    assert found(directory, disk_bytes=200 << 40, disk_segment_bytes=1 << 30) == []
    (directory / "kvserver.store").touch(0o600)
    assert [code for code, _ in found(directory, disk_bytes=200 << 40, disk_segment_bytes=1 << 30)] == ["disk-space"]


def test_a_server_is_refused_with_the_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk-path.*absent.*disk_paths="):
        disk_paths.refuse(Config(disk_paths=f"{tmp_path}/absent,{tmp_path}/absent2"))
