"""The data plane. Each class's C++ header in csrc/ is its manual; this file is the interface for Python.

Numbers are bytes unless the name says otherwise. Every call that can take longer than a few microseconds releases the
GIL. Bad arguments raise ValueError naming what was expected and what came; errors of the system raise OSError.
"""

from collections.abc import Sequence
from typing import Literal

from kvserver._native_disk import DiskEngine as DiskEngine
from kvserver._native_disk import DiskFaults as DiskFaults
from kvserver._native_disk import DiskStore as DiskStore
from kvserver._native_disk import RecoveryOrder as RecoveryOrder
from kvserver._native_disk import xxh3 as xxh3

BUILD: str
"""Compiler, processor and kind of copy instructions, for the log and `kvserver doctor`."""

SLOT_ALIGN: int
"""Alignment of slots (4096): every slot starts and ends at a multiple of it."""

# ---------------------------------------------------------------- shared memory

def create_memfd(name: str, bytes: int, huge_page_bytes: int = 0, sealed: bool = True) -> int:
    """Makes a memfd of that size. The caller owns the descriptor.

    sealed: it can neither shrink nor grow, and takes no further seals."""

def free_huge_pages(huge_page_bytes: int) -> int:
    """The number of huge pages of that size that are reserved and free on this machine."""

def is_dax(fd: int) -> bool:
    """Whether the file's pages are the medium itself (fsdax), with no page cache between."""

class ArenaGrower:
    """Touches an arena slab by slab from the front, in background threads (MADV_POPULATE_WRITE).

    With numa_nodes, mbind comes first: one node is preferred, over several the pages are interleaved. Existing content
    is kept. Running out of memory stops the growth, not the process."""

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
        """Stops and joins the threads, and unmaps. For every class here: closing twice is allowed, and use after
        close() raises ValueError."""

# ---------------------------------------------------------------- names of chunks

def sha256(bytes: bytes, portable: bool = False) -> bytes:
    """SHA-256, with the processor's instructions for it if it has them. portable: without them, for tests."""

def chain_keys(token_ids: list[int], begin: int, end: int, chunk_tokens: int, before: bytes) -> bytes:
    """The packed keys of the whole chunks in token_ids[begin:end]: the SHA-256 chain of client/kvclient/keys.py."""

def chain_keys_of_packed(tokens: bytes, chunk_tokens: int, before: bytes) -> bytes:
    """The keys as from chain_keys(), for all tokens, which are packed as little-endian u32."""

def block_hash_keys(block_hashes: list[bytes], first: int, stride: int, head: bytes) -> bytes:
    """The packed SHA-256 of head || block_hashes[i] for i = first, first + stride, ...

    Without a head, the hashes themselves."""

class Tokens:
    """A copy of a prompt of `total` tokens, made piece by piece."""

    def __init__(self, total: int) -> None: ...
    def add(self, token_ids: list[int], most: int) -> int:
        """Copies the next tokens, at most `most`. Returns how many are left. token_ids: the whole prompt."""

class Naming:
    """A future of the keys of one prompt."""

    @property
    def ready(self) -> bool: ...
    def wait(self, seconds: float) -> bool:
        """Waits up to that time without hashing itself. Whether the keys are ready."""
    def keys(self) -> bytes:
        """The keys, as from chain_keys(). Hashes here if the thread has not begun, else waits for it."""

class Namer:
    """A thread that names prompts. It starts with the first prompt."""

    def __init__(self) -> None: ...
    def name(self, tokens: Tokens, chunk_tokens: int, before: bytes) -> Naming:
        """Starts chain_keys() in the thread. All tokens must have been added; `tokens` cannot be used afterwards."""

class Marker:
    """Makes the marks of a namespace's chunks in a remote store, under one epoch (docs/remote-format.md).

    Namespace and key together: at most 120 bytes. epoch: 64 bits."""

    def __init__(self, namespace: bytes, epoch: int) -> None: ...
    def of(self, key: bytes) -> int:
        """64 bits that stand for a chunk; the lowest two are 0 and make room for a kind."""

class MarkTable:
    """A table of marks with kinds. Its size is fixed: a new mark takes the place of another one when all places in
    which it may lie are taken, first of all of one whose kind is GONE."""

    def __init__(self, most: int) -> None:
        """most: marks, a power of two and at least four."""
    def put(self, mark: int) -> int:
        """Takes a mark with its kind. Returns the mark of another chunk whose place it took; 0: of none."""
    def kind(self, mark: int) -> int:
        """The kind with which a mark of kind 0 is there; 0: it is not there."""
    def kind_of(self, marker: Marker, key: bytes) -> int:
        """The same for the mark of a chunk. Nearly every lookup that misses asks, so it is one call."""

