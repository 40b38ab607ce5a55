"""Lookups at the server, their answers, and the return of every lease.

A request has at most one lookup in flight and at most one answer that it believes. An answer that is too late, or for a
request that no longer waits, still shows what need not be stored. Its lease goes back at once.

An answer may say that more is coming, from a remote store or from an engine that computes it. A consumer expects that
its producer says so soon. A request that can wait keeps the answer with its lease, and asks again until nothing comes
or its time is over.
"""

from collections.abc import Iterable, Iterator

from kvclient.offload.ranges import chunks_from_disk, chunks_to_look_up, is_aligned, usable_tokens
from kvclient.offload.request import Answer, Lookup, Phase, Request
from kvclient.offload.values import LookupOrder, Options, Statistics
from kvclient.values import RECOVERING, Found, Lease

ASK_AGAIN_S = 0.005
"""Pause after an answer that says that more is coming. A remote store takes milliseconds for a chunk."""


AWAIT_AGAIN_S = 0.02
"""The same for a prompt that another engine computes, which takes that engine a step for each chunk or more."""
AWAIT_AGAIN_MAX_S = 0.2
"""The pause grows to this, because hundreds may wait, and each lookup costs the waiting engine's steps some 75 us."""
AWAIT_AGAIN_SHARE = 16
"""The pause is at least this part of the time that the request has waited."""


