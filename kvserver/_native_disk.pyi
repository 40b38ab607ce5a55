"""The disk part of kvserver._native, in a file of its own; at run time there is no module of this name.

As there: numbers are bytes unless the name says otherwise, every call that can take longer than a few microseconds
releases the GIL, bad arguments raise ValueError, the system's refusals raise OSError.
"""

from typing import Literal

def xxh3(bytes: bytes) -> int:
    """The 64-bit XXH3 that seals records on disk."""

class DiskFaults:
    """What goes wrong with the I/O of the stores that it is given to: for tests. Requests are counted from 1 in the
    order in which they are handed to the system, whatever store they go to."""

    def __init__(self) -> None: ...
    def plan(
        self,
        nth: int,
        kind: Literal["error", "short", "ragged", "torn", "flip", "misdirect", "stall"],
        errno: int = 5,
        lasting: bool = False,
    ) -> None:
        """The nth request, and with `lasting` all after it. error: fails with errno, nothing is done. short: half of it
        is done, and said so. ragged: it says that it stopped in the middle of a block. torn: half of it is done, and
        success is said (a read: of a write). flip: one bit is wrong. misdirect: it goes one block further. stall:
        nothing happens before release().

        Payloads whose offset, length or memory is no whole number of blocks are refused with EINVAL, as by O_DIRECT."""
    def release(self) -> None:
        """Ends all stalls, those that are planned as well."""
    @property
    def requests(self) -> int:
        """How many there were."""
    @property
    def stalled(self) -> int:
        """How many wait for release()."""
    def record(self) -> None:
        """From now on keeps what trace() tells."""
    def trace(self) -> list[tuple[Literal["begin", "end", "flush"], int, Literal["payloads", "headers"], int, bytes]]:
        """(event, request, file, offset, bytes) of writes: "begin" has file, offset and bytes, "end" says that it was
        completed with success, "flush" that all that had ended is durable."""

