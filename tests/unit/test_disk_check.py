"""Which directories a server refuses to start on, and what it says of them."""

import fcntl
import os
from pathlib import Path

import pytest

from kvserver import disk_check, disk_leave
from kvserver.config import Config
from kvserver.errors import ConfigError
from kvserver.sizes import show_bytes


def found(*directories: Path, disk_bytes: int = 1 << 20, disk_segment_bytes: int = 64 << 10) -> list[tuple[str, str]]:
    paths = ",".join(map(str, directories))
    config = Config(disk_paths=paths, disk_bytes=disk_bytes, disk_segment_bytes=disk_segment_bytes)
    return [tuple(problem) for problem in disk_check.problems(config)]  # type: ignore[misc]


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
    for (_, message), says in zip(codes, ("No such file", "no directory", f"(process {os.getpid()})"), strict=True):
        assert says in message


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
    """Each alone would fit, and the second would be set aside when the first has taken its bytes."""
    directories = made(tmp_path, "a", "b")
    disk_bytes = free_bytes(tmp_path) * 2 // 3 // 4096 * 4096
    assert found(directories[0], disk_bytes=disk_bytes) == []
    ((code, message),) = found(*directories, disk_bytes=disk_bytes)
    assert code == "disk-space"
    assert f"the file system of {directories[0]}, {directories[1]} has" in message
    assert f"2 x disk_bytes={show_bytes(disk_bytes)} do not fit" in message


@pytest.mark.parametrize("name", ["kvserver.store", "kvserver.store.new", "kvserver.headers.new"])
def test_what_a_store_has_already_counts_as_room(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a server left that died while it made one: the next one removes that."""
    (directory,) = made(tmp_path, "a")
    (directory / name).write_bytes(bytes(1 << 20))
    taken = (directory / name).stat().st_blocks * 512
    real = os.statvfs(directory)
    no_room = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 0, 0, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: no_room)
    assert found(directory, disk_bytes=1 << 20) == []
    assert f"0 bytes free and {taken:,} in stores" in found(directory, disk_bytes=2 << 20)[0][1]


def test_a_drained_directory_needs_no_room(tmp_path: Path) -> None:
    (directory,) = made(tmp_path, "a")
    disk_leave.mark(str(directory))
    assert found(directory, disk_bytes=200 << 40, disk_segment_bytes=1 << 30) == []
    (directory / "kvserver.store").touch()
    assert [code for code, _ in found(directory, disk_bytes=200 << 40, disk_segment_bytes=1 << 30)] == ["disk-space"]


def test_a_server_is_refused_with_the_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk-path.*absent.*disk_paths="):
        disk_check.refuse(Config(disk_paths=f"{tmp_path}/absent,{tmp_path}/absent2"))
