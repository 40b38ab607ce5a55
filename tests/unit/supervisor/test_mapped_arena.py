"""An arena that is no memory of the machine: in a directory on storage, or on a device. Nothing there is believed, and
nothing of anybody else is written over.

No machine of the project has a device DAX. A node of /dev/zero with a made-up /sys stands in for one: it can be mapped,
has no size and no blocks, and cannot be searched."""

import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvserver.cli.doctor import doctor
from kvserver.config.config import Config
from kvserver.config.paths import mount_of, opened, outside_memory
from kvserver.errors import ConfigError
from kvserver.supervisor import kept_memory, mapped_arena, numa
from kvserver.supervisor.arena_files import ARENA, ArenaFiles
from kvserver.supervisor.kept_memory import Held, hold
from kvserver.supervisor.machine_memory import RESERVE_BYTES, Memory
from kvserver.supervisor.mapped_arena import ArenaOnDevice, ArenaOnStorage, keeper_at, settled
from kvserver.supervisor.systemd import Manager
from kvserver.units import GIB, KIB, MIB
from tests.rigs.full_disk import fill, mounted

ZERO = os.makedev(1, 5)
HOLDS = """
import sys
print("holds it", flush=True)
sys.stdin.read()
"""


def config(path: Path, **other: object) -> Config:
    keys = {"arena_path": str(path), "arena_bytes": 6 * MIB, "slab_bytes": 2 * MIB, "chunks_max": 700, **other}
    return Config(**keys)  # type: ignore[arg-type]


def begin(configured: Config) -> tuple[ArenaOnStorage | ArenaOnDevice, Held]:
    keeper = keeper_at(configured)
    assert isinstance(keeper, ArenaOnStorage | ArenaOnDevice)
    try:
        return keeper, hold(configured, Manager({}), keeper)
    except ConfigError:
        keeper.close()
        raise


def end(keeper: ArenaOnStorage | ArenaOnDevice, held: Held) -> None:
    for descriptor in (held.arena, held.ledger):
        os.close(descriptor)
    keeper.close()


def refusal(configured: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        begin(configured)
    return str(caught.value)


# ---------------------------------------------------------------- a directory on storage


def test_the_arena_is_a_whole_file_without_a_name(storage: Path) -> None:
    keeper, held = begin(config(storage))
    found = os.fstat(held.arena)
    assert (found.st_size, found.st_nlink, stat.S_IMODE(found.st_mode)) == (6 * MIB, 0, 0o600)
    assert found.st_blocks * 512 >= 6 * MIB, "a hole would be a SIGBUS where others fill the file system"
    assert found.st_dev == storage.stat().st_dev
    assert list(storage.iterdir()) == []
    assert "memfd:kvserver-ledger" in os.readlink(f"/proc/self/fd/{held.ledger}")
    with opened(str(storage)) as there, pytest.raises(FileNotFoundError):  # nobody can give it one
        os.link(f"/proc/self/fd/{held.arena}", "named", src_dir_fd=there, dst_dir_fd=there)
    end(keeper, held)


def test_a_start_finds_nothing_of_the_one_before(storage: Path) -> None:
    keeper, held = begin(config(storage))
    os.pwrite(held.arena, b"sealed", 4096)
    end(keeper, held)
    keeper, held = begin(config(storage))
    assert (held.found, os.pread(held.arena, 6, 4096)) == (False, bytes(6))
    end(keeper, held)


def test_files_of_others_in_the_directory_are_left_alone(storage: Path) -> None:
    storage.mkdir(mode=0o700)
    names = ("theirs", f"{ARENA}.0123456789abcdef")
    for name in names:
        (storage / name).write_text(f"of somebody: {name}")
    end(*begin(config(storage)))
    assert {path.name: path.read_text() for path in storage.iterdir()} == {
        name: f"of somebody: {name}" for name in names
    }


def test_a_file_in_place_of_the_directory_is_refused_and_left_alone(storage: Path) -> None:
    storage.write_text("of somebody")
    with pytest.raises(ConfigError, match=f"arena-path: {storage}: is no directory, and no device DAX"):
        keeper_at(config(storage))
    assert storage.read_text() == "of somebody"


def test_a_second_server_is_refused_as_long_as_the_first_one_lives(storage: Path) -> None:
    keeper, held = begin(config(storage))
    assert f"arena-in-use: {storage} belongs to another server that lives" in refusal(config(storage))
    end(keeper, held)
    end(*begin(config(storage)))


def test_a_file_system_without_room_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path, 9 * MIB) as root:
        end(*begin(config(root / "own", arena_bytes=4 * MIB)))
        said = refusal(config(root / "own", arena_bytes=64 * MIB))
        assert f"arena-memory: {root}/own on ext4 has " in said
        assert said.endswith(f" bytes; expected {64 * MIB} for arena_bytes")


