"""The chunks of one namespace: a tree of nodes, one for each prefix, named by its key.

A node is *ready* when every group that a prefix needs throughout (kind full) is present in it and its parent is ready.
So the ready nodes are closed under prefixes, and three things follow:

* the longest ready prefix of n keys is found by bisection, with log2(n) probes of one dict;
* whoever pins a node keeps all its ancestors, because only leaves are ever evicted: a lease is one pin;
* a chunk that was sealed before its parent simply waits until the parent is ready.

Window and state groups may be absent from any node; see coverage.py.
"""

from collections.abc import Iterator, Sequence

from kvserver.index.tags import Tags
from kvserver.transfer.layout import Geometry, PageShape
from kvserver.wire.messages import KEY_BYTES

ABSENT = -1
"""In Node.slots: no slot."""

WAITING, READY, GONE = range(3)


class Node:
    """One chunk position of one chain. Memory matters here: a million of these fit in 400 MB with all they hold."""

    __slots__ = (
        "children",
        "depth",
        "disk",
        "in_dram",
        "key",
        "parent",
        "pins",
        "present",
        "queued",
        "slots",
        "state",
        "tenant",
        "used",
    )

    def __init__(self, key: bytes, parent: "Node | None", used: int, tenant: int) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Chunks of the prefix that ends here; 0 only for the root."""
        self.children: Node | dict[Node, None] | None = None
        """None, the only child, or all of them (a dict, because a set of nodes has another order in every process)."""
        self.pins = 0
        self.used = used
        """When it, or anything below it that is gone now, was last asked for. Any monotonic unit."""
        self.tenant = tenant
        self.slots: tuple[int, ...] = ()
        """Arena offset of each part (see Space.parts), or ABSENT. Empty: no part has a slot."""
        self.present = 0
        """Bit g: every shard of group g is sealed, in DRAM or on disk."""
        self.in_dram = 0
        """Bit g: every shard of group g has a slot."""
        self.disk: OnDisk | None = None
        """None: nothing of it, and of no child, was ever on disk."""
        self.state = WAITING
        self.queued = 0
        """Bits of the eviction orders that have an entry for it (eviction.py)."""

    def touch(self, used: int) -> None:
        """It was asked for then; never goes back."""
        self.used = max(self.used, used)

    def mark(self, bits: int) -> None:
        """Sets bits of `queued`."""
        self.queued |= bits

    def unmark(self, bits: int) -> None:
        self.queued &= ~bits

    def pin(self) -> None:
        self.pins += 1

    def unpin(self) -> None:
        assert self.pins > 0
        self.pins -= 1

    @property
    def on_disk(self) -> int:
        """Bit g: every shard of group g has an extent."""
        return 0 if self.disk is None else self.disk.groups

    @property
    def away(self) -> bool:
        """Something of it has to be read from disk before it can be copied to a device."""
        return self.present & ~self.in_dram != 0

    @property
    def cold(self) -> bool:
        """It, and whatever lies below it, is on disk alone and nobody pins it."""
        return self.disk is not None and self.disk.cold

    def child_count(self) -> int:
        if self.children is None:
            return 0
        return len(self.children) if isinstance(self.children, dict) else 1

    def child_nodes(self) -> "Iterator[Node]":
        if isinstance(self.children, dict):
            yield from self.children
        elif self.children is not None:
            yield self.children


class OnDisk:
    """Records of a node on disk, and whether its children have some."""

    __slots__ = (
        "children",
        "cold",
        "cold_children",
        "extents",
        "generation",
        "groups",
        "keeps",
        "ordered_at",
        "written",
    )

    def __init__(self) -> None:
        self.groups = 0
        self.extents: tuple[int, ...] = ()
        """The extent of each part, or ABSENT. Empty: none."""
        self.generation = 0
        """Generation of all its records."""
        self.ordered_at = -1
        """The device whose order of eviction (eviction.DeviceLru) knows it; that on which it lies, once it may go."""
        self.keeps = False
        """The records on disk keep the chunk servable without its slots."""
        self.written = False
        """It is being written."""
        self.children = 0
        """Children that have something on disk or are being written. Extents go leaf first, as chunks do."""
        self.cold_children = 0
        self.cold = False

    @property
    def claims(self) -> bool:
        """Its parent must stay on disk for it."""
        return self.groups != 0 or self.written


class Part:
    """One shard of one group: the unit that has a slot."""

    __slots__ = ("group", "pages", "payload_bytes", "shard", "slot_bytes")

    def __init__(self, group: int, shard: int) -> None:
        self.group = group
        self.shard = shard
        self.pages: PageShape | None = None
        """None until a rank has registered this shard."""
        self.payload_bytes = 0
        self.slot_bytes = 0


class Space:
    """One namespace."""

    def __init__(self, digest: bytes, number: int, geometry: Geometry, tags: Tags | None = None) -> None:
        """tags: those that are known of the namespace from before."""
        self.digest = digest
        self.number = number
        """Its place in the ledger's table."""
        self.geometry = geometry
        self.root = Node(b"", None, 0, 0)
        self.root.state = READY
        self.nodes: dict[bytes, Node] = {}
        self.doomed: dict[bytes, Node] = {}
        """Nodes of a cleared namespace, which go in turn, the last first. A node that is still needed then moves to
        `nodes`."""
        self.parts: list[Part] = []
        self.part_of: list[int] = []
        """Group -> its first part; part_of[g] + shard is the part."""
        self._group_parts: list[range] = []
        self.needed = 0
        """Bits of the groups of kind full: a ready node has all of them."""
        self.slot_sizes: set[int] = set()
        """Slot sizes (bytes) of the parts whose size is known."""
        self.caches = 0
        """Registered caches that use this namespace."""
        self.tenant: int | None = None
        """Whose it is, where there are quotas; None while nobody has used it."""
        self.lookup_tokens: dict[str, int] = {}
        """Tokens asked for, by result: its model's, which other namespaces share (service/telling/counters.py)."""
        self.tags = tags or Tags()
        """Tags of all tenants who have used it, with quotas or without."""
        for index, group in enumerate(geometry.groups):
            self.part_of.append(len(self.parts))
            self.parts.extend(Part(index, shard) for shard in range(group.shards))
            self._group_parts.append(range(self.part_of[index], len(self.parts)))
            if group.kind == "full":
                self.needed |= 1 << index
        self.only_full = self.needed == (1 << len(geometry.groups)) - 1
        self.away = 0
        """Nodes of which something is on disk alone."""
        self.dram_bytes = 0
        """Slot bytes of what nodes have in DRAM."""
        self.disk_bytes = 0
        """And of what they have on disk."""

    @property
    def complete(self) -> bool:
        """Every shard's size is known, so whole chunks can be reserved."""
        return all(part.pages is not None for part in self.parts)

    def all_nodes(self) -> Iterator[Node]:
        yield from self.nodes.values()
        yield from self.doomed.values()

    def touch(self, used: int, tail: Node | None = None) -> None:
        """Somebody asked for the prefix that ends in `tail`, or used the namespace without one."""
        self.root.touch(used)
        if tail is not None:
            tail.touch(used)

    def cache_came(self) -> None:
        """A cache that uses the namespace was registered."""
        self.caches += 1

    def cache_left(self) -> None:
        self.caches -= 1

    def belongs_to(self, tenant: int) -> None:
        """Its chunks are charged to this tenant."""
        self.tenant = tenant

    def count_tokens_in(self, tokens: dict[str, int]) -> None:
        """Tokens that are asked for are counted there, by result."""
        self.lookup_tokens = tokens

    def doom(self) -> None:
        """Nothing is asked of the namespace any more."""
        self.doomed, self.nodes = self.nodes, self.doomed

    def next_doomed(self) -> Node:
        """The one that goes next; its children went before. It is in `nodes` from now on.

        popitem() alone is quick here: an iterator from the end steps over all that went before."""
        key, node = self.doomed.popitem()
        self.nodes[key] = node
        return node

    def successor(self, *, caches: int) -> "Space":
        """The same namespace without its chunks, for so many caches that go on using it."""
        heir = Space(self.digest, self.number, self.geometry, self.tags)
        heir.parts, heir.slot_sizes, heir.caches = self.parts, self.slot_sizes, caches
        heir.tenant, heir.lookup_tokens = self.tenant, self.lookup_tokens
        return heir

    def fix_part(self, index: int, pages: PageShape, payload_bytes: int, slot_bytes: int) -> None:
        """The size of a part, for as long as the namespace lives."""
        part = self.parts[index]
        assert part.pages is None
        part.pages, part.payload_bytes, part.slot_bytes = pages, payload_bytes, slot_bytes
        self.slot_sizes.add(slot_bytes)

    def group_parts(self, group: int) -> range:
        return self._group_parts[group]

    def add(self, key: bytes, parent: Node, used: int, tenant: int) -> Node:
        """A new node without any part, waiting."""
        assert parent.state != GONE
        node = Node(key, parent, used, tenant)
        self._hang(node, parent)
        settle(parent)
        return node

    def remove(self, node: Node) -> Node:
        """Takes a leaf without extents out; returns its parent, which inherits its last use."""
        assert node.children is None
        assert node.state != GONE
        assert not node.on_disk
        parent = node.parent
        assert parent is not None
        if self.doomed.pop(node.key, None) is None:
            del self.nodes[node.key]
        self._detach(node, parent)
        node.parent = None
        node.state = GONE
        parent.used = max(parent.used, node.used)
        return parent

    def _hang(self, node: Node, parent: Node) -> None:
        assert node.key not in self.nodes
        self.nodes[node.key] = node
        match parent.children:
            case None:
                parent.children = node
            case dict() as children:
                children[node] = None
            case only:
                parent.children = {only: None, node: None}

    @staticmethod
    def _detach(node: Node, parent: Node) -> None:
        if isinstance(parent.children, dict):
            del parent.children[node]
            if len(parent.children) == 1:
                (parent.children,) = parent.children
        else:
            assert parent.children is node
            parent.children = None

    def cut(self, node: Node, other: "Space") -> None:
        """Moves a node and all below it to a space without nodes, where they hang on its root. They wait there, and
        nothing of them is present: they are held by pins alone."""
        assert not other.nodes
        parent = node.parent
        assert parent is not None
        for at in self.subtree(node):
            other.nodes[at.key] = self.nodes.pop(at.key)
            self.away -= at.away
            at.present, at.state = 0, WAITING
            for space, sign in ((self, -1), (other, 1)):
                space.dram_bytes += sign * space.group_bytes(at.in_dram)
                space.disk_bytes += sign * space.group_bytes(at.on_disk)
        self._detach(node, parent)
        root = other.root
        root.depth, root.state = parent.depth, WAITING
        node.parent, root.children = root, node
        for above, count in ((parent, -1), (root, 1)):
            _claim(above, count * (node.disk is not None and node.disk.claims))
            if node.cold:
                assert above.disk is not None
                above.disk.cold_children += count

    def add_cold(self, node: Node, groups: int, extents: tuple[int, ...], generation: int) -> None:
        """Takes in a new leaf, ready because it is on disk whole. It is cold from the first, so nothing changes for
        those above it, and a chain costs no more than its nodes."""
        parent = node.parent
        assert parent is not None
        assert parent.state == READY
        assert groups & self.needed == self.needed
        self._hang(node, parent)
        node.state = READY
        node.present = groups
        node.disk = disk = OnDisk()
        disk.groups, disk.extents, disk.generation = groups, extents, generation
        disk.keeps = disk.cold = True
        self.disk_bytes += self.group_bytes(groups)
        if parent.disk is None:
            parent.disk = OnDisk()
        parent.disk.children += 1
        parent.disk.cold_children += 1
        self.away += 1

    def put_on_disk(self, node: Node, groups: int, extents: tuple[int, ...], generation: int) -> Node:
        """Sets the records that the node has on disk from now on; groups = 0: none. Returns what settle() does."""
        assert node.parent is not None
        disk = node.disk = node.disk or OnDisk()
        before, was_away = disk.claims, node.away
        self.disk_bytes += self.group_bytes(groups) - self.group_bytes(disk.groups)
        disk.groups, disk.extents, disk.generation = groups, extents if groups else (), generation
        node.present = node.in_dram | groups
        self.away += node.away - was_away
        disk.keeps = groups != 0 and groups & self.needed == self.needed
        _claim(node.parent, disk.claims - before)
        return settle(node)

    def put_in_dram(self, node: Node, groups: int, slots: Sequence[int]) -> None:
        """Sets the groups (bits) that the node has in DRAM from now on, and the slot of each part."""
        self.dram_bytes += self.group_bytes(groups) - self.group_bytes(node.in_dram)
        was_away = node.away
        node.in_dram, node.slots = groups, tuple(slots) if groups else ()
        node.present = groups | node.on_disk
        self.away += node.away - was_away

    @staticmethod
    def set_written(node: Node, written: bool) -> None:
        """A write of the node begins, or is over."""
        assert node.parent is not None
        disk = node.disk = node.disk or OnDisk()
        before = disk.claims
        disk.written = written
        _claim(node.parent, disk.claims - before)

    def group_bytes(self, groups: int) -> int:
        """Slot bytes of these groups (bits) of a chunk."""
        total = group = 0
        while groups:
            if groups & 1:
                for part in self._group_parts[group]:
                    total += self.parts[part].slot_bytes
            groups >>= 1
            group += 1
        return total

    def make_ready(self, node: Node) -> list[Node]:
        """Called when a node may have become ready; returns the nodes that did, parents first."""
        ready: list[Node] = []
        stack = [node]
        while stack:
            at = stack.pop()
            if at.state != WAITING or at.present & self.needed != self.needed:
                continue
            assert at.parent is not None
            if at.parent.state != READY:
                continue
            at.state = READY
            ready.append(at)
            if at.children is not None:
                stack.extend(at.child_nodes())
        return ready

    def subtree(self, node: Node) -> list[Node]:
        """The node and all its descendants, parents before children."""
        found = [node]
        for at in found:
            found.extend(at.child_nodes())
        return found

    def ready_chunks(self, keys: bytes) -> int:
        """How many leading keys are ready nodes. `keys` is a whole number of packed keys that chain.

        The last key is probed first: a prompt that is asked for again hits whole."""
        nodes = self.nodes
        low, high = 0, len(keys) // KEY_BYTES
        middle = high
        while low < high:
            node = nodes.get(keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES])
            if node is not None and node.state == READY and node.depth == middle:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def chain(self, tail: Node) -> list[Node]:
        """The nodes of the prefix that ends in `tail`, head first."""
        chain: list[Node] = []
        node: Node | None = tail
        while node is not None and node.depth:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain


def _claim(parent: Node, count: int) -> None:
    if count:
        parent.disk = parent.disk or OnDisk()
        parent.disk.children += count


def settle(node: Node) -> Node:
    """To be called when pins, slots, extents or children of a node have changed: says of it, and of its ancestors,
    whether they are cold. Returns the last one that heard of it, which may be a leaf of what is in DRAM now."""
    at = node
    while at.disk is not None and at.parent is not None:
        disk = at.disk
        bare = disk.groups != 0 and not at.in_dram and at.pins == 0
        cold = bare and disk.cold_children == at.child_count()
        if cold == disk.cold:
            break
        disk.cold = cold
        at = at.parent
        if at.disk is None:
            at.disk = OnDisk()
        at.disk.cold_children += 1 if cold else -1
    return at
