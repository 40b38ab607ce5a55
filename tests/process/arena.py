"""Changes bytes in a server's arena without its knowledge."""

import mmap
import os
from pathlib import Path

from tests.process.harness import Server


def flip(server: Server, page: bytes) -> None:
    """Changes a byte of a page in the server's arena."""
    folder = Path(f"/proc/{server.pid}/fd")
    arena = next(path for path in folder.iterdir() if "kvserver-arena" in os.readlink(path))
    with arena.open("r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as mapped:
        at = mapped.find(page)
        assert at >= 0
        mapped[at] ^= 1
