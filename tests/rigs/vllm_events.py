"""vLLM's event classes as its releases have them, and requests with chained block hashes.

The tables were read in the sources of vLLM 0.20.0 to 0.33.0. tests/e2e compares 0.32.0's with the real classes.
"""

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

REQUIRED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
LATER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("0.20", ("extra_keys", "group_idx")),
    ("0.22", ("kv_cache_spec_kind", "kv_cache_spec_sliding_window")),
    ("0.26", ("locality",)),
    ("0.29", ("ownership",)),
    ("0.30", ("session_id",)),
    ("0.33", ("lookahead_token_ids",)),
)
"""Optional fields of BlockStored by the release that added them."""
OF_REMOVALS = {"group_idx", "locality", "ownership"}
MAPS_SINCE = "0.24"
"""Before this release an event is an array; since then it is a map."""
RELEASES = ("0.20", "0.22", "0.24", "0.26", "0.29", "0.30", "0.33")
"""Releases that differ."""


def events_of(release: str) -> Any:
    """What stands for vllm.distributed.kv_events."""
    more = [name for since, names in LATER if since <= release for name in names]
    base: Any = {"tag": True, "array_like": release < MAPS_SINCE, "omit_defaults": True, "gc": False}
    stored = msgspec.defstruct("BlockStored", [*((name, Any) for name in REQUIRED), *_optional(more)], **base)
    removed_more = [name for name in more if name in OF_REMOVALS]
    removed = msgspec.defstruct(
        "BlockRemoved", [("block_hashes", Any), ("medium", Any), *_optional(removed_more)], **base
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], **base)
    batch = msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[Any]), ("data_parallel_rank", int | None, None)],
        array_like=True,
        omit_defaults=True,
    )
    return SimpleNamespace(BlockStored=stored, BlockRemoved=removed, AllBlocksCleared=cleared, KVEventBatch=batch)


def _optional(names: Sequence[str]) -> list[tuple[str, Any, None]]:
    return [(name, Any, None) for name in names]


def encoded(kv_events: Any, events: Sequence[Any], rank: int = 0) -> bytes:
    """The payload that vLLM's publisher makes of one step's events."""
    batch = kv_events.KVEventBatch(ts=1.5, events=list(events), data_parallel_rank=rank)
    return msgspec.msgpack.encode(batch)


class Utils:
    """What stands for vllm.v1.core.kv_cache_utils."""

    def __init__(self, *, ints: bool = True) -> None:
        self._ints = ints

    def maybe_convert_block_hash(self, block_hash: bytes) -> int | bytes:
        return int.from_bytes(block_hash, "big") & ((1 << 64) - 1) if self._ints else block_hash

    @staticmethod
    def generate_block_hash_extra_keys(
        request: Any, start: int, end: int, mm: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys = [("lora", request.lora_request.lora_name)] if request.lora_request else []
        keys += [("salt", request.cache_salt)] if request.cache_salt and start == 0 else []
        return tuple(keys) or None, mm

    @staticmethod
    def to_event_extra_keys(extra_keys: list[Any]) -> list[Any] | None:
        return [None if keys is None else tuple(key[1] for key in keys) for keys in extra_keys] or None

    class BlockHashListWithBlockSize(list[bytes]):
        """As in recent releases: the hash of a larger block is that of its last part."""

        def __init__(self, hashes: Sequence[bytes], tokens: int, block_tokens: int) -> None:
            scale = block_tokens // tokens
            super().__init__(hashes[scale - 1 :: scale])


def block_hashes(tokens: Sequence[int], block_tokens: int, parent: bytes = b"") -> list[bytes]:
    """The chained hashes of all whole blocks. parent: the hash before them."""
    hashes = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        text = repr(list(tokens[start : start + block_tokens])).encode()
        hashes.append(parent := hashlib.sha256(parent + text).digest())
    return hashes
