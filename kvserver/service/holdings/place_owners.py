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


@dataclass(slots=True, eq=False, kw_only=True)
class DiskJob:
    """A write or read of parts of one chunk, in flight at the disk mover. It pins its node."""

    number: int
    kind: Literal["write", "read", "scrub"]
    """scrub: a read that only compares. It keeps nothing in DRAM, and no tenant is charged for its slots."""
    space: Space
    node: Node
    device: int
    groups: int
    """Bit g: all shards of group g."""
    generation: int
    began_ns: int
    moves: bool = False
    """A write to another place of the same device. It takes only free extents, and its tenant is not charged for them
    until the old ones are free: a tenant at its maximum would lose a chunk for each that moves."""
    parts: list[int] = field(init=False)
    slots: list[int] = field(init=False, default_factory=list)
    """The slot of each part; a read or scrub owns its slots."""
    extents: list[int] = field(init=False, default_factory=list)
    """The extent of each part; a write owns its extents."""
    bytes: int = field(init=False)
    """Bytes of all extents."""

    def __post_init__(self) -> None:
        groups = range(len(self.space.geometry.groups))
        self.parts = [part for group in groups if self.groups >> group & 1 for part in self.space.group_parts(group)]
        self.bytes = sum(self.space.parts[part].slot_bytes for part in self.parts)

    def takes(self, slots: list[int], extents: list[int]) -> None:
        """The places of the parts, in their order."""
        self.slots, self.extents = slots, extents

    def move_to(self, space: Space) -> None:
        """The node was cut off, and hangs in this space now."""
        self.space = space


SlotOwner = Node | Pending | Orphan | DiskJob
ExtentOwner = Node | DiskJob
