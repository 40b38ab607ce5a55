"""The values that an engine's connector and decide.py exchange. Plain data: most of it travels to the workers.

Token counts are numbers of leading tokens of a sequence unless stated otherwise. `tables` is one sequence of block ids
per group, in the order of Options.groups: tables[g][i] is the block that holds block i of the sequence.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from kvclient.values import Blocks, Lease
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES, Kind

Tables = Sequence[Sequence[int]]

Side = Literal["", "producer", "consumer"]
"""The side of a request that is computed on one engine and goes on at another. producer: this engine computes its
prompt, and others wait for that. consumer: another engine computes it, or will soon. Empty: neither."""


class Group(NamedTuple):
    """The part of a group that is needed at a boundary, in the words of its registration."""

    block_tokens: int
    kind: Kind = "full"
    window_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that an engine fixes for the life of its connector. Checked once, here."""

    chunk_tokens: int
    groups: tuple[Group, ...]
    ranks: int = 1
    """Number of workers that report the end of each job."""
    stores: bool = True
    retrieves: bool = True
    """At least one of `stores` and `retrieves` is True. An engine that only stores still looks up, without leases, so
    that held chunks are not stored again."""
    retrieve_tokens_min: int = 0
    """Fewest tokens that make a retrieve worthwhile."""
    engine_steps_back: bool = False
    """Whether the engine itself recomputes the last token if the whole sequence was retrieved. Otherwise one token is
    left out, because the engine needs its logits."""
    resumes_output: bool = True
    """Whether the engine can go on after retrieved tokens that it generated itself, after a preemption."""
    null_block: int | None = None
    """Block id of an empty place in the tables. Never stored, never written."""
    lookup_deadline_s: float = 0.1
    """Time after which a missing answer is a miss for the waiting request."""
    coming_wait_s: float = 0.0
    """How long a lookup whose answer says that more is coming is asked again, from the request's first lookup on.
    0: never."""
    await_others: bool = False
    """Whether every prompt that another engine computes is waited for, and every prompt is pledged to others. Else only
    consumers wait, and only producers pledge (Side)."""
    await_wait_s: float = 0.0
    """How long another engine is waited for, from the request's first lookup on. 0: never."""
    await_producer_s: float = 0.0
    """How long a consumer waits for the first sign of its producer, or the next one: a pledge or another chunk."""
    await_tokens_max: int = 0
    """Most tokens whose blocks retrieves hold that wait for another engine. Requests beyond that wait without blocks.
    Only where a retrieve may end short and the engine uses what came."""
    awaiting_max: int = 4
    """Most such retrieves. Each takes several of the jobs of a worker's client, whose other retrieves need them too."""
    moment_s: float = 0.25
    """How long an incomplete answer is believed. Another engine may be storing the rest."""
    lease_spare_s: float = 1.0
    """Least remaining time of a lease that is used, because the ranks still have to submit their retrieves."""
    ahead_max: int = 32
    """Most requests looked up ahead of match(). Each may get a lease, which keeps chunks in the server's memory or
    reads them from disk."""
    retrieve_wait_s: float = 1.0
    """How long a request waits for its turn if retrieves_max are in flight. Then it computes."""
    retrieves_max: int = 32
    stores_max: int = 16
    store_chunks_max: int = 2048
    """Most chunks in flight in all stores together. The engine cannot reuse their blocks meanwhile."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "ranks", "retrieves_max", "stores_max", "store_chunks_max"):
            if getattr(self, name) < 1:
                raise RequestError("options", f"{name}={getattr(self, name)} must be at least 1")
        for name in (
            "lookup_deadline_s",
            "coming_wait_s",
            "await_wait_s",
            "await_producer_s",
            "await_tokens_max",
            "awaiting_max",
            "lease_spare_s",
            "retrieve_wait_s",
            "retrieve_tokens_min",
            "ahead_max",
        ):
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
        """Whether a prefix one token shorter than found is usable too. This is false for states and windows.

        A state is valid only at its last token, and a window may hold nothing before its first token.
        """
        return all(group.kind == "full" for group in self.groups)

    def awaits(self, side: Side) -> bool:
        """Whether a request of that side waits for another engine that computes its prompt. No server takes a pledge of
        windows or states."""
        return self.is_plain and self.await_wait_s > 0 and (self.await_others or side == "consumer")

    def pledges(self, side: Side) -> bool:
        """Whether others are told that this engine computes a prompt of that side."""
        return self.is_plain and self.stores and (self.await_others or side == "producer")

    @cached_property
    def gain_min(self) -> int:
        """Fewest tokens that a retrieve has to bring; at least 1."""
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
    """Look up the keys, and pass the answer to Offload.found() exactly once, whatever happens to the request."""

    number: int
    keys: bytes
    chunks_wanted_min: int
    may_wait: bool = False
    """Whether the answer may say what another engine computes."""


class PledgeOrder(NamedTuple):
    """Pledge the chunks of these keys, and pass the answer to Offload.pledged()."""

    request: Hashable
    keys: bytes


class RetrieveOrder(NamedTuple):
    """Every rank fills the blocks and reports the end of the job. Nobody else may touch the blocks until then."""

    job: int
    request: Hashable
    lease: Lease
    blocks: tuple[Blocks, ...]
    hbm_tokens: int
    """The engine's own tokens. None of their blocks is in `blocks`."""
    end_tokens: int
    """The engine goes on after this token if all ranks succeed, otherwise after hbm_tokens."""
    refused: str = ""
    """Why the order cannot be carried out (the tables do not fit). Report it as failed without trying."""
    disk_tokens: int = 0
    """Tokens of this retrieve that the server had only on disk when asked. See ranges.chunks_from_disk()."""
    wait_s: float = 0.0
    """How long it may take, because it waits for chunks that another engine computes. 0: it waits for none."""


