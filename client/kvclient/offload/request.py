"""One request in decide.py, from begin() until none of its jobs is in flight; and the jobs that are."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from kvclient.offload.values import Options, RetrieveOrder, Side, StoreOrder
from kvclient.values import Lease, PledgeResult
from kvserver.wire.messages import KEY_BYTES

Order = TypeVar("Order", RetrieveOrder, StoreOrder)


class Phase(Enum):
    WAITING = "waiting"
    """Waiting for a place in the engine, and meanwhile for the server's answer."""
    RETRIEVING = "retrieving"
    """The request has its blocks, and a job writes some of them."""
    RUNNING = "running"
    FINISHED = "finished"


class Lookup(NamedTuple):
    """A lookup in flight."""

    number: int
    chunks: int
    chunks_wanted_min: int
    asked_s: float
    due_s: float
    is_ahead: bool = False
    """True while no match() has asked for the answer."""


@dataclass(eq=False, slots=True)
class Answer:
    """The server's last answer, or a miss because it did not answer."""

    chunks: int
    lease: Lease | None
    asked_chunks: int
    chunks_wanted_min: int
    why: str = ""
    coming: int = 0
    """Chunks after those that may come from a remote store soon."""
    awaited: int = 0
    """Chunks after those that another engine computes now."""
    ask_again_s: float | None = None
    """Time from which a request that waits for those asks again. None until a match() has seen the answer."""
    believed_until_s: float | None = None
    """None until a match() that waited for the answer has seen it."""
    is_told: bool = False
    """match() has returned 0 because of this answer."""
    wait_s: float = 0.0
    """If not 0, the last match() has offered the awaited chunks too, and a retrieve may wait for them so long."""

    def still_good(self, options: Options, now_s: float) -> bool:
        """Whether the answer may still be used. A complete answer with a lease is good as long as the lease.

        Any other answer is good for a moment, because more may be stored, and without a lease what was found may go. At
        first sight every answer is good; otherwise an engine with slow steps would ask forever.
        """
        if self.believed_until_s is None:
            self.believed_until_s = now_s + options.moment_s
            return True
        if not self.asked_chunks:
            return True
        if self.lease is not None and self.chunks >= self.asked_chunks:
            return self.has_lease(options, now_s)
        return now_s < self.believed_until_s

    def has_lease(self, options: Options, now_s: float) -> bool:
        """Whether the lease keeps the chunks until the ranks have submitted their retrieves."""
        return self.lease is not None and now_s < self.lease.expires_monotonic_s - options.lease_spare_s


@dataclass(eq=False, slots=True)
class Request:
    name: Hashable
    prompt_tokens: int
    keys: bytes
    """Packed keys of the whole chunks. Empty if the request cannot be keyed."""
    reads: bool
    is_keyed: bool = True
    side: Side = ""
    handed_tokens: int | None = None
    """Leading tokens that a consumer's producer says it has stored. None: it does not say."""
    tokens: int = 0
    """Length of the sequence at the last match, output included."""
    phase: Phase = Phase.WAITING
    lookup: Lookup | None = None
    answer: Answer | None = None
    asked_first_s: float | None = None
    """Time of its first lookup, from which waits for what is coming count."""
    seen_chunks: int = -1
    """The most chunks that a match() has seen in an answer, awaited ones included. -1: it has seen none."""
    seen_s: float = 0.0
    """Time at which a match() has seen that they had become more."""
    disk_chunks: int = 0
    """Bits of the chunks that leases of this wait had read from disk. See tiers.py."""
    queued_s: float | None = None
    """Time since when the request waits for its turn to retrieve."""
    retrieve: int = 0
    """Number of its retrieve, while RETRIEVING."""
    is_barred: bool = False
    """True if a retrieve of it has failed (rule 5)."""
    frontier: int = 0
    """The server holds the chunks before this one, or receives them now."""
    held_for_sure: int | None = None
    """Chunks before the frontier that the server held for certain, while it did not know all of its disks. Otherwise
    None."""
    due: int = 0
    """Number of computed chunks."""
    storing: dict[int, int] = field(default_factory=dict)
    """Stores in flight: job -> end chunk."""
    stored_until: int = 0
    """Largest end chunk of stores that ended since the lookup was sent, which its answer cannot include."""
    is_pledged: bool = False
    """Others were told that the engine computes it, or it was found not worthwhile."""
    pledged_from: int = 0
    pledged_until: int = 0
    """The chunks that were to be pledged: those before are held, if no store of them is in flight."""
    pledge: PledgeResult | None = None
    jobs: int = 0
    """Jobs in flight: stores, and retrieves from before or after a preemption."""
    stopped: str = ""
    """Why nothing more is stored: the chain has a gap before the frontier. Empty if it has none."""
    hbm_tokens: int = 0
    found_tokens: int = 0
    retrieved_tokens: int = 0
    retrieve_s: float | None = None
    """Duration of its retrieves, each that of the slowest rank. None if none has ended. So is store_s."""
    disk_tokens: int = 0
    """Retrieved tokens that came from disk."""
    stored_tokens: int = 0
    store_s: float | None = None
    preemptions: int = 0
    is_asked: bool = False
    """Whether the server was ever asked anything for it: a lookup or a store."""
    is_admitted: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        self.tokens = self.prompt_tokens

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def storing_until(self) -> int:
        return max(self.storing.values(), default=0)

    @property
    def may_end_at_once(self) -> bool:
        """Whether its first step may well be its last. A step under a lookup stores nothing."""
        return not self.reads or self.side == "producer"

    def key_range(self, first_chunk: int, end_chunk: int) -> bytes:
        return self.keys[first_chunk * KEY_BYTES : end_chunk * KEY_BYTES]

    def parent_of(self, chunk: int) -> bytes:
        return self.key_range(chunk - 1, chunk) if chunk else b""


@dataclass(eq=False, slots=True)
class Job(Generic[Order]):
    """A job ends when all ranks have reported. One rank's failure fails it, and each rank's report counts once."""

    order: Order
    owner: Request
    ranks_left: set[int]
    chunks: int
    """The fewest leading chunks that any rank has: of a store's order, or of the prefix of a retrieve."""
    seconds: float = 0.0
    """Duration on the slowest rank."""
    why: str = ""
    """The first rank's reason, if any rank had one."""


class Jobs(Generic[Order]):
    """Jobs of one kind in flight, by number."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs: dict[int, Job[Order]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, order: Order, owner: Request, *, chunks: int = 0) -> None:
        assert order.job not in self._jobs
        self._jobs[order.job] = Job(order, owner, set(range(self._ranks)), chunks)
        owner.jobs += 1

    def reported(
        self, job: int, rank: int, *, chunks: int = 0, why: str = "", seconds: float = 0.0
    ) -> Job[Order] | None:
        """Take a rank's report. Returns the job if this was its last rank."""
        entry = self._jobs.get(job)
        if entry is None or rank not in entry.ranks_left:
            return None
        entry.ranks_left.remove(rank)
        entry.chunks = min(entry.chunks, chunks)
        entry.seconds = max(entry.seconds, seconds)
        entry.why = entry.why or why
        if entry.ranks_left:
            return None
        del self._jobs[job]
        entry.owner.jobs -= 1
        return entry

    def are_of(self, name: Hashable) -> bool:
        return any(entry.owner.name == name for entry in self._jobs.values())
