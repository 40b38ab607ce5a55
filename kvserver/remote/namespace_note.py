"""The note of a namespace in a remote store: its epoch, and what its chunks look like. Pure packing.

A note says which epoch's chunks count. A damaged note is no note: it gets a fresh one, and the chunks of before are not
found any more. So does a note of another namespace: a store may give the wrong object.
"""

from hashlib import blake2b
from typing import Annotated, NamedTuple

import msgspec

from kvserver.remote.chunk_value import FORMAT, NamespaceName

CHECK_BYTES = 16
NOTE_BYTES_MAX = 1 << 16
"""Stores read no more of a note, and the mover's report of it has to fit into ORDER_BYTES_MAX."""


class NamespaceNote(NamedTuple):
    epoch: int
    """Random, 64 bits. Never a counter: a note that comes back from before must not bring a number back with it."""
    document: bytes
    """The namespace's geometry (tiers/records.py)."""


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    """The packing itself has no integer above 64 bits."""
    document: bytes


def encode(note: NamespaceNote, of: NamespaceName) -> bytes:
    packed = msgspec.msgpack.encode(_Packed(FORMAT, *note))
    return packed + _check(packed, of)


def decode(value: bytes | None, of: NamespaceName) -> NamespaceNote | None:
    """The note; None if there is none, or if it is damaged, too long, of another format or of another namespace."""
    if value is None or len(value) > NOTE_BYTES_MAX or _check(value[:-CHECK_BYTES], of) != value[-CHECK_BYTES:]:
        return None
    try:
        packed = msgspec.msgpack.decode(value[:-CHECK_BYTES], type=_Packed)
    except msgspec.MsgspecError:
        return None
    return NamespaceNote(packed.epoch, packed.document) if packed.format == FORMAT else None


def _check(packed: bytes, of: NamespaceName) -> bytes:
    return blake2b(packed + of.namespace + of.tenant.encode(), digest_size=CHECK_BYTES).digest()
