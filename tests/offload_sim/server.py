"""The server as a connector sees it: prefixes with parts, tiers, leases, refusals, occasional restarts."""

from dataclasses import dataclass, field
from random import Random

from kvclient.offload.values import LookupOrder, Options, StoreOrder
from kvclient.values import RECOVERING, Blocks, Found, Lease, RetrieveResult, StoreResult
from kvserver.wire.messages import KEY_BYTES

from .content import Page, keys, page, require
from .shapes import Day

TTLS_S = (0.7, 20.0, 20.0, 20.0)
"""In some seeds the lease's lifetime is shorter than the minimum for its use."""


@dataclass
class Chunk:
    parent: bytes
    parts: dict[tuple[int, int], list[Page]] = field(default_factory=dict)
    """(group, rank) -> pages."""


@dataclass
class Promise:
    keys: list[bytes]
    expires_s: float
    ranks_used: list[int] = field(default_factory=list)


def cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class Server:
    def __init__(self, options: Options, day: Day, rng: Random, tiers: Random, remote: Random) -> None:
        """tiers, remote: separate random numbers for the disk, and for a remote store."""
        self.chunks: dict[bytes, Chunk] = {}
        self.leases: dict[int, Promise] = {}
        self.incarnation = 1
        self.tokens_of: dict[bytes, bytes] = {}
        """Key -> the tokens it names. A real server does not know them; here they are compared."""
        self.untold: set[bytes] = set()
        """Chunks on disks that are still being read: not known yet."""
        self.on_disk: set[bytes] = set()
        """Chunks only on disk: they have left DRAM and were not read since."""
        self.up = True
        self.faulty = True
        self._options = options
        self._day = day
        self._rng, self._tiers, self._remote = rng, tiers, remote
        self._numbers = 0
        self._ttl_s = rng.choice(TTLS_S)

    # ---------------------------------------------------------------- requests

    def lookup(self, order: LookupOrder, now_s: float) -> Found:
        if not self.up:
            return Found(0, None, "connection-lost")
        asked = cut(order.keys)
        found = next((count for count in range(len(asked), 0, -1) if self._servable(asked[:count])), 0)
        why = RECOVERING if self.untold and found < len(asked) else ""
        if found < max(1, order.chunks_wanted_min):
            return Found(found, None, why, self._coming(len(asked) - found))
        self._numbers += 1
        self.leases[self._numbers] = Promise(asked[:found], now_s + self._ttl_s)
        if self._happens(self._day.timeout):
            del self.leases[self._numbers]  # the client closed its lane, which ended the lease
            return Found(0, None, "timeout")
        lease = Lease(self._numbers, found, self.incarnation, now_s + self._ttl_s, self._promote(asked[:found]))
        return Found(found, lease, why, self._coming(len(asked) - found))

    def release(self, lease: Lease) -> None:
        if lease.incarnation == self.incarnation:
            self.leases.pop(lease.number, None)

    def read(
        self, lease: Lease, rank: int, blocks: tuple[Blocks, ...], now_s: float
    ) -> list[list[Page]] | RetrieveResult:
        """The pages of the blocks, or the refusal."""
        if not self.up:
            return RetrieveResult(False, 0, "connection-lost")
        promise = self.leases.get(lease.number)
        if lease.incarnation != self.incarnation or promise is None or promise.expires_s <= now_s:
            return RetrieveResult(False, 0, "lease-lost")
        require(rank not in promise.ranks_used, f"rank {rank} uses lease {lease.number} twice")
        brought = []
        for item in blocks:
            per_chunk = self._options.chunk_tokens // self._options.groups[item.group].block_tokens
            pages = []
            for block in range(item.first_block, item.first_block + len(item.block_ids)):
                chunk, within = divmod(block, per_chunk)
                require(chunk < len(promise.keys), f"chunk {chunk} lies beyond the lease")
                held = self.chunks[promise.keys[chunk]].parts.get((item.group, rank))
                require(held is not None, f"group {item.group} brings chunk {chunk}, which its boundary does not need")
                assert held is not None
                pages.append(held[within])
            brought.append(pages)
        promise.ranks_used.append(rank)
        if len(promise.ranks_used) == self._options.ranks:
            del self.leases[lease.number]
        if self._happens(self._day.retrieve_fails):
            return RetrieveResult(False, 0, "mover-lost")
        return brought

    def store(self, order: StoreOrder, rank: int, pages: list[list[Page]]) -> StoreResult:
        """Stores pages, after comparing them with the meaning of the keys."""
        if not self.up:
            return StoreResult(0, 0, 0, "connection-lost")
        brought_keys = cut(order.keys)
        stop, why = len(brought_keys), ""
        if self._happens(self._day.store_short):
            stop, why = (
                self._rng.randrange(len(brought_keys)),
                self._rng.choice(("full", "busy", "discarded", "timeout")),
            )
        parent = order.parent
        for at, key in enumerate(brought_keys):
            if at == stop:
                return StoreResult(at, at, 0, why)
            if parent and (parent not in self.chunks or parent in self.untold):
                return StoreResult(at, at, 0, "parent-absent")
            chunk = self.chunks.setdefault(key, Chunk(parent))
            require(chunk.parent == parent, "a key came with another parent")
            for item, brought in zip(order.blocks, pages, strict=True):
                self._keep(chunk, (key, rank, order.first_chunk + at), item, brought)
            self.untold.discard(key)
            parent = key
        return StoreResult(len(brought_keys), len(brought_keys), 0, "")

    # ---------------------------------------------------------------- events

    def demote(self) -> None:
        """Moves a chunk out of DRAM; its descendants have left before."""
        inner = {chunk.parent for key, chunk in self.chunks.items() if key not in self.on_disk}
        leaves = [key for key in self.chunks if key not in inner and key not in self.on_disk]
        if leaves:
            self.on_disk.add(self._tiers.choice(leaves))

    def bring(self, tokens: bytes) -> None:
        """Adds a sequence stored by another engine of the same kind."""
        parent = b""
        for index, key in enumerate(keys(tokens, self._options.chunk_tokens)):
            chunk = self.chunks.setdefault(key, Chunk(parent))
            self.tokens_of.setdefault(key, tokens[: (index + 1) * self._options.chunk_tokens])
            for group in range(len(self._options.groups)):
                for rank in range(self._options.ranks):
                    chunk.parts.setdefault((group, rank), self._pages_of(key, group, rank, index))
            parent = key

    def expire(self, now_s: float) -> None:
        for number in [number for number, promise in self.leases.items() if promise.expires_s <= now_s]:
            del self.leases[number]

    def evict(self) -> None:
        """Evicts a leaf that no lease covers."""
        inner = {chunk.parent for chunk in self.chunks.values()}
        promised = {key for promise in self.leases.values() for key in promise.keys}
        leaves = [key for key in self.chunks if key not in inner and key not in promised]
        if leaves:
            gone = self._rng.choice(leaves)
            del self.chunks[gone]
            self.on_disk.discard(gone)

    def restart(self, *, wipe: bool) -> None:
        self.incarnation += 1
        self._numbers = 0
        self.leases.clear()
        self.untold.clear()
        if wipe:
            self.chunks.clear()
            self.on_disk.clear()
        elif self._rng.random() < 0.5:
            self.know_nothing_of_disks()

    def know_nothing_of_disks(self) -> None:
        """Simulates a restart: a random chunk and its descendants are only on disk, and not found yet."""
        below = {self._rng.choice(list(self.chunks))} if self.chunks else set()
        while more := {key for key, chunk in self.chunks.items() if chunk.parent in below} - below:
            below |= more
        self.untold = below

    def read_disks(self) -> None:
        self.untold.clear()

    # ---------------------------------------------------------------- helpers

    def _coming(self, chunks_absent: int) -> int:
        """What is said to come of the absent chunks. It comes only if another engine happens to store it."""
        return self._remote.randint(0, chunks_absent) if self.faulty and self._remote.random() < 0.7 else 0

    def _promote(self, found: list[bytes]) -> int:
        """Number of chunks to be read. Reading begins from the head; some are in DRAM before the next question."""
        away = [key for key in found if key in self.on_disk]
        self.on_disk.difference_update(away[: self._tiers.randint(0, len(away))])
        return len(away)

    def _keep(self, chunk: Chunk, place: tuple[bytes, int, int], item: Blocks, pages: list[Page]) -> None:
        key, rank, index = place
        block_tokens = self._options.groups[item.group].block_tokens
        per_chunk = self._options.chunk_tokens // block_tokens
        begin = index * per_chunk - item.first_block
        if begin < 0:
            return
        mine = pages[begin : begin + per_chunk]
        wanted = self._pages_of(key, item.group, rank, index)
        require(mine == wanted, f"wrong bytes are stored: group {item.group} chunk {index} rank {rank}: {mine}")
        chunk.parts.setdefault((item.group, rank), mine)

    def _pages_of(self, key: bytes, group: int, rank: int, index: int) -> list[Page]:
        block_tokens = self._options.groups[group].block_tokens
        per_chunk = self._options.chunk_tokens // block_tokens
        blocks = range(index * per_chunk, (index + 1) * per_chunk)
        return [page(rank, group, block_tokens, block, self.tokens_of[key]) for block in blocks]

    def _servable(self, asked: list[bytes]) -> bool:
        """A brute-force check of the chunks that a boundary needs."""
        end = len(asked) * self._options.chunk_tokens
        for index, group in enumerate(self._options.groups):
            first_token = {"full": 0, "window": max(0, end - group.window_tokens), "state": end - 1}[group.kind]
            for key in asked[first_token // self._options.chunk_tokens :]:
                parts = self.chunks[key].parts if key in self.chunks else {}
                if any((index, rank) not in parts for rank in range(self._options.ranks)):
                    return False
        return all(key in self.chunks and key not in self.untold for key in asked)

    def _happens(self, chance: float) -> bool:
        return self.faulty and self._rng.random() < chance