class StoreOrder(NamedTuple):
    """Every rank stores the blocks once they are computed, and reports the end of the job.

    The blocks must keep their bytes until Offload.store_ended() returns the end, whatever happens to the request. Pin
    them, or ask Offload.holds().
    """

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
    """The end of a retrieve: all ranks have reported. ok: every block of every rank holds its bytes, else undefined
    ones behind token `until`."""

    order: RetrieveOrder
    ok: bool
    why: str
    until: int = 0
    """The engine goes on after this token."""


class StoreEnd(NamedTuple):
    """The end of a store: all ranks have reported, and the blocks may change."""

    order: StoreOrder
    chunks: int
    """Leading chunks of the order that every rank holds now."""


# ---------------------------------------------------------------- for people


@dataclass
class Statistics:
    """Counts since the connector was made. They only grow, except those in flight. Ranks and groups do not multiply
    tokens."""

    requests: int = 0
    requests_unkeyed: int = 0
    tokens_asked: int = 0
    """All tokens of the admitted requests."""
    tokens_hbm: int = 0
    """Part of tokens_asked: in the engine's own cache."""
    tokens_found: int = 0
    """Part of tokens_asked: held by the server at the last lookup, including those in the engine's cache."""
    tokens_retrieved: int = 0
    tokens_from_disk: int = 0
    """Part of tokens_retrieved: in chunks on disk only when asked. See ranges.chunks_from_disk()."""
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
    """Reason -> tokens that were not stored, or that could have been retrieved and were not."""

    def skip(self, why: str, tokens: int) -> None:
        """Count tokens for which the server is not used."""
        self.skipped_tokens[why] = self.skipped_tokens.get(why, 0) + tokens


class Summary(NamedTuple):
    """The outcome of one request, after its last job has ended. str() is its log line."""

    request: Hashable
    prompt_tokens: int
    hbm_tokens: int
    """Value at the last admission, as for found_tokens."""
    found_tokens: int
    retrieved_tokens: int
    stored_tokens: int
    preemptions: int
    why: str
    """Why the server was not used, or not to the end. Empty if there is nothing to report, but never if the server was
    asked nothing."""
    disk_tokens: int = 0
    """Part of retrieved_tokens."""
    retrieve_s: float | None = None
    """Duration of its retrieves, one after another, failed ones included. None if there was none. So is store_s."""
    store_s: float | None = None

    def __str__(self) -> str:
        words = {
            "request": self.request,
            "prompt": self.prompt_tokens,
            "hbm": self.hbm_tokens,
            "hit": self.found_tokens,
            "loaded": self.retrieved_tokens,
            "disk": self.disk_tokens or None,
            "load_ms": _ms(self.retrieve_s),
            "stored": self.stored_tokens,
            "store_ms": _ms(self.store_s),
            "preempted": self.preemptions or None,
            "why": self.why or None,
        }
        return " ".join(f"{word}={value}" for word, value in words.items() if value is not None)


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.1f}"
