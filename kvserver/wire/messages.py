"""The protocol between clients and the brain. This file *is* the protocol; docs/PROTOCOL.md tells the conversations.

Frames are msgpack arrays `[tag, id, field, ...]` in the order in which the fields stand here. A request gets exactly
one reply with the same `id`: its typed answer, or Error. Two doors carry the same frames:

* ZeroMQ: a ROUTER at `ipc://SOCKET`; one frame per message. Hello must come first; the routing identity then names
  the session.
* The local door: a SOCK_SEQPACKET Unix socket at `SOCKET.local`. The first message of a connection is Attach (the
  connection that is the worker's liveness, and the only one that carries descriptors) or Lane (a connection for
  lookups and other small requests, answered without ZeroMQ's four thread hops: 15 us instead of 190 us a round trip).

Units: tokens, blocks, chunks and bytes are counts. A key is KEY_BYTES long, keys are packed back to back in prefix
order. Block ids are packed little-endian int32. Unknown fields, unknown tags and wrong types are refused.
"""

from typing import Annotated, Literal

import msgspec

PROTOCOL = 6
"""Exact match at Hello. Changes when the meaning of any frame changes; it is not the package's version."""

KEY_BYTES = 32
NAMESPACE_BYTES = 32
SESSION_BYTES = 16
FRAME_BYTES_MAX = 1 << 20
"""A longer frame is refused before it is decoded."""
REGISTER_BYTES_MAX = 1 << 18
"""The same for a Register. The largest valid one takes 250 KB."""
CHUNKS_MAX = 4096
"""Keys in one request."""
BLOCKS_MAX = 65_536
"""Block ids in one request, all groups together."""
PLACES_MAX = BLOCKS_MAX * 3 // 2
"""Block ids plus twice the chunks that they touch, in one request, all groups together: as many fit one order to a
mover. Only chunks of less than four blocks can reach it."""
GROUPS_MAX = 16
RANGES_MAX = 256
"""Block ranges of a store or retrieve. More are refused before they are decoded; at most one per group is valid."""
REGION_RUNS_MAX = 4096
BUFFERS_MAX = 256
"""Allocations of one cache. A host cache has fewer, as each needs a descriptor."""
SHARDS_MAX = 256
BOARD_WORDS = 4096
"""Job state words of one session (see kvserver._native.Board)."""
ALL_RIGHT = -1
"""No chunk of a retrieve has wrong bytes."""
NAME_BYTES_MAX = 128
HANDLE_BYTES = 64
"""An IPC handle of a GPU driver."""
SEGMENT_BYTES_MIN = 1 << 20
SEGMENT_BYTES_MAX = 16 << 20
STAGING_SEGMENTS = 16
"""Segments of a staging memory: eight for stores, then eight for retrieves."""

Kind = Literal["full", "window", "state"]
Mode = Literal["direct", "staged", "server-gather", "engine-driven"]
DeviceKind = Literal["host", "cuda", "rocm"]
Why = Literal["", "full", "parent-absent", "ranks-missing", "busy", "abandoned", "discarded"]
FoundWhy = Literal["", "recovering"]


class Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """Base of all frames: a msgpack array."""


# ---------------------------------------------------------------- pieces


class GroupSpec(Frame, frozen=True):
    """One group of a cache: layers that share block ids."""

    block_tokens: int
    """Tokens of one block. Divides chunk_tokens; a state group has block_tokens == chunk_tokens."""
    blocks: int
    """Block ids of this group are in [0, blocks)."""
    kind: Kind
    """full: every chunk of a prefix is needed. window: those that hold its last `window_tokens` tokens.
    state: only the chunk that ends at the boundary (one block: the state after its last token)."""
    window_tokens: int
    """0 unless kind is window."""
    shards: int
    """Shards that make a chunk of this group complete (ranks that hold different bytes; 1 for a replicated group)."""
    shard: int
    """The shard that this cache reads and writes."""
    writers: int
    """Ranks of the engine that hold this same shard (1 unless the group is replicated); chunk i is stored by writer
    i % writers. Engines of one namespace may have different numbers."""
    writer: int
    """This rank among the writers."""
    regions: list["RegionRun"]


