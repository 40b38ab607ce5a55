"""The options of a replay, checked once, here. All other files trust them."""

from dataclasses import dataclass, field
from pathlib import Path

from kvserver.sizing.options import TrafficOptions, require

MIB = 1 << 20
DISK_FLAG, DISK_PATHS_FLAG = "--disk-bytes", "--disk-paths"


@dataclass(frozen=True)
class Arm:
    """One configuration of the server that the same workload runs against."""

    name: str
    serve_flags: tuple[str, ...] = ()
    """Flags added to `kvserver serve`. With --disk-bytes but no --disk-paths the server gets a temporary directory."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(TrafficOptions):
    """All options. The defaults are those of `make demo`: 2 cores, a minute, 2 GiB of memory, 3 GiB of disk."""

    requests: int = 1500

    # -- the engine workers
    regions: int = 8
    """Layers x K/V."""
    page_bytes: int = 8192
    """Bytes of one block in one region. With the other defaults a token is 1 KiB."""

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
    def block_bytes(self) -> int:
        return self.regions * self.page_bytes

    @property
    def pool_bytes(self) -> int:
        return self.pool_blocks * self.block_bytes

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("regions", "model_token_bytes"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("restart_after", "model_disk_bytes_per_s"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        for name in ("pool_tokens", "link_bytes_per_s", "prefill_times"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        require(
            self.page_bytes >= 8 and self.page_bytes % 8 == 0,
            f"page_bytes={self.page_bytes} must be a positive multiple of 8",
        )
        require(len(self.arms) >= 1, "arms must name at least one server configuration")
        require(self.socket is None or len(self.arms) == 1, "a server that is used cannot be started in several arms")
        require(
            self.socket is None or not self.restart_after,
            "a server that is used is not killed: restart_after must be 0",
        )
