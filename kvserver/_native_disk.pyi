"""The disk part of kvserver._native, in a separate file; at run time there is no module of this name.

As in _native.pyi: numbers are bytes unless the name says otherwise, every call that can take longer than a few
microseconds releases the GIL, bad arguments raise ValueError, errors of the system raise OSError.
"""

from typing import Literal

def xxh3(bytes: bytes) -> int:
    """The 64-bit XXH3 that seals records on disk."""

class DiskFaults:
    """Planned faults of the I/O of stores, for tests.

    Requests are counted from 1, in the order in which they are given to the system, over all stores."""

    def __init__(self) -> None: ...
    def plan(
        self,
        nth: int,
        kind: Literal["error", "short", "ragged", "torn", "flip", "misdirect", "stall"],
        errno: int = 5,
        lasting: bool = False,
    ) -> None:
        """Plans a fault for the nth request; with `lasting` also for all after it.

        error: fails with errno, nothing is done. short: half of it is done and reported. ragged: it reports a stop in
        the middle of a block. torn: half of it is done, and success is reported (a read: of a write). flip: one bit is
        wrong. misdirect: it goes one block further. stall: nothing happens before release().

        Payloads whose offset, length or memory is no whole number of blocks are refused with EINVAL, as by O_DIRECT."""
    def release(self) -> None:
        """Ends all stalls, also planned ones."""
    @property
    def requests(self) -> int:
        """Number of requests so far."""
    @property
    def stalled(self) -> int:
        """Number of requests that wait for release()."""
    def record(self) -> None:
        """Starts recording events for trace()."""
    def trace(self) -> list[tuple[Literal["begin", "end", "flush"], int, Literal["payloads", "headers"], int, bytes]]:
        """The recorded events of writes: (event, request, file, offset, bytes).

        "begin" has file, offset and bytes. "end": the write was completed with success. "flush": all writes that had
        ended are durable."""