# ---------------------------------------------------------------- digests of payloads

DIGEST_PAYLOAD_BYTES_MAX: int  # 4 GiB
NO_DIGEST: int  # 2**64 - 1: takes the place of a digest or a sum that nobody computed

DigestSum = tuple[int, int]
"""(sum, bytes): the sum of that many bytes of a payload, a number below 2**61 - 1."""

DigestPath = Literal["best", "avx2", "portable"]
"""Vector instructions: what the processor has, none beyond AVX2, or none. The last two are for tests."""

def digest_sum(
    bytes: bytes | bytearray | memoryview, begin: int, end: int, offset: int, path: DigestPath = "best"
) -> DigestSum:
    """The sum of bytes[begin:end], whose first byte is byte `offset` of its payload (docs/digest.md).

    bytes: in one stretch; it may change meanwhile."""

def digest_copy(
    source: bytes | bytearray | memoryview, target: memoryview, offset: int, path: DigestPath = "best"
) -> DigestSum:
    """Copies bytes into memory of the same size, and returns the sum of what was read. Their first byte is byte
    `offset` of its payload. Writes past the cache where the target is aligned for that."""

def add_digest_sums(one: DigestSum, other: DigestSum) -> DigestSum:
    """The sum of two parts of one payload that share no byte."""

def payload_digest(
    sum: DigestSum, namespace: bytes, key: bytes, group: int, shard: int, payload_bytes: int
) -> int | None:
    """The digest of a payload, from the sum of all its bytes. None: other than payload_bytes bytes were summed."""

# ---------------------------------------------------------------- ledger

class Ledger:
    """The ledger: one checksummed 136-byte entry for each place where a slot can start (arena_offset // SLOT_ALIGN), in
    a sparse memfd, and a table of namespace documents.

    One writer. An entry is published by a release store of its state after everything else, and withdrawn by a release
    store before anything else. So a writer that is killed at any instruction leaves a valid entry or none.

    A record is RECORD_BYTES packed little-endian:
    arena_offset i64 | namespace 32s | key 32s | parent 32s | group u16 | shard u16 | payload_bytes u32 |
    tenant u32 | slot_bytes / SLOT_ALIGN u32 | generation u64 | sum of the payload u64, or NO_DIGEST
    """

    RECORD_BYTES: int  # 136
    NAMESPACES_MAX: int  # 256
    DOCUMENT_BYTES_MAX: int  # 65536

    @staticmethod
    def file_bytes(arena_bytes: int) -> int:
        """Size that the ledger's file must have for an arena."""
    def __init__(self, fd: int, arena_bytes: int) -> None:
        """Maps the ledger. If its header is all zero, it is new: magic, format, arena_bytes and checksum are written.

        Another header raises ValueError; nothing is changed then."""
    def seal(self, records: bytes) -> None:
        """Publishes records. Raises ValueError for a place that is sealed already: clear it first."""
    def clear(self, arena_offsets: bytes) -> None:
        """Withdraws the entries at these packed int64 offsets. Free entries stay as they are."""
    def scan(self) -> bytes:
        """All sealed and valid entries as packed records, ascending by offset. Skips holes of the sparse file.

        Entries with a bad checksum or out of range are withdrawn and counted."""
    @property
    def damaged(self) -> int:
        """Entries and namespace documents that scan() and namespaces() dropped."""
    def put_namespace(self, index: int, document: bytes) -> None: ...
    def drop_namespace(self, index: int) -> None: ...
    def forget_pages(self) -> None:
        """Unmaps the file's pages from this process, which bounds its resident memory. The file keeps its content.

        The next access to a page costs a minor fault."""
    def namespaces(self) -> list[tuple[int, bytes]]: ...
    def sums(self, arena_offsets: bytes, names: bytes) -> bytes | None:
        """The sum of the payload in each of these slots, packed u64; NO_DIGEST where it is not known.

        For readers beside the writer, while it keeps the slots; withdrawn entries still have their content. names: the
        first 8 bytes of SHA-256(namespace || group u16 || shard u16 || keys of the slots). None: other payloads are
        there."""
    def close(self) -> None: ...

