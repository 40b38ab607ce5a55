"""The brain with a witness: a file that records every chunk on disk that the brain takes in or gives up.

The line is written before the brain goes on, so a test that kills it at any instant knows what was sealed on disk. A
chunk is *sealed on disk* from the moment at which the brain hears that its records are written until it gives up their
places. One system call writes each line, so the line survives the process."""

import os
import struct
from pathlib import Path
from typing import Any

from kvserver.brain import process
from kvserver.index.space import Node, Space
from kvserver.service import service
from kvserver.service.disk import recovery
from kvserver.service.holdings.disk_chunks import DiskChunks
from kvserver.service.holdings.place_owners import DiskJob
from kvserver.service.state.core import Core
from kvserver.service.state.disk_tier import DiskTier
from tests.process.checked import checked
from tests.process.disk_faults.program import FOLDER

LINE = struct.Struct("<c32s32sB")
"""Event, namespace, key, groups (bits)."""
FILE = "witness"
BORN, RECOVERED, HOLDS, WRITES, READS, ENDED = b"b", b"c", b"p", b"w", b"r", b"e"
NOBODY = bytes(32)

Name = tuple[bytes, bytes]
"""Namespace and key."""


class Account:
    """The witness's lines, summed up.

    A brain that died before it had taken in the disk's content wrote nothing and gave nothing up. Its lines do not
    count: what the brain before it held is still there."""

    def __init__(self) -> None:
        self.held: dict[Name, int] = {}
        """Groups on disk (bits), by chunk."""
        self.taken_in: dict[Name, int] = {}
        """`held` at the moment at which the last brain had taken in all that it found and began to write."""
        self.writing: set[Name] = set()
        self.reading: set[Name] = set()
        """Chunks whose order to the disk mover has not ended."""


def read(folder: Path) -> Account:
    """Reads the account as it was when the last brain wrote its last line."""
    whole = (folder / FILE).read_bytes()
    account, held = Account(), dict[Name, int]()
    for what, namespace, key, groups in LINE.iter_unpack(whole[: len(whole) // LINE.size * LINE.size]):
        name = namespace, key
        match what:
            case b"b":
                held = {}
                account.writing, account.reading = set(), set()
            case b"c":
                account.held, account.taken_in = held, dict(held)
            case b"p" if groups:
                held[name] = groups
            case b"p":
                held.pop(name, None)
            case b"w":
                account.writing.add(name)
            case b"r":
                account.reading.add(name)
            case b"e":
                account.writing.discard(name)
                account.reading.discard(name)
    return account


class Witness:
    """Sits between product code and the state that it changes."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._recovered = False
        self._say(BORN)

    def _say(self, what: bytes, namespace: bytes = NOBODY, key: bytes = NOBODY, groups: int = 0) -> None:
        os.write(self._file, LINE.pack(what, namespace, key, groups))

    def watch(self) -> None:
        put, add, found = Space.put_on_disk, Space.add_cold, recovery.found
        began, ended = DiskChunks._began, DiskChunks._ended

        def put_seen(self: Space, node: Node, groups: int, *rest: Any) -> Node:
            above = put(self, node, groups, *rest)
            say(HOLDS, self.digest, node.key, groups)
            return above

        def add_seen(self: Space, node: Node, groups: int, *rest: Any) -> None:
            add(self, node, groups, *rest)
            say(HOLDS, self.digest, node.key, groups)

        def began_seen(self: DiskChunks, job: DiskJob) -> None:
            began(self, job)
            say(WRITES if job.kind == "write" else READS, job.space.digest, job.node.key)

        def ended_seen(self: DiskChunks, job: DiskJob) -> None:
            ended(self, job)
            say(ENDED, job.space.digest, job.node.key)

        def found_seen(core: Core, tier: DiskTier, *rest: Any) -> None:
            found(core, tier, *rest)
            if tier.recovered:
                say(RECOVERED)

        say = self._say
        Space.put_on_disk, Space.add_cold = put_seen, add_seen  # type: ignore[method-assign]
        DiskChunks._began, DiskChunks._ended = began_seen, ended_seen  # type: ignore[method-assign]
        recovery.found = found_seen


if __name__ == "__main__":
    Witness(Path(os.environ[FOLDER])).watch()
    service.status = checked
    process.main()