class RegionRun(Frame, frozen=True):
    """`regions` equally spaced regions: page (r, b) lies at offset + r*region_stride + b*block_stride of the buffer."""

    buffer: int
    """Index into Register.buffers."""
    offset: int
    regions: int
    region_stride: int
    block_stride: int
    page_bytes: int
    """Bytes of one block in one region."""


class Buffer(Frame, frozen=True):
    """One exported allocation of the engine."""

    descriptor: int
    """host: the number that Offered gave for the descriptor. Otherwise -1."""
    handle: bytes
    """GPU kinds: the IPC handle of the allocation's base, HANDLE_BYTES long. host: empty."""
    bytes: int
    """Size of the allocation; every page of every region lies inside."""


class Staging(Frame, frozen=True):
    """Device memory of the client through which the bytes of a staged cache pass, and the ring that hands it over."""

    handle: bytes
    """IPC handle of its base. It has STAGING_SEGMENTS segments."""
    segment_bytes: int
    """Whole MiB, SEGMENT_BYTES_MIN to SEGMENT_BYTES_MAX."""
    ring: int
    """The number that Offered gave for the ring's descriptor."""


class GroupBlocks(Frame, frozen=True):
    """The blocks of one group in a store or retrieve: block_ids[i] holds block `first_block + i` of the prefix."""

    group: int
    first_block: int
    block_ids: bytes


class Limits(Frame, frozen=True):
    """Limits of the server. The client splits larger requests by itself."""

    chunks_max: int
    blocks_max: int
    jobs_max: int
    """Stores and retrieves in flight for one session."""
    lease_ttl_ms: int


Ranges = Annotated[list[GroupBlocks], msgspec.Meta(max_length=RANGES_MAX)]

# ---------------------------------------------------------------- requests


class Hello(Frame, tag="hello", frozen=True):
    """First message of a ZeroMQ connection."""

    id: int
    protocol: int
    engine: str
    """Name of the engine, the same in all its processes. A lease belongs to (engine, epoch)."""
    epoch: int
    """Identifies a start of the engine; each start uses another value."""
    ranks: int
    """Workers of the engine that retrieve under one lease."""
    rank: int
    """This worker's rank; -1 for a process that only looks up (a scheduler)."""
    software: str
    """Name and version of the client, for the log."""


class Attach(Frame, tag="attach", frozen=True):
    """First message of the local connection that keeps the session alive. Reply: Attached, with the board."""

    id: int
    session: bytes


class Lane(Frame, tag="lane", frozen=True):
    """First message of a local connection for requests. Reply: LaneOpen."""

    id: int
    session: bytes


class Offer(Frame, tag="offer", frozen=True):
    """On the attached connection, with exactly one descriptor: memory that Register will name. Reply: Offered."""

    id: int


class Watch(Frame, tag="watch", frozen=True):
    """On the attached connection: asks for the pidfd of the mover that serves a cache. Reply: Watched and the pidfd.

    Readable means that the mover is gone and none of its copies can still run."""

    id: int
    cache: int


class Register(Frame, tag="register", frozen=True):
    """Registers one rank's KV cache. Needs an attached session. Reply: Registered."""

    id: int
    name: str
    """Names the cache within the session; a second registration under the same name is refused."""
    namespace: bytes
    chunk_tokens: int
    device: DeviceKind
    device_id: str
    """GPU kinds: UUID (32 hexadecimal digits), "@", PCI bus id, so that both sides mean the same device even if they
    number devices differently. host: empty."""
    ipc_mode: str
    """The client's kind of IPC handles. ROCm: "legacy" or "dmabuf", which are incompatible. Otherwise empty."""
    mode: Mode
    tenant: str
    """The tenant whose quota its chunks count against; empty: the account of tenants without a quota."""
    buffers: list[Buffer]
    groups: list[GroupSpec]
    staging: list[Staging]
    """One for mode staged, none otherwise."""
    tokens_max: int
    """Tokens of the engine's longest prompt; a cache is refused when the arena can never hold one. 0: unknown."""
    model: str
    """Name of the model for people, only a label in /metrics. Empty: unknown."""