class Scrubber:
    """Reads slots of the arena at the lowest priority, in a thread of its own, and compares them with the ledger.

    It reads the arena as a file and maps nothing of it.

    An item is ITEM_BYTES packed little-endian: arena_offset i64 | payload_bytes u64 | names 8s, as in Ledger.sums() for
    this slot alone. Whoever orders it keeps the slot until the job has ended."""

    ITEM_BYTES: int  # 24

    def __init__(self, arena_fd: int, arena_bytes: int, ledger_fd: int, ledger_bytes: int) -> None:
        """ledger_bytes: the arena_bytes of the ledger."""
    @property
    def eventfd(self) -> int:
        """Readable when ends() may have some; read it to reset, then call ends()."""
    def submit(self, job: int, items: bytes) -> None:
        """Jobs are read in their order. Raises ValueError when an item is not in the arena."""
    def ends(self, most: int) -> list[tuple[int, list[int], int]]:
        """(job, wrong items, bytes). wrong: numbered in the order of the job's items. Other bytes or another name than
        the ledger says, or not readable. bytes: that were compared, payloads without a known sum left out."""
    def close(self) -> None:
        """Stops after the read under way. Jobs that are left have no end."""

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
        """Makes a word LIVE under its next generation, which is returned. Raises ValueError if it is LIVE or
        SUBMITTED."""
    def state(self, word: int) -> tuple[int, int]:
        """The word's (generation, state)."""
    def abandon_store(self, word: int, generation: int) -> int:
        """Moves a word from LIVE or SUBMITTED to ABANDONED, and returns its state afterwards.

        ABANDONED, FAILED and DONE all mean that the source blocks may be reused; only DONE means stored. Raises
        ValueError if the word has another generation."""
    def abandon_retrieve(self, word: int, generation: int) -> int:
        """Moves a word from LIVE to ABANDONED, and returns its state afterwards.

        SUBMITTED means that the blocks are still being written and must stay untouched until the state changes or the
        mover is gone."""
    def close(self) -> None: ...

# ---------------------------------------------------------------- copies

Runs = Sequence[tuple[int, int, int, int, int, int]]
"""Fields of transfer.native.Run in order: buffer, offset, regions, region_stride, block_stride, page_bytes."""
Groups = Sequence[tuple[int, int, Runs]]
"""For each group: (blocks_per_chunk, blocks, runs)."""
CopyGroups = Sequence[tuple[int, int, bytes, bytes, bytes]]
"""Fields of transfer.native.CopyGroup in order: group, first_block, block_ids (packed int32), slots (packed int64),
sums (packed u64)."""
JobMode = Literal["direct", "staged", "server-gather"]
Status = Literal["done", "abandoned", "failed", "invalid", "unmapped", "mapped", "refused", "broken"]
Completion = tuple[int, Status, int, int, str, str, JobMode, bytes, list[int]]
"""Fields of transfer.native.Completion. Only DeviceEngine has the last three statuses."""

def plan_pieces(
    groups: Groups,
    copy_groups: CopyGroups,
    arena_bytes: int,
    kind: Literal["store", "retrieve"],
    bytes_max: int = ...,
    pages_max: int = ...,
    order: Literal["neighbours", "shards"] = "neighbours",
) -> list[list[tuple[int, int, int, int]]]:
    """The merged copies of one job as (buffer, buffer_offset, arena_offset, bytes), in the order of execution, cut into
    the pieces that workers take one by one.

    A piece has at most bytes_max bytes, from at most pages_max pages; without these bounds there is one.

    A shard's bytes in its slot are [run][region][block of the chunk][page_bytes]. Order: copy groups, their runs, then
    regions and blocks, the one with the larger stride outside; blocks of a store by id, of a retrieve in prefix order.
    With "shards": copy groups, their shards in prefix order, and bytes as they lie in the slot.
    Neighbours that are adjacent on both sides are one copy. ValueError("block-range: ...") or
    ("block-duplicate: ...") for ids out of range, negative, or twice; ("slots: ...") when the slots do not fit the
    blocks or the arena."""

