"""The result of a replay: counts and estimates for each server configuration, and the problems."""

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p95: float
    p99: float
    largest: float


class Traffic(msgspec.Struct, frozen=True):
    """Jobs of one kind that moved bytes, from the call to its reply."""

    jobs: int
    bytes: int
    gb_per_s: float
    """Bytes over the time in which at least one of them, of any worker, was in flight."""
    ms: Quantiles
    """Durations of the jobs."""


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of the prompts' tokens; the rest was computed."""

    prompt_tokens: int
    hbm_tokens: int
    dram_tokens: int
    disk_tokens: int

    @property
    def hit_tokens(self) -> int:
        return self.hbm_tokens + self.dram_tokens + self.disk_tokens


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated times to first token (cost.py), in seconds."""

    alone: Quantiles
    """Estimates without any waiting."""
    queued: Quantiles
    """Estimates with waiting for the worker and for the disk (queueing.py)."""
    requests_per_hour: float
    """Requests answered per hour, with that waiting, from the first request to the last."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive requests of the run."""

    at_s: float
    """Time of the middle request on the workload's clock."""
    sources: Sources
    ttft_p95_s: float
    """With waiting."""
    ttft_hbm_only_p95_s: float


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """The server was killed (SIGKILL) and started again; the engines and their HBM lived on."""

    requests: int
    """Requests that had ended by then."""
    ready_s: float
    """From its start until it served again, with the chunks found on disk."""
    window: int
    """Number of requests in `before` (the last ones) and in `after` (the first ones)."""
    before: Sources
    after: Sources


class DiskUse(msgspec.Struct, frozen=True, kw_only=True):
    """The disk tier's counters, over all lives of the server."""

    total_bytes: int
    used_bytes: int
    written_bytes: int
    """Bytes in records, without their headers."""
    read_bytes: int
    process_written_bytes: int
    """Bytes that the disk mover sent to the device (write_bytes of /proc/PID/io); 0 if that cannot be read."""
    evictions: int
    recovered: int
    """Chunks that a restarted server found on disk."""
    refused: dict[str, int]
    """Chunks that left DRAM and are not on disk, by reason (tiers/placement.py)."""
    faults: dict[str, int]


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    requests: int
    prompt_tokens: int
    hbm_tokens: int
    retrieved_tokens: int
    computed_tokens: int
    """hbm + retrieved + computed = prompt, exactly."""
    foreign_tokens: int
    """Part of retrieved_tokens that was certainly stored by another worker."""
    disk_tokens: int
    """Part of retrieved_tokens that was read from disk first."""
    retrieve: Traffic
    store: Traffic
    from_disk: Traffic
    """Retrieves that waited for the disk; `bytes` counts only their bytes from disk."""
    lookup_us: Quantiles
    ttft: Latency
    ttft_hbm_only: Latency
    """For the same requests and the same HBM contents, without a server."""
    disk_bytes_per_s: float
    """Disk rate used for both estimates; 0 if nothing came from disk."""
    lookups_unserved: dict[str, int]
    """Counts by reason. Each is a miss."""
    retrieves_failed: dict[str, int]
    stores_cut_short: dict[str, int]
    compared_bytes: int
    wrong_bytes: int
    """Wrong bytes among retrieved and spot-checked bytes."""
    spot_bytes: int
    hbm_evictions: int
    server: dict[str, int]
    """Counters of the server, under the names of its status document."""
    disk: DiskUse | None
    """None without a disk tier."""
    restart: Restart | None
    series: list[Window]
    wall_s: float

    @property
    def dram_tokens(self) -> int:
        return self.retrieved_tokens - self.disk_tokens


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    trace: str
    seed: int
    workers: int
    users: int
    token_bytes: int
    """Real bytes per token in this run."""
    cost_model: str
    arms: list[ArmResult]
    problems: list[str]
    """Why the replay did not pass; empty if it passed."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1


def byte_problems(arm: ArmResult) -> list[str]:
    """Problems with an arm's bytes. A run that moved or compared nothing has shown nothing, so it fails."""
    problems = []
    if arm.wrong_bytes:
        problems.append(f"{arm.name}: {arm.wrong_bytes} wrong bytes")
    if arm.retrieved_tokens == 0:
        problems.append(f"{arm.name}: nothing was retrieved")
    if arm.compared_bytes != arm.retrieve.bytes or arm.compared_bytes == 0:
        problems.append(f"{arm.name}: {arm.compared_bytes} bytes compared of {arm.retrieve.bytes} retrieved")
    return problems
