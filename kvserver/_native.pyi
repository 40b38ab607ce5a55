"""The data plane. Each class's C++ header in csrc/ is its manual; this file is what Python may rely on.

Numbers are bytes unless the name says otherwise. Every call that can take longer than a few microseconds releases the
GIL. Bad arguments raise ValueError naming what was expected and what came; the system's refusals raise OSError.
"""

from typing import Literal

BUILD: str
"""Compiler, processor and kind of copies, for the log and `kvserver doctor`."""

SLOT_ALIGN: int
"""4096: slots start and end on it, in arena and ledger alike."""

# ---------------------------------------------------------------- shared memory

def create_memfd(name: str, bytes: int, huge_page_bytes: int = 0, sealed: bool = True) -> int:
    """A memfd of that size; sealed = it can neither shrink, grow nor be sealed further. Caller owns the descriptor."""

def free_huge_pages(huge_page_bytes: int) -> int:
    """Huge pages of that size that are reserved and free on this machine."""

class ArenaGrower:
    """Touches an arena slab by slab from the front, in parallel, in the background (MADV_POPULATE_WRITE, after mbind
    when numa_node >= 0). Content that is there already is kept. Running out of memory stops growth, not the process."""

    def __init__(self, fd: int, arena_bytes: int, slab_bytes: int, threads: int, numa_node: int = -1) -> None: ...
    @property
    def eventfd(self) -> int:
        """Readable when slabs_ready or problem changed; read it to reset."""
    @property
    def slabs_ready(self) -> int: ...
    @property
    def problem(self) -> str: ...
    def close(self) -> None:
        """Stops and joins the threads, unmaps. Every class here: closing twice is allowed, use afterwards raises
        ValueError."""

# ---------------------------------------------------------------- ledger

class Ledger:
    """One checksummed 128-byte entry for each place where a slot can start (arena_offset // SLOT_ALIGN), in a sparse
    memfd, and a table of namespace documents. One writer. Entries are published by a release store of their state
    after everything else, and withdrawn by a release store before anything else, so a writer that is killed at any
    instruction leaves either the old truth or none.

    A record is RECORD_BYTES packed little-endian:
    arena_offset i64 | namespace 32s | key 32s | parent 32s | group u16 | shard u16 | payload_bytes u32 |
    tenant u32 | slot_bytes / SLOT_ALIGN u32 | generation u64
    """

    RECORD_BYTES: int  # 128
    NAMESPACES_MAX: int  # 256
    DOCUMENT_BYTES_MAX: int  # 65536

    @staticmethod
    def file_bytes(arena_bytes: int) -> int:
        """Size that the ledger's descriptor must have for an arena."""
    def __init__(self, fd: int, arena_bytes: int) -> None:
        """Maps the ledger. All zero = a new one: the header (magic, format, arena_bytes, checksum) is written. A
        header that disagrees raises ValueError; nothing is changed then."""
    def seal(self, records: bytes) -> None:
        """Publishes records. A place that is sealed already is an error (ValueError): clear first."""
    def clear(self, arena_offsets: bytes) -> None:
        """Withdraws the entries at these packed int64 offsets; free ones are left."""
    def scan(self) -> bytes:
        """All sealed and valid entries as packed records, ascending by offset. Skips holes of the sparse file.
        Entries with a bad checksum or out of range are withdrawn and counted."""
    @property
    def damaged(self) -> int:
        """Entries and namespace documents that scan() and namespaces() dropped."""
    def put_namespace(self, index: int, document: bytes) -> None: ...
    def drop_namespace(self, index: int) -> None: ...
    def forget_pages(self) -> None:
        """Gives this process's page tables of the file back; the file keeps its content. Bounds the writer's resident
        memory; the next access to a page costs a minor fault."""
    def namespaces(self) -> list[tuple[int, bytes]]: ...
    def close(self) -> None: ...

# ---------------------------------------------------------------- job state words

FREE: int  # 0
LIVE: int  # 1  the client has sent the job
SUBMITTED: int  # 2  the mover works on it
DONE: int  # 3  every byte is in place (a store: its bytes were final while the client still held the blocks)
ABANDONED: int  # 4  the client gave it up; a store will never be sealed, a retrieve never began
FAILED: int  # 5  ended without success, and nothing of it moves any more

class Board:
    """The client's side of a session's job words: 64-bit atomics (generation << 8 | state) in a shared memfd."""

    def __init__(self, fd: int, words: int) -> None:
        """Maps the board (its size must fit `words`); does not own the descriptor."""
    def begin(self, word: int) -> int:
        """Makes a word that is not LIVE or SUBMITTED live under its next generation; returns that generation.
        ValueError when it is in use."""
    def state(self, word: int) -> tuple[int, int]:
        """(generation, state)."""
    def abandon_store(self, word: int, generation: int) -> int:
        """LIVE or SUBMITTED → ABANDONED; returns the state afterwards (ValueError if the word has another generation).
        ABANDONED, FAILED or DONE all mean that the
        source blocks may be reused; only DONE means stored."""
    def abandon_retrieve(self, word: int, generation: int) -> int:
        """LIVE → ABANDONED; returns the state afterwards. SUBMITTED means that the blocks are still being written
        and must stay untouched until the state changes or the mover is gone."""
    def close(self) -> None: ...