class CopyEngine:
    """Host copies between registered KV pools and the arena by worker threads. Retrieves run before stores.

    Steps of a job: its word goes live → submitted (else: completion "abandoned"). The plan is made and checked (else:
    word FAILED, completion "invalid", no byte moved). The bytes are copied, and the word goes submitted → done. A store
    whose word is ABANDONED by then completes as "abandoned". If a pool is truncated during a copy (SIGBUS), the job
    ends as "failed" with code "pool-shrunk", and the process continues. Each submitted job completes exactly once;
    `bytes` of its completion counts the copied bytes, whatever its status."""

    def __init__(self, arena_fd: int, arena_bytes: int, threads: int) -> None: ...
    @property
    def backend(self) -> str:
        """Description of the copies, for example "host non-temporal, 2 threads"."""
    @property
    def eventfd(self) -> int:
        """Readable while completions wait; read it to reset, then drain completions()."""
    def map_board(self, session: int, fd: int, words: int) -> None:
        """Maps a session's board. Raises ValueError("descriptor-seal: ...") unless it is sealed against shrinking."""
    def drop_board(self, session: int) -> None:
        """Unmaps a session's board. Raises ValueError while a cache of the session is mapped."""
    def map_cache(self, cache: int, session: int, fds: list[int], buffer_bytes: list[int], groups: Groups) -> None:
        """Maps one pool per descriptor (the descriptors stay the caller's).

        Raises ValueError("descriptor-size: ...") when a file is smaller than buffer_bytes, ("descriptor-seal: ...")
        when it is sealed against writing or not a shared memory file, ("layout: ...") when a page exceeds its
        buffer."""
    def unmap_cache(self, cache: int) -> None:
        """Unmaps a cache after its last job, and completes with status "unmapped"."""
    def submit(
        self,
        job: int,
        kind: Literal["store", "retrieve"],
        cache: int,
        word: int,
        generation: int,
        groups: CopyGroups,
        digests: bool = False,
    ) -> None:
        """Submits a job. digests: a store tells the sums of its shards. A retrieve compares them; where one differs, it
        fails as "digest", with the bytes in the cache.

        Raises ValueError, without a completion, for an unknown or leaving cache, a word that is not on the session's
        board, a job number in use, or ids or slots that are not whole numbers. Other errors complete as "invalid"."""
    def cancel(self, job: int) -> None:
        """Ends a job soon: pieces that have not begun are skipped. It completes as "abandoned" and its word becomes
        FAILED. If its last pieces were under way, it completes as usual."""
    def completions(self, most: int) -> list[Completion]: ...
    def close(self) -> None:
        """Cancels jobs that have not begun, finishes running ones, joins the threads, and unmaps everything.

        completions() and eventfd may still be used."""

# ---------------------------------------------------------------- bytes that are a function of a seed

def fill_pattern(fd: int, offset: int, bytes: int, seed: int) -> None:
    """Writes the byte stream of a 64-bit seed into a file, which is mapped for the call."""

class Pattern:
    """A mapped file for filling and checking many ranges: ranges are packed (offset u64, bytes u64, seed u64)."""

    def __init__(self, fd: int, bytes: int) -> None: ...
    def fill(self, ranges: bytes) -> None: ...
    def wrong(self, ranges: bytes) -> int:
        """The number of bytes that differ from the pattern."""
    def close(self) -> None: ...

def copy_seconds(source_fd: int, target_fd: int, bytes: int, threads: int, non_temporal: bool) -> float:
    """Seconds for one contiguous copy between files that are mapped and touched beforehand: the upper bound of all
    copies' rates."""

# ---------------------------------------------------------------- GPU drivers, devices, kernels

Vendor = Literal["cuda", "rocm"]
"""Vendor of a GPU. In the functions below, `library` is the path of its library; "": the copy that is mapped already,
else a search."""

class DriverError(RuntimeError):
    """A driver's call failed, for example "cuMemAlloc_v2: CUDA_ERROR_ILLEGAL_ADDRESS (700)"."""

class DriverAbsent(RuntimeError):
    """A driver cannot be used: no library, missing symbols, or no device. The message names them."""

def probe_driver(vendor: Vendor, library: str = "") -> tuple[str, int, int, list[str], list[str], str]:
    """Starts the driver in this process. Never raises for something that the machine lacks.

    Returns (library, version, devices, missing required symbols, missing optional ones, problem); problem "": usable.
    """

def device_facts(vendor: Vendor, library: str, ordinal: int) -> tuple[str, str, str, str, int]:
    """A device's (id, name, architecture, PCI bus id, memory in bytes). The id is the same in every process."""

def ipc_mode(vendor: Vendor) -> Literal["", "legacy", "dmabuf"]:
    """The kind of IPC handles that this process makes and opens; both sides must have the same."""

