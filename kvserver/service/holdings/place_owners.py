"""Owners of places. A slot belongs to a present chunk, a chunk being stored, a job whose chunk is gone, or a read that
fills it. An extent belongs to a chunk, or to a write that fills it."""

from dataclasses import dataclass, field
from typing import Literal

from kvserver.index.space import Node, Space

UNASSIGNED, SEALED = 0, -1
"""Values in Pending.parts. Any other value is the number of the job that writes the part."""


class Pending:
    """A node with groups that are reserved and not complete. It pins its node while it exists."""

    __slots__ = ("deadline_ns", "node", "parts", "slots", "space")

    def __init__(self, space: Space, node: Node, deadline_ns: int) -> None:
        self.space = space
        self.node = node
        self.deadline_ns = deadline_ns
        self.parts: dict[int, int] = {}
        """Part -> UNASSIGNED, SEALED or a job's number."""
        self.slots: dict[int, int] = {}
        """Part -> arena offset."""


class Orphan:
    """A slot whose chunk is gone while a job may still write to it."""

    __slots__ = ("job", "tenant")

    def __init__(self, job: int, tenant: int) -> None:
        self.job = job
        self.tenant = tenant


@dataclass(slots=True, eq=False)
class DiskJob:
    """A write or read of parts of one chunk, in flight at the disk mover. It pins its node."""

    number: int
    kind: Literal["write", "read"]
    space: Space
    node: Node
    device: int
    groups: int
    """Bit g: all shards of group g."""
    generation: int
    began_ns: int
    parts: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """The slot of each part; a read owns its slots."""
    extents: list[int] = field(default_factory=list)
    """The extent of each part; a write owns its extents."""
    bytes: int = 0
    """Bytes of all extents."""
    moves: bool = False
    """A write to another place of the same device. It takes only free extents, and its tenant is not charged for them
    until the old ones are free: a tenant at its maximum would lose a chunk for each that moves."""


SlotOwner = Node | Pending | Orphan | DiskJob
ExtentOwner = Node | DiskJob
