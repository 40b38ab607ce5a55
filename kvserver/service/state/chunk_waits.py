"""Who waits for which chunk, and the reads that are queued for them.

A chunk on disk alone is read because a lease needs it soon, a retrieve came before its chunks, or an operator holds it.
Each of these is a fetch. It ends when all its chunks are in DRAM, or when one of them cannot come.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvserver.errors import DeviceError
from kvserver.index.coverage import first_needed
from kvserver.index.space import Node, Space
from kvserver.service.holdings.disk_eviction import device_of


def missing(space: Space, tail: Node) -> dict[Node, int]:
    """Node -> groups (bits) that the prefix ending in `tail` needs and that are on disk alone, head first."""
    if not space.away:
        return {}
    firsts = [first_needed(space, group, tail.depth) for group in range(len(space.geometry.groups))]
    found: dict[Node, int] = {}
    for position, node in enumerate(space.chain(tail)):
        if node.away:
            wanted = sum(1 << group for group, first in enumerate(firsts) if position >= first)
            if bits := wanted & node.present & ~node.in_dram:
                found[node] = bits
    return found


@dataclass(slots=True, eq=False, kw_only=True)
class Fetch:
    """The chunks that somebody waits for.

    Its functions refer to whoever waits. So that one gives the fetch away at the end: the brain never collects cycles
    that have lived for a second (Shell._tick)."""

    space: Space
    needs: dict[Node, int]
    """Node -> groups (bits) that are still to come, head first."""
    on_ready: Callable[[], None]
    """All chunks are in DRAM."""
    on_failed: Callable[[DeviceError, int], None]
    """(error, now_ns): one of them cannot come. The fetch is over."""


class Read(NamedTuple):
    """A read that is queued."""

    space: Space
    groups: int
    """Bits."""
    device: int
    """The device on which the chunk lay when the read was queued."""


class ChunkWaits:
    """All fetches, by the nodes that they wait for."""

    def __init__(self) -> None:
        self.reads: dict[Node, Read] = {}
        """The queued reads."""
        self.lines: dict[int, OrderedDict[Node, None]] = {}
        """Device -> its queued reads, in this order. A device without queued reads has no line."""
        self.waiters: dict[Node, list[Fetch]] = {}
        self.starved: set[str] = set()
        """Accounts ("" without quotas) that lacked a slot for a read. The read is tried again at the next tick."""
        self._starved_since: dict[str, int] = {}
        """Account -> since when (ns) none of its reads could be ordered."""

    def begin(self, fetch: Fetch) -> Fetch:
        """Queues the reads of a fetch, in the order of its needs."""
        for node, groups in fetch.needs.items():
            self.waiters.setdefault(node, []).append(fetch)
            self._want(fetch.space, node, groups)
        return fetch

    def end(self, fetch: Fetch) -> None:
        """Ends a fetch. A read that is under way still brings its chunk to DRAM."""
        for node in list(fetch.needs):
            self._got(fetch, node)

    def wait_for(self, fetch: Fetch, needs: dict[Node, int]) -> None:
        """Has a fetch wait for these nodes and groups instead, after all fetches that began before."""
        self.end(fetch)
        fetch.needs.update(needs)
        self.begin(fetch)

    def prefer(self, fetch: Fetch) -> None:
        """Puts the queued reads of a fetch in front of all others."""
        for node in reversed(fetch.needs):
            if (read := self.reads.get(node)) is not None:
                self.lines[read.device].move_to_end(node, last=False)

    def arrived(self, space: Space, node: Node, now_ns: int) -> None:
        """Serves the fetches that waited for a node that was read, or that cannot be read."""
        for fetch in list(self.waiters.get(node, ())):
            if node not in fetch.needs:
                continue  # an earlier failure ended it
            left = fetch.needs[node] & ~node.in_dram
            if left & ~node.on_disk:
                self.fail(fetch, unreadable(), now_ns)
            elif left:
                fetch.needs[node] = left
                self._want(space, node, left)
            else:
                self._got(fetch, node)
                if not fetch.needs:
                    fetch.on_ready()

    def fail(self, fetch: Fetch, error: DeviceError, now_ns: int) -> None:
        self.end(fetch)
        fetch.on_failed(error, now_ns)

    def fail_all(self, nodes: Iterable[Node], error: DeviceError, now_ns: int) -> None:
        """Fails all fetches that wait for one of these nodes."""
        for node in list(nodes):
            for fetch in list(self.waiters.get(node, ())):
                if node in fetch.needs:
                    self.fail(fetch, error, now_ns)

    def ordered(self, node: Node, account: str) -> None:
        """The read of a node is under way. account: the one that pays for it."""
        self._starved_since.pop(account, None)
        self._leave_line(node)

    def starve(self, account: str, now_ns: int) -> None:
        """There was no slot for a read of this account."""
        self.starved.add(account)
        self._starved_since.setdefault(account, now_ns)

    def feed(self) -> None:
        """Slots may have come free."""
        self.starved.clear()

    def starved_ns(self, now_ns: int) -> int:
        """How long some account has had no slot for any of its reads."""
        self._starved_since = {name: since for name, since in self._starved_since.items() if name in self.starved}
        return now_ns - min(self._starved_since.values(), default=now_ns)

    def _want(self, space: Space, node: Node, groups: int) -> None:
        """Queues groups (bits) of a node to be read, after those that wait for the same device."""
        known = self.reads.get(node)
        device = known.device if known is not None else device_of(node)
        self.reads[node] = Read(space, groups | (known.groups if known is not None else 0), device)
        self.lines.setdefault(device, OrderedDict())[node] = None

    def _leave_line(self, node: Node) -> None:
        read = self.reads.pop(node, None)
        if read is not None:
            line = self.lines[read.device]
            del line[node]
            if not line:
                del self.lines[read.device]

    def _got(self, fetch: Fetch, node: Node) -> None:
        """Ends a fetch's wait for this node. The last fetch that waited takes the queued read away."""
        del fetch.needs[node]
        waiting = self.waiters[node]
        waiting.remove(fetch)
        if not waiting:
            del self.waiters[node]
            self._leave_line(node)


def mover_lost() -> DeviceError:
    return DeviceError("disk-lost", "the disk mover is gone, or does not answer")


def unreadable() -> DeviceError:
    return DeviceError("disk-io", "a chunk could not be read from disk")
