"""The server as a connector sees it, and the scheduler's client: chunks with parts, leases, refusals, restarts."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import Protocol

from kvclient.transport.inquiries import Answered
from kvclient.values import Found, Lease, PledgeResult

from .content import cut
from .shapes import Options

LOOKUP_TIMEOUT_S = 0.5
Compute = Callable[[bytes], dict[tuple[int, int], list[list[bytes]]]]
TTLS_S = (2.0, 20.0, 20.0)


class Clock:
    """Replaces the module `time` in the code under test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Promise:
    """A lease."""

    keys: list[bytes]
    """The chunks that are here. It grows."""
    awaited: list[bytes]
    """The chunks behind those that another engine computes."""
    expires_s: float
    ranks_used: set[int] = field(default_factory=set)


class Waiter(Protocol):
    """A load that waits for chunks of another engine."""

    lease: Lease
    keys: list[bytes]
    """The chunks that it has got."""
    awaited: list[bytes]

    def came(self, key: bytes, parts: dict[tuple[int, int], list[list[bytes]]]) -> None: ...

    def fail(self, why: str) -> None: ...


@dataclass
class Others:
    """Another engine that computes a prompt."""

    keys: list[bytes]
    """All chunks of the prompt."""
    dies_after: int
    """It stores so many chunks, and no more."""


