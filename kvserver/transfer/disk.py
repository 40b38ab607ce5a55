"""The door to the native disk engine: stores that are opened, and completions as values."""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from kvserver.transfer.native import DiskEngine, DiskStore
from kvserver.wire.orders import Fault

FINGERPRINT = hashlib.sha256(b"kvserver disk records 1").digest()
"""Version of the meaning of a record. Namespaces of the records tell models, shapes and chunk sizes apart."""
Engine = Literal["auto", "uring", "threads"]
COMPLETION = struct.Struct("<QIHHQQQQ")
assert COMPLETION.size == DiskEngine.COMPLETION_BYTES
FAULTS: dict[int, Fault] = {
    DiskEngine.IO_ERROR: "io",
    DiskEngine.CHECKSUM: "checksum",
    DiskEngine.STALE: "stale",
    DiskEngine.SHORT: "short",
    DiskEngine.CANCELLED: "cancelled",
}


class Completion(NamedTuple):
    """The end of one record of a job."""

    job: int
    item: int
    fault: Fault | None
    errno: int
    io_ns: int
    sum: int
    """Sum of a payload that was read, else NO_SUM."""


class Unusable(Exception):
    """A device that cannot be opened: why, with its path."""


def open_store(
    directory: str, *, device: int, capacity_bytes: int, segment_bytes: int, engine: Engine = "auto"
) -> tuple[DiskStore, bytes]:
    """A device, opened or made, and the records on it. Raises Unusable."""
    with _unusable():
        store = DiskStore(
            directory,
            device=device,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            fingerprint=FINGERPRINT,
        )
        return store, b"" if store.created else store.recover(engine)


def open_to_read(directory: str, *, device: int, alone: bool) -> tuple[DiskStore, bytes]:
    """A device as it is, and the records on it; nothing there is changed. alone: locked, so that no server changes it
    either; otherwise one may be at work there. Raises Unusable."""
    with _unusable():
        store = DiskStore.open_to_read(directory, device=device, fingerprint=FINGERPRINT, alone=alone)
        return store, store.recover()


@contextmanager
def _unusable() -> Iterator[None]:
    try:
        yield
    except ValueError as refusal:
        raise Unusable(str(refusal)) from refusal
    except OSError as problem:
        raise Unusable(problem.strerror or str(problem)) from problem


def completions(engine: DiskEngine, most: int) -> Iterator[Completion]:
    for job, item, status, errno, _, _, io_ns, sum_ in COMPLETION.iter_unpack(engine.completions(most)):
        yield Completion(job, item, FAULTS.get(status), errno, io_ns, sum_)
