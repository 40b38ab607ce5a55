"""The values that callers pass to the client and get back. Plain data; nothing here touches a socket."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvserver.errors import RequestError
from kvserver.wire.messages import SEGMENT_BYTES_MAX, STAGING_SEGMENTS, FoundWhy, GroupSpec, Mode, RegionRun

STAGING_BYTES = STAGING_SEGMENTS * SEGMENT_BYTES_MAX
CHOSEN_MODES: dict[str, Mode] = {"host": "direct", "portable": "engine-driven"}

BlockIds = bytes | bytearray | memoryview | Sequence[int]
"""Packed little-endian int32, anything with a buffer of C ints (array("i"), an int32 tensor), or a sequence of ints."""


class Blocks(NamedTuple):
    """Blocks of one group: block_ids[i] holds block `first_block + i` of the prefix."""

    group: int
    first_block: int
    block_ids: BlockIds


class HostBuffer(NamedTuple):
    """Ordinary memory in which the engine keeps its KV: a memfd, or another shared memory file."""

    descriptor: int
    """The client duplicates it; the caller may close it after register_cache()."""
    bytes: int


class DeviceBuffer(NamedTuple):
    """GPU memory in which the engine keeps its KV, a tensor's extent. It must stay until the cache is unregistered."""

    address: int
    """Address of the first byte: data_ptr()."""
    bytes: int


class TensorBuffer(NamedTuple):
    """A torch tensor in which the engine keeps its KV, for device portable. It must keep its storage until the cache is
    unregistered."""

    tensor: Any
    """A torch.Tensor. Offsets of regions count from its first byte."""


Buffered = HostBuffer | DeviceBuffer | TensorBuffer


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """One rank's KV cache as registered with the server. Kept, and registered again after every reconnect."""

    name: str
    """Name of the cache within the client."""
    namespace: bytes
    """keys.namespace_digest() of everything that must be equal before bytes can be shared."""
    chunk_tokens: int
    buffers: Sequence[Buffered]
    groups: Sequence[GroupSpec]
    """Offsets of their regions count from the beginning of their buffers."""
    device: str = "host"
    """host, cuda, rocm, or portable: any device of torch, through torch and a buffer on the host. portable is slow, for
    devices that cannot be reached otherwise, and is used only if set here."""
    library: str = ""
    """GPUs: path of the driver's library. Empty: the library that this process has loaded, or that the system finds."""
    tenant: str = ""
    mode: Mode | Literal[""] = ""
    """Empty: direct on the host, staged on GPUs, engine-driven for portable."""
    staging_bytes: int = STAGING_BYTES
    """Device memory that mode staged takes besides the KV cache, or less if there is not enough. portable: host memory,
    at least for two chunks, and briefly as much on the device."""
    tokens_max: int = 0
    """Tokens of the engine's longest prompt; 0 if unknown. A server whose arena can never hold one refuses the
    cache."""
    model: str = ""
    """The model's name for people, a label in the server's /metrics. At most 128 printable bytes (label_of())."""

    @property
    def chosen_mode(self) -> Mode:
        return self.mode or CHOSEN_MODES.get(self.device, "staged")


