"""The data plane. Each class's C++ header in csrc/ is its manual; this file is what Python may rely on.

Numbers are bytes unless the name says otherwise. Every call that can take longer than a few microseconds releases the
GIL. Bad arguments raise ValueError naming what was expected and what came; the system's refusals raise OSError.
"""

from collections.abc import Sequence
from typing import Literal

from kvserver._native_disk import DiskEngine as DiskEngine
from kvserver._native_disk import DiskFaults as DiskFaults
from kvserver._native_disk import DiskStore as DiskStore
from kvserver._native_disk import DiskTelling as DiskTelling
from kvserver._native_disk import xxh3 as xxh3

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
    where there are numa_nodes: one is preferred, several have its pages in turn). Content that is there already is
    kept. Running out of memory stops growth, not the process."""

    def __init__(
        self, fd: int, arena_bytes: int, slab_bytes: int, threads: int, numa_nodes: Sequence[int] = ()
    ) -> None: ...
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

# ---------------------------------------------------------------- names of chunks

def sha256(bytes: bytes, portable: bool = False) -> bytes:
    """By the processor's instructions for it, where it has them. portable: without, for tests."""

def chain_keys(token_ids: list[int], begin: int, end: int, chunk_tokens: int, before: bytes) -> bytes:
    """The chain of client/kvclient/keys.py over the whole chunks of token_ids[begin:end], by SHA-256; packed."""

def chain_keys_of_packed(tokens: bytes, chunk_tokens: int, before: bytes) -> bytes:
    """The same of tokens that are packed as little-endian u32."""

def block_hash_keys(block_hashes: list[bytes], first: int, stride: int, head: bytes) -> bytes:
    """SHA-256 of head || block_hashes[i] for i = first, first + stride, ..., or without a head the hashes themselves;
    packed."""

class Tokens:
    """A prompt of `total` tokens that is copied piece by piece."""

    def __init__(self, total: int) -> None: ...
    def add(self, token_ids: list[int], most: int) -> int:
        """Copies those that follow, so many at most; returns how many are left. token_ids: of the whole prompt."""

class Naming:
    """The keys of one prompt, now or soon."""

    @property
    def ready(self) -> bool: ...
    def wait(self, seconds: float) -> bool:
        """Whether it is ready within that time. Without the GIL; hashes nothing itself."""
    def keys(self) -> bytes:
        """What chain_keys() returns. Hashes here what the thread has not begun, else waits for it."""

class Namer:
    """Owns a thread, from the first prompt on."""

    def __init__(self) -> None: ...
    def name(self, tokens: Tokens, chunk_tokens: int, before: bytes) -> Naming:
        """chain_keys() in that thread. All tokens must have been added; they are taken."""

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
    def put_sums(self, arena: int, arena_bytes: int, threads: int) -> tuple[int, int, int]:
        """When nobody writes to the arena any more: folds the sum of each sealed payload into its entry. No scan()
        takes such an entry for sealed until compare_sums() has found its bytes unchanged. arena: a descriptor of it.
        Returns slots and bytes that were summed, and slots that could not be read and are withdrawn."""
    def compare_sums(self, arena: int, arena_bytes: int, threads: int) -> tuple[int, int, int]:
        """The other end of put_sums(). Returns slots and bytes that are unchanged and sealed again, and slots that are
        not: the next scan() drops and counts them."""
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
JobMode = Literal["direct", "staged", "server-gather"]
Status = Literal["done", "abandoned", "failed", "invalid", "unmapped", "mapped", "refused", "broken"]
Completion = tuple[int, Status, int, int, str, str, JobMode]
"""(job or cache, status, bytes, copy_ns, code, message, mode of a job). The last three statuses: DeviceEngine's."""

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

# ---------------------------------------------------------------- GPU drivers, devices, kernels

Vendor = Literal["cuda", "rocm"]
"""`library` below: path of the vendor's library; "" = the copy that is mapped already, else a search."""

class DriverError(RuntimeError):
    """A driver's call failed: "cuMemAlloc_v2: CUDA_ERROR_ILLEGAL_ADDRESS (700)"."""

class DriverAbsent(RuntimeError):
    """No library, symbols missing (named), or no device; says what was looked for."""

def probe_driver(vendor: Vendor, library: str = "") -> tuple[str, int, int, list[str], list[str], str]:
    """(library, version, devices, missing required symbols, missing optional ones, problem); problem "" = usable.
    Never raises for what the machine lacks. Starts the driver in this process."""

def choose_vendor(kind: Literal["cuda", "rocm", "auto"], library: str = "") -> Vendor:
    """For "auto" the only vendor with devices. DriverAbsent when there is none, or both."""

