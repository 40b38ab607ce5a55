"""The chunks of one namespace: a tree of nodes, one for each prefix, named by its key.

A node is *ready* when every group that a prefix needs throughout (kind full) is present in it and its parent is ready.
So the ready nodes are closed under prefixes, and three things follow:

* the longest ready prefix of n keys is found by bisection, with log2(n) probes of one dict;
* a pin on a node keeps all its ancestors, because only leaves are ever evicted: a lease is one pin;
* a chunk that was sealed before its parent simply waits until the parent is ready.

A node may be cut off with all below it. Then it hangs below the root of another space. The nodes below it stay in
`nodes` until it is their turn to be taken over, and look as before. Only their way up tells that they were cut off: it
does not lead to the root of this space. So whoever finds a node by its key asks find().

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
        """Time of the last request for it, or for a descendant that is gone now. Any monotonic unit."""
        self.tenant = tenant
        self.slots: tuple[int, ...] = ()
        """Arena offset of each part (see Space.parts), or ABSENT. Empty: no part has a slot."""
        self.present = 0
        """Bit g: every shard of group g is sealed, in DRAM or on disk."""
        self.in_dram = 0
        """Bit g: every shard of group g has a slot."""
        self.disk: OnDisk | None = None
        """None: neither it nor a child was ever on disk."""
        self.state = WAITING
        self.queued = 0
        """Bits of the eviction orders that have an entry for it (eviction.py)."""

    def touch(self, used: int) -> None:
        """Records a request for it at that time; an earlier time changes nothing."""
        self.used = used if used > self.used else self.used

    def mark(self, bits: int) -> None:
        """Sets bits of `queued`."""
        self.queued |= bits

    def unmark(self, bits: int) -> None:
        self.queued &= ~bits

    def pin(self, count: int = 1) -> None:
        self.pins += count

    def unpin(self, count: int = 1) -> None:
        assert self.pins >= count
        self.pins -= count

    @property
    def on_disk(self) -> int:
        """Bit g: every shard of group g has an extent."""
        return 0 if self.disk is None else self.disk.groups

    @property
    def away(self) -> bool:
        """Whether a part has to be read from disk before the chunk can be copied to a device."""
        return self.present & ~self.in_dram != 0

    @property
    def cold(self) -> bool:
        """Whether it and all its descendants are on disk only and without pins."""
        return self.disk is not None and self.disk.cold

    def child_count(self) -> int:
        if self.children is None:
            return 0
        return len(self.children) if isinstance(self.children, dict) else 1

    def cold_child_count(self) -> int:
        return 0 if self.disk is None else self.disk.cold_children

    def child_nodes(self) -> "Iterator[Node]":
        if isinstance(self.children, dict):
            yield from self.children
        elif self.children is not None:
            yield self.children


class OnDisk:
    """Records of a node on disk, and how many of its children have records."""

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
        """Device whose eviction order (eviction.DeviceLru) has an entry for it; its own device, once it may go."""
        self.keeps = False
        """The records on disk keep the chunk servable without its slots."""
        self.written = False
        """Whether a write of it is under way."""
        self.children = 0
        """Children with records on disk, or with a write under way. Extents go leaf first, as chunks do."""
        self.cold_children = 0
        self.cold = False

    @property
    def claims(self) -> bool:
        """Whether its parent must stay on disk."""
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
        """tags: of an earlier life of the namespace."""
        self.digest = digest
        self.number = number
        """Index in the ledger's table of namespaces."""
        self.geometry = geometry
        self.root = Node(b"", None, 0, 0)
        self.root.state = READY
        self.nodes: dict[bytes, Node] = {}
        self.doomed: dict[bytes, Node] = {}
        """Nodes of a cleared namespace, removed step by step, the last one first. A node that is still needed then
        moves to `nodes`."""
        self.cuts: list[Space] = []
        """Spaces of what was cut off here while nodes of it may still be in `nodes`."""
        self.origin: Space | None = None
        """The space from which this one was cut off, while that one may still have nodes of it."""
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
        """Tag of the tenant that it belongs to, if there are quotas. None: no tenant has used it."""
        self.epochs: dict[str, int] = {}
        """Remote store -> its epoch to which the chunks belong (remote/epoch_lease.py). A store that has told none is
        not there. The only store is ""."""
        self.lookup_tokens: dict[str, int] = {}
        """Tokens asked for, by result. All namespaces of a model share it (service/telling/counters.py)."""
        self.tags = tags or Tags()
        """Tags of all tenants that have used it, with or without quotas."""
        for index, group in enumerate(geometry.groups):
            self.part_of.append(len(self.parts))
            self.parts.extend(Part(index, shard) for shard in range(group.shards))
            self._group_parts.append(range(self.part_of[index], len(self.parts)))
            if group.kind == "full":
                self.needed |= 1 << index
        self.only_full = self.needed == (1 << len(geometry.groups)) - 1
        self.away = 0
        """Nodes with a part that is on disk only."""
        self.dram_bytes = 0
        """Slot bytes of all parts in DRAM."""
        self.disk_bytes = 0
        """Slot bytes of all parts on disk."""

    @property
    def complete(self) -> bool:
        """Whether every shard's size is known, so that whole chunks can be reserved."""
        return all(part.pages is not None for part in self.parts)

    def all_nodes(self) -> Iterator[Node]:
        yield from self.nodes.values()
        yield from self.doomed.values()

    def has(self, node: Node) -> bool:
        """Whether the node is counted here, wherever it hangs."""
        return self.nodes.get(node.key) is node or self.doomed.get(node.key) is node

    def find(self, key: bytes) -> Node | None:
        """The node of this key, unless it was cut off."""
        node = self.nodes.get(key)
        return None if node is None or self.is_cut(node) else node

    def is_cut(self, node: Node) -> bool:
        """Whether a node that was in this space has been cut off. While there are cuts, this follows its way up."""
        return bool(self.cuts) and self._last_ready(node) is not self.root

    def cut_of(self, node: Node) -> "Space":
        """The space of the cut to which a node that is cut off belongs. It is quick when the node's parent was taken
        over."""
        at = self._last_ready(node)
        while not any(cut.has(at) for cut in self.cuts):
            assert at.parent is not None
            at = at.parent
        return next(cut for cut in self.cuts if cut.has(at))

    def live_chunks(self, walk: Sequence[Node]) -> int:
        """The number of leading nodes of a chain that have not been cut off."""
        low, high = 0, len(walk)
        while self.cuts and low < high:
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if self.is_cut(walk[middle - 1]) else (middle, high)
        return high

    def _last_ready(self, node: Node) -> Node:
        """The root if the node hangs in this space. Otherwise the first node on its way up that a cut has taken over,
        or, if a ready node comes before, the last ready one below such a node."""
        at = node
        while at.state != READY:
            if self.nodes.get(at.key) is not at or at.parent is None:
                return at
            at = at.parent
        while at.parent is not None and at.parent.state == READY:
            at = at.parent
        return at

    def touch(self, used: int, tail: Node | None = None) -> None:
        """Records a request for the prefix that ends in `tail`, or, without it, a use of the namespace."""
        self.root.touch(used)
        if tail is not None:
            tail.touch(used)

    def cache_came(self) -> None:
        """Records that a cache with this namespace was registered."""
        self.caches += 1

    def cache_left(self) -> None:
        self.caches -= 1

    def belongs_to(self, tenant: int) -> None:
        """Charges its chunks to this tenant."""
        self.tenant = tenant

    def belongs_to_epochs(self, epochs: dict[str, int]) -> None:
        """Its chunks belong to these epochs, by the names of the remote stores."""
        self.epochs = epochs

    def count_tokens_in(self, tokens: dict[str, int]) -> None:
        """Counts the tokens that are asked for in `tokens`, by result."""
        self.lookup_tokens = tokens

    def doom(self) -> None:
        """Marks all nodes for removal: the namespace was cleared."""
        self.doomed, self.nodes = self.nodes, self.doomed

    def next_doomed(self) -> Node:
        """Moves the node to be removed next to `nodes`, and returns it. Its children were removed before.

        Only popitem() is quick here: an iterator from the end would step over all nodes removed before."""
        key, node = self.doomed.popitem()
        self.nodes[key] = node
        return node

    def successor(self, *, caches: int) -> "Space":
        """The same namespace without chunks, for the caches that still use it."""
        heir = Space(self.digest, self.number, self.geometry, self.tags)
        heir.parts, heir.slot_sizes, heir.caches = self.parts, self.slot_sizes, caches
        heir.tenant, heir.lookup_tokens = self.tenant, self.lookup_tokens
        return heir

    def fix_part(self, index: int, pages: PageShape, payload_bytes: int, slot_bytes: int) -> None:
        """Sets the size of a part, once."""
        part = self.parts[index]
        assert part.pages is None
        part.pages, part.payload_bytes, part.slot_bytes = pages, payload_bytes, slot_bytes
        self.slot_sizes.add(slot_bytes)

    def is_whole(self, node: "Node") -> bool:
        """DRAM has all of the chunk that a prefix needs."""
        return bool(node.in_dram) and node.in_dram & self.needed == self.needed

    def group_parts(self, group: int) -> range:
        return self._group_parts[group]

    def add(self, key: bytes, parent: Node, used: int, tenant: int) -> Node:
        """Adds a node without parts; it waits."""
        assert parent.state != GONE
        node = Node(key, parent, used, tenant)
        self._hang(node, parent)
        settle(parent)
        return node

    def remove(self, node: Node) -> Node:
        """Removes a leaf without extents. Returns its parent, which inherits its last use."""
        assert node.children is None
        assert node.state != GONE
        assert not node.on_disk
        parent = node.parent
        assert parent is not None
        self._leave(node)
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

    def _leave(self, node: Node) -> None:
        nodes = self.doomed if self.doomed.get(node.key) is node else self.nodes
        assert nodes[node.key] is node
        del nodes[node.key]

    def cut(self, node: Node, other: "Space") -> None:
        """Cuts a node off: it hangs below the root of an empty space from now on, with all below it. Nodes below it
        are taken over one by one."""
        assert not other.nodes
        parent = node.parent
        assert parent is not None
        self._detach(node, parent)
        root = other.root
        root.depth, root.state = parent.depth, WAITING
        node.parent, root.children = root, node
        for above, count in ((parent, -1), (root, 1)):
            _claim(above, count * (node.disk is not None and node.disk.claims))
            if node.cold:
                assert above.disk is not None
                above.disk.cold_children += count
        self.cuts.append(other)
        other.origin = self
        other.take_over(node)

    def take_over(self, node: Node) -> None:
        """Takes a node that was cut off from the space that it was cut off from. It waits, and none of its parts counts
        as present: only pins keep it."""
        origin = self.origin
        assert origin is not None
        origin._leave(node)
        self.nodes[node.key] = node
        origin.away -= node.away
        node.present, node.state = 0, WAITING
        dram_bytes, disk_bytes = self.group_bytes(node.in_dram), self.group_bytes(node.on_disk)
        origin.dram_bytes -= dram_bytes
        origin.disk_bytes -= disk_bytes
        self.dram_bytes += dram_bytes
        self.disk_bytes += disk_bytes

    def all_taken_over(self) -> None:
        """Nothing that was cut off is left in the space that it was cut off from."""
        assert self.origin is not None
        self.origin.cuts.remove(self)
        self.origin = None

    def add_cold(self, node: Node, groups: int, extents: tuple[int, ...], generation: int) -> None:
        """Adds a leaf that is on disk as a whole, so it is ready. It is cold from the beginning: its ancestors do not
        change, and the cost of a chain is linear."""
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
        """Sets the records that the node has on disk; groups = 0: none. Returns the result of settle()."""
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
        """Sets the groups (bits) that the node has in DRAM, and the slot of each part."""
        self.dram_bytes += self.group_bytes(groups) - self.group_bytes(node.in_dram)
        was_away = node.away
        node.in_dram, node.slots = groups, tuple(slots) if groups else ()
        node.present = groups | node.on_disk
        self.away += node.away - was_away

    @staticmethod
    def set_written(node: Node, written: bool) -> None:
        """Records that a write of the node begins or has ended."""
        assert node.parent is not None
        disk = node.disk = node.disk or OnDisk()
        before = disk.claims
        disk.written = written
        _claim(node.parent, disk.claims - before)

    def group_bytes(self, groups: int) -> int:
        """Slot bytes of these groups (bits) in one chunk."""
        total = group = 0
        while groups:
            if groups & 1:
                for part in self._group_parts[group]:
                    total += self.parts[part].slot_bytes
            groups >>= 1
            group += 1
        return total

    def rank_bytes(self, groups: int) -> int:
        """Slot bytes of these groups in one chunk that one rank loads: a shard of each group."""
        return sum(
            self.group_bytes(1 << number) // group.shards
            for number, group in enumerate(self.geometry.groups)
            if groups >> number & 1
        )

    def make_ready(self, node: Node) -> list[Node]:
        """Makes a node ready if it can be, and its descendants. Returns the nodes that became ready, parents first."""
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
        """Number of leading keys that are ready nodes. `keys`: packed keys of one chain."""
        chunks = self._ready_chunks(keys, len(keys) // KEY_BYTES)
        while self.cuts and chunks:
            last = self._last_ready(self.nodes[keys[(chunks - 1) * KEY_BYTES : chunks * KEY_BYTES]])
            if last is self.root:
                break
            chunks = self._ready_chunks(keys, last.depth - 1)  # what lies above may have been stored again
        return chunks

    def _ready_chunks(self, keys: bytes, most: int) -> int:
        """The same for `most` leading keys, whether they were cut off or not.

        The last key is probed first, because a repeated prompt hits as a whole."""
        nodes = self.nodes
        low, high = 0, most
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


def is_below(node: Node, top: Node) -> bool:
    """Whether the node is `top`, or hangs below it."""
    at = node
    while at.depth > top.depth and at.parent is not None:
        at = at.parent
    return at is top


def _claim(parent: Node, count: int) -> None:
    if count:
        parent.disk = parent.disk or OnDisk()
        parent.disk.children += count


def settle(node: Node) -> Node:
    """Updates `cold` of a node and its ancestors. Call it when its pins, slots, extents or children have changed.

    Returns the last node that was looked at, which may now be a leaf among the chunks in DRAM."""
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
