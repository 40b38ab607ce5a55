"""How a chunk lies in a remote store: its name, its head, and where its payloads are (docs/remote-format.md).

A head describes one write of one chunk, and is its commit point: a chunk without a head is not there. Payloads of two
writes are never mixed, because each head says which write its payloads belong to. Pure packing; payloads are not
touched here.
"""

import struct
from base64 import b32decode, b32encode
from binascii import Error as NotBase32
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from kvserver.errors import KvError

FORMAT = 1
MAGIC = b"KVCHUNK\n"
VALUE_BYTES_MAX = 8 << 20
"""Bytes of all payloads that may follow a head in the same value."""
INLINE_BYTES_MAX = 1 << 20
"""Bytes that such payloads may have on average. Larger ones lie in fragments."""
FRAGMENT_BYTES_MAX = 8 << 20
FRAGMENTS_MAX = 1 << 16
"""Fragments of a chunk that is read. A probe names each of them. With 8 MiB each, as they are written: 512 GiB."""
CHECK_BYTES = 16
FIXED = struct.Struct("<8sHHI32s32s32sQQQ")
"""Magic, format, shards, bytes of a fragment (0: payloads follow), namespace, key, parent, epoch, write, time."""
SHARD = struct.Struct("<HHIQ")
SHARDS_MAX = 246
HEAD_BYTES_MAX = FIXED.size + SHARDS_MAX * SHARD.size + CHECK_BYTES
KEY_BYTES = 32
HEX = frozenset("0123456789abcdef")


class WrongValue(KvError):
    """A value in a store is no head of ours, or is damaged. A reader takes it as a miss."""

    family = "device"


class NamespaceName(NamedTuple):
    """Names all that a store has of one namespace."""

    tenant: str
    """A name from the configuration; permissions of a store can be given for it. "-": none."""
    namespace: bytes

    def pieces(self) -> tuple[str, ...]:
        """The pieces that a store joins to a name, from general to special."""
        return (f"kv{FORMAT}", self.tenant, text_of(self.namespace))


class ChunkName(NamedTuple):
    """Names one chunk in every store."""

    of: NamespaceName
    epoch: int
    """Random number of the namespace; a Clear replaces it. 64 bits."""
    key: bytes
    ranks: str = ""
    """Which ranks' shards this machine holds; empty if all. Machines with other ranks write other chunks."""


class Shard(NamedTuple):
    """One payload of a chunk."""

    group: int
    shard: int
    payload_bytes: int
    digest: int
    """As in docs/digest.md."""


class Head(NamedTuple):
    """A chunk as a store has it: all but its bytes."""

    namespace: bytes
    key: bytes
    parent: bytes
    epoch: int
    write: int
    """Random number of this write, 64 bits. Fragments carry it in their names."""
    written_s: int
    """Time of the write by its machine's clock, in seconds since 1970. For people."""
    shards: tuple[Shard, ...]
    fragment_bytes: int = 0
    """Bytes of a fragment; 0 if the payloads follow the head in the same value."""

    @property
    def payload_bytes(self) -> int:
        return sum(shard.payload_bytes for shard in self.shards)


class Fragment(NamedTuple):
    """A stretch of one payload that is a value of its own."""

    number: int
    shard: int
    """Index of the shard in its head."""
    offset: int
    """Offset in the payload."""
    bytes: int


@lru_cache(4096)
def text_of(digest: bytes) -> str:
    """32 bytes as 52 characters that every store, file system and permission pattern takes: a to z and 2 to 7.

    Kept, because b32encode() takes 16 us, and each write of a chunk names its namespace and its key several times."""
    return b32encode(digest).decode().rstrip("=").lower()


def digest_from_text(text: str) -> bytes | None:
    """The digest with that text_of(); None for any other text."""
    try:
        digest = b32decode(text.upper() + "=" * (-len(text) % 8))
    except (NotBase32, ValueError):
        return None
    return digest if len(digest) == KEY_BYTES and text_of(digest) == text else None