class Unregister(Frame, tag="unregister", frozen=True):
    """Ends a registration after its jobs. Reply: Unregistered, when the mover has let the memory go."""

    id: int
    cache: int


class Lookup(Frame, tag="lookup", frozen=True):
    """Asks for the longest prefix that every group and shard can serve. Reply: Found. Moves no bytes."""

    id: int
    namespace: bytes
    keys: bytes
    chunks_wanted_min: int
    """A lease is granted only for at least this many chunks (at least 1)."""


class Await(Lookup, tag="await", frozen=True):
    """A lookup that may wait for what another engine computes. Reply: Awaited."""


class Pledge(Frame, tag="pledge", frozen=True):
    """An engine computes this prompt now, and will store it. Reply: Pledged."""

    id: int
    namespace: bytes
    keys: bytes
    """All keys from the beginning of the prompt."""
    ttl_ms: int
    """The pledge ends after this time, or the server's own limit."""


class Unpledge(Frame, tag="unpledge", frozen=True):
    """Takes a pledge back: what was not stored will not be. Reply: Unpledged. One that is over is not an error."""

    id: int
    pledge: int


class Release(Frame, tag="release", frozen=True):
    """Gives a lease back. Reply: Released. Releasing an unknown or expired lease is not an error."""

    id: int
    lease: int


class Store(Frame, tag="store", frozen=True):
    """Stores the shards of one rank for a run of chunks. Reply: Stored, after the bytes are sealed."""

    id: int
    cache: int
    word: int
    """Index of the job's state word on the session's board."""
    generation: int
    """Generation under which the client made that word live."""
    deadline_ms: int
    """The client waits this long; afterwards it may abandon the word at any time."""
    first_chunk: int
    parent: bytes
    """Key of chunk first_chunk - 1; empty when first_chunk is 0."""
    keys: bytes
    groups: Ranges
    """Whole chunks. Full groups cover all keys; window and state groups may cover a part, or be absent."""


class Retrieve(Frame, tag="retrieve", frozen=True):
    """Brings leased blocks into the cache; a block range may start and end inside a chunk. Reply: Retrieved."""

    id: int
    cache: int
    lease: int
    word: int
    generation: int
    deadline_ms: int
    groups: Ranges
    more: bool
    """This rank will retrieve under the same lease again."""


class Clear(Frame, tag="clear", frozen=True):
    """Forgets every chunk of a namespace. Reply: Cleared. Chunks stored before are not served afterwards."""

    id: int
    namespace: bytes


class Drain(Frame, tag="drain", frozen=True):
    """Empties a device of the disk tier, so that it can be removed. Reply: Draining, at once; /status shows the
    progress. A repeated request changes nothing."""

    id: int
    device: int


class Explain(Frame, tag="explain", frozen=True):
    """Asks for the answer that a lookup would get now, and why it is not longer. Reply: Explained. Changes nothing."""

    id: int
    namespace: bytes
    """Empty: all known namespaces, up to the length of lists in the status document."""
    keys: bytes
    """Keys of a prompt from its beginning, or any single key. Empty: only the namespaces are listed."""


class Status(Frame, tag="status", frozen=True):
    """Asks for the /status document. Reply: StatusIs."""

    id: int


Request = (
    Hello | Attach | Lane | Offer | Watch | Register | Unregister | Lookup | Release | Store | Retrieve | Clear | Drain
    | Explain | Status | Await | Pledge | Unpledge
)  # fmt: skip

# ---------------------------------------------------------------- replies


