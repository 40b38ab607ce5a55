"""Devices of a known speed: file systems of their own on loop devices, whose reads a control group limits."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/blkio")
"""Control groups (version 1) that limit block devices. Root may make one."""
LIMIT = "blkio.throttle.read_bps_device"
EXIT_CANNOT = 77
"""Exit status where such devices cannot be made, as of benchmarks/gate.py."""


@contextmanager
def limited_disks(count: int, *, size_bytes: int, read_bytes_per_s: int, parent: Path | None) -> Iterator[list[Path]]:
    """Yields `count` directories, each on an ext4 of its own. This process, and what it starts meanwhile, reads each at
    this rate at most. Exits with EXIT_CANNOT and the reason where this machine has no such devices."""
    if why := _why_not():
        sys.stderr.write(f"SKIPPED: {why}\n")
        sys.exit(EXIT_CANNOT)
    group = GROUPS / f"kvserver-bench-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="kvserver-bench-", dir=parent) as name:
        roots = [Path(name) / str(number) for number in range(count)]
        mounted: list[Path] = []
        group.mkdir()
        try:
            for root in roots:
                root.mkdir()
                _mount(Path(f"{root}.image"), root, size_bytes)
                mounted.append(root)
                device = os.stat(root).st_dev
                limit = f"{os.major(device)}:{os.minor(device)} {read_bytes_per_s}"
                (group / LIMIT).write_text(limit)
            (group / "cgroup.procs").write_text(str(os.getpid()))
            yield [_directory(root) for root in roots]
        finally:
            (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
            for root in mounted:
                subprocess.run(["umount", str(root)], check=True)
            group.rmdir()


def _why_not() -> str:
    if os.geteuid():
        return "only root can mount devices and limit them"
    if not (GROUPS / LIMIT).exists():
        return f"{GROUPS / LIMIT}: no control groups (version 1) limit block devices here"
    return "" if Path("/dev/loop-control").exists() else "/dev/loop-control: there are no loop devices"


def _mount(image: Path, root: Path, size_bytes: int) -> None:
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(root)], check=True)


def _directory(root: Path) -> Path:
    made = root / "kv"
    made.mkdir(mode=0o700)
    return made
