"""Namespaces that leave the index: the ledger forgets them, and whose they are is remembered.

A device may still have records of them, as nobody has noted yet that these are void, or they only made room; the next
brain would find them. So clearing a tenant must know of them.
"""

from kvserver.index.space import Space
from kvserver.service.base.effects import DropNamespace
from kvserver.service.state.core import Core


def left(core: Core, space: Space) -> None:
    """It has no cache, and its chunks are gone."""
    core.effects.append(DropNamespace(space.number))
    if core.disk is not None and space.digest in core.disk.noted:
        core.disk.left_out[space.digest] = space.tags


def came(core: Core, space: Space) -> None:
    """Somebody registers it. What the devices may have of it is still whose it was."""
    if core.disk is not None:
        space.tags = core.disk.left_out.pop(space.digest, space.tags)
    core.chunks.add_space(space)
