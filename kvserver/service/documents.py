"""What a later brain is told: the document of a namespace, in the ledger and on disk, so that it can tell what is
whole; and on disk that of a prefix that was cleared."""

from collections.abc import Sequence
from hashlib import sha256

import msgspec

from kvserver.index.space import Space
from kvserver.service.wishes import ClearedPrefix
from kvserver.tiers.records import DOCUMENT_FORMAT, GroupDocument, NamespaceDocument
from kvserver.tiers.slots import slot_bytes_for
from kvserver.transfer.layout import Geometry, GroupGeometry, PageShape

PREFIX_NOTE = b"kvserver cleared prefix"
_prefix_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes, bytes])


def document_of(space: Space, pages: Sequence[PageShape | None] | None = None) -> NamespaceDocument:
    """pages: of each part, where it is not yet what the space says."""
    shapes = pages if pages is not None else [part.pages for part in space.parts]
    groups = [
        GroupDocument(
            shape.block_tokens,
            shape.kind,
            shape.window_tokens,
            shape.shards,
            shape.writers,
            [None if (shard := shapes[part]) is None else list(shard) for part in space.group_parts(index)],
        )
        for index, shape in enumerate(space.geometry.groups)
    ]
    return NamespaceDocument(DOCUMENT_FORMAT, space.digest, space.geometry.chunk_tokens, groups)


def space_from(number: int, document: NamespaceDocument) -> Space:
    """The namespace without its chunks."""
    groups = tuple(
        GroupGeometry(group.block_tokens, group.kind, group.window_tokens, group.shards, group.writers)
        for group in document.groups
    )
    space = Space(document.digest, number, Geometry(document.chunk_tokens, groups))
    for index, group in enumerate(document.groups):
        for shard, pages in enumerate(group.pages):
            if pages is not None:
                blocks_per_chunk = document.chunk_tokens // group.block_tokens
                payload_bytes = blocks_per_chunk * sum(regions * page_bytes for regions, page_bytes in pages)
                part = space.part_of[index] + shard
                space.fix_part(part, tuple(pages), payload_bytes, slot_bytes_for(payload_bytes))
    return space


def prefix_note(prefix: ClearedPrefix) -> bytes:
    """In place of a namespace, in the note of a cleared prefix."""
    return sha256(PREFIX_NOTE + prefix.namespace + prefix.key).digest()


def prefix_document(prefix: ClearedPrefix) -> bytes:
    return msgspec.msgpack.encode((PREFIX_NOTE, prefix.namespace, prefix.key))


def prefix_from(document: bytes) -> ClearedPrefix | None:
    """None where the document is about something else."""
    try:
        kind, namespace, key = _prefix_decoder.decode(document)
    except msgspec.MsgspecError:
        return None
    return ClearedPrefix(namespace, key) if kind == PREFIX_NOTE else None