def full_group(
    *,
    block_tokens: int,
    blocks: int,
    regions: Sequence[RegionRun],
    shards: int = 1,
    shard: int = 0,
    writers: int = 1,
    writer: int = 0,
) -> GroupSpec:
    """The common group: full attention, which needs every chunk of a prefix."""
    return GroupSpec(
        block_tokens=block_tokens,
        blocks=blocks,
        kind="full",
        window_tokens=0,
        shards=shards,
        shard=shard,
        writers=writers,
        writer=writer,
        regions=list(regions),
    )


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time limits of the calls, in seconds. A call over its limit ends as a miss, or with `why`."""

    lookup_s: float = 0.1
    """Lookup and release, which are on the engine's hot path."""
    request_s: float = 5.0
    """Status and clear."""
    store_s: float = 30.0
    retrieve_s: float = 10.0
    """Time after which to give up. A retrieve's future may complete later, when its blocks are quiet."""
    register_s: float = 60.0
    """Register and unregister. A device's first registration starts a process."""
    connect_s: float = 5.0
    """Time from an accepted connection to the end of the handshake."""
    probe_s: float = 1.0
    """How long the background probe after a timeout waits for an answer before it tries again. A job's timeout leads to
    a probe only if the server was silent for this long."""
    backoff_first_s: float = 0.02
    backoff_max_s: float = 1.0
    """Pauses between attempts to connect, probe or register. They double from first to max, with jitter."""
    close_s: float = 5.0
    """How long close() waits for retrieves whose blocks are still being written."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value <= 86_400:
                raise RequestError("timeouts", f"{name}={value} must be in (0, 86400] seconds")
        if self.backoff_first_s > self.backoff_max_s:
            raise RequestError(
                "timeouts", f"backoff_first_s={self.backoff_first_s} must not exceed backoff_max_s={self.backoff_max_s}"
            )


class Lease(NamedTuple):
    """The server's promise to keep a prefix. Belongs to the engine (name and epoch).

    Any process of the engine may use it, each rank for one retrieve.
    """

    number: int
    chunks: int
    incarnation: int
    """Incarnation of the server that granted it. Another incarnation does not know it."""
    expires_monotonic_s: float
    """Expiry on this machine's CLOCK_MONOTONIC, never later than the server's own."""
    chunks_on_disk: int = 0
    """Number of chunks that had to be read from disk when the lease was granted. The read began then."""
    awaited: int = 0
    """Number of chunks after those that another engine computes. A retrieve may reach to their end, and waits."""


RECOVERING: FoundWhy = "recovering"
"""Value of Found.why from a server that answered."""


class Found(NamedTuple):
    """A lookup's outcome: `chunks` leading chunks can be served, with a lease if there were enough of them."""

    chunks: int
    lease: Lease | None
    why: str = ""
    """Empty if the server answered. "recovering": it answered, but may hold more, because it has not read all its disks
    yet. Otherwise the reason why it could not be asked, as in StoreResult."""
    coming: int = 0
    """How many chunks after those may come from a remote store soon. Who can wait asks again."""
    awaited: int = 0
    """How many chunks after those the lease is on while another engine computes them. 0 unless the lookup may wait."""
    producer: str = ""
    """Name of that engine."""


class PledgeResult(NamedTuple):
    """A pledge's outcome: the server counts on this engine for `chunks` chunks after the `held` ones."""

    number: int
    """0: nothing was pledged. Client.unpledge() takes the pledge back."""
    held: int
    chunks: int
    """Fewer than asked if another engine has pledged the next one, or the server takes no more."""
    incarnation: int = 0
    """Incarnation of the server that took it."""
    why: str = ""
    """Why the server could not be asked, as in StoreResult, or the code of its refusal."""


class StoreResult(NamedTuple):
    """A store's outcome: the server holds `chunks` leading chunks. The blocks belong to the caller again in
    every case."""

    chunks: int
    chunks_written: int
    """Chunks that this store wrote. The others were held already."""
    bytes: int
    why: str
    """Empty if all chunks were stored. Otherwise one of messages.Stored.why, an error code of the server, or a reason
    of the client: busy (too many jobs in flight), timeout, not-connected, connection-lost, not-registered, closed,
    client-bug, device-error (the awaited event failed), or late (all bytes arrived in time, but the count of chunks
    never did, so none is claimed here)."""


class RetrieveResult(NamedTuple):
    """A retrieve's outcome. ok: every block holds its bytes. Otherwise their content is undefined, but for
    right_chunks, and nobody writes them."""

    ok: bool
    bytes: int
    why: str
    """Empty if ok. digest: some chunk has other bytes than were stored. not-coming: some awaited chunk was not stored,
    in time or at all. Besides those and the reasons in StoreResult, the client has two of its own. lease-lost: an
    earlier incarnation of the server granted the lease. doubt: the server reported success, and the job's word did
    not."""
    right_chunks: int = 0
    """If not ok: in the prefix, the blocks of this many leading chunks hold their bytes nevertheless."""
