"""The contract of a remote store. The same tests hold every kind of store to it (tests/unit/remote).

All calls block, and may come from any thread. Each ends by its deadline, which the store was opened with, or soon
after; a caller that must not wait longer kills the process. Buffers of a caller are not touched after a call has
returned or raised. A write that failed may have happened all the same.

A store that cannot know whether something is there raises an error; it never answers that nothing is there.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from kvserver.errors import DeviceError
from kvserver.remote.chunk_value import ChunkName, Head, NamespaceName, WrongValue

Problem = Literal["remote-slow", "remote-down", "remote-full", "remote-denied", "remote-refused"]
"""In this order: a deadline has passed, for a dead node looks like a slow one; a node cannot be reached; it answers but
takes no writes; a permission or a password is missing; it does not know what we ask for."""


class StoreError(DeviceError):
    """A call to a store failed. node: which of its nodes, if that is known."""

    def __init__(self, code: Problem, message: str, *, node: str = "") -> None:
        super().__init__(code, f"{node}: {message}" if node else message)
        self.node = node


class Gone(DeviceError):
    """A chunk is not there any more, or another write of it is. The prefix ends here."""


class WrongSource(Exception):
    """A payload that is to be written does not have the digest of its head. Raised where a store takes the payload."""


class Sources(Protocol):
    """Payloads of a chunk on their way to a store, one for each shard of its head."""

    def __iter__(self) -> Iterator[memoryview]:
        """All payloads. Raises WrongSource."""

    def __getitem__(self, index: int) -> memoryview:
        """One payload. Raises WrongSource."""

    def copy_to(self, target: memoryview, index: int) -> None:
        """Copies one payload into memory of its size. Other threads go on meanwhile. Raises WrongSource."""


class Facts(NamedTuple):
    """Facts that a store tells of itself, for people."""

    kind: str
    version: str
    evicts: bool | None
    """Whether it makes room by itself; None if it cannot be found out."""
    warnings: tuple[str, ...] = ()


class Listed(NamedTuple):
    """The name of a value that a store has, and the value's size. Its content was not read."""

    epoch: int
    key: bytes
    ranks: str
    fragment: str
    """Empty: the chunk's head, and what follows it in the same value."""
    bytes: int
    used_s: float | None = None
    """Time of its last use, or of its write where use is not counted, in seconds since 1970. None: not told."""


Cursor = object
"""A place in a namespace's announcements, from the store that is asked with it."""


class Announced(NamedTuple):
    """Announcements of a namespace, the oldest first."""

    batch: bytes
    """Marks (remote/announcement.py)."""
    cursor: Cursor
    """The place behind them."""
    is_all: bool
    """Whether there were no more."""


class Store(Protocol):
    """One remote. It owns its connections; close() ends them."""

    def facts(self) -> Facts:
        """Asks the store for what an operator should know. Raises StoreError."""

    def node_of(self, name: ChunkName) -> str:
        """The node that a chunk belongs to, as far as is known. Chunks of one node fail together. Does not ask it."""

    def nodes(self) -> frozenset[str]:
        """All that node_of() may answer now. Does not ask anybody."""

    def heads(self, names: Sequence[ChunkName], shards: int) -> list[Head | StoreError | WrongValue | None]:
        """Reads the heads of chunks, in at most two round trips, and counts that as use. None: not there.

        shards: how many a head has at most, so that no more is read. A head is given only while all of its fragments
        are there. A name that cannot be answered has its error, and so has a value that is no head of its name; the
        others are answered."""

    def read(self, name: ChunkName, head: Head, targets: Sequence[memoryview | None]) -> list[int] | None:
        """Reads payloads of a chunk into the targets, one for each shard of the head, of its size; None: not wanted.

        Raises Gone or StoreError. Targets may then have any bytes. Payloads are not verified: that is done by the
        head's digests. Returns the sum of each payload as its bytes came, NO_SUM where none was wanted; None: this
        store sums nothing."""

    def write(self, name: ChunkName, head: Head, sources: Sources) -> bool:
        """Writes a chunk, its head last. False: another write of this chunk is there already. Raises StoreError.

        All sources are taken before the head is written."""

    def touch(self, name: ChunkName, head: Head) -> None:
        """Counts as use of a whole chunk: a store drops what was not used for longest. Raises StoreError."""

    def drop(self, name: ChunkName, head: Head | None) -> None:
        """Removes a chunk; without its head the fragments stay until the store evicts them. Raises StoreError."""

    def drop_listed(self, of: NamespaceName, values: Sequence[Listed]) -> None:
        """Removes values that values() has given, in as few calls as the store can. Raises StoreError."""

    def notes(self, names: Sequence[NamespaceName]) -> list[bytes | None]:
        """Reads the notes of namespaces in one round trip. Raises StoreError."""

    def make_note(self, name: NamespaceName, note: bytes) -> bool:
        """Writes a note where there is none. False: there is one. Raises StoreError."""

    def replace_note(self, name: NamespaceName, note: bytes) -> None:
        """Writes a note, whatever is there. Raises StoreError."""

    def announce(self, of: NamespaceName, epoch: int, batch: bytes) -> None:
        """Appends marks to the announcements of a namespace. Old ones make room for them. Raises StoreError."""

    def announced(self, of: NamespaceName, epoch: int, after: Cursor | None) -> Announced:
        """Reads announcements behind a place, at most about a MiB; None: from the beginning. Raises StoreError.

        Some may be lost, and what a server has told it reads itself."""

    def drop_announced(self, of: NamespaceName, epoch: int) -> None:
        """Removes all announcements of an epoch. Raises StoreError."""

    def look(self, name: ChunkName) -> Head | None:
        """Reads one head and changes nothing: it does not count as use, and fragments may be missing. None: not there.

        Raises StoreError, or WrongValue for a value that is no head of that name."""

    def namespaces(self, tenant: str) -> Iterator[list[NamespaceName]]:
        """Lists the namespaces of a tenant that have a note, for people: no server needs it.

        One list for each call to the store, also an empty one, so that the caller can stop at any time. The next call
        begins when the next list is asked for. A name may come twice, and one that is written meanwhile may be left
        out. Raises StoreError: "remote-denied" if the user may not list names."""

    def values(self, of: NamespaceName) -> Iterator[list[Listed]]:
        """Lists what a namespace has, of all epochs, in the same way. Notes are left out."""

    def close(self) -> None:
        """Ends all connections. Calls under way end with an error."""
