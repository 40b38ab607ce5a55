"""What an engine's connector and offload.py say to each other. Plain values: most travel to the workers.

A token count is of leading tokens of a sequence unless it says otherwise. `tables` are one sequence of block ids per
group, in the order of Options.groups: tables[g][i] is the block that holds block i of the sequence.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from kvclient.values import Blocks, Lease
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES, Kind

Tables = Sequence[Sequence[int]]


class Group(NamedTuple):
    """What a group needs at a boundary; the same words as in its registration."""

    block_tokens: int
    kind: Kind = "full"
    window_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an engine fixes for the life of its connector. Checked once, here."""

    chunk_tokens: int
    groups: tuple[Group, ...]
    ranks: int = 1
    """Workers that report the end of each job."""
    stores: bool = True
    retrieves: bool = True
    """Not both False. An engine that only stores still looks up, without leases: what is held is not stored again."""
    retrieve_tokens_min: int = 0
    """A retrieve that would bring fewer tokens than this is not worth its while."""
    engine_steps_back: bool = False
    """Whether the engine computes the last token of a sequence by itself when all of it was retrieved. Otherwise one
    token is left for it: it needs that token's logits."""
    resumes_output: bool = True
    """Whether the engine can go on behind retrieved tokens that it has generated itself, after a preemption."""
    null_block: int | None = None
    """Stands in the tables where the engine holds nothing; never stored, never written."""
    lookup_deadline_s: float = 0.1
    """An answer that takes longer is a miss for the request that waits."""
    moment_s: float = 0.25
    """How long it is believed that a sequence is not held whole; somebody may be storing it."""
    lease_spare_s: float = 1.0
    """A lease that ends sooner is not used: the ranks still have to submit their retrieves."""
    ahead_max: int = 32
    """Requests that are asked for before the engine wants to know, at a time: each may get a lease, which keeps what it
    promises in the server's memory, or brings it there from disk."""
    retrieve_wait_s: float = 1.0
    """How long a request waits for its turn when retrieves_max are in flight; then it computes."""
    retrieves_max: int = 32
    stores_max: int = 16
    store_chunks_max: int = 2048
    """Chunks in flight, all stores together: the engine's blocks under them cannot be used for anything else."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "ranks", "retrieves_max", "stores_max", "store_chunks_max"):
            if getattr(self, name) < 1:
                raise RequestError("options", f"{name}={getattr(self, name)} must be at least 1")
        for name in ("lookup_deadline_s", "lease_spare_s", "retrieve_wait_s", "retrieve_tokens_min", "ahead_max"):
            if not getattr(self, name) >= 0:
                raise RequestError("options", f"{name}={getattr(self, name)} must not be negative")
        if not self.moment_s > 0:
            raise RequestError("options", f"moment_s={self.moment_s} must be positive: an answer is good for a moment")
        if not self.groups:
            raise RequestError("options", "groups is empty; expected at least one group")
        if not (self.stores or self.retrieves):
            raise RequestError("options", "stores=False and retrieves=False leave nothing to do")
        for index, group in enumerate(self.groups):
            _check_group(index, group, self.chunk_tokens)

    @cached_property
    def is_plain(self) -> bool:
        """Whether one token less than what was found is of use as well. A state is that after its last token, and of a
        window nothing may be held before its first."""
        return all(group.kind == "full" for group in self.groups)

    @cached_property
    def gain_min(self) -> int:
        """Tokens that a retrieve has to bring."""
        return max(1, self.retrieve_tokens_min)


def _check_group(index: int, group: Group, chunk_tokens: int) -> None:
    if group.block_tokens < 1 or chunk_tokens % group.block_tokens:
        raise RequestError(
            "options", f"group {index}: block_tokens={group.block_tokens} must divide chunk_tokens={chunk_tokens}"
        )
    if group.kind == "state" and group.block_tokens != chunk_tokens:
        raise RequestError(
            "options", f"group {index}: block_tokens={group.block_tokens} of a state must be {chunk_tokens}"
        )
    if (group.kind == "window") != (group.window_tokens > 0):
        raise RequestError("options", f"group {index}: window_tokens={group.window_tokens} of kind {group.kind}")


# ---------------------------------------------------------------- orders


class LookupOrder(NamedTuple):
    """Ask the server, and bring the answer to Offload.found() exactly once, whatever becomes of the request."""

    number: int
    keys: bytes
    chunks_wanted_min: int


class RetrieveOrder(NamedTuple):
    """For every rank: fill the blocks, and report the end of the job. Nobody else may touch them until then."""

    job: int
    request: Hashable
    lease: Lease
    blocks: tuple[Blocks, ...]
    hbm_tokens: int
    """The engine's own tokens; no block of theirs is among `blocks`."""
    end_tokens: int
    """The engine goes on behind this token when all ranks succeeded, and behind hbm_tokens when one did not."""
    refused: str = ""
    """Why it cannot be carried out (the tables do not fit); report it as failed without trying."""
    disk_tokens: int = 0
    """Of those that it brings, what the server had on disk alone when the request asked: offload_tiers.py."""


