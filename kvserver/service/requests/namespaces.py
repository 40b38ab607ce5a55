"""Namespaces that enter and leave the index. When one leaves, the ledger forgets it, and its tenants are remembered.

A device may still have records of it: nobody has noted yet that they are void, or its chunks left only to make room.
The next brain would find them, so clearing a tenant must know of them.
"""

from kvserver.index.space import Space
from kvserver.service.base.effects import DropNamespace
from kvserver.service.state.core import Core
from kvserver.transfer.layout import Geometry


def left(core: Core, space: Space) -> None:
    """Handles a namespace that left the index: it has no cache, and its chunks are gone."""
    core.emit(DropNamespace(space.number))
    if core.disk is not None and space.digest in core.disk.notes.noted:
        core.disk.notes.left_out[space.digest] = space.tags


def came(core: Core, digest: bytes, number: int, geometry: Geometry) -> Space:
    """Adds a newly registered namespace. Records that devices may have of it keep their tenants."""
    tags = core.disk.notes.left_out.pop(digest, None) if core.disk is not None else None
    space = Space(digest, number, geometry, tags)
    core.chunks.add_space(space)
    return space
