"""One request as offload.py sees it, from begin() until nothing of it is in flight."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvclient.offload_values import Options
from kvclient.values import Lease
from kvserver.wire.messages import KEY_BYTES


class Phase(Enum):
    WAITING = "waiting"
    """For its place in the engine, and meanwhile for the server's answer."""
    RETRIEVING = "retrieving"
    """It has its blocks; a job writes some of them."""
    RUNNING = "running"
    FINISHED = "finished"


class Question(NamedTuple):
    """A lookup in flight."""

    number: int
    chunks: int
    chunks_wanted_min: int
    asked_s: float
    due_s: float
    is_ahead: bool = False
    """Nobody has wanted to know yet."""


@dataclass(eq=False, slots=True)
class Answer:
    """What the server said last, or that it did not."""

    chunks: int
    lease: Lease | None
    asked_chunks: int
    chunks_wanted_min: int
    why: str = ""
    believed_until_s: float | None = None
    """None until somebody has looked at it, who had waited for it."""
    is_told: bool = False
    """match() has said that nothing follows from it."""

    def still_good(self, options: Options, now_s: float) -> bool:
        """Whole and leased: for as long as the lease. Otherwise for a moment: more may come, and without a lease what
        was found may go. At first sight in any case: an engine with slow steps would ask for ever."""
        if self.believed_until_s is None:
            self.believed_until_s = now_s + options.moment_s
            return True
        if not self.asked_chunks:
            return True
        if self.lease is not None and self.chunks >= self.asked_chunks:
            return self.has_lease(options, now_s)
        return now_s < self.believed_until_s

    def has_lease(self, options: Options, now_s: float) -> bool:
        """Whether what was found is kept until the ranks have submitted their retrieves."""
        return self.lease is not None and now_s < self.lease.expires_monotonic_s - options.lease_spare_s


@dataclass(eq=False, slots=True)
class Request:
    name: Hashable
    prompt_tokens: int
    keys: bytes
    """Packed, of whole chunks; empty when it cannot be keyed."""
    reads: bool
    is_keyed: bool = True
    tokens: int = 0
    """Of the sequence when it was matched last, output included."""
    phase: Phase = Phase.WAITING
    question: Question | None = None
    answer: Answer | None = None
    disk_chunks: int = 0
    """Bits of those that leases of this wait had read from disk: offload_tiers.py."""
    queued_s: float | None = None
    """Since when it waits for its turn to retrieve."""
    retrieve: int = 0
    """Its job, while RETRIEVING."""
    is_barred: bool = False
    """A retrieve of it has failed: rule 5."""
    frontier: int = 0
    """Chunks before it are held by the server, or are on their way to it."""
    held_for_sure: int | None = None
    """Of the chunks before the frontier, when the server did not know yet what its disks hold; None: it knew."""
    due: int = 0
    """Chunks that are computed."""
    storing: dict[int, int] = field(default_factory=dict)
    """Stores in flight: job, chunk where it ends."""
    stored_until: int = 0
    """Where stores have ended since the question was asked, so that its answer cannot know of them."""
    jobs: int = 0
    """In flight: stores, and retrieves of this life of it or an earlier one."""
    stopped: str = ""
    """Why nothing more is stored: the chain has a gap before the frontier."""
    hbm_tokens: int = 0
    found_tokens: int = 0
    retrieved_tokens: int = 0
    disk_tokens: int = 0
    """Of those retrieved."""
    stored_tokens: int = 0
    preemptions: int = 0
    why: str = ""

    def __post_init__(self) -> None:
        self.tokens = self.prompt_tokens

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def storing_until(self) -> int:
        return max(self.storing.values(), default=0)

    def key_range(self, first_chunk: int, end_chunk: int) -> bytes:
        return self.keys[first_chunk * KEY_BYTES : end_chunk * KEY_BYTES]

    def parent_of(self, chunk: int) -> bytes:
        return self.key_range(chunk - 1, chunk) if chunk else b""