class StoreOrder(NamedTuple):
    """For every rank: store the blocks once they are computed, and report the end of the job. Their bytes must stay
    until Offload.store_ended() says so, whatever becomes of the request: pin them, or ask Offload.holds()."""

    job: int
    request: Hashable
    first_chunk: int
    parent: bytes
    keys: bytes
    blocks: tuple[Blocks, ...]

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES


class RetrieveEnd(NamedTuple):
    """All ranks have reported. ok: every block of every rank holds its bytes; otherwise their content is undefined."""

    order: RetrieveOrder
    ok: bool
    why: str


class StoreEnd(NamedTuple):
    """All ranks have reported: the blocks of the order may change."""

    order: StoreOrder
    chunks: int
    """Leading chunks of the order that every rank holds now."""


# ---------------------------------------------------------------- for people


@dataclass
class Statistics:
    """Counts since the connector was made; they only grow, except for what is in flight. Tokens count once however
    many ranks and groups they have."""

    requests: int = 0
    requests_unkeyed: int = 0
    tokens_asked: int = 0
    """Of requests that were admitted: all their tokens."""
    tokens_hbm: int = 0
    """Of them in the engine's own cache."""
    tokens_found: int = 0
    """Of them held by the server when it was asked last, the engine's own included."""
    tokens_retrieved: int = 0
    tokens_from_disk: int = 0
    """Of them from chunks that the server had on disk alone when the request asked: offload_tiers.py."""
    tokens_stored: int = 0
    lookups: int = 0
    tokens_looked_up: int = 0
    lookups_late: int = 0
    lookups_unserved: int = 0
    retrieves: int = 0
    retrieves_failed: int = 0
    retrieves_in_flight: int = 0
    stores: int = 0
    stores_short: int = 0
    stores_in_flight: int = 0
    preemptions: int = 0
    skipped_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of requests that were not stored, or could have been retrieved and were not, by reason."""

    def skip(self, why: str, tokens: int) -> None:
        """Counts tokens for which the server is not used."""
        self.skipped_tokens[why] = self.skipped_tokens.get(why, 0) + tokens


class Summary(NamedTuple):
    """What became of one request, when nothing of it is in flight any more. str() is its line in the log."""

    request: Hashable
    prompt_tokens: int
    hbm_tokens: int
    """At its last admission, like found_tokens."""
    found_tokens: int
    retrieved_tokens: int
    stored_tokens: int
    preemptions: int
    why: str
    """Why the server was not used, or not to the end; empty when there is nothing to say."""
    disk_tokens: int = 0
    """Of retrieved_tokens."""

    def __str__(self) -> str:
        line = (
            f"request={self.request} prompt={self.prompt_tokens} hbm={self.hbm_tokens} hit={self.found_tokens} "
            f"loaded={self.retrieved_tokens}"
        )
        line += f" disk={self.disk_tokens}" if self.disk_tokens else ""
        line += f" stored={self.stored_tokens}"
        line += f" preempted={self.preemptions}" if self.preemptions else ""
        return f"{line} why={self.why}" if self.why else line
