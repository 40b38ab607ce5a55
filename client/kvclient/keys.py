"""Keys of chunks and digests of namespaces: 32 bytes over everything that must be equal before bytes can be shared.

Every function depends on its arguments alone. Python's hash() and PYTHONHASHSEED do not matter, so two processes on two
machines agree. Keys are packed one after another in prefix order, as the protocol wants them. Token ids never travel.
"""

import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Literal, get_args

from blake3 import blake3

from kvserver import _native
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES

Algorithm = Literal["sha256", "blake3"]
ALGORITHMS = frozenset(get_args(Algorithm))

TokenIds = Sequence[int] | memoryview
"""A list, an array, or anything with a buffer of integers, such as an int32 or int64 tensor of a framework."""

_SEED_TEXT = b"kvserver.chain.1\0"
_BLOCK_HASH_TEXT = b"kvserver.block-hash.1\0"
_NAMESPACE_TEXT = b"kvserver.namespace.1\0"
_TOKEN_BYTES = 4
_NESTING_MAX = 32
_UNSIGNED_FORMATS = ("I", "L")

LONG_TOKENS = 2048
"""Shortest prompt that a background thread hashes. For shorter prompts, waking it takes as long as hashing."""

PIECE_TOKENS = 4096
"""Tokens copied at a time. Takes about 5 us if their memory is near, 50 us if not."""

PIECES = 8
"""Most pieces of a prompt. Longer prompts have longer pieces."""


# ---------------------------------------------------------------- chunks


def chunk_keys(
    token_ids: TokenIds,
    chunk_tokens: int,
    *,
    algorithm: Algorithm = "sha256",
    extra: bytes = b"",
    parent: bytes = b"",
) -> bytes:
    """The packed keys of all whole chunks of a prompt. A last, partial chunk has no key.

    With H the algorithm, u32 and u64 little-endian, and t the token ids:

        key[-1] = parent, or without one  H("kvserver.chain.1" 0x00 || u64(chunk_tokens) || extra)
        key[i]  = H(key[i-1] || u32(t[i*chunk_tokens]) || ... || u32(t[(i+1)*chunk_tokens - 1]))

    extra: everything in the request that changes the bytes and is not a token (cache salt, LoRA adapter, multimodal
    hashes), encoded by the caller. namespace_digest() of a mapping is a good encoding.

    parent: the key before token_ids[0], to continue a chain. That chain includes the extra already.
    """
    before = _before(algorithm, chunk_tokens, extra, parent)
    if algorithm == "sha256":
        return _sha256_chain(token_ids, chunk_tokens, before)
    tokens = _packed_tokens(token_ids)
    chunk_bytes = chunk_tokens * _TOKEN_BYTES
    keys = []
    for start in range(0, len(tokens) - chunk_bytes + 1, chunk_bytes):
        before = blake3(before + tokens[start : start + chunk_bytes]).digest()
        keys.append(before)
    return b"".join(keys)