def mapped_vendors() -> list[Vendor]:
    """Whose library this process has mapped already."""

def device_facts(vendor: Vendor, library: str, ordinal: int) -> tuple[str, str, str, str, int]:
    """(id, name, architecture, PCI bus id, memory in bytes). The id is the same in every process."""

def device_ordinal(vendor: Vendor, library: str, id: str) -> int:
    """-1: this process sees no such device."""

def ipc_mode(vendor: Vendor) -> Literal["", "legacy", "dmabuf"]:
    """How this process makes and opens IPC handles; both sides must agree."""

def kfd_arch(topology: str, pci: str) -> str:
    """An AMD device's architecture from Linux's topology directory; "" when it does not say."""

def kernel_report(
    vendor: Vendor, library: str, ordinal: int, rtc_library: str = "", cache_dir: str = ""
) -> tuple[str, str, str]:
    """Loads the kernels once: (provider, architecture, why the run-time compiler was not used or "").
    ValueError("kernels: ...") when they cannot be had."""

# ---------------------------------------------------------------- GPU: the client's part

PIECES_MAX: int
"""Of one segment."""
PIECE_BYTES_MAX: int

Stretch = tuple[int, int, bytes, int, int, int]
"""(group, first_in_chunk, block_ids (packed int32), staging offset, begin, end): shard bytes [begin, end)."""

def pack_stretches(stretches: list[Stretch]) -> bytes:
    """A segment's list as it lies in the ring."""

def expand_stretches(
    groups: Groups, list: bytes, segment_bytes: int, bases: list[int]
) -> list[tuple[int, int, int]] | None:
    """The pieces of a segment's list: (device address, staging offset, bytes). None: more than PIECES_MAX.
    ValueError("staging-list: ...") when the list does not fit layout or segment."""

def pieces_at_most(groups: Groups, group: int, begin: int, end: int) -> int:
    """No expansion of these shard bytes has more pieces."""

class RingOwner:
    """The client's side of a staging ring; csrc/gpu/staging/ring.h is the manual."""

    def __init__(self, segment_bytes: int) -> None: ...
    @property
    def fd(self) -> int: ...
    def take(self, lane: int) -> tuple[int, int, int, bytes] | None:
        """(segment, sequence, job, list) of a segment that was asked for; None when there is none."""
    def done(self, lane: int, segment: int, sequence: int) -> None: ...
    def fault(self, lane: int, segment: int, sequence: int, code: int) -> None: ...
    def sleep(self, timeout_ms: int) -> None: ...
    def ring_bell(self) -> None: ...

class RingPeer:
    """The mover's side of a staging ring. States: 0 empty, 1 asked, 2 taken, 3 done, 4 fault."""

    def __init__(self, fd: int, segment_bytes: int) -> None:
        """ValueError("staging: ...") when it is no ring of that segment size; the descriptor stays the caller's."""
    def ask(self, lane: int, segment: int, job: int, stretches: list[Stretch]) -> bool: ...
    def state(self, lane: int, segment: int) -> int: ...
    def withdraw(self, lane: int, segment: int) -> bool: ...
    def recycle(self, lane: int, segment: int) -> None: ...
    def fault(self, lane: int, segment: int) -> int: ...

def export_memory(vendor: str, library: str, pointer: int, bytes: int) -> tuple[str, int, int, int, bytes]:
    """(device id, ordinal, base, bytes, IPC handle) of the allocation that holds the memory. ValueError("device: ..."),
    ("range: ...") or ("not-exportable: ..."); DriverAbsent."""

class StagedCopier:
    """The client's thread that gathers into staging and scatters out of it (csrc/gpu/staging/staged_copier.h)."""

    def __init__(
        self, vendor: str, library: str, ordinal: int, segment_bytes: int, rtc_library: str, cache_dir: str
    ) -> None:
        """Takes 16 segments of device memory, of less than segment_bytes when that is not to be had. ValueError
        ("staging-memory: ..."), ("kernels: ..."); DriverError."""
    @property
    def handle(self) -> bytes:
        """IPC handle of the staging memory."""
    @property
    def segment_bytes(self) -> int: ...
    @property
    def kernels(self) -> tuple[str, str, str]:
        """(provider, arch, note), as kernel_report returns them."""
    def begin_ring(self, groups: Groups, bases: list[int], buffer_bytes: list[int]) -> int:
        """The descriptor of a new ring, which stays the copier's. ValueError unless quiet."""
    def end_ring(self) -> None: ...
    @property
    def quiet(self) -> bool:
        """No ring, and no kernel of an earlier one runs."""
    def mark(self, lane: int) -> int:
        """What the lane (0 store, 1 retrieve) has taken so far."""
    def passed(self, lane: int, mark: int) -> bool:
        """All that the lane had taken by then has ended."""
    @property
    def eventfd(self) -> int:
        """Readable when quiet or broken may have changed; read it to reset."""
    @property
    def broken(self) -> str:
        """The driver's error that ended all work here; empty while all is well."""

