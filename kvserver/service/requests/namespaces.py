"""Namespaces that enter and leave the index. When one leaves, the ledger forgets it, and its tenants are remembered.

A device may still have records of it: nobody has noted yet that they are void, or its chunks left only to make room.
The next brain would find them, so clearing a tenant must know of them.
"""

from kvserver.index.space import Space
from kvserver.service.base.effects import DropNamespace
from kvserver.service.state.core import Core


def left(core: Core, space: Space) -> None:
    """Handles a namespace that left the index: it has no cache, and its chunks are gone."""
    core.effects.append(DropNamespace(space.number))
    if core.disk is not None and space.digest in core.disk.noted:
        core.disk.left_out[space.digest] = space.tags


def came(core: Core, space: Space) -> None:
    """Adds a newly registered namespace. Records that devices may have of it keep their tenants."""
    if core.disk is not None:
        space.tags = core.disk.left_out.pop(space.digest, space.tags)
    core.chunks.add_space(space)