def kfd_arch(topology: str, pci: str) -> str:
    """An AMD device's architecture from Linux's topology directory; "" when it does not say."""

def kernel_report(
    vendor: Vendor, library: str, ordinal: int, rtc_library: str = "", cache_dir: str = ""
) -> tuple[str, str, str]:
    """Loads the kernels once. Returns (provider, architecture, why the run-time compiler was not used or "").

    Raises ValueError("kernels: ...") when no kernels can be loaded."""

# ---------------------------------------------------------------- GPU: the client's part

PIECES_MAX: int
"""Most pieces of one segment."""
PIECE_BYTES_MAX: int

Stretch = tuple[int, int, bytes, int, int, int]
"""(group, first_in_chunk, block_ids (packed int32), staging offset, begin, end): shard bytes [begin, end)."""

def pack_stretches(stretches: list[Stretch]) -> bytes:
    """A segment's list, encoded as in the ring."""

def expand_stretches(
    groups: Groups, list: bytes, segment_bytes: int, bases: list[int]
) -> list[tuple[int, int, int]] | None:
    """The pieces of a segment's list: (device address, staging offset, bytes). None: more than PIECES_MAX.

    Raises ValueError("staging-list: ...") when the list does not fit layout or segment."""

def pieces_at_most(groups: Groups, group: int, begin: int, end: int) -> int:
    """An upper bound of the pieces of any expansion of these shard bytes."""

class RingOwner:
    """The client's side of a staging ring; csrc/gpu/staging/ring.h is the manual."""

    def __init__(self, segment_bytes: int) -> None: ...
    @property
    def fd(self) -> int: ...
    def take(self, lane: int) -> tuple[int, int, int, int, bytes] | None:
        """Takes a segment that the mover asked for: (segment, sequence, job, work, list); None when there is none.

        work: 0 copy, 1 copy and sum, 2 sum."""
    def done(self, lane: int, segment: int, sequence: int, sums: bytes = b"") -> None:
        """sums: (sum, bytes) of each stretch, packed u64, if they were asked for."""
    def fault(self, lane: int, segment: int, sequence: int, code: int) -> None: ...
    def sleep(self, timeout_ms: int) -> None: ...

class RingPeer:
    """The mover's side of a staging ring. States: 0 empty, 1 asked, 2 taken, 3 done, 4 fault."""

    def __init__(self, fd: int, segment_bytes: int) -> None:
        """Maps a ring; the descriptor stays the caller's. Raises ValueError("staging: ...") unless it is a ring with
        that segment size."""
    def ask(self, lane: int, segment: int, job: int, stretches: list[Stretch], work: int = 0) -> bool: ...
    def state(self, lane: int, segment: int) -> int: ...
    def sums(self, lane: int, segment: int, count: int) -> bytes:
        """(sum, bytes) of the first stretches of a segment that is done, packed u64: any numbers of the client's."""
    def withdraw(self, lane: int, segment: int) -> bool: ...
    def recycle(self, lane: int, segment: int) -> None: ...
    def fault(self, lane: int, segment: int) -> int: ...

def export_memory(vendor: str, library: str, pointer: int, bytes: int) -> tuple[str, int, int, int, bytes]:
    """The (device id, ordinal, base, bytes, IPC handle) of the allocation that contains the memory.

    Raises ValueError("device: ..."), ("range: ...") or ("not-exportable: ..."); DriverAbsent."""

class StagedCopier:
    """The client's thread that gathers into staging and scatters out of it (csrc/gpu/staging/staged_copier.h)."""

    def __init__(
        self,
        vendor: str,
        library: str,
        ordinal: int,
        segment_bytes: int,
        shard_bytes: int,
        rtc_library: str,
        cache_dir: str,
    ) -> None:
        """Allocates 16 segments of device memory, smaller than segment_bytes if there is not enough.

        shard_bytes: of the longest shard in any ring's layout. Raises ValueError("staging-memory: ..."),
        ("device-memory: ..."), ("kernels: ..."); DriverError."""
    @property
    def handle(self) -> bytes:
        """IPC handle of the staging memory."""
    @property
    def segment_bytes(self) -> int: ...
    @property
    def kernels(self) -> tuple[str, str, str]:
        """(provider, arch, note), as kernel_report returns them."""
    def begin_ring(self, groups: Groups, bases: list[int], buffer_bytes: list[int]) -> int:
        """Makes a new ring and returns its descriptor, which stays the copier's. Raises ValueError unless quiet, or if
        a shard is longer than shard_bytes."""
    def end_ring(self) -> None: ...
    @property
    def quiet(self) -> bool:
        """Whether there is no ring, and no kernel of an earlier one runs."""
    def mark(self, lane: int) -> int:
        """A mark of everything that the lane (0 store, 1 retrieve) has taken so far, for passed()."""
    def passed(self, lane: int, mark: int) -> bool:
        """Whether everything that the lane had taken at the mark has ended."""
    @property
    def eventfd(self) -> int:
        """Readable when quiet or broken may have changed; read it to reset."""
    @property
    def broken(self) -> str:
        """The driver's error that ended all work here; empty while all is well."""