class Naming:
    """The keys of a long prompt, made in the background.

    Reading token ids needs the interpreter, so the caller does it piece by piece. The prompt must not change meanwhile.
    Belongs to one thread.
    """

    def __init__(self, namer: _native.Namer, token_ids: list[int], chunk_tokens: int, before: bytes) -> None:
        whole_tokens = len(token_ids) // chunk_tokens * chunk_tokens
        self._namer = namer
        self._arguments = (token_ids, chunk_tokens, before)
        self._piece_tokens = max(PIECE_TOKENS, -(-whole_tokens // PIECES))
        self._copied: _native.Tokens | None = _native.Tokens(whole_tokens)
        self._hashed: _native.Naming | None = None
        self.go_on()

    def go_on(self) -> bool:
        """Read the next piece, if one is left. Returns whether all are read."""
        if self._copied is None:
            return True
        token_ids, chunk_tokens, before = self._arguments
        try:
            if self._copied.add(token_ids, self._piece_tokens):
                return False
            self._hashed = self._namer.name(self._copied, chunk_tokens, before)
        except ValueError:
            pass  # not only plain integers: keys() raises, or takes the slow path
        self._copied = None
        return True

    @property
    def ready(self) -> bool:
        """Whether keys() returns without delay."""
        return self._copied is None and (self._hashed is None or self._hashed.ready)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`. Returns whether the keys are ready."""
        return self._copied is None and (self._hashed is None or self._hashed.wait(seconds))

    def keys(self) -> bytes:
        """The keys. If they are not ready, makes them here or waits, whichever is sooner. RequestError: not
        token ids."""
        while not self.go_on():
            pass
        return self._hashed.keys() if self._hashed is not None else _sha256_chain(*self._arguments)


class Namer:
    """Makes keys of prompts. A thread of its own helps with long prompts."""

    def __init__(self) -> None:
        self._namer = _native.Namer()

    def begin(self, token_ids: list[int], chunk_tokens: int, *, extra: bytes = b"") -> bytes | Naming:
        """chunk_keys() of a whole prompt, or for a long prompt a Naming that makes them in the background."""
        before = _before("sha256", chunk_tokens, extra, b"")
        if len(token_ids) < LONG_TOKENS:
            return _sha256_chain(token_ids, chunk_tokens, before)
        return Naming(self._namer, token_ids, chunk_tokens, before)


def keys_from_block_hashes(
    block_hashes: Sequence[bytes],
    blocks_per_chunk: int,
    *,
    algorithm: Algorithm = "sha256",
    extra: bytes = b"",
) -> bytes:
    """The packed keys of all whole chunks of a prompt whose blocks the engine has hashed itself.

    The engine's hashes must be chained over the whole prefix, deterministic and 32 bytes long. Then a chunk's last hash
    identifies all tokens up to its end. It is the key, if nothing else in the request changes the bytes:

        key[i] = block_hashes[(i+1)*blocks_per_chunk - 1], or with an extra, H being the algorithm,
                 H("kvserver.block-hash.1" 0x00 || u64(blocks_per_chunk) || u64(len(extra)) || extra || that hash)

    So chunks of two sizes may have the same key; their namespaces must differ.
    """
    _check_algorithm(algorithm)
    if blocks_per_chunk < 1:
        raise RequestError("blocks-per-chunk", f"blocks_per_chunk={blocks_per_chunk} must be at least 1")
    head = _BLOCK_HASH_TEXT + struct.pack("<QQ", blocks_per_chunk, len(extra)) + extra if extra else b""
    if (algorithm == "sha256" or not extra) and isinstance(block_hashes, list):
        with suppress(ValueError):  # the code below reports what is wrong
            return _native.block_hash_keys(block_hashes, blocks_per_chunk - 1, blocks_per_chunk, head)
    last_hashes = block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk]
    wrong = sorted(set(map(len, last_hashes)) - {KEY_BYTES})
    if wrong:
        raise RequestError(
            "block-hash", f"block hashes of {wrong} bytes; only {KEY_BYTES} bytes are enough to name content by"
        )
    if not extra:
        return b"".join(last_hashes)
    hashed = hashlib.sha256 if algorithm == "sha256" else blake3
    return b"".join([hashed(head + last).digest() for last in last_hashes])


def key_to_text(key: bytes) -> str:
    """A key or namespace as 64 lower-case hexadecimal digits, for logs and command lines."""
    if len(key) != KEY_BYTES:
        raise RequestError("key", f"{len(key)} bytes; a key has {KEY_BYTES}")
    return key.hex()


def key_from_text(text: str) -> bytes:
    """The inverse of key_to_text; refuses every other spelling, so that one key has one text."""
    if len(text) != 2 * KEY_BYTES or not set(text) <= set("0123456789abcdef"):
        raise RequestError("key-text", f"{text[:80]!r} is not {2 * KEY_BYTES} lower-case hexadecimal digits")
    return bytes.fromhex(text)


# ---------------------------------------------------------------- namespaces


def namespace_digest(facts: Mapping[str, object]) -> bytes:
    """SHA-256 over everything that must be equal before bytes can be shared.

    This includes the identity of model and weights (by content, not by path), every dtype, layer shapes, block and
    chunk size, the grid of ranks, quantisation, the engine's layout version, and the weight epoch.

    Values may be None, bool, int, float, str, bytes, and lists, tuples and mappings of these. Anything else is refused,
    because its text could differ between processes. With N a little-endian u64 count of bytes or items:

        None -> "n"   True -> "t"   False -> "f"   int -> "i" N decimal   float -> "d" f64
        str -> "s" N utf-8   bytes -> "b" N raw   list, tuple -> "l" N items
        mapping -> "m" N (key value)..., ordered by the keys' utf-8
    """
    if not facts:
        raise RequestError(
            "namespace", "an empty namespace would make all bytes interchangeable; say what must be equal"
        )
    parts = [_NAMESPACE_TEXT]
    _encode(facts, parts, "namespace", 0)
    return hashlib.sha256(b"".join(parts)).digest()


def _encode(value: object, parts: list[bytes], where: str, depth: int) -> None:
    if depth > _NESTING_MAX:
        raise RequestError("namespace", f"{where} is nested deeper than {_NESTING_MAX}")
    match value:
        case None:
            parts.append(b"n")
        case bool():
            parts.append(b"t" if value else b"f")
        case int():
            _append(parts, b"i", str(int(value)).encode())
        case float():
            if math.isnan(value):
                raise RequestError("namespace", f"{where} is not a number, and that equals nothing")
            parts.append(b"d" + struct.pack("<d", value))
        case str():
            _append(parts, b"s", value.encode())
        case bytes():
            _append(parts, b"b", value)
        case list() | tuple():
            parts.append(b"l" + struct.pack("<Q", len(value)))
            for index, item in enumerate(value):
                _encode(item, parts, f"{where}[{index}]", depth + 1)
        case Mapping():
            _encode_mapping(value, parts, where, depth)
        case _:
            raise RequestError(
                "namespace",
                f"{where} is a {type(value).__name__}; expected None, bool, int, float, str, bytes, list, mapping",
            )


def _encode_mapping(value: Mapping[object, object], parts: list[bytes], where: str, depth: int) -> None:
    items = []
    for name, item in value.items():
        if not isinstance(name, str):
            raise RequestError("namespace", f"{where} has the key {name!r}; keys must be str")
        items.append((name.encode(), name, item))
    parts.append(b"m" + struct.pack("<Q", len(items)))
    for encoded, name, item in sorted(items, key=lambda entry: entry[0]):
        _append(parts, b"s", encoded)
        _encode(item, parts, f"{where}.{name}", depth + 1)


def _append(parts: list[bytes], tag: bytes, content: bytes) -> None:
    parts.append(tag + struct.pack("<Q", len(content)))
    parts.append(content)


# ---------------------------------------------------------------- tokens


def _check_algorithm(algorithm: str) -> None:
    if algorithm not in ALGORITHMS:
        raise RequestError("algorithm", f"algorithm={algorithm!r} must be one of {sorted(ALGORITHMS)}")


def _before(algorithm: Algorithm, chunk_tokens: int, extra: bytes, parent: bytes) -> bytes:
    """key[-1] of chunk_keys()."""
    _check_algorithm(algorithm)
    if chunk_tokens < 1:
        raise RequestError("chunk-tokens", f"chunk_tokens={chunk_tokens} must be at least 1")
    if parent and len(parent) != KEY_BYTES:
        raise RequestError(
            "parent", f"{len(parent)} bytes of parent; expected {KEY_BYTES}, or none at the start of a chain"
        )
    if parent and extra:
        raise RequestError(
            "extra", "extra goes into the start of a chain; this one has a parent, which holds it already"
        )
    return parent or _chain_start(algorithm, chunk_tokens, extra)


@lru_cache(maxsize=256)
def _chain_start(algorithm: Algorithm, chunk_tokens: int, extra: bytes) -> bytes:
    """Hash of the chain's start. Cached, because nearly all requests share it and OpenSSL's setup is slow."""
    seed = _SEED_TEXT + struct.pack("<Q", chunk_tokens) + extra
    return hashlib.sha256(seed).digest() if algorithm == "sha256" else blake3(seed).digest()


def _sha256_chain(token_ids: TokenIds, chunk_tokens: int, before: bytes) -> bytes:
    if isinstance(token_ids, list):
        with suppress(ValueError):  # other kinds of numbers, or no tokens at all: packing tells them apart
            return _native.chain_keys(token_ids, 0, len(token_ids), chunk_tokens, before)
    return _native.chain_keys_of_packed(bytes(_packed_tokens(token_ids)), chunk_tokens, before)


def _packed_tokens(token_ids: TokenIds) -> memoryview:
    """The ids as little-endian u32, without a Python loop over them. Refuses ids that do not fit."""
    if isinstance(token_ids, bytes | bytearray | str):
        raise RequestError("tokens", f"{type(token_ids).__name__} given; expected token ids, not their bytes or text")
    ids: TokenIds = token_ids
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        pass  # not a buffer: a plain sequence
    else:
        if _is_packed(view):
            return view.cast("B")
        ids = view.tolist()  # twice as fast as going through the view's items
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError, NotImplementedError) as problem:
        raise RequestError("tokens", f"token ids must be integers in [0, 2^32): {problem}") from problem
    assert packed.itemsize == _TOKEN_BYTES
    if sys.byteorder != "little":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _is_packed(ids: memoryview) -> bool:
    plain = ids.ndim == 1 and ids.c_contiguous and ids.itemsize == _TOKEN_BYTES
    return plain and ids.format in _UNSIGNED_FORMATS and sys.byteorder == "little"
