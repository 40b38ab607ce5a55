"""Notes of cleared prefixes on devices. Each is a document like a namespace's, with its own digest."""

from hashlib import sha256
from typing import NamedTuple

import msgspec

PREFIX_NOTE = b"kvserver cleared prefix"
_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes, bytes])


class ClearedPrefix(NamedTuple):
    """A chunk that was cleared with all its descendants."""

    namespace: bytes
    key: bytes


def prefix_note(prefix: ClearedPrefix) -> bytes:
    """The digest that the note has in place of a namespace."""
    return sha256(PREFIX_NOTE + prefix.namespace + prefix.key).digest()


def prefix_document(prefix: ClearedPrefix) -> bytes:
    return msgspec.msgpack.encode((PREFIX_NOTE, prefix.namespace, prefix.key))


def prefix_from(document: bytes) -> ClearedPrefix | None:
    """The prefix of a document; None if the document is of another kind."""
    try:
        kind, namespace, key = _decoder.decode(document)
    except msgspec.MsgspecError:
        return None
    return ClearedPrefix(namespace, key) if kind == PREFIX_NOTE else None
