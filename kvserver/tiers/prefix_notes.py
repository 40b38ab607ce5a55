"""Notes of cleared prefixes on devices: a document like a namespace's, under a digest of its own."""

from hashlib import sha256
from typing import NamedTuple

import msgspec

PREFIX_NOTE = b"kvserver cleared prefix"
_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes, bytes])


class ClearedPrefix(NamedTuple):
    """A chunk that was cleared with all below it."""

    namespace: bytes
    key: bytes


def prefix_note(prefix: ClearedPrefix) -> bytes:
    """In place of a namespace, in the note."""
    return sha256(PREFIX_NOTE + prefix.namespace + prefix.key).digest()


def prefix_document(prefix: ClearedPrefix) -> bytes:
    return msgspec.msgpack.encode((PREFIX_NOTE, prefix.namespace, prefix.key))


def prefix_from(document: bytes) -> ClearedPrefix | None:
    """None where the document is about something else."""
    try:
        kind, namespace, key = _decoder.decode(document)
    except msgspec.MsgspecError:
        return None
    return ClearedPrefix(namespace, key) if kind == PREFIX_NOTE else None
