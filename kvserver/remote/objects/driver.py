"""The contract of a driver: what an object store or a plug-in must offer. `kvserver remote contract` tests one.

A driver keeps named objects. A name has a-z, 0-9, ".", "-" and "_" in pieces with "/" between them, 300 characters at
most. An object is there as a whole or not at all, and a reader sees all bytes of one write of it.

All calls block, and may come from any thread, also several at once. The steps of one list may come from different
threads. Each call ends within `within_s` seconds, or soon after.
Buffers of a caller are not touched after a call has returned or raised. A write that failed may have happened all the
same. A driver that cannot know whether something is there raises an error; it never answers that nothing is there.

Every call may raise StoreError. What else is raised counts as "remote-slow" (TimeoutError), "remote-denied"
(PermissionError) or "remote-down", so that a store that fails again and again is left alone.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvserver.remote.store import Facts, StoreError

DigestSum = tuple[int, int]
"""The sum of some bytes of a payload (docs/digest.md), and how many they are."""


class Start(NamedTuple):
    """The beginning of an object."""

    beginning: bytes | memoryview
    bytes: int
    """The length of the whole object."""


class Named(NamedTuple):
    """An object that a list has."""

    name: str
    bytes: int
    written_s: float
    """Time of its last write by the store's clock, in seconds since 1970."""


class Driver(Protocol):
    """Access to one place with objects, such as a bucket. It owns its connections; close() ends them."""

    def facts(self) -> Facts:
        """Tells what an operator should know. Asks the store only if that is needed."""

    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        """Reads the beginnings of objects, so many bytes or what an object has. None: not there.

        The more of them are asked for at a time the better. One that cannot be answered has its error; the others are
        answered."""

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        """Fills each piece with the bytes from its offset, all of them from one write. Pieces come in the order of
        their offsets. False: the object is not there, or is too short, or another write of it came between."""

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        """Writes an object of these pieces unless there is one. False: there is one. Of two writers one gets True."""

    def replace(self, name: str, value: bytes, *, within_s: float) -> None:
        """Writes an object, whatever is there."""

    def touch(self, name: str, *, within_s: float) -> None:
        """Counts as use of an object, if the store drops what was not used for longest. One that is gone is no error.

        Nothing depends on it: a store that evicts by age alone does nothing."""

    def remove(self, names: Sequence[str], *, within_s: float) -> None:
        """Removes objects. One that is not there is no error."""

    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        """Lists all objects whose names begin so; it ends with "/". One list for each call to the store, which takes
        `within_s` at most. The next call begins when the next list is asked for."""

    def close(self) -> None:
        """Ends all connections."""


@runtime_checkable
class ChunkDriver(Driver, Protocol):
    """A driver that makes chunks faster than objects of which nothing is known. Plug-ins need none of this."""

    def first_pieces(
        self, names: Sequence[str], most_bytes: int, *, within_s: float
    ) -> list[Start | StoreError | None]:
        """As starts(), but a beginning may end with the first piece of which its object was created."""

    def read_summed(
        self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float
    ) -> list[DigestSum] | None:
        """As read(), and returns the sum of each piece, of the bytes that came. None where read() says False."""