class Server:
    def __init__(self, options: Options, rng: Random, clock: Clock, compute: Compute) -> None:
        """compute: what another engine stores of a chunk."""
        self.others: list[Others] = []
        self.pledged: dict[int, list[bytes]] = {}
        """Pledge -> the chunks that are still to be stored."""
        self.waiters: list[Waiter] = []
        self.counts: Counter[str] = Counter()
        self._compute = compute
        self.chunks: dict[bytes, dict[tuple[int, int], list[list[bytes]]]] = {}
        """Key -> (group, rank) -> contents of its blocks."""
        self.leases: dict[int, Promise] = {}
        self.incarnation = 1
        self.is_up = True
        self._options, self._rng, self._clock = options, rng, clock
        self._numbers = 0

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def lookup(self, asked: list[bytes], wanted_min: int, *, may_wait: bool) -> Found:
        found = next((count for count in range(len(asked), 0, -1) if self._servable(asked[:count])), 0)
        awaited = self._awaited(asked, found) if may_wait and found < len(asked) else 0
        if found + awaited < max(1, wanted_min):
            return Found(found, None, "")
        self._numbers += 1
        expires_s = self._clock.now_s + self._rng.choice(TTLS_S)
        self.leases[self._numbers] = Promise(asked[:found], asked[found : found + awaited], expires_s)
        lease = Lease(self._numbers, found, self.incarnation, expires_s, awaited=awaited)
        self.counts["lookups that may wait"] += awaited > 0
        return Found(found, lease, "", awaited=awaited, producer="other" if awaited else "")

    def _awaited(self, asked: list[bytes], found: int) -> int:
        """How many chunks another engine computes behind those that are found. It may begin now."""
        if any(asked[found] in keys for keys in self.pledged.values()):
            return 0
        for other in self.others:
            same = [one == its for one, its in zip(asked, other.keys, strict=False)]
            if len(other.keys) > found and all(same[: found + 1]):
                return (same.index(False) if False in same else len(same)) - found
        if self._rng.random() < 0.5:
            return 0
        stops = self._rng.choice((0, 1, len(asked), len(asked)))
        self.others.append(Others(list(asked), stops))
        return len(asked) - found

    def others_go_on(self) -> None:
        """One of the other engines stores its next chunk, or has ended."""
        if not self.others:
            return
        other = self._rng.choice(self.others)
        done = next((count for count in range(len(other.keys), 0, -1) if self._servable(other.keys[:count])), 0)
        if done < len(other.keys) and other.dies_after > 0:
            other.dies_after -= 1
            self.holds(other.keys[done], self._compute(other.keys[done]))
            self.counts["chunks of another engine"] += 1
        else:
            self.others.remove(other)
            self._break_off(other.keys)

    def _break_off(self, keys: list[bytes]) -> None:
        """Some of these chunks were awaited. They do not come."""
        for promise in self.leases.values():
            if set(promise.awaited[:1]) & set(keys):
                promise.awaited.clear()
        for waiter in list(self.waiters):
            if set(waiter.awaited[:1]) & set(keys):
                waiter.fail("not-coming")

    def _pass_on(self) -> None:
        """A chunk has become whole: whoever awaits it gets it in the same step."""
        for promise in self.leases.values():
            while promise.awaited and self._is_whole(promise.awaited[0]):
                promise.keys.append(promise.awaited.pop(0))
        for waiter in list(self.waiters):
            while waiter.awaited and self._is_whole(waiter.awaited[0]):
                waiter.came(waiter.awaited[0], self.chunks[waiter.awaited[0]])

    def holds(self, key: bytes, parts: dict[tuple[int, int], list[list[bytes]]]) -> None:
        """Some parts of a chunk are stored."""
        known = self.chunks.setdefault(key, {})
        for part, held in parts.items():
            known.setdefault(part, held)
        if self._is_whole(key):
            for keys in self.pledged.values():
                if key in keys:
                    keys.remove(key)
            self._pass_on()
        self.pledged = {number: keys for number, keys in self.pledged.items() if keys}

    def not_stored(self, missing: list[bytes]) -> None:
        """A store did not bring these chunks: whoever has pledged some does not keep its word."""
        self.pledged = {number: keys for number, keys in self.pledged.items() if not set(keys) & set(missing)}

    def pledge(self, asked: list[bytes]) -> PledgeResult:
        held = next((count for count in range(len(asked), 0, -1) if self._servable(asked[:count])), 0)
        taken = {key for keys in self.pledged.values() for key in keys} | {key for o in self.others for key in o.keys}
        mine = list(takewhile(lambda key: key not in taken, asked[held:]))
        if not mine:
            return PledgeResult(0, held, 0)
        self._numbers += 1
        self.pledged[self._numbers] = mine
        self.counts["pledges"] += 1
        return PledgeResult(self._numbers, held, len(mine), self.incarnation)

    def unpledge(self, pledge: PledgeResult) -> None:
        if pledge.incarnation == self.incarnation:
            self.counts["pledges taken back"] += self.pledged.pop(pledge.number, None) is not None

    def promise(self, lease: Lease) -> Promise | None:
        """The lease's promise; None if it is lost."""
        if not self.is_up or lease.incarnation != self.incarnation:
            return None
        promise = self.leases.get(lease.number)
        return promise if promise is not None and promise.expires_s > self._clock.now_s else None

    def release(self, lease: Lease) -> None:
        if lease.incarnation == self.incarnation:
            self.leases.pop(lease.number, None)

    def give_back(self, lease: Lease) -> None:
        """As release(), by the scheduler's half. A load under it that waits fails at its next part, or ends before."""
        self.release(lease)
        for waiter in list(self.waiters):
            if waiter.lease == lease and self._rng.random() < 0.7:
                waiter.fail("lease-unknown")

    def evict(self) -> None:
        promised = {key for promise in self.leases.values() for key in promise.keys}
        promised |= {key for waiter in self.waiters for key in waiter.keys}
        free = [key for key in self.chunks if key not in promised]
        if free:
            key = self._rng.choice(free)
            del self.chunks[key]
            self.not_stored([key])  # of a chunk that some rank had not stored yet the others' parts are gone

    def expire(self) -> None:
        for number in [number for number, promise in self.leases.items() if promise.expires_s <= self._clock.now_s]:
            del self.leases[number]

    def restart(self) -> None:
        self.incarnation += 1
        self.leases.clear()
        self.pledged.clear()
        self.others.clear()
        for waiter in list(self.waiters):
            waiter.fail("connection-lost")
        if self._rng.random() < 0.5:
            self.chunks.clear()

    def _is_whole(self, key: bytes) -> bool:
        groups, ranks = range(len(self._options.groups)), range(self._options.ranks)
        return all((group, rank) in self.chunks.get(key, {}) for group in groups for rank in ranks)

    def _servable(self, asked: list[bytes]) -> bool:
        """A brute-force check of the chunks that a boundary needs."""
        end = len(asked) * self._options.chunk_tokens
        for group, kind in enumerate(self._options.groups):
            for key in asked[kind.first(end) // self._options.chunk_tokens :]:
                parts = self.chunks.get(key, {})
                if any((group, rank) not in parts for rank in range(self._options.ranks)):
                    return False
        return all(key in self.chunks for key in asked)


@dataclass(frozen=True)
class Question:
    number: int
    keys: list[bytes]
    wanted_min: int
    may_wait: bool
    asked_s: float


class SchedulerClient:
    """kvclient's Client and Inquiries in one, as far as the scheduler's half uses them. Sometimes answers late."""

    def __init__(self, server: Server, rng: Random, clock: Clock) -> None:
        self._server, self._rng, self._clock = server, rng, clock
        self._questions: list[Question] = []
        self._answers: list[Answered] = []

    # ---------------------------------------------------------------- calls of the connector

    def inquiries(self) -> "SchedulerClient":
        return self

    @property
    def connected(self) -> bool:
        return self._server.is_up

    @property
    def ready(self) -> bool:
        return bool(self._answers)

    def __len__(self) -> int:
        return len(self._questions) + len(self._answers)

    def ask(
        self, number: int, namespace: bytes, keys: bytes, *, chunks_wanted_min: int = 1, may_wait: bool = False
    ) -> None:
        if self._server.is_up:
            self._questions.append(Question(number, cut(keys), chunks_wanted_min, may_wait, self._clock.now_s))
        else:
            self._answer(number, Found(0, None, "not-connected"))

    def take(self) -> list[Answered]:
        if self._rng.random() < 0.5:
            self.progress()
        answers, self._answers = self._answers, []
        return answers

    def wait(self, due_s: float) -> None:
        if self._rng.random() < 0.7:
            self.progress()
            self.progress()
        else:
            self._clock.now_s = max(self._clock.now_s, due_s)

    def release(self, lease: Lease) -> None:
        self._server.give_back(lease)

    def pledge(self, namespace: bytes, keys: bytes) -> PledgeResult:
        return self._server.pledge(cut(keys)) if self._server.is_up else PledgeResult(0, 0, 0, why="not-connected")

    def unpledge(self, pledge: PledgeResult) -> None:
        if self._server.is_up:
            self._server.unpledge(pledge)

    def close(self) -> None:
        """Does nothing: the seed is over."""

    # ---------------------------------------------------------------- calls of the simulation

    def progress(self) -> None:
        """May answer one question; questions past their timeout are given up."""
        if self._questions and self._rng.random() < 0.5:
            question = self._questions.pop(self._rng.randrange(len(self._questions)))
            self._answer(question.number, self._lookup(question))
        for question in list(self._questions):
            if self._clock.now_s - question.asked_s > LOOKUP_TIMEOUT_S:
                self._questions.remove(question)
                self._answer(question.number, Found(0, None, "timeout"))

    def _lookup(self, question: Question) -> Found:
        return self._server.lookup(question.keys, question.wanted_min, may_wait=question.may_wait)

    def lose_connection(self) -> None:
        for question in self._questions:
            self._answer(question.number, Found(0, None, "connection-lost"))
        self._questions.clear()

    def _answer(self, number: int, found: Found) -> None:
        self._answers.append(Answered(number, found))
