"""The options of recorded traffic and of a sizing, checked once, here. All other files trust them."""

from dataclasses import dataclass
from typing import Literal, get_args

from kvserver.errors import ConfigError
from kvserver.sizing.trace import ARRIVAL_BLOCK_TOKENS, SESSION_BLOCK_TOKENS

SIZES_MAX = 64
Policy = Literal["lru", "arc"]
RemoteWrite = Literal["none", "reuse", "through"]


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """Which requests are sent, and the engine workers that they are sent to."""

    trace: str = "claude-code"
    """A sample's name (claude-code, mooncake) or a file."""
    requests: int = 0
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
    workers: int = 2
    in_flight: int = 3
    """Maximum of requests that a worker has begun and not ended."""
    block_tokens: int = 64
    blocks_per_chunk: int = 4
    pool_tokens: int = 256 * 1024
    """Paged KV of each worker ("HBM"). 0: none, so every reused token comes from the server."""

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    @property
    def pool_blocks(self) -> int:
        return self.pool_tokens // self.block_tokens

    def __post_init__(self) -> None:
        for name in ("users", "context_tokens_max", "workers", "in_flight", "block_tokens", "blocks_per_chunk"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("requests", "think_s_max"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        for name in ("warm_prefix_ratio", "migrate_ratio"):
            require(0.0 <= getattr(self, name) <= 1.0, f"{name}={getattr(self, name)} must be in [0, 1]")
        for tokens in (SESSION_BLOCK_TOKENS, ARRIVAL_BLOCK_TOKENS):
            require(
                tokens % self.block_tokens == 0,
                f"block_tokens={self.block_tokens} must divide {tokens}, the tokens of a trace block",
            )
        least = self.context_tokens_max + self.block_tokens
        require(
            self.pool_tokens == 0 or self.pool_tokens >= least,
            f"pool_tokens={self.pool_tokens} must be at least {least}: one request of "
            f"context_tokens_max={self.context_tokens_max} has to fit",
        )


@dataclass(frozen=True, kw_only=True)
class SizingOptions(TrafficOptions):
    """The same traffic for each size. `trace` may also be a key log (keylog.py)."""

    arena_bytes: tuple[int, ...] = ()
    """Empty: powers of two, up to 1.5 times the bytes of all chunks."""
    policy: Policy = "lru"
    """The server's eviction_policy."""
    token_bytes: int = 128 * 1024
    """KV bytes of a token, over all ranks: Llama-3.1-8B in bf16."""
    machines: int = 1
    """Servers, each with an arena of that size. Workers are dealt out to them."""
    remote_write: RemoteWrite = "none"
    """Which chunks go to a store that all machines share; none: there is no store."""
    remote_bytes: int = 0
    """Size of the store, which drops what was used longest ago; 0: no end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.arena_bytes:
            require(size >= 1, f"arena_bytes={size} must be positive")
        sizes = len(self.arena_bytes)
        require(sizes <= SIZES_MAX, f"arena_bytes names {sizes} sizes, at most {SIZES_MAX} are replayed")
        policies = get_args(Policy)
        require(self.policy in policies, f"policy={self.policy!r} must be {' or '.join(policies)}")
        writes = get_args(RemoteWrite)
        require(self.remote_write in writes, f"remote_write={self.remote_write!r} must be {' or '.join(writes)}")
        require(self.remote_bytes >= 0, f"remote_bytes={self.remote_bytes} must not be negative")
        require(
            1 <= self.machines <= self.workers,
            f"machines={self.machines} must be in [1, workers={self.workers}]: each needs a worker",
        )
        require(self.token_bytes >= 1, f"token_bytes={self.token_bytes} must be positive")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError("traffic-options", message)