class DiskStore:
    """One device: a directory with two preallocated files, for payloads and for headers, which have equal segments.

    docs/disk-format.md describes the format, csrc/disk/store.h is the manual.

    A segment serves extents of one size at a time. An *extent* is named by its offset, like a slot of the arena:
    segment * segment_bytes + position * extent_bytes. The caller decides which extents are used. A write with another
    extent_bytes than its segment's ends all records of that segment.

    A record is RECORD_BYTES packed little-endian, a Ledger's record and 16 bytes:
    arena_offset i64 | namespace 32s | key 32s | parent 32s | group u16 | shard u16 | payload_bytes u32 |
    tenant u32 | extent_bytes / SLOT_ALIGN u32 | generation u64 | sum u64 | extent i64 | device u32 | stored_s u32
    arena_offset: -1 if there is none. sum: recover() gives NO_DIGEST, and no order needs it. stored_s: time of the
    write in seconds since 1970, set by the engine.
    """

    RECORD_BYTES: int  # 152
    FORMAT: int
    """Version of the format on disk."""
    FILE: str
    HEADERS: str
    """FILE and HEADERS are the names of the files of payloads and of headers. Other files are left alone."""

    @staticmethod
    def extents_per_segment(segment_bytes: int, extent_bytes: int) -> int:
        """Extents in one segment; 0: not even one fits.

        A 64th of the segment is its table, with 256 bytes for each extent and 256 more. That limits the number of
        extents smaller than 16 KiB."""
    def __init__(
        self,
        directory: str,
        *,
        device: int,
        capacity_bytes: int,
        segment_bytes: int,
        fingerprint: bytes,
        faults: DiskFaults | None = None,
    ) -> None:
        """Opens the store, or creates it in an existing directory.

        device: its number in records, below 64. capacity_bytes: upper bound of the file; a rest that is no whole
        segment stays unused. A store of another capacity grows, or loses its last segments. fingerprint: 32 bytes; only
        an equal one may open the store again. A store of an older format is emptied and used again.

        ValueError with a code in front: "disk-locked" (another process has it), "disk-foreign" (another fingerprint,
        a newer format or another segment_bytes, or damaged), "disk-unknown" (a file of that name is no store of ours),
        "disk-owner" (it belongs to another user, or others may read or write it),
        "disk-size" (not one segment, or impossible), "disk-filesystem" (it cannot preallocate). OSError: ENOSPC
        (nothing is left behind then), EROFS, EACCES, ENOENT and others."""
    @staticmethod
    def open_to_read(directory: str, *, device: int, fingerprint: bytes, alone: bool = True) -> "DiskStore":
        """Opens a store for reading, with its own sizes. Nothing is made, resized or written.

        Missing parts of a file count as unreadable, or read as SHORT. alone: locks the store, so that no server changes
        it meanwhile. Otherwise recover() returns each record as it was when its header was read, and records that are
        being written may count as damaged. Raises as above; "disk-foreign" also if one of both files is missing or
        empty, or of an older format."""
    @property
    def device(self) -> int: ...
    @property
    def segments(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int:
        """Bytes of both files, all of them preallocated."""
    @property
    def created(self) -> bool:
        """Whether the store is new, so that there is nothing to recover."""
    @property
    def emptied_format(self) -> int:
        """Format of an older release whose records were dropped when the store was opened; 0: none were."""
    @property
    def segments_cut(self) -> int:
        """Number of segments of which one file had lost its part when the store was opened. Their records are gone.

        0 for a store that was resized properly, which keeps both files alike."""
    @property
    def direct(self) -> bool:
        """Whether O_DIRECT works. Otherwise I/O goes through the page cache, which costs memory and copies; log it."""
    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and values for /status: file, id, direct, ..."""
    def recover(self, engine: Literal["auto", "uring", "threads"] = "auto") -> bytes:
        """Reads all valid records, ascending by extent, and waits for that. Must come before an engine uses the store.

        Reads 256 bytes for each record and each segment. Records that cannot be read are left out and counted; raises
        OSError when none can be. engine: as in DiskEngine."""
    @property
    def damaged(self) -> int:
        """Number of headers and labels that recover() found neither valid, nor empty, nor of an earlier use."""
    @property
    def unreadable(self) -> int:
        """Number of headers and labels that recover() could not read."""
    def flush(self) -> None:
        """Makes all reported writes durable (fdatasync) and waits: they survive a crash of the kernel and a power cut.

        Without it, the kernel writes headers within half a minute. The end of the process never needs it."""
    def close(self) -> None:
        """Closes the store and releases its lock. Close its engine before."""

class RecoveryOrder:
    """Records in the order in which an index can insert them.

    The records of a chunk come together, the newest first. A chunk comes after its parent, and its descendants follow
    before any other chunk. Chunks whose parent has no record come as well, as heads."""

    def __init__(self, found: list[bytes], *, chunk_most: int) -> None:
        """Sorts copies of the records. Takes a second for some two million.

        found: the results of recover() of each device. A chunk has at most its chunk_most newest records."""
    @property
    def records(self) -> int: ...
    @property
    def namespaces(self) -> dict[bytes, int]:
        """Namespaces that have records, ascending, each with the newest generation of its records."""
    def next(self, most: int) -> bytes:
        """The records of the next whole chunks, `most` at most, but of one chunk at least. Empty at the end."""

class DiskEngine:
    """Copies records between the arena and the extents of stores, with one thread per device and `sum_threads` for
    the sums of payloads (docs/digest.md).

    Reads go before writes and withdrawals, except for one write in nine. Each kind is served in order within a segment.

    Each submitted item completes exactly once, in any order. Until then its slot and its extent are in use. A cancelled
    item keeps them too, while the device holds its I/O."""

    COMPLETION_BYTES: int
    """Size of a packed completion (48): job u64 | item u32 | status u16 | errno u16 | payload_bytes u64 | wait_ns u64 |
    io_ns u64 | sum u64. item: index in the submitted list. wait_ns: before its first I/O, io_ns: from then on. sum:
    of a payload that was read, else NO_DIGEST."""
    DONE: int  # 0  write: payload and header are on the device. read: the bytes are right. withdraw: not found again
    IO_ERROR: int  # 1  the device said errno
    CHECKSUM: int  # 2  read: these are not the bytes that were written. write: not those that the ledger has the sum of
    STALE: int  # 3  read, withdraw: the extent holds no such record (any more)
    SHORT: int  # 4  the file ended
    CANCELLED: int  # 5

    def __init__(
        self,
        *,
        arena_fd: int,
        arena_bytes: int,
        stores: list[DiskStore],
        engine: Literal["auto", "uring", "threads"],
        depth: int,
        sum_threads: int,
        registered_piece_bytes: int = 256 << 20,
        ledger_fd: int = -1,
        ledger_bytes: int = 0,
    ) -> None:
        """Starts the threads. Call recover() before on each store that was not created. A store has one engine at a
        time, which keeps it open.

        depth: payloads under way at a device. registered_piece_bytes: size of the arena's pieces that are registered
        with io_uring; slots that cross two pieces are copied all the same. ledger_fd, ledger_bytes: the arena's ledger
        and the arena_bytes for which it was made; without it any bytes are written. engine: "auto" takes io_uring where
        the system allows it; `backend` has the choice and the reason. Raises ValueError("disk-engine: ...") if "uring"
        is not available."""
    @property
    def backend(self) -> str:
        """Description of the I/O, such as "io_uring, depth 32, O_DIRECT" or
        "41 threads (io_uring: Operation not permitted), ..."."""
    @property
    def eventfd(self) -> int:
        """Readable while completions wait; read it to reset, then drain completions()."""
    def arena_ready(self, bytes: int) -> None:
        """The first `bytes` of the arena are touched: io_uring may register them, if memlock allows."""
    @property
    def registered_bytes(self) -> int:
        """Bytes of the arena registered with io_uring, as far as memlock allowed; the minimum over the devices."""
    def submit(self, job: int, kind: Literal["write", "read", "withdraw"], records: bytes) -> None:
        """Submits a job of several records.

        write: copies the slot at arena_offset to the extent; the extent's old record is withdrawn before. The ledger's
        entry of the slot is read in this call. read: copies the extent to the slot, if it holds exactly this record
        (namespace, key, group, shard, generation, payload_bytes). withdraw: a later recover() does not find the record
        any more.

        Raises ValueError, without a completion, for an unknown device, an extent or slot out of range or not aligned, a
        payload larger than the extent or empty, a generation of 0, a job number in use, or more than a million items
        under way."""
    def cancel(self, job: int) -> None:
        """Cancels a job: items that have not begun complete as CANCELLED at once, the others as usual.

        An unknown job is no error."""
    def completions(self, most: int) -> bytes:
        """The next completions, packed, `most` at most."""
    def close(self) -> None:
        """Cancels items that have not begun, waits for the others, and joins the threads.

        completions() and eventfd may still be used. A device that never answers blocks this call: end the process
        instead."""