# ---------------------------------------------------------------- copies

Runs = list[tuple[int, int, int, int, int, int]]
"""RegionRun fields in order: buffer, offset, regions, region_stride, block_stride, page_bytes."""
Groups = list[tuple[int, int, Runs]]
"""(blocks_per_chunk, blocks, runs) of each group."""
CopyGroups = list[tuple[int, int, bytes, bytes]]
"""CopyGroup fields in order: group, first_block, block_ids (packed int32), slots (packed int64)."""
Completion = tuple[int, Literal["done", "abandoned", "failed", "invalid", "unmapped"], int, int, str, str]
"""(job or cache, status, bytes, copy_ns, code, message)."""

def plan_copies(
    groups: Groups, copy_groups: CopyGroups, arena_bytes: int, kind: Literal["store", "retrieve"]
) -> list[tuple[int, int, int, int]]:
    """The merged copies of one job as (buffer, buffer_offset, arena_offset, bytes), in the order of execution.

    A shard's bytes in its slot are [run][region][block of the chunk][page_bytes]. Order: copy groups, their runs, then
    regions and blocks, the one with the larger stride outside; blocks of a store by id, of a retrieve in prefix order.
    Neighbours that are adjacent on both sides are one copy. ValueError("block-range: ...") or
    ("block-duplicate: ...") for ids out of range, negative, or twice; ("slots: ...") when the slots do not fit the
    blocks or the arena."""

def plan_pieces(
    groups: Groups,
    copy_groups: CopyGroups,
    arena_bytes: int,
    kind: Literal["store", "retrieve"],
    bytes_max: int,
    pages_max: int,
) -> list[list[tuple[int, int, int, int]]]:
    """The copies of plan_copies in the pieces that workers take one by one: of at most bytes_max bytes, out of at most
    pages_max pages."""

class CopyEngine:
    """Host copies between registered KV pools and the arena by worker threads. Retrieves run before stores.

    A job: the word goes live → submitted (else: completion "abandoned"), the plan is made and checked (else word
    FAILED, completion "invalid", no byte moved), the bytes move, and the word goes submitted → done. A store whose
    word is ABANDONED by then completes as "abandoned". A pool that was truncated under a copy (SIGBUS) ends the job as
    "failed" with code "pool-shrunk"; the process lives on. Each submitted job completes exactly once; `bytes` of its
    completion counts what was moved, whatever became of the job."""

    def __init__(self, arena_fd: int, arena_bytes: int, threads: int) -> None: ...
    @property
    def backend(self) -> str:
        """For example "host non-temporal, 2 threads"."""
    @property
    def eventfd(self) -> int:
        """Readable while completions wait; read it to reset, then drain completions()."""
    def map_board(self, session: int, fd: int, words: int) -> None:
        """ValueError("descriptor-seal: ...") when the board is not sealed against shrinking."""
    def drop_board(self, session: int) -> None:
        """ValueError while a cache of the session is mapped."""
    def map_cache(self, cache: int, session: int, fds: list[int], buffer_bytes: list[int], groups: Groups) -> None:
        """Maps one pool per descriptor (the descriptors stay the caller's). ValueError("descriptor-size: ...") when a
        file is smaller than buffer_bytes, ("descriptor-seal: ...") when it is sealed against writing or not a shared
        memory file, ("layout: ...") when a page leaves its buffer."""
    def unmap_cache(self, cache: int) -> None:
        """After the cache's last job: unmaps and completes with status "unmapped"."""
    def submit(
        self, job: int, kind: Literal["store", "retrieve"], cache: int, word: int, generation: int, groups: CopyGroups
    ) -> None:
        """ValueError, and no completion: an unknown or leaving cache, a word that is not on the session's board, a job
        number in use, ids or slots that are not whole numbers. Everything else that is wrong completes as "invalid"."""
    def cancel(self, job: int) -> None:
        """Ends a job soon: no piece of it that has not begun is begun. It completes as "abandoned" and its word becomes
        FAILED, unless its last pieces were under way: then it completes as usual."""
    def completions(self, most: int) -> list[Completion]: ...
    def close(self) -> None:
        """Cancels jobs that have not begun, finishes running ones, joins the threads, unmaps everything. completions()
        and eventfd may still be used."""

# ---------------------------------------------------------------- bytes that are a function of a seed

def fill_pattern(fd: int, offset: int, bytes: int, seed: int) -> None:
    """Writes the byte stream of `seed` (64-bit) into a file that is mapped for the call."""

class Pattern:
    """A mapped file for filling and checking many ranges: ranges are packed (offset u64, bytes u64, seed u64)."""

    def __init__(self, fd: int, bytes: int) -> None: ...
    def fill(self, ranges: bytes) -> None: ...
    def wrong(self, ranges: bytes) -> int:
        """How many bytes differ from what fill would write."""
    def close(self) -> None: ...

def copy_seconds(source_fd: int, target_fd: int, bytes: int, threads: int, non_temporal: bool) -> float:
    """Seconds for one contiguous copy between files that are mapped and touched beforehand: the ceiling."""