class EventWatch:
    """A thread that polls events which the engine has recorded."""

    def __init__(self, vendor: str, library: str, ordinal: int) -> None: ...
    def watch(self, ticket: int, event: int) -> None:
        """`event`: address of a driver's event, which must live until its ticket is among the completed ones."""
    @property
    def eventfd(self) -> int:
        """Readable when tickets may have been completed; read it to reset."""
    def completed(self) -> list[tuple[int, bool]]:
        """(ticket, whether the event is done); False: the driver refused to tell."""

# ---------------------------------------------------------------- copies of one device (the mover's engine)

Measured = tuple[float, int, int, float, int, int]
"""Of stores, then of retrieves: the link's GB/s, and the lengths from which copies between pool and arena need no
packing, for caches with staging and for those without; 2**64 - 1 = never."""

class DeviceEngine:
    """Copies between KV pools on one GPU and the arena. As CopyEngine, with these differences.

    map_cache() ends with a completion "mapped" or "refused" (code and message). A completion "broken" says that the
    driver failed on the data path: nothing more will end, and the process has to. Jobs wait until their slots are
    within arena_ready(). Jobs of one cache and direction begin one after the other; those of different caches run side
    by side."""

    def __init__(
        self,
        *,
        kind: Literal["cuda", "rocm"],
        library: str,
        device_id: str,
        arena_reach: Literal["auto", "register", "bounce"],
        rtc_library: str,
        cache_dir: str,
        arena_fd: int,
        arena_bytes: int,
        slab_bytes: int,
        threads: int,
        gather_segment_bytes: int,
        measured: Measured | None,
    ) -> None:
        """Opens the driver, loads the kernels, maps the arena, and measures the link (150 ms) unless `measured` says
        what an earlier run found. ValueError("device-unknown: ..." | "kernels: ..." | "arena-reach: ..." |
        "device-memory: ..."), DriverAbsent, DriverError."""
    @property
    def backend(self) -> str:
        """For example "cuda sm_90, nvrtc 13.0, arena by register, direct from 4 MiB, without staging from 256 KiB"."""
    @property
    def facts(self) -> list[tuple[str, str]]:
        """What there is to know about device, driver, kernels and link, by name."""
    @property
    def measured(self) -> Measured: ...
    @property
    def imports(self) -> int:
        """Allocations of other processes that are open."""
    @property
    def eventfd(self) -> int: ...
    def self_test(self) -> str:
        """Stores and retrieves on scratch memory, packed and direct; waits. Empty, or what went wrong."""
    def map_board(self, session: int, fd: int, words: int) -> None: ...
    def drop_board(self, session: int) -> None: ...
    def map_cache(
        self,
        cache: int,
        session: int,
        buffers: list[tuple[bytes, int]],
        staging: tuple[bytes, int, int] | None,
        ipc_mode: str,
        groups: Groups,
    ) -> None:
        """buffers: (IPC handle, bytes). staging: (IPC handle, segment_bytes, descriptor of the ring, which stays the
        caller's). Refusals: "layout", "handle", "handle-size", "handle-device", "handle-pid", "ipc-mode", "staging"."""
    def unmap_cache(self, cache: int) -> None:
        """A cache that is not mapped (any more) is no error: it may have been refused meanwhile."""
    def submit(
        self,
        job: int,
        kind: Literal["store", "retrieve"],
        cache: int,
        word: int,
        generation: int,
        groups: CopyGroups,
        mode: str,
    ) -> None:
        """`mode`: what the cache was registered for; ValueError for "staged" without staging. Where copies are long
        enough the job goes "direct" all the same; its completion says how it went."""
    def cancel(self, job: int) -> None: ...
    def arena_ready(self, slabs: int) -> None:
        """The first `slabs` slabs of the arena are real, and jobs may name slots in them."""
    def completions(self, most: int) -> list[Completion]: ...
    def close(self) -> None:
        """Stops all jobs, waits for their ends, unmaps everything."""

def cut_job(
    groups: Groups,
    copy_groups: CopyGroups,
    arena_bytes: int,
    kind: Literal["store", "retrieve"],
    segment_bytes: int,
    pieces_max: int,
    list_bytes_max: int,
    alone: bool,
) -> list[list[tuple[int, int, int, int]]]:
    """How a job that is not direct is cut into segments: (slot, begin, end, staging) of the parts of each. Bytes
    [begin, end) of the shard in that slot lie at offset `staging` of the segment."""