def epoch_from_text(text: str) -> int | None:
    """The epoch that a name has as 16 hexadecimal digits; None for any other text."""
    return int(text, 16) if len(text) == 16 and HEX.issuperset(text) else None


def fragment_bytes_for(shards: Sequence[Shard]) -> int:
    """The size of a head's fragments: 0 where one value is better, because all payloads together are small, or many
    are. Each fragment costs a call and a key."""
    total = sum(shard.payload_bytes for shard in shards)
    is_one_value = total <= VALUE_BYTES_MAX and total <= INLINE_BYTES_MAX * len(shards)
    return 0 if is_one_value else FRAGMENT_BYTES_MAX


def fragments_of(head: Head) -> Iterator[Fragment]:
    """The fragments of a chunk in order; none if its payloads follow its head."""
    number = 0
    for index, shard in enumerate(head.shards):
        for offset in range(0, shard.payload_bytes if head.fragment_bytes else 0, head.fragment_bytes or 1):
            yield Fragment(number, index, offset, min(head.fragment_bytes, shard.payload_bytes - offset))
            number += 1


def head_bytes(shards: int) -> int:
    """Bytes of a head with so many shards."""
    return FIXED.size + shards * SHARD.size + CHECK_BYTES


def encode(head: Head) -> bytes:
    """The bytes of a head. Raises ValueError for one that no decoder would take."""
    if not 1 <= len(head.shards) <= SHARDS_MAX:
        raise ValueError(f"a head has {len(head.shards)} shards; expected 1 to {SHARDS_MAX}")
    fields = FIXED.pack(
        MAGIC,
        FORMAT,
        len(head.shards),
        head.fragment_bytes,
        head.namespace,
        head.key,
        head.parent,
        head.epoch,
        head.write,
        head.written_s,
    )
    packed = fields + b"".join(SHARD.pack(*shard) for shard in head.shards)
    return packed + _check(packed)


def decode(value: bytes | memoryview) -> Head:
    """The head at the beginning of a value; what follows it is not looked at. Raises WrongValue."""
    if len(value) < FIXED.size + CHECK_BYTES:
        raise WrongValue("short", f"{len(value)} bytes are no head; expected {head_bytes(1)} at least")
    magic, form, count, fragment_bytes, namespace, key, parent, epoch, write, written_s = FIXED.unpack_from(value)
    if magic != MAGIC:
        raise WrongValue("foreign", f"begins with {bytes(magic)!r}; expected {MAGIC!r}")
    if form != FORMAT:
        raise WrongValue("format", f"has format {form}; expected {FORMAT}")
    if not 1 <= count <= SHARDS_MAX:
        raise WrongValue("shards", f"has {count} shards; expected 1 to {SHARDS_MAX}")
    end = head_bytes(count)
    if len(value) < end:
        raise WrongValue("short", f"{len(value)} bytes; expected a head of {end}")
    if _check(value[: end - CHECK_BYTES]) != bytes(value[end - CHECK_BYTES : end]):
        raise WrongValue("check", "is damaged: its bytes and its check differ")
    shards = tuple(map(Shard._make, SHARD.iter_unpack(value[FIXED.size : end - CHECK_BYTES])))
    fragments = sum(-(-shard.payload_bytes // fragment_bytes) for shard in shards) if fragment_bytes else 0
    if fragments > FRAGMENTS_MAX:
        raise WrongValue("fragments", f"has {fragments} fragments; expected {FRAGMENTS_MAX} at most")
    return Head(namespace, key, parent, epoch, write, written_s, shards, fragment_bytes)


def decode_of(name: ChunkName, value: bytes | memoryview) -> Head:
    """The head of exactly that chunk. Raises WrongValue, also if it belongs to another one."""
    head = decode(value)
    if (head.namespace, head.key, head.epoch) != (name.of.namespace, name.key, name.epoch):
        raise WrongValue("other", "is the head of another chunk than its name says")
    return head


def _check(packed: bytes | memoryview) -> bytes:
    """Against errors, not against an attacker: whoever writes to a shared store is trusted (docs/remote-format.md)."""
    return blake2b(packed, digest_size=CHECK_BYTES).digest()
