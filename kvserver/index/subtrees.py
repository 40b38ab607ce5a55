"""Subtrees that are cut off, and the walk over one: children go before their parents, some at a time."""

from dataclasses import dataclass, field

from kvserver.index.space import GONE, Node, is_below


class Below:
    """Whether nodes are a certain one, or hang below it. It is quick for a node whose parent was asked for before."""

    def __init__(self, top: Node) -> None:
        self.top = top
        self._known: dict[Node | None, bool] = {}

    def __contains__(self, node: Node) -> bool:
        known = self._known.get(node.parent)
        found = self._known[node] = is_below(node, self.top) if known is None else known or node is self.top
        return found


@dataclass(slots=True, eq=False)
class Cut:
    """A chunk that was cut off with all below it. It is walked over like a tree in post-order, because children go
    before their parents."""

    top: Node
    above: Node
    """The chunk that it was cut off from."""
    todo: list[Node]
    """Nodes that are not looked at yet: children of those in `path`, the next one last."""
    path: list[Node] = field(default_factory=list)
    """The nodes on the way to the next one. Each goes when all its children have been looked at."""
    chunks: int = 0
    """Chunks that were taken over so far."""

    @property
    def is_over(self) -> bool:
        return not self.todo and not self.path

    def next_down(self) -> Node | None:
        """The next node to be taken over, if all that lies before it has been."""
        todo, path = self.todo, self.path
        is_next = todo and (not path or todo[-1].state == GONE or todo[-1].parent is path[-1])
        return todo.pop() if is_next else None

    def goes_below(self, node: Node) -> None:
        """The children of this node come next."""
        self.path.append(node)
        match node.children:
            case None:
                pass
            case dict() as children:
                self.todo.extend(children)  # one of 300,000 children takes 3 ms here, once
            case only:
                self.todo.append(only)

    def next_up(self) -> Node:
        """The next node whose children have all been looked at."""
        return self.path.pop()

    def took_over(self) -> None:
        self.chunks += 1