class Lookups:
    """The lookups of all requests. Orders and releases collect here until they are taken."""

    def __init__(self, options: Options, statistics: Statistics, numbers: Iterator[int]) -> None:
        self.orders: list[LookupOrder] = []
        self.releases: list[Lease] = []
        self._options = options
        self._statistics = statistics
        self._numbers = numbers
        self._in_flight: dict[int, Request] = {}
        """Lookup number -> its request, also if nobody waits for the answer any more."""

    def ask(self, it: Request, *, hbm_tokens: int, now_s: float, is_ahead: bool = False) -> None:
        """Create a lookup. It wants a lease only if a retrieve after hbm_tokens would be worthwhile."""
        chunk_tokens = self._options.chunk_tokens
        chunks = min(chunks_to_look_up(self._options, it.tokens), it.chunks)
        if not chunks:
            self.set_answer(it, Answer(0, None, 0, 0))
            return
        wanted = hbm_tokens + self._options.gain_min
        enough = wanted <= usable_tokens(self._options, it.tokens)
        wanted_min = -(-wanted // chunk_tokens) if enough else chunks + 1
        number = next(self._numbers)
        due_s = now_s + self._options.lookup_deadline_s
        if it.asked_first_s is None:
            it.asked_first_s = now_s
        it.lookup = Lookup(number, chunks, wanted_min, now_s, due_s, is_ahead)
        it.stored_until, it.is_asked = 0, True
        self._in_flight[number] = it
        may_wait = it.reads and self._options.awaits(it.side)
        self.orders.append(LookupOrder(number, it.key_range(0, chunks), wanted_min, may_wait))
        self._statistics.lookups += 1
        self._statistics.tokens_looked_up += chunks * chunk_tokens

    def awaits_more(self, it: Request, *, hbm_tokens: int, now_s: float) -> bool:
        """Whether the request waits, because more is coming that helps it. Asks again when the pause is over.

        Options.coming_wait_s bounds the wait, await_wait_s that for another engine, and await_producer_s that for its
        next sign. A lookup that is under way when the time ends is still waited for. If it is not answered, the request
        computes, because a retrieve would not be served either.
        """
        answer = it.answer
        if answer is not None and answer.chunks + answer.awaited > it.seen_chunks:
            it.seen_s = now_s if it.seen_chunks >= 0 else it.seen_s
            it.seen_chunks = answer.chunks + answer.awaited
        if answer is None or answer.is_told or not self._more_helps(it, answer, hbm_tokens):
            return False
        if it.lookup is not None:
            if self.gave_up(it, now_s):
                self.miss(it, "late")
            return it.lookup is not None
        if not self.is_in_time(it, answer, now_s):
            return False
        if answer.ask_again_s is None:
            answer.ask_again_s = now_s + self._pause_s(it, answer, now_s)
        elif now_s >= answer.ask_again_s:
            self.ask(it, hbm_tokens=hbm_tokens, now_s=now_s)
        return True

    def is_in_time(self, it: Request, answer: Answer, now_s: float) -> bool:
        """Whether something is coming, and the request may still wait for it."""
        if it.asked_first_s is None:
            return False
        waited_s, options = now_s - it.asked_first_s, self._options
        if answer.awaited:
            return waited_s < options.await_wait_s
        if answer.coming and waited_s < options.coming_wait_s:
            return True
        silent_s = now_s - max(it.asked_first_s, it.seen_s)
        is_patient = waited_s < options.await_wait_s and silent_s < options.await_producer_s
        return is_patient and self._expected(it, answer) > 0

    @staticmethod
    def _pause_s(it: Request, answer: Answer, now_s: float) -> float:
        if answer.coming and not answer.awaited:
            return ASK_AGAIN_S
        assert it.asked_first_s is not None
        return min(AWAIT_AGAIN_MAX_S, max(AWAIT_AGAIN_S, (now_s - it.asked_first_s) / AWAIT_AGAIN_SHARE))

    def expects_beyond(self, it: Request, answer: Answer) -> bool:
        """Whether a consumer expects more of its prompt than is pledged. Not once the engine has begun to compute."""
        is_new = it.side == "consumer" and not it.is_admitted and self._options.awaits(it.side)
        return is_new and answer.chunks + answer.awaited < self._end_expected(it, answer)

    def _end_expected(self, it: Request, answer: Answer) -> int:
        """The chunk up to which a consumer expects its prompt: it may be longer than what its producer computed."""
        handed = it.handed_tokens
        chunks = answer.asked_chunks
        return chunks if handed is None else min(chunks, handed // self._options.chunk_tokens)

    def _expected(self, it: Request, answer: Answer) -> int:
        """How many more chunks a consumer expects, though nobody says that they come. None after a pledge that was not
        kept."""
        is_kept = not answer.why and answer.chunks >= it.seen_chunks
        expects = is_kept and self.expects_beyond(it, answer)
        return self._end_expected(it, answer) - answer.chunks if expects else 0

    def _more_helps(self, it: Request, answer: Answer, hbm_tokens: int) -> bool:
        """Whether the request could retrieve more if all that is coming were there."""
        usable = usable_tokens(self._options, it.tokens)
        found = min(answer.chunks * self._options.chunk_tokens, usable)
        more = max(answer.coming + answer.awaited, self._expected(it, answer))
        reach = min((answer.chunks + more) * self._options.chunk_tokens, usable)
        is_enough = reach > found and reach - hbm_tokens >= self._options.gain_min
        return is_enough and is_aligned(self._options, hbm_tokens)

    def gave_up(self, it: Request, now_s: float) -> bool:
        """Whether the request's lookup is past its deadline. If so, nobody waits for the answer any more."""
        if it.lookup is None or now_s < it.lookup.due_s:
            return False
        it.lookup = None
        self._statistics.lookups_late += 1
        return True

    def miss(self, it: Request, why: str) -> None:
        it.queued_s, it.why = None, why
        self.set_answer(it, Answer(0, None, 1, 0, why))

    def set_answer(self, it: Request, answer: Answer | None) -> None:
        """Replace the request's answer, and release the lease of the old one."""
        if it.answer is not None:
            self.release(it.answer.lease)
        it.answer = answer

    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            self.releases.append(lease)

    def answered(self, number: int, found: Found) -> Request:
        """Take the answer to a lookup, once per lookup. Returns its request."""
        it = self._in_flight.pop(number)
        lookup = it.lookup if it.lookup is not None and it.lookup.number == number else None
        self._statistics.lookups_unserved += bool(found.why)
        if lookup is not None:
            it.lookup = None
            if found.why in {"", RECOVERING}:
                it.found_tokens = found.chunks * self._options.chunk_tokens
                self._set_frontier(it, found)
        elif not it.is_barred:
            it.frontier = max(it.frontier, found.chunks)
        if lookup is None or it.phase is not Phase.WAITING:
            self.release(found.lease)
            return it
        it.disk_chunks |= chunks_from_disk(found.lease)
        # An answer to a lookup ahead may be old when match() first sees it, so it is believed only from asked_s on.
        until_s = lookup.asked_s + self._options.moment_s if lookup.is_ahead else None
        answer = Answer(
            found.chunks,
            found.lease,
            lookup.chunks,
            lookup.chunks_wanted_min,
            found.why,
            coming=found.coming,
            awaited=found.awaited,
            believed_until_s=until_s,
        )
        self.set_answer(it, answer)
        return it

    @staticmethod
    def _set_frontier(it: Request, found: Found) -> None:
        """Set the frontier to what the server holds.

        While the server still reads its disks, chunks stored earlier are believed to be there. If one is missing, a
        store ends with "parent-absent", and the frontier goes back.
        """
        held = max(found.chunks, it.storing_until, it.stored_until)
        if found.why and not it.stopped and held < it.frontier:
            it.held_for_sure = held
        else:
            it.frontier, it.stopped, it.held_for_sure = held, "", None

    def leases_lost(self, requests: Iterable[Request]) -> None:
        for it in requests:
            if it.answer is not None and it.answer.lease is not None:
                self.set_answer(it, None)