class Welcome(Frame, tag="welcome", frozen=True):
    id: int
    session: bytes
    """Secret that Attach and Lane present."""
    server: str
    incarnation: int
    """Changes with every start of the brain; registrations and leases of an earlier one are gone."""
    limits: Limits


class Attached(Frame, tag="attached", frozen=True):
    id: int


class LaneOpen(Frame, tag="lane-open", frozen=True):
    id: int


class Offered(Frame, tag="offered", frozen=True):
    id: int
    descriptor: int


class Watched(Frame, tag="watched", frozen=True):
    id: int
    mover: int


class Registered(Frame, tag="registered", frozen=True):
    id: int
    cache: int
    mover: int


class Unregistered(Frame, tag="unregistered", frozen=True):
    id: int


class Found(Frame, tag="found", frozen=True):
    """`chunks` leading chunks are held for every group and shard."""

    id: int
    chunks: int
    lease: int
    """0 when no lease was granted."""
    ttl_ms: int
    chunks_on_disk: int
    """Part of `chunks` that has to be read from disk first. The reads begin with the lease; a retrieve waits for
    them."""
    why: FoundWhy
    """recovering: disks that the server has not read yet since its start may hold more, so a short answer says nothing
    about the rest. Empty: the rest is not held."""
    coming: int = 0
    """How many chunks after those may come from a remote store soon. Who can wait asks again, every few milliseconds.
    0: none comes, or what comes has made no progress for a while."""


class Awaited(Found, tag="awaited", frozen=True):
    """As Found. The lease is also on `awaited` chunks that follow, each from the moment at which it is stored."""

    awaited: int = 0
    """0: nobody computes what follows, and nothing is awaited."""
    producer: str = ""
    """The engine that computes them. Empty if `awaited` is 0."""


class Pledged(Frame, tag="pledged", frozen=True):
    id: int
    pledge: int
    """0: nothing was pledged."""
    held: int
    """Leading chunks that are held already."""
    chunks: int
    """How many after those were pledged. Fewer than asked if another engine has pledged the next one, there is no room
    for so much, or the namespace has groups that are not full."""


class Unpledged(Frame, tag="unpledged", frozen=True):
    id: int


class Released(Frame, tag="released", frozen=True):
    id: int


class Stored(Frame, tag="stored", frozen=True):
    """`chunks` counts the leading chunks of the request whose shards of this rank are now held, whether they were found
    or written by this job. It is less than asked if some could not be stored; `why` says why."""

    id: int
    chunks: int
    chunks_written: int
    bytes: int
    why: Why
    """full: nothing more could be evicted. parent-absent: the chunk before the first is not held. ranks-missing: not
    every shard of the namespace has been registered yet. busy: another job is writing some of it. abandoned: the
    client gave the job up. discarded: cleared, or another rank failed to store its shard in time."""


class Retrieved(Frame, tag="retrieved", frozen=True):
    """The end of a retrieve. Its word is DONE if all bytes are right, else FAILED."""

    id: int
    bytes: int
    wrong_from: int
    """The first chunk of the prefix whose bytes are not those that were stored; blocks before it are right. ALL_RIGHT:
    all are."""


class Cleared(Frame, tag="cleared", frozen=True):
    id: int
    chunks: int


class Draining(Frame, tag="draining", frozen=True):
    id: int


class Explained(Frame, tag="explained", frozen=True):
    id: int
    document: bytes
    """JSON, a list of wire/explanation.Explanation."""


class StatusIs(Frame, tag="status-is", frozen=True):
    id: int
    document: bytes
    """JSON."""


class Error(Frame, tag="error", frozen=True):
    """The typed refusal of a request."""

    id: int
    """The request's, or 0 when none could be read."""
    family: Literal["request", "resource", "device"]
    code: str
    message: str


Reply = (
    Welcome | Attached | LaneOpen | Offered | Watched | Registered | Unregistered | Found | Released | Stored
    | Retrieved | Cleared | Draining | Explained | StatusIs | Error | Awaited | Pledged | Unpledged
)  # fmt: skip
