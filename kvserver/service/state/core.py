"""All tables of the service. Each belongs to a class that changes it; decisions are elsewhere."""

from collections.abc import Callable
from typing import Literal

from kvserver.errors import RequestError
from kvserver.index.space import Node, Space
from kvserver.service.base.timers import Timers
from kvserver.service.holdings.accounts import Accounts
from kvserver.service.holdings.chunks import Chunks
from kvserver.service.state.bounds import Bounds
from kvserver.service.state.caches import Cache, Caches
from kvserver.service.state.clears import Clears
from kvserver.service.state.disk_tier import DiskTier
from kvserver.service.state.jobs import Jobs
from kvserver.service.state.leases import Leases
from kvserver.service.state.movers import Mover, Movers
from kvserver.service.state.operator_state import OperatorState
from kvserver.service.state.outbox import Outbox
from kvserver.service.state.pledges import Pledges, Size
from kvserver.service.state.remote_tier import RemoteTier
from kvserver.service.state.scrub import Scrub
from kvserver.service.state.sessions import Session, Sessions
from kvserver.service.telling.counters import Counters
from kvserver.service.telling.evicted_keys import EvictedKeys
from kvserver.service.telling.log_sampling import RequestLines
from kvserver.service.telling.lookup_counts import LookupCounts
from kvserver.service.telling.reuse import Reuse
from kvserver.tiers.placement import LoadRate, Rate
from kvserver.wire.messages import NAME_BYTES_MAX

MILLISECOND_NS = 1_000_000


class Core(Outbox):
    """The tables, and the effects of the event that is being handled."""

    def __init__(
        self, bounds: Bounds, random_bytes: Callable[[int], bytes], server: str, incarnation: int, started_ns: int
    ) -> None:
        super().__init__(Counters())
        self.bounds = bounds
        self.random_bytes = random_bytes
        self.server = server
        self.incarnation = incarnation
        self.started_ns = started_ns
        self.reuse = Reuse(started_ns)
        self.lookup_counts = LookupCounts(self.counters, self.reuse)
        self.evicted_keys = EvictedKeys(bounds.chunks_max)
        self.lines = RequestLines(bounds.request_lines)
        self.chunks = Chunks(
            arena_bytes=bounds.arena_bytes,
            slab_bytes=bounds.slab_bytes,
            chunks_max=bounds.chunks_max,
            forget_chunks=bounds.forget_chunks,
            counters=self.counters,
            accounts=Accounts(bounds.tenants) if bounds.tenants else None,
            eviction_policy=bounds.eviction_policy,
        )
        self.timers = Timers()
        self.clears = Clears(self, self.timers, self.chunks)
        self.disk: DiskTier | None = None
        if bounds.disk_devices:
            self.disk = DiskTier(bounds, self, self.chunks, self.clears, started_ns)
            self.chunks.stand_above(self.disk.chunks)
        several = len(bounds.remotes) > 1
        self.remotes = [
            RemoteTier(remote, self, started_ns, number=number, name=remote.name if several else "")
            for number, remote in enumerate(bounds.remotes)
        ]
        self.sessions = Sessions()
        self.caches = Caches()
        self.movers = Movers()
        self.leases = Leases()
        pledged_bytes_max = bounds.arena_bytes * bounds.pledged_percent_max // 100
        self.pledges = Pledges(Size(bounds.pledges_total_max, bounds.pledged_chunks_max, pledged_bytes_max))
        self.chunks.tell_of_pledged(self.pledges)
        self.jobs = Jobs()
        self.loads = LoadRate()
        self.scrub = Scrub(started_ns)
        self.operators = OperatorState()
        self.untold: list[tuple[Space, list[Node]]] = []
        """Chunks of an earlier brain that subscribers have not been told of. The last one in each list is told next."""
        self.arena_problem = self.arena_placement = ""
        first_lease = int.from_bytes(random_bytes(6), "big") << 8  # no lease of an earlier brain names one of ours
        self._last = {"session": 0, "cache": 0, "mover": 0, "lease": first_lease, "job": 0, "disk": 0, "hold": 0}
        self._last["scrub"] = self._last["pledge"] = 0

    def number(
        self, kind: Literal["session", "cache", "mover", "lease", "job", "disk", "hold", "scrub", "pledge"]
    ) -> int:
        """A number that this brain gives only once; never 0."""
        self._last[kind] += 1
        return self._last[kind]

    def remote_of(self, mover: Mover) -> RemoteTier | None:
        """The remote store that a mover serves; None if it serves none, or not any more."""
        return next((tier for tier in self.remotes if tier.mover is mover), None)

    def fresh_epoch(self) -> int:
        """A random epoch for a namespace of a remote store."""
        return int.from_bytes(self.random_bytes(8), "big")

    def computes_faster(self, tokens: int, reads: list[tuple[Rate, int]], load_bytes: int) -> bool:
        """Whether an engine computes tokens sooner than they come to DRAM, and from there to its device.

        reads: bytes that come at each rate, all at the same time. load_bytes: what each rank then gets. False without
        `recompute_tokens_per_s`. A rate that nobody knows refuses nothing, and an old one lets one read through.
        """
        if not self.bounds.recompute_tokens_per_s:
            return False
        if any(not rate.measured or (rate.is_old and not rate.is_busy) for rate, _ in reads):
            return False
        reads_s = max(rate.seconds_for(count) for rate, count in reads)
        return reads_s + self.loads.seconds_for(load_bytes) > tokens / self.bounds.recompute_tokens_per_s

    def own_cache(self, session: Session, number: int) -> Cache:
        cache = self.caches.get(number)
        if cache is None or cache.session is not session:
            raise RequestError(
                "cache-unknown", f"this session has no cache {number}: never registered, or its mover died"
            )
        return cache

    def reload(self, bounds: Bounds) -> None:
        """Other bounds hold from now on."""
        if bounds.request_lines != self.bounds.request_lines:
            self.lines = RequestLines(bounds.request_lines)
        self.bounds = bounds

    def arena_grew(self, slabs: int, problem: str, placement: str) -> None:
        self.chunks.pool.grow(slabs)
        self.arena_problem, self.arena_placement = problem, placement


def check_name(what: str, text: str) -> None:
    """Refuses a name that cannot be logged: empty, too long or not printable."""
    if not 1 <= len(text.encode()) <= NAME_BYTES_MAX or not text.isprintable():
        raise RequestError("name", f"{what}={text[:NAME_BYTES_MAX]!r} must be 1 to {NAME_BYTES_MAX} printable bytes")
