"""What a user of ATOM says in --kv-transfer-config. Wrong values are errors when the engine starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvclient.settings import checked
from kvclient.values import STAGING_BYTES, Timeouts
from kvserver.errors import RequestError

MIB = 1 << 20
CHUNK_TOKENS_MIN = 256
"""Below, names and slots cost more than the finer cut of a prefix brings."""
ROLES = {"offload": (True, True), "kv_both": (True, True), "kv_producer": (True, False), "kv_consumer": (False, True)}
"""Whether it stores, and whether it loads."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See docs/atom.md for what each is good for."""

    socket: str
    """Path of the server's socket."""
    chunk_tokens: int = 0
    """Tokens of a chunk. 0: the smallest multiple of ATOM's block that has at least 256."""
    min_load_tokens: int = 256
    """A hit that brings fewer tokens than this beyond what HBM holds is computed instead."""
    lookup_timeout_ms: int = 20
    """ATOM's scheduler waits for a lookup, for so long at most; then it is a miss."""
    load_timeout_ms: int = 10_000
    store_timeout_ms: int = 10_000
    """Blocks that are being stored cannot be preempted meanwhile."""
    model_id: str = ""
    """Stands for the digest of the model's files; needed where there are none. Models that differ must not share it."""
    weights_epoch: int = 0
    """Changes whenever the weights do without their files."""
    tenant: str = ""
    staging_mib: int = STAGING_BYTES // MIB
    """GPU memory that the connector takes beside the KV cache."""

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(
            lookup_s=self.lookup_timeout_ms / 1000,
            retrieve_s=self.load_timeout_ms / 1000,
            store_s=self.store_timeout_ms / 1000,
        )


def parse(transfer: Mapping[str, Any]) -> Settings:
    """Of a kv_transfer_config."""
    extra = transfer.get("kv_connector_extra_config")
    if not isinstance(extra, Mapping):
        raise RequestError(
            "settings", f"kv_connector_extra_config={extra!r} must be a mapping that names the server's socket"
        )
    return checked(Settings, extra)


def role_of(transfer: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether it stores, and whether it loads."""
    role = transfer.get("kv_role", "offload")
    if role not in ROLES:
        raise RequestError("settings", f"kv_role={role!r} must be one of {sorted(ROLES)}")
    return ROLES[role]


def chosen_chunk_tokens(block_tokens: int, wanted: int) -> int:
    """Tokens of a chunk: what the user wants, or the smallest that is worth it."""
    if wanted % block_tokens:
        raise RequestError(
            "chunk-tokens",
            f"chunk_tokens={wanted} must be a multiple of {block_tokens}, the tokens of one of ATOM's blocks "
            "(block size x context parallel ranks)",
        )
    return wanted or -(-CHUNK_TOKENS_MIN // block_tokens) * block_tokens