def test_a_file_system_that_fills_up_meanwhile_refuses_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArenaOnStorage, "_room_bytes", lambda _: GIB)  # as it was when it was asked
    with mounted("ext4", tmp_path, 9 * MIB) as root:
        (root / "own").mkdir(mode=0o700)
        fill(root)
        assert "kvserver-arena of 4194304 bytes cannot be made: No space left" in refusal(
            config(root / "own", arena_bytes=4 * MIB)
        )


def test_an_arena_on_storage_needs_no_memory_of_the_machine(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = Memory(total_bytes=GIB, available_bytes=RESERVE_BYTES + 4096, limit_bytes=None)
    monkeypatch.setattr(kept_memory, "read_memory", lambda: little)
    end(*begin(config(storage)))
    with pytest.raises(ConfigError, match="arena-memory: arena_bytes=6291456 and"):
        hold(config(storage, arena_path=""), Manager({}))


@pytest.mark.parametrize(
    ("key", "value"), [("huge_page_bytes", 2 * MIB), ("numa_node", 0), ("ledger_path", "/dev/shm/kvserver-ledger")]
)
def test_a_key_of_an_arena_in_memory_is_refused(storage: Path, key: str, value: object) -> None:
    said = refusal(config(storage, **{key: value}))
    assert said.startswith(f"arena-path: {key}={value!r} is for an arena in memory; expected {key}=")
    end(*begin(config(storage)))


def test_gpus_reach_an_arena_on_storage_without_pinning_it(storage: Path) -> None:
    assert "arena-path: arena_reach=register pins the arena" in refusal(config(storage, arena_reach="register"))
    keeper = keeper_at(config(storage))
    assert settled(config(storage), keeper).arena_reach == "bounce"
    assert keeper is not None
    keeper.close()
    assert settled(Config(), None).arena_reach == "auto"


@pytest.mark.parametrize("dax", [False, True])
def test_a_page_cache_between_is_warned_of(
    storage: Path, dax: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapped_arena, "is_dax", lambda _: dax)
    with caplog.at_level(logging.WARNING, logger="kvserver"):
        end(*begin(config(storage)))
    told = [record.getMessage() for record in caplog.records if "arena on storage" in record.getMessage()]
    assert len(told) == (0 if dax else 1)


def test_a_file_on_ordinary_storage_is_no_dax(storage: Path) -> None:
    keeper, held = begin(config(storage))
    assert not mapped_arena.is_dax(held.arena)
    end(keeper, held)


def test_a_memory_file_system_keeps_its_arena_as_ever() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvserver-test-") as memory:
        assert outside_memory(f"{memory}/made/later") == ""
        keeper = keeper_at(config(Path(memory)))
        assert isinstance(keeper, ArenaFiles)
        keeper.close()
    assert keeper_at(Config()) is None


def test_doctor_and_placement_know_that_it_lies_outside_memory(storage: Path) -> None:
    configured = config(storage, arena_bytes=64 << 40, slab_bytes=GIB)
    with opened(str(storage.parent)) as descriptor:
        kind = mount_of(descriptor).file_system
    assert doctor.memory(configured) == ("ok", f"the arena is {storage} on {kind}, where a start looks for 64TiB")
    assert str(numa.place(configured)) == f"{storage} on {kind}"


# ---------------------------------------------------------------- a device


class Sys:
    """A made-up /sys in which /dev/zero is a device DAX, and a node of it that is ours alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.about = folder / "sys/dev/char/1:5"
        self.about.mkdir(parents=True)
        self.node = folder / "dax7.0"
        try:
            os.mknod(self.node, stat.S_IFCHR | 0o600, ZERO)
            os.close(os.open(self.node, os.O_RDWR))
        except PermissionError:
            pytest.skip("this user may make no device")
        monkeypatch.setattr(mapped_arena, "SYS", folder / "sys")
        self.say(subsystem="dax", size=7 * MIB, align=2 * MIB)

    def say(self, *, subsystem: str = "", size: int = 0, align: int = 0) -> None:
        if subsystem:
            (self.about / "subsystem").unlink(missing_ok=True)
            (self.about / "subsystem").symlink_to(f"/sys/bus/{subsystem}")
        for name, number in (("size", size), ("align", align)):
            if number:
                (self.about / name).write_text(f"{number}\n")


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sys:
    return Sys(tmp_path, monkeypatch)


def test_the_arena_is_the_device_and_the_ledger_is_memory(device: Sys) -> None:
    keeper, held = begin(config(device.node))
    assert os.fstat(held.arena).st_rdev == ZERO
    assert "memfd:kvserver-ledger" in os.readlink(f"/proc/self/fd/{held.ledger}")
    assert not held.found
    end(keeper, held)


def test_a_process_with_the_arena_keeps_the_device_from_the_next_server(device: Sys) -> None:
    """A mover that does not end might write to it."""
    keeper, held = begin(config(device.node))
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(held.arena,)) as mover:
        assert mover.stdout is not None
        assert mover.stdout.readline() == b"holds it\n"
        assert f"arena-in-use: {device.node} is used by another server" in refusal(config(device.node))
        end(keeper, held)
        assert "or by a process of an earlier one" in refusal(config(device.node))
        mover.kill()
        mover.wait(10)
    end(*begin(config(device.node)))


@pytest.mark.parametrize(
    ("said", "about", "keys"),
    [
        ("arena-path: {} is a device of mem; expected a device DAX", {"subsystem": "mem"}, {}),
        ("arena-memory: the device {} has 4194304 bytes; expected 6291456 for", {"size": 4 * MIB}, {}),
        ("must be a multiple of 4194304, the alignment of {}; with such a slab_bytes", {"align": 4 * MIB}, {}),
        ("scrub_bytes_per_s=1024 reads the arena as a file, which a device is not", {}, {"scrub_bytes_per_s": KIB}),
        ("numa_node=0 is for an arena in memory; expected numa_node=-1", {}, {"numa_node": 0}),
    ],
)
def test_a_device_that_does_not_fit_is_refused(
    device: Sys, said: str, about: dict[str, object], keys: dict[str, object]
) -> None:
    device.say(**about)  # type: ignore[arg-type]
    assert said.format(device.node) in refusal(config(device.node, **keys))


def test_a_device_that_says_no_alignment_has_that_of_huge_pages(device: Sys) -> None:
    (device.about / "align").unlink()
    assert "must be a multiple of 2097152" in refusal(config(device.node, slab_bytes=MIB, arena_bytes=5 * MIB))
    end(*begin(config(device.node)))


def test_a_device_that_others_may_use_is_refused(device: Sys) -> None:
    device.node.chmod(0o660)
    assert f"{device.node} belongs to user {os.geteuid()} and has mode 0660; expected" in refusal(config(device.node))


def test_a_device_that_is_no_dax_is_refused_on_this_machine() -> None:
    said = refusal(config(Path("/dev/null")))
    assert said == "arena-path: /dev/null is a device of mem; expected a device DAX"


def test_gpus_may_pin_a_device(device: Sys) -> None:
    keeper = keeper_at(config(device.node))
    assert settled(config(device.node), keeper).arena_reach == "auto"
    assert keeper is not None
    keeper.close()
