"""Decoders of routers that read vLLM's events, written after their sources.

llm-d: engineadapter/vllm_msgpack.go and pool.go in pkg/kvevents of llm-d-router, commits 1c5d5987 and 0557f296.
Dynamo: lib/kv-router/src/zmq_wire/ (types.rs 2bd0a36d, deserialize.rs 0917ca25, mod.rs 035d7262, convert.rs 2bd0a36d).
Both are stricter here than there: what they would drop or misread raises Undecoded.
"""

from typing import Any, NamedTuple

import msgspec

STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
FIELDS = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS, "AllBlocksCleared": ()}
MAIN_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
DYNAMO_TIERS = {"GPU": "device", "CPU": "host-pinned", "STORAGE": "disk"}


class Undecoded(Exception):
    """A router would drop this."""


class Seen(NamedTuple):
    """An event as a router sees it."""

    tag: str
    hashes: list[int]
    parent: int | None
    tokens: list[int]
    block_size: int
    tier: str
    lora_name: str | None
    group: int | None
    namespace: str | None = None
    """The cache salt, as far as the router reads one."""


def llm_d(payload: bytes) -> list[Seen]:
    """Arrays and maps; a hash is a number or bytes, of which the last eight count."""
    batch = msgspec.msgpack.decode(payload)
    _check(isinstance(batch, list) and len(batch) >= 2 and isinstance(batch[0], float), "a batch")
    return [_llm_d_event(event) for event in batch[1]]


def _llm_d_event(event: Any) -> Seen:
    tag, fields = _fields(event)
    hashes = [_hash_of_bytes_too(value) for value in fields.get("block_hashes") or []]
    parent, tokens = fields.get("parent_block_hash"), fields.get("token_ids") or []
    group, kind = fields.get("group_idx"), fields.get("kv_cache_spec_kind")
    size = fields.get("block_size") or 0
    if tag == "BlockStored":
        _check(all(0 <= token < 1 << 32 for token in tokens), "token ids of 32 bits")
        if group is not None and kind is not None:
            _check(kind in MAIN_KINDS, f"a kind that is indexed, not {kind}")
            _check(size > 0 and len(tokens) == size * len(hashes), "as many tokens as the blocks have")
        extra = fields.get("extra_keys")
        _check(extra is None or len(extra) == len(hashes), "extra keys for each block")
    tier = (fields.get("medium") or "gpu").lower()
    parent = None if parent is None else _hash_of_bytes_too(parent)
    return Seen(tag, hashes, parent, tokens, size, tier, fields.get("lora_name"), group)


def dynamo(payload: bytes, *, block_size: int) -> list[Seen]:
    """A batch of exactly three fields; a hash is a number; blocks have the router's own size."""
    batch = msgspec.msgpack.decode(payload)
    _check(isinstance(batch, list) and len(batch) == 3 and isinstance(batch[2], int | None), "a batch of three")
    return [_dynamo_event(event, block_size) for event in batch[1]]


def _dynamo_event(event: Any, block_size: int) -> Seen:
    tag, fields = _fields(event)
    hashes = [_number(value) for value in fields.get("block_hashes") or []]
    parent, tokens = fields.get("parent_block_hash"), fields.get("token_ids") or []
    group, kind, namespace = fields.get("group_idx"), fields.get("kv_cache_spec_kind"), None
    if fields.get("locality") not in (None, "LOCAL"):
        raise Undecoded("it is not local")
    if tag == "BlockStored":
        _check(kind in MAIN_KINDS if kind is not None else group in (None, 0), "the main group")
        _check(fields["block_size"] == block_size, f"blocks of {block_size} tokens")
        _check(len(tokens) == block_size * len(hashes), "as many tokens as the blocks have")
        _check(len({*hashes, parent}) == len(hashes) + 1, "a block that is not its own parent")
        namespace = _namespace(fields.get("extra_keys"), fields.get("lora_name"))
    tier = DYNAMO_TIERS[fields.get("medium") or "GPU"] if tag != "AllBlocksCleared" else ""
    parent = None if parent is None else _number(parent)
    return Seen(tag, hashes, parent, tokens, block_size, tier, fields.get("lora_name"), group, namespace)


def _namespace(extra_keys: Any, lora_name: str | None) -> str | None:
    """A salt stands behind the adapter's name in the first block's extra keys."""
    texts = [key for key in (extra_keys or [None])[0] or () if isinstance(key, str) and key != lora_name]
    return texts[0] if texts else None


def _fields(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        tag = event.get("type")
        known = {name: value for name, value in event.items() if name in (*FIELDS.get(tag, ()), "locality")}
    else:
        _check(isinstance(event, list) and bool(event), "an array or a map")
        tag = event[0]
        known = dict(zip(FIELDS.get(tag, ()), event[1:], strict=False))
    _check(tag in FIELDS, f"a known tag, not {tag!r}")
    for name in () if tag == "AllBlocksCleared" else ("block_hashes",):
        _check(isinstance(known.get(name), list), name)
    if tag == "BlockStored":
        _check(isinstance(known.get("token_ids"), list) and isinstance(known.get("block_size"), int), "tokens and size")
    return str(tag), known


def _hash_of_bytes_too(value: Any) -> int:
    if isinstance(value, bytes):
        _check(0 < len(value) <= 64, "a hash of at most 64 bytes")
        return int.from_bytes(value[-8:], "big")
    return _number(value)


def _number(value: Any) -> int:
    _check(isinstance(value, int) and 0 <= value < 1 << 64, "a hash of 64 bits")
    return int(value)


def _check(holds: bool, expected: str) -> None:
    if not holds:
        raise Undecoded(f"expected {expected}")
