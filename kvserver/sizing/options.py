"""The options of a sizing, checked once, here."""

from dataclasses import dataclass
from typing import Literal, get_args

from kvserver.errors import ConfigError
from kvserver.replay.options import ReplayOptions

SIZES_MAX = 64
Policy = Literal["lru", "arc"]


@dataclass(frozen=True, kw_only=True)
class SizingOptions:
    """All options. Traffic is that of a replay with the same numbers (replay/options.py)."""

    trace: str = "claude-code"
    """A sample's name, a trace, or a key log (keylog.py)."""
    arena_bytes: tuple[int, ...] = ()
    """Empty: powers of two, up to 1.5 times the bytes of all chunks."""
    policy: Policy = "lru"
    """The server's eviction_policy."""
    token_bytes: int = 128 * 1024
    """KV bytes of a token, over all ranks: Llama-3.1-8B in bf16."""
    requests: int = 0
    """0: all of the trace once."""
    users: int = 16
    workers: int = 2
    in_flight: int = 3
    pool_tokens: int = 256 * 1024
    """Paged KV of each worker. 0: none, so every reused token comes from the server."""
    context_tokens_max: int = 100_000
    think_s_max: float = 600.0
    block_tokens: int = 64
    blocks_per_chunk: int = 4
    seed: int = 42

    def __post_init__(self) -> None:
        for size in self.arena_bytes:
            if size < 1:
                raise ConfigError("sizing-options", f"sizes={size} must be positive")
        if len(self.arena_bytes) > SIZES_MAX:
            raise ConfigError(
                "sizing-options", f"sizes names {len(self.arena_bytes)} sizes, at most {SIZES_MAX} are replayed"
            )
        if self.policy not in get_args(Policy):
            raise ConfigError("sizing-options", f"policy={self.policy!r} must be {' or '.join(get_args(Policy))}")
        if self.token_bytes < 1:
            raise ConfigError("sizing-options", f"token_bytes={self.token_bytes} must be positive")
        self.replay  # noqa: B018 - raises ConfigError for the rest

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    @property
    def replay(self) -> ReplayOptions:
        return ReplayOptions(
            trace=self.trace,
            requests=self.requests,
            users=self.users,
            workers=self.workers,
            in_flight=self.in_flight,
            pool_tokens=self.pool_tokens or self.context_tokens_max + self.block_tokens,
            context_tokens_max=self.context_tokens_max,
            think_s_max=self.think_s_max,
            block_tokens=self.block_tokens,
            blocks_per_chunk=self.blocks_per_chunk,
            seed=self.seed,
        )
