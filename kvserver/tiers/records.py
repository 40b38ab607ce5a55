"""Ledger records, which describe each sealed slot beside the arena, and the document of each namespace.

The layout of a record is that of `kvserver._native.Ledger` (136 bytes, little-endian); the native side adds state and
checksum. Pure packing: the service decides what is written, and when.
"""

import struct
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import NamedTuple

import msgspec

from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.messages import Kind

RECORD = struct.Struct("<q32s32s32sHHIIIQQ")
NO_PARENT = bytes(32)
NO_SUM = (1 << 64) - 1
"""Takes the place of a payload's sum that nobody computed (docs/digest.md)."""
SHARD = struct.Struct("<HH")
NAMES_BYTES = 8
SCRUB_ITEM = struct.Struct(f"<qQ{NAMES_BYTES}s")
"""Slot, bytes of its payload, and names_hash() of that payload (_native.Scrubber)."""
NO_GROUP = 0xFFFF
"""Group of a mark: the record of a chunk without a slot (tiers/marks.py)."""


class Record(NamedTuple):
    """One sealed slot, or a mark."""

    offset: int
    namespace: bytes
    key: bytes
    parent: bytes
    """Key of the chunk before; NO_PARENT for the first of a chain."""
    group: int
    shard: int
    payload_bytes: int
    tenant: int
    slot_bytes: int
    generation: int
    """Number of the store; a later store has a larger one."""
    sum: int
    """Sum of the payload, or NO_SUM. The native side keeps its digest."""


DISK_RECORD = struct.Struct("<q32s32s32sHHIIIQQqII")
Packed = tuple[int, bytes, bytes, bytes, int, int, int, int, int, int, int, int, int, int]
"""One unpacked record: a DiskRecord, but its extent's size is in units of SLOT_ALIGN."""


class DiskRecord(NamedTuple):
    """One record of a device, as kvserver._native.DiskStore describes it."""

    arena_offset: int
    """ABSENT (-1) if it has no slot."""
    namespace: bytes
    key: bytes
    parent: bytes
    group: int
    shard: int
    payload_bytes: int
    tenant: int
    extent_bytes: int
    generation: int
    sum: int
    """As in Record."""
    offset: int
    """Offset of the extent on its device."""
    device: int
    stored_s: int
    """Time of the write in seconds since 1970, set by the device."""


def names_hash(namespace: bytes, group: int, shard: int, keys: Iterable[bytes]) -> bytes:
    """Hash of the names of payloads, which the ledger must have at their slots (_native.Ledger.sums)."""
    return sha256(b"".join((namespace, SHARD.pack(group, shard), *keys))).digest()[:NAMES_BYTES]


def pack_disk(record: DiskRecord) -> bytes:
    return DISK_RECORD.pack(*record[:8], record.extent_bytes // SLOT_ALIGN, *record[9:])


def disk_record(packed: Packed) -> DiskRecord:
    return DiskRecord._make((*packed[:8], packed[8] * SLOT_ALIGN, *packed[9:]))


def unpack_disk(records: bytes) -> Iterator[DiskRecord]:
    return map(disk_record, DISK_RECORD.iter_unpack(records))


def pack(record: Record) -> bytes:
    return RECORD.pack(*record[:8], record.slot_bytes // SLOT_ALIGN, *record[9:])


def unpack_all(records: bytes) -> Iterator[Record]:
    for fields in RECORD.iter_unpack(records):
        record = Record._make(fields)
        yield record._replace(slot_bytes=record.slot_bytes * SLOT_ALIGN)


OWN_WRITERS = 1
"""Stands where documents once told how many ranks hold a shard. Each cache says that for itself."""


class GroupDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_tokens: int
    kind: Kind
    window_tokens: int
    shards: int
    writers: int
    """OWN_WRITERS. A number of ranks in documents of before, where it was part of the geometry; nobody reads it."""
    pages: list[list[tuple[int, int]] | None]
    """(regions, page_bytes) of each run of each shard; None where that shard was never registered."""


class NamespaceDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The geometry of a namespace, kept so that a restarted brain can tell complete chunks from others."""

    format: int
    digest: bytes
    chunk_tokens: int
    groups: list[GroupDocument]
    epoch: int | None = None
    """Epoch of the only remote store to which its chunks belong; None: there is no such store, or it has told none."""
    epochs: dict[str, int] = {}
    """The same where several stores are named, by their names."""


DOCUMENT_FORMAT = 1
DOCUMENT_BYTES_MAX = 65_536
"""Room in the ledger for one document (kvserver._native.Ledger), and in a store for its note."""
SHAPES_BYTES_MAX = DOCUMENT_BYTES_MAX - 256
"""A document that is registered. Epochs of four remote stores come to it later, and the note's own fields."""
encode_document = msgspec.msgpack.Encoder().encode
_document_decoder = msgspec.msgpack.Decoder(NamespaceDocument)


def decode_document(document: bytes) -> NamespaceDocument | None:
    """The document; None if it has another format. Then its chunks are dropped, never guessed at."""
    try:
        decoded = _document_decoder.decode(document)
    except msgspec.MsgspecError:
        return None
    return decoded if decoded.format == DOCUMENT_FORMAT else None
