"""What callers hand to the client and what they get back. Plain values; nothing here touches a socket."""

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
    """Ordinary memory that the engine keeps its KV in: a memfd, or another shared memory file."""

    descriptor: int
    """The client duplicates it; the caller may close it after register_cache()."""
    bytes: int


class DeviceBuffer(NamedTuple):
    """GPU memory that the engine keeps its KV in, a tensor's extent. It must stay until the cache is unregistered."""

    address: int
    """Of the first byte: data_ptr()."""
    bytes: int


class TensorBuffer(NamedTuple):
    """A torch tensor that the engine keeps its KV in, on whatever device: for device portable. It must keep its storage
    until the cache is unregistered."""

    tensor: Any
    """torch.Tensor. Offsets of regions count from its first byte."""


Buffered = HostBuffer | DeviceBuffer | TensorBuffer


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """One rank's KV cache as the server is to know it. Kept, and registered again after every reconnect."""

    name: str
    """Names the cache within the client."""
    namespace: bytes
    """keys.namespace_digest() of everything that must be equal for bytes to be interchangeable."""
    chunk_tokens: int
    buffers: Sequence[Buffered]
    groups: Sequence[GroupSpec]
    """Offsets of their regions count from the begin of their buffers."""
    device: str = "host"
    """host, cuda or rocm. portable: any device that torch knows, by torch alone, through a buffer on the host. That is
    slow, for devices that nothing else here reaches, and never chosen unless it is said."""
    library: str = ""
    """GPUs: path of the driver's library. Empty: the one that this process has loaded, or that the system finds."""
    tenant: str = ""
    mode: Mode | Literal[""] = ""
    """Empty: direct on the host, staged on GPUs, engine-driven where it is portable."""
    staging_bytes: int = STAGING_BYTES
    """Device memory that mode staged takes beside the KV cache; less when it is not to be had. portable: memory of the
    host, for two chunks at least, and as much of the device's for moments."""
    tokens_max: int = 0
    """Tokens of the engine's longest prompt. A server whose arena can never hold one refuses the cache. 0: not said."""
    model: str = ""
    """What people call the model, a label in the server's /metrics: 128 printable bytes at most (identity.label_of)."""

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
    """The common group: full attention, every chunk of a prefix is needed."""
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
    """How long each call may take, in seconds. Afterwards it ends as a miss, or with what `why` says."""

    lookup_s: float = 0.1
    """Lookup and release: on the engine's hot path."""
    request_s: float = 5.0
    """Status and clear."""
    store_s: float = 30.0
    retrieve_s: float = 10.0
    """When to give up. The future of a retrieve may complete later, when its blocks are quiet."""
    register_s: float = 60.0
    """Register and unregister; the first of a device starts a process."""
    connect_s: float = 5.0
    """From a connection that was accepted to the end of the handshake."""
    probe_s: float = 1.0
    """After a timeout: how long the background probe waits for a sign of life before it tries again. A job's timeout
    leads to a probe when the server has said nothing for as long."""
    backoff_first_s: float = 0.02
    backoff_max_s: float = 1.0
    """Between attempts to connect, probe or register; doubles from first to max, with jitter."""
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
    """The server's promise to keep a prefix. Belongs to the engine (name and epoch): any of its processes may use it,
    each rank for one retrieve."""

    number: int
    chunks: int
    incarnation: int
    """Of the server that granted it; another one does not know it."""
    expires_monotonic_s: float
    """On CLOCK_MONOTONIC of this machine; never later than the server's own idea."""
    chunks_on_disk: int = 0
    """How many of the chunks had to be read from disk when the lease was granted, which began then."""


RECOVERING: FoundWhy = "recovering"
"""Found.why of a server that has answered."""


class Found(NamedTuple):
    """A lookup's outcome: `chunks` leading chunks can be served, with a lease when there were enough of them."""

    chunks: int
    lease: Lease | None
    why: str = ""
    """Empty when the server answered. recovering: it did, and there may be more than it knows of: it has not heard yet
    what its disks hold. Otherwise why it could not be asked, as in StoreResult."""


class StoreResult(NamedTuple):
    """`chunks` leading chunks of the request are held now; the blocks are the caller's again in every case."""

    chunks: int
    chunks_written: int
    """How many of them this store brought; the rest was held already."""
    bytes: int
    why: str
    """Empty when all were stored. The server's reasons are messages.Stored.why and its error codes; the client adds
    busy (too many jobs in flight), timeout, not-connected, connection-lost, not-registered, closed, client-bug, and
    device-error (the event to wait for has failed), and
    late: all bytes were taken in time, but the count of chunks never came, so none is claimed here."""


class RetrieveResult(NamedTuple):
    """ok: every block holds its bytes. Otherwise nobody writes the blocks any more and their content is undefined."""

    ok: bool
    bytes: int
    why: str
    """Empty when ok. The client adds lease-lost (granted by an earlier life of the server) and doubt (the server said
    done, the job's word did not) to the reasons named in StoreResult."""
