"""A small file system for tests that can be filled up, so that the kernel itself reports a full disk."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BALLAST = "ballast"
FILES_MAX = 300


@contextmanager
def mounted(kind: str, place: Path, size_bytes: int) -> Iterator[Path]:
    """Mounts a file system of this kind, tmpfs or ext4. Skips the test where mounts are not allowed."""
    root = place / f"mounted-{kind}"
    root.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "none", str(root)]
    else:
        image = place / "image"
        with image.open("wb") as file:
            file.truncate(size_bytes)
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4")
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def fill(root: Path) -> None:
    """Fills the file system until it has no byte left for another file, root's included."""
    folder = root / BALLAST
    folder.mkdir()
    for size in (1 << 20, 4096, 1):
        for number in range(FILES_MAX):
            if not _fits(folder / f"{size}-{number}", size):
                _sync(root)  # frees the space that was reserved for the worst case
                if not _has_room(folder):
                    break
    assert not _has_room(folder)


def make_room(root: Path) -> None:
    shutil.rmtree(root / BALLAST)
    _sync(root)


def _sync(root: Path) -> None:
    """Syncs this file system alone: others may be busy."""
    subprocess.run(["sync", "--file-system", str(root)], check=True)


def _has_room(folder: Path) -> bool:
    fits = _fits(folder / "trial", 1)
    (folder / "trial").unlink(missing_ok=True)
    return fits


def _fits(path: Path, size: int) -> bool:
    try:
        with path.open("wb", buffering=0) as file:
            written = file.write(bytes(size))
            os.fsync(file.fileno())
            return written == size
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise
        return False
