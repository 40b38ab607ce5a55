"""Who owns a slot of the arena: a chunk that is present, a chunk that is being stored, or a job whose chunk is gone."""

from kvserver.index.space import Node, Space

UNASSIGNED, SEALED = 0, -1
"""In Pending.parts, beside the number of the job that writes the part."""


class Pending:
    """A node with groups that are reserved and not complete. Pins its node while it exists."""

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

    __slots__ = ("job",)

    def __init__(self, job: int) -> None:
        self.job = job


SlotOwner = Node | Pending | Orphan
