"""The document of a namespace: its shape, kept in the ledger and on disk so that a later brain can tell which chunks
are whole."""

from collections.abc import Sequence

from kvserver.index.space import Space
from kvserver.tiers.records import DOCUMENT_FORMAT, OWN_WRITERS, GroupDocument, NamespaceDocument
from kvserver.tiers.slots import slot_bytes_for
from kvserver.transfer.layout import Geometry, GroupGeometry, PageShape


def document_of(space: Space, pages: Sequence[PageShape | None] | None = None) -> NamespaceDocument:
    """The namespace's document. pages: for each part, where it differs from the space."""
    shapes = pages if pages is not None else [part.pages for part in space.parts]
    groups = [
        GroupDocument(
            shape.block_tokens,
            shape.kind,
            shape.window_tokens,
            shape.shards,
            OWN_WRITERS,
            [None if (shard := shapes[part]) is None else list(shard) for part in space.group_parts(index)],
        )
        for index, shape in enumerate(space.geometry.groups)
    ]
    named = {name: epoch for name, epoch in space.epochs.items() if name}
    chunk_tokens = space.geometry.chunk_tokens
    return NamespaceDocument(DOCUMENT_FORMAT, space.digest, chunk_tokens, groups, space.epochs.get(""), named)


def space_from(number: int, document: NamespaceDocument) -> Space:
    """The namespace that a document describes, without chunks."""
    groups = tuple(
        GroupGeometry(group.block_tokens, group.kind, group.window_tokens, group.shards) for group in document.groups
    )
    space = Space(document.digest, number, Geometry(document.chunk_tokens, groups))
    only = {} if document.epoch is None else {"": document.epoch}
    space.belongs_to_epochs(only | document.epochs)
    for index, group in enumerate(document.groups):
        for shard, pages in enumerate(group.pages):
            if pages is not None:
                blocks_per_chunk = document.chunk_tokens // group.block_tokens
                payload_bytes = blocks_per_chunk * sum(regions * page_bytes for regions, page_bytes in pages)
                part = space.part_of[index] + shard
                space.fix_part(part, tuple(pages), payload_bytes, slot_bytes_for(payload_bytes))
    return space
