"""The server as a connector sees it, and the scheduler's client: chunks with parts, leases, refusals, restarts."""

from dataclasses import dataclass, field
from random import Random

from kvclient.transport.inquiries import Answered
from kvclient.values import Found, Lease

from .content import cut
from .shapes import Options

LOOKUP_TIMEOUT_S = 0.5
TTLS_S = (2.0, 20.0, 20.0)


class Clock:
    """Replaces the module `time` in the code under test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Promise:
    keys: list[bytes]
    expires_s: float
    ranks_used: set[int] = field(default_factory=set)


class Server:
    def __init__(self, options: Options, rng: Random, clock: Clock) -> None:
        self.chunks: dict[bytes, dict[tuple[int, int], list[list[bytes]]]] = {}
        """Key -> (group, rank) -> contents of its blocks."""
        self.leases: dict[int, Promise] = {}
        self.incarnation = 1
        self.is_up = True
        self._options, self._rng, self._clock = options, rng, clock
        self._numbers = 0

    def lookup(self, asked: list[bytes], wanted_min: int) -> Found:
        found = next((count for count in range(len(asked), 0, -1) if self._servable(asked[:count])), 0)
        if found < max(1, wanted_min):
            return Found(found, None, "")
        self._numbers += 1
        expires_s = self._clock.now_s + self._rng.choice(TTLS_S)
        self.leases[self._numbers] = Promise(asked[:found], expires_s)
        return Found(found, Lease(self._numbers, found, self.incarnation, expires_s), "")

    def promise(self, lease: Lease) -> Promise | None:
        """The lease's promise; None if it is lost."""
        if not self.is_up or lease.incarnation != self.incarnation:
            return None
        promise = self.leases.get(lease.number)
        return promise if promise is not None and promise.expires_s > self._clock.now_s else None

    def release(self, lease: Lease) -> None:
        if lease.incarnation == self.incarnation:
            self.leases.pop(lease.number, None)

    def evict(self) -> None:
        promised = {key for promise in self.leases.values() for key in promise.keys}
        free = [key for key in self.chunks if key not in promised]
        if free:
            del self.chunks[self._rng.choice(free)]

    def expire(self) -> None:
        for number in [number for number, promise in self.leases.items() if promise.expires_s <= self._clock.now_s]:
            del self.leases[number]

    def restart(self) -> None:
        self.incarnation += 1
        self.leases.clear()
        if self._rng.random() < 0.5:
            self.chunks.clear()

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

    def ask(self, number: int, namespace: bytes, keys: bytes, *, chunks_wanted_min: int = 1) -> None:
        if self._server.is_up:
            self._questions.append(Question(number, cut(keys), chunks_wanted_min, self._clock.now_s))
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
        self._server.release(lease)

    def close(self) -> None:
        """Does nothing: the seed is over."""

    # ---------------------------------------------------------------- calls of the simulation

    def progress(self) -> None:
        """May answer one question; questions past their timeout are given up."""
        if self._questions and self._rng.random() < 0.5:
            question = self._questions.pop(self._rng.randrange(len(self._questions)))
            self._answer(question.number, self._server.lookup(question.keys, question.wanted_min))
        for question in list(self._questions):
            if self._clock.now_s - question.asked_s > LOOKUP_TIMEOUT_S:
                self._questions.remove(question)
                self._answer(question.number, Found(0, None, "timeout"))

    def lose_connection(self) -> None:
        for question in self._questions:
            self._answer(question.number, Found(0, None, "connection-lost"))
        self._questions.clear()

    def _answer(self, number: int, found: Found) -> None:
        self._answers.append(Answered(number, found))