class DiskStore:
    """One device: a directory with two preallocated files, of payloads and of headers, which have equal segments.
    docs/disk-format.md is its format, csrc/disk/store.h its manual.

    A segment serves extents of one size at a time. An *extent* is named as a slot of the arena is: segment *
    segment_bytes + position * extent_bytes. Which extents are used is the caller's business; a write with another
    extent_bytes than its segment serves ends all records of that segment.

    A record is RECORD_BYTES packed little-endian, a Ledger's record and 16 bytes:
    arena_offset i64 | namespace 32s | key 32s | parent 32s | group u16 | shard u16 | payload_bytes u32 |
    tenant u32 | extent_bytes / SLOT_ALIGN u32 | generation u64 | extent i64 | device u32 | stored_s u32
    arena_offset: -1 where there is none. stored_s: when it was written, seconds since 1970; set by the engine.
    """

    RECORD_BYTES: int  # 144
    FILE: str
    HEADERS: str
    """Names of the files in the directory, of payloads and of headers. All others are left alone."""

    @staticmethod
    def extents_per_segment(segment_bytes: int, extent_bytes: int) -> int:
        """Positions of a segment; 0 = not even one fits. A 64th of the segment is its table: 256 bytes for each of
        them, and 256 more, which limits how many there are of less than 16 KiB."""
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
        """Opens the store, or creates it: the directory must exist. device: its number in records, below 64.
        capacity_bytes: all that the file may take; what is no whole segment stays unused. A store of another capacity
        grows, or loses the segments that are too many. fingerprint: 32 bytes; equal ones may share a store.

        ValueError with a code in front: "disk-locked" (another process has it), "disk-foreign" (another fingerprint,
        format version or segment_bytes, or damaged), "disk-unknown" (a file of that name is no store of ours),
        "disk-owner" (it belongs to another user, or others may read or write it),
        "disk-size" (not one segment, or impossible), "disk-filesystem" (it cannot preallocate). OSError: ENOSPC
        (nothing is left behind then), EROFS, EACCES, ENOENT and others."""
    @staticmethod
    def open_to_read(directory: str, *, device: int, fingerprint: bytes, alone: bool = True) -> "DiskStore":
        """The store as it was left: nothing is made, resized or written, and its sizes are its own. What a file has
        lost counts as unreadable, or reads SHORT. alone: locked, so that no server changes it meanwhile; otherwise
        recover() tells what was there when each header was read, and what is being written may count as damaged.
        Raises as above; "disk-foreign" also where one of both files is missing or empty."""
    @property
    def device(self) -> int: ...
    @property
    def segments(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int:
        """Physical bytes of both files, all of them preallocated."""
    @property
    def created(self) -> bool:
        """It is new: there is nothing to recover."""
    @property
    def segments_cut(self) -> int:
        """Segments of which one file had lost its part when the store was opened; 0 for one that was resized in
        order, which keeps both files alike. What they held is gone."""
    @property
    def direct(self) -> bool:
        """O_DIRECT works. Otherwise the page cache takes part, which costs memory and copies; say so."""
    @property
    def facts(self) -> list[tuple[str, str]]:
        """For /status: file, id, direct, ..."""
    def recover(self, engine: Literal["auto", "uring", "threads"] = "auto") -> bytes:
        """All valid records, ascending by extent; waits. Reads 256 bytes a record and a segment. Must come before
        an engine uses the store. What cannot be read is not found, and counted; OSError when nothing can be.
        engine: as of a DiskEngine."""
    @property
    def damaged(self) -> int:
        """Headers and labels that recover() found to be neither valid, nor empty, nor of an earlier life."""
    @property
    def unreadable(self) -> int:
        """Headers and labels that recover() could not read."""
    def flush(self) -> None:
        """What was reported as written survives a crash of the kernel and a power cut as well (fdatasync); waits.
        Without it the kernel writes headers in its time, within half a minute. The end of the process never needs
        it."""
    def close(self) -> None:
        """After its engine. Lets the lock go."""

class DiskTelling:
    """Records in the order in which an index can take them in: those of a chunk together, newest first; a chunk after
    its parent, and what is below it before anything else. Chunks whose parent has no record come as well, as heads."""

    def __init__(self, found: list[bytes], *, chunk_most: int) -> None:
        """found: what recover() returned, of each device; copied. Of a chunk with more than chunk_most records the
        newest are told. Takes a second for some two million records."""
    @property
    def records(self) -> int: ...
    @property
    def namespaces(self) -> list[tuple[bytes, int]]:
        """Those that have records, and the newest generation of them."""
    def next(self, most: int) -> bytes:
        """The next chunks, whole: as many as have `most` records together, but one at least. Empty at the end."""

class DiskEngine:
    """Moves records between the arena and the extents of stores, by one thread a device and `hash_threads` for
    checksums. Reads go before writes and withdrawals, but for one write in nine; each kind first come first served
    within a segment.

    Each submitted item completes exactly once, in any order. Until then its slot and its extent are in use: also a
    cancelled item keeps them while the device holds its I/O."""

    COMPLETION_BYTES: int
    """40: job u64 | item u32 | status u16 | errno u16 | payload_bytes u64 | wait_ns u64 | io_ns u64. item: its index in
    the submitted list. wait_ns: before its first I/O, io_ns: from then on."""
    DONE: int  # 0  write: payload and header are on the device. read: the bytes are right. withdraw: not found again
    IO_ERROR: int  # 1  the device said errno
    CHECKSUM: int  # 2  the bytes that were read are not those that were written
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
        hash_threads: int,
        registered_piece_bytes: int = 256 << 20,
    ) -> None:
        """depth: payloads under way at a device. registered_piece_bytes: of the arena, what io_uring is told at once;
        what lies in two pieces is moved all the same. "auto" takes io_uring where the system allows it; `backend` says
        what it is and why; ValueError("disk-engine: ...") when "uring" is not to be had. Keeps the stores open;
        recover() was called on each that was not created. A store has one engine at a time."""
    @property
    def backend(self) -> str:
        """For example "io_uring, depth 32, O_DIRECT" or "41 threads (io_uring: Operation not permitted), ..."."""
    @property
    def eventfd(self) -> int:
        """Readable while completions wait; read it to reset, then drain completions()."""
    def arena_ready(self, bytes: int) -> None:
        """The first `bytes` of the arena are real: io_uring may register them, when memlock allows."""
    @property
    def registered_bytes(self) -> int:
        """Of the arena, with io_uring: what memlock allowed so far, at the device that has least."""
    def submit(self, job: int, kind: Literal["write", "read", "withdraw"], records: bytes) -> None:
        """write: the slot at arena_offset to the extent; what the extent held is withdrawn before. read: the extent to
        the slot, if it holds exactly this record (namespace, key, group, shard, generation, payload_bytes). withdraw:
        the record is not found by a later recover() any more.

        ValueError, and no completion: an unknown device, an extent or slot out of range or not aligned, a payload
        larger than the extent or empty, a generation of 0, a job number in use, more than a million items under
        way."""
    def cancel(self, job: int) -> None:
        """Items that have not begun complete as CANCELLED at once; the others as usual. Unknown jobs are no error."""
    def completions(self, most: int) -> bytes:
        """At most `most`, packed."""
    def close(self) -> None:
        """Cancels what has not begun, waits for the rest, joins. completions() and eventfd may still be used. A device
        that never answers keeps it waiting: end the process instead."""