class EventWatch:
    """A thread that polls driver events recorded by the engine."""

    def __init__(self, vendor: str, library: str, ordinal: int) -> None: ...
    def watch(self, ticket: int, event: int) -> None:
        """Watches a driver's event. event: its address; the event must live until its ticket is completed."""
    @property
    def eventfd(self) -> int:
        """Readable when tickets may have been completed; read it to reset."""
    def completed(self) -> list[tuple[int, bool]]:
        """Completed tickets: (ticket, whether the event is done). False: the driver reported an error for it."""

# ---------------------------------------------------------------- copies of one device (the mover's engine)

Measured = tuple[float, int, int, float, int, int]
"""Fields of transfer.native.Measured."""

class DeviceEngine:
    """Copies between KV pools on one GPU and the arena. Like CopyEngine, with these differences.

    map_cache() ends with a completion "mapped" or "refused" (code and message). A completion "broken" means that the
    driver failed on the data path: nothing more will complete, and the process has to end. Jobs wait until their slots
    are within arena_ready(). Jobs of one cache and direction begin one after the other; jobs of different caches run
    side by side."""

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
        """Opens the driver, loads the kernels, maps the arena, and measures the link.

        The measurement takes 150 ms; `measured` has the result of an earlier one. Raises ValueError("device-unknown:
        ..." | "kernels: ..." | "arena-reach: ..." | "device-memory: ..."), DriverAbsent, DriverError."""
    @property
    def backend(self) -> str:
        """Description of the copies, for example
        "cuda sm_90, nvrtc 13.0, arena by register, direct from 4 MiB, without staging from 256 KiB"."""
    @property
    def facts(self) -> list[tuple[str, str]]:
        """Names and values of facts about device, driver, kernels and link."""
    @property
    def measured(self) -> Measured: ...
    @property
    def imports(self) -> int:
        """Number of open allocations of other processes."""
    @property
    def eventfd(self) -> int: ...
    def self_test(self) -> str:
        """Stores and retrieves on scratch memory, packed and direct, and waits. Compares bytes and sums. A flipped byte
        must be noticed. Empty, or the problem."""
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
        """Maps a cache. buffers: (IPC handle, bytes).

        staging: (IPC handle, segment_bytes, descriptor of the ring, which stays the caller's). Refusals: "layout",
        "handle", "handle-size", "handle-device", "handle-pid", "ipc-mode", "staging", "device-memory"."""
    def unmap_cache(self, cache: int) -> None:
        """Unmaps a cache. One that is not mapped (any more) is no error: it may have been refused meanwhile."""
    def submit(
        self,
        job: int,
        kind: Literal["store", "retrieve"],
        cache: int,
        word: int,
        generation: int,
        groups: CopyGroups,
        mode: str,
        digests: bool = False,
    ) -> None:
        """Submits a job. mode: that of the registered cache; raises ValueError for "staged" without staging.

        If its copies are long enough, the job is "direct" instead; its completion has the mode.

        digests: the engine's memory is summed, and the completion has the sums of a store. A retrieve whose groups
        bring other sums than its bytes have ends as failed, "digest". One without sums is invalid, "sums"."""
    def cancel(self, job: int) -> None: ...
    def arena_ready(self, slabs: int) -> None:
        """The first `slabs` slabs of the arena are touched; jobs with slots in them may begin."""
    def completions(self, most: int) -> list[Completion]: ...
    def close(self) -> None:
        """Stops all jobs, waits for their ends, and unmaps everything."""

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
    """The segments of a job that is not direct: for each segment its parts (slot, begin, end, staging).

    Bytes [begin, end) of the shard in that slot lie at offset `staging` of the segment."""
