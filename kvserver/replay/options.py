"""The options of a replay, checked once, here. All other files trust them."""

from dataclasses import dataclass, field
from pathlib import Path

from kvserver.errors import ConfigError
from kvserver.replay.trace import ARRIVAL_BLOCK_TOKENS, SESSION_BLOCK_TOKENS

MIB = 1 << 20


_POSITIVE = (
    "users",
    "context_tokens_max",
    "workers",
    "in_flight",
    "block_tokens",
    "blocks_per_chunk",
    "regions",
    "model_token_bytes",
)
DISK_FLAG, DISK_PATHS_FLAG = "--disk-bytes", "--disk-paths"


@dataclass(frozen=True)
class Arm:
    """One configuration of the server that the same workload runs against."""

    name: str
    serve_flags: tuple[str, ...] = ()
    """Flags added to `kvserver serve`. With --disk-bytes but no --disk-paths the server gets a temporary directory."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """All options. The defaults are those of `make demo`: 2 cores, a minute, 2 GiB of memory, 3 GiB of disk."""

    # -- users and requests
    trace: str = "claude-code"
    """A sample's name (claude-code, mooncake) or a file."""
    requests: int = 1500
    """Number of requests to send; 0: all of the trace once."""
    users: int = 16
    """Sessions at any time. Not used by traces in arrival order."""
    context_tokens_max: int = 100_000
    """A session ends at its first longer request, as in the trace's own tester."""
    think_s_max: float = 600.0
    """Longer pauses are cut to this. All pauses pass on a simulated clock."""
    warm_prefix_ratio: float = 0.5
    """Share of the longest tool-and-system prompt that is common to all sessions."""
    migrate_ratio: float = 0.2
    """Chance that a conversation's next request goes to another worker."""
    seed: int = 42

    # -- the engine workers
    workers: int = 2
    in_flight: int = 3
    """Maximum of requests that a worker has begun and not ended."""
    block_tokens: int = 64
    blocks_per_chunk: int = 4
    regions: int = 8
    """Layers x K/V."""
    page_bytes: int = 8192
    """Bytes of one block in one region. With the other defaults a token is 1 KiB."""
    pool_tokens: int = 256 * 1024
    """Paged KV of each worker ("HBM")."""

    # -- the server
    socket: Path | None = None
    """Use the server at this socket instead of starting one; then there can be only one arm."""
    arena_bytes: int = 384 * MIB
    """Deliberately smaller than the working set and than the workers' pools: this is the case for a disk."""
    arms: tuple[Arm, ...] = field(default=(Arm("+ DRAM"), Arm("+ DRAM + NVMe", (DISK_FLAG, "3GiB"))))
    disk_dir: Path = Path("/var/tmp")
    """Parent of the disk tiers' directories, which are removed at the end. On a real disk, so not in /tmp."""
    restart_after: int = 0
    """The server is killed (all its processes) and restarted after this many requests have ended. 0: never."""
    start_s_max: float = 30.0
    job_s_max: float = 10.0
    """Timeout of a worker's store or retrieve."""
    stall_s_max: float = 60.0
    """The replay is given up if nothing ends for this long."""

    # -- parameters of the cost model (cost.py)
    prefill_times: float = 8.75
    """Prefill time of the modelled model relative to Llama-3.1-8B: 70e9 parameters over 8e9."""
    model_token_bytes: int = 160 * 1024
    """KV bytes of one token of the modelled model: Llama-3.1-70B in fp8."""
    model_disk_bytes_per_s: float = 0.0
    """Rate of the modelled disks. 0: as measured in this run."""
    link_bytes_per_s: float = 55e9
    """Rate at which the modelled engine gets its bytes back: PCIe gen5 x16 as measured."""

    name: str = "replay"
    """First word of the verdict line."""

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    @property
    def block_bytes(self) -> int:
        return self.regions * self.page_bytes

    @property
    def pool_blocks(self) -> int:
        return self.pool_tokens // self.block_tokens

    @property
    def pool_bytes(self) -> int:
        return self.pool_blocks * self.block_bytes

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("requests", "restart_after", "model_disk_bytes_per_s"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        _require(self.think_s_max >= 0, f"think_s_max={self.think_s_max} must not be negative")
        for name in ("warm_prefix_ratio", "migrate_ratio"):
            _require(0.0 <= getattr(self, name) <= 1.0, f"{name}={getattr(self, name)} must be in [0, 1]")
        for tokens in (SESSION_BLOCK_TOKENS, ARRIVAL_BLOCK_TOKENS):
            _require(
                tokens % self.block_tokens == 0,
                f"block_tokens={self.block_tokens} must divide {tokens}, the tokens of a trace block",
            )
        _require(
            self.page_bytes >= 8 and self.page_bytes % 8 == 0,
            f"page_bytes={self.page_bytes} must be a positive multiple of 8",
        )
        least = self.context_tokens_max + self.block_tokens
        _require(
            self.pool_tokens >= least,
            f"pool_tokens={self.pool_tokens} must be at least {least}: one request of "
            f"context_tokens_max={self.context_tokens_max} has to fit",
        )
        _require(len(self.arms) >= 1, "arms must name at least one server configuration")
        _require(self.socket is None or len(self.arms) == 1, "a server that is used cannot be started in several arms")
        _require(
            self.socket is None or not self.restart_after,
            "a server that is used is not killed: restart_after must be 0",
        )
        for name in ("link_bytes_per_s", "prefill_times"):
            _require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError("replay-options", message)
