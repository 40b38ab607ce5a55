"""Invariants of every decision, for any engine and server. Uses no internals."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvclient.offload.values import LookupOrder, Options, RetrieveOrder, StoreOrder, Summary, Tables
from kvclient.values import RECOVERING, Found, Lease

from .content import require
from .pool import Pool
from .server import cut
from .shapes import NULL

QUESTIONS_MAX = 2
"""A second question is allowed if the engine has lost its prefix, and the request was not worth a lease before."""
LONG_AGO = float("-inf")


@dataclass(eq=False)
class Life:
    """One request, from begin to finish."""

    name: Hashable
    reads: bool
    keyed: bool
    keys: list[bytes]
    prompt_tokens: int
    asked_first_s: float | None = None
    asked_due_s: float = 0.0
    """Deadline of the question it waits for; 0: none."""
    question: int = 0
    answer: Found | None = None
    """The last timely answer since it was last preempted or retrieved."""
    answered_s: float = 0.0
    floor: int = 0
    """Leading chunks that need not be stored."""
    sent: int = 0
    """Leading chunks that were found or sent at some time."""
    storing: dict[int, int] = field(default_factory=dict)
    stored_since_asked: int = 0
    retrieving: int = 0
    unsure: int | None = None
    """Chunks held according to an answer that did not know all disks; more may have been stored before."""
    was_short: bool = False
    """One of its stores was cut short since the server was asked last."""
    failed: bool = False
    is_ahead: bool = False
    """Its question was asked ahead, and the engine has not asked match() yet."""
    ahead_s: float | None = None
    """When the question of `answer` was asked, if nobody waited for it."""
    told_nothing: Found | None = None
    """The answer after which it was told "nothing": this stands while the question is asked again."""
    has_to_ask: bool = False
    """It uses such an answer that has become stale, so the next question is due at once."""
    questions: int = 0
    """Questions it had to wait for since match() last gave another result than "wait"."""
    queued_s: float | None = None
    from_disk: set[int] = field(default_factory=set)
    """Tokens that its answers placed on disk, since it was last preempted or retrieved."""
    perhaps_from_disk: set[int] = field(default_factory=set)
    """Further such tokens, from answers for which it may not have waited any more."""
    summaries: int = 0
    finished: bool = False


class Watch:
    def __init__(self, options: Options, pool: Pool) -> None:
        self.lives: list[Life] = []
        self.jobs: dict[int, tuple[Life, RetrieveOrder | StoreOrder]] = {}
        self._numbers: set[int] = set()
        self._options = options
        self._pool = pool
        self._asked: dict[int, Life] = {}
        self._lent: dict[tuple[int, int], str] = {}
        """(incarnation, number) of leases that were granted and have not ended -> their holder."""
        self.brought = 0, 0
        """Tokens of successful retrieves, and how many of them came from disk."""
        self._forgotten: set[tuple[int, int]] = set()
        """Leases lost in a restart of the server."""

    def begin(self, name: Hashable, tokens: int, keys: list[bytes], *, reads: bool, keyed: bool) -> Life:
        life = Life(name, reads and self._options.retrieves, keyed, list(keys), tokens)
        self.lives.append(life)
        return life

    # ---------------------------------------------------------------- lookups and leases

    def asked(self, life: Life, order: LookupOrder, now_s: float, *, is_ahead: bool) -> None:
        self._new_number(order.number)
        require(life.keyed, "a request without keys is looked up")
        require(not life.failed, "a request whose retrieve failed asks again")
        require(not life.question or now_s >= life.asked_due_s, "two questions at a time")
        require(cut(order.keys) == life.keys[: len(cut(order.keys))] and order.keys != b"", "looked up by other keys")
        life.question, life.asked_due_s = order.number, now_s + self._options.lookup_deadline_s
        life.asked_first_s = now_s if life.asked_first_s is None else life.asked_first_s
        life.stored_since_asked, life.has_to_ask = 0, False
        life.questions += not is_ahead
        life.is_ahead, life.ahead_s = is_ahead, now_s if is_ahead else None
        self._asked[order.number] = life
        ahead = sum(other.is_ahead for other in self.lives if not other.finished)
        require(not is_ahead or ahead <= self._options.ahead_max, f"{ahead} requests are asked for ahead of time")

    def answered(self, number: int, found: Found, now_s: float) -> None:
        life = self._asked.pop(number)
        life.is_ahead &= found.lease is not None
        if found.lease is not None:
            self._lent[found.lease.incarnation, found.lease.number] = "answer"
        if found.why not in {"", RECOVERING}:
            if life.question == number and life.answer is not None and life.answer.coming:
                life.answer = None  # it was asked for the rest, and its server is not there any more
            life.question = 0 if life.question == number else life.question
            return
        if life.question == number and found.lease is not None:
            first, each = found.chunks - found.lease.chunks_on_disk, self._options.chunk_tokens
            tokens = life.from_disk if now_s < life.asked_due_s else life.perhaps_from_disk
            tokens.update(range(first * each, found.chunks * each))
        anew = sure = max(found.chunks, life.stored_since_asked, *life.storing.values())
        if life.question == number and found.why and not life.was_short:
            anew = max(anew, life.floor)
        if life.question == number and now_s < life.asked_due_s:
            life.unsure, life.was_short = sure if found.why else None, False
            life.floor, life.answer, life.answered_s, life.question = anew, found, now_s, 0
        elif life.question == number:  # perhaps the request still waited for it, and perhaps what was before holds
            if found.why:
                life.unsure = sure if life.unsure is None else min(sure, life.unsure)
            life.floor, life.answer, life.answered_s, life.question = min(anew, life.floor), found, LONG_AGO, 0
        elif not life.failed:
            life.floor = max(life.floor, found.chunks)
        life.sent = max(life.sent, found.chunks)

    def released(self, lease: Lease) -> None:
        key = (lease.incarnation, lease.number)
        if key in self._forgotten:
            return
        holder = self._lent.pop(key, None)
        require(holder is not None, f"lease {lease.number} is given back twice, or was never granted")
        require(holder != "job", f"lease {lease.number} is given back while a retrieve may need it")

    def server_restarted(self) -> None:
        """Leases that the server has forgotten need not be given back, but may be."""
        self._forgotten.update(self._lent)
        self._lent.clear()

    @property
    def leases_out(self) -> list[tuple[int, int]]:
        return list(self._lent)

    # ---------------------------------------------------------------- match

    def matched(self, life: Life, said: int | None, *, tokens: int, hbm: int, now_s: float, retrieves: int) -> None:
        life.is_ahead = False
        if said is None:
            life.ahead_s = None if life.question else life.ahead_s  # from now on the request waits for the answer
            self._has_to_wait(life, now_s, retrieves)
            return
        stands = not said and life.told_nothing is not None and life.told_nothing is life.answer
        is_stale = self._is_stale(life, tokens, hbm, now_s)
        require(not is_stale or (stands and not life.has_to_ask), "an answer from long ago is believed")
        life.has_to_ask, life.told_nothing = is_stale, None if said else life.answer
        life.questions, life.queued_s = 0, None
        if said:
            require(life.reads and not life.failed and retrieves < self._options.retrieves_max, "may not retrieve")
            require(life.answer is not None and life.answer.lease is not None, "nothing was promised")
            require(said == self._gain(life, tokens, hbm), f"offers {said}, expected {self._gain(life, tokens, hbm)}")
        elif self._should_read(life, tokens, hbm, now_s, retrieves):
            require(False, f"offers nothing, expected {self._gain(life, tokens, hbm)}")
        elif retrieves >= self._options.retrieves_max and self._gain(life, tokens, hbm):
            life.answer = None  # it may have waited for its turn too long

    def _is_stale(self, life: Life, tokens: int, hbm: int, now_s: float) -> bool:
        """True if it relies on an answer that nobody waited for and that is too old."""
        answer, may_read = life.answer, self._options.resumes_output or tokens <= life.prompt_tokens
        if answer is None or life.ahead_s is None or life.question or life.failed or not (life.reads and may_read):
            return False
        is_whole = answer.lease is not None and (answer.chunks + 1) * self._options.chunk_tokens >= tokens
        gains = tokens - self._options.chunk_tokens - hbm >= max(1, self._options.retrieve_tokens_min)
        return gains and not is_whole and now_s >= life.ahead_s + self._options.moment_s

    def _has_to_wait(self, life: Life, now_s: float, retrieves: int) -> None:
        may_come = life.answer is not None and life.answer.coming > 0 and life.asked_first_s is not None
        if may_come and life.reads and now_s < life.asked_first_s + self._options.coming_wait_s:
            life.questions = 0  # it asks again until nothing comes
            require(not life.question or now_s < life.asked_due_s, "has to wait for an answer that is overdue")
            return
        if life.question:
            require(now_s < life.asked_due_s, "has to wait for an answer that is overdue")
            require(life.questions <= QUESTIONS_MAX, "is asked to wait for one answer after the other")
            return
        require(retrieves >= self._options.retrieves_max, "has to wait for nothing")
        life.queued_s = now_s if life.queued_s is None else life.queued_s
        life.questions = 0  # the answer becomes stale while it waits
        require(now_s - life.queued_s < self._options.retrieve_wait_s, "has to wait for its turn for too long")

    def _gain(self, life: Life, tokens: int, hbm: int) -> int:
        """The expected offer, computed independently from the rules."""
        if life.answer is None:
            return 0
        found = life.answer.chunks * self._options.chunk_tokens
        end = min(found, tokens)
        if end == tokens and any(group.kind != "full" for group in self._options.groups):
            return 0  # its last chunk is not asked for
        if end == tokens and not self._options.engine_steps_back:
            end = tokens - 1
        gain = end - hbm
        fits = all(hbm % group.block_tokens == 0 for group in self._options.groups if group.kind != "state")
        return gain if fits and gain > 0 and gain >= self._options.retrieve_tokens_min else 0

    def _should_read(self, life: Life, tokens: int, hbm: int, now_s: float, retrieves: int) -> bool:
        answer = life.answer
        if not life.reads or life.failed or answer is None or answer.lease is None or life.question:
            return False
        if not self._options.resumes_output and tokens > life.prompt_tokens:
            return False
        fresh = now_s < life.answered_s + self._options.moment_s
        alive = now_s < answer.lease.expires_monotonic_s - self._options.lease_spare_s
        return fresh and alive and retrieves < self._options.retrieves_max and self._gain(life, tokens, hbm) > 0

    # ---------------------------------------------------------------- orders

    def retrieves(self, life: Life, order: RetrieveOrder, hbm: int, tables: Tables) -> None:
        self._new_number(order.job)
        require(order.request == life.name and not life.retrieving, "a retrieve for another request, or a second one")
        require(order.hbm_tokens == hbm and not order.refused, f"refused: {order.refused}")
        key = (order.lease.incarnation, order.lease.number)
        require(life.answer is not None and order.lease == life.answer.lease, "not the lease of the last answer")
        require(key in self._lent or key in self._forgotten, "the lease was given back")
        if key in self._lent:
            self._lent[key] = "job"
        for item in order.blocks:
            bt = self._options.groups[item.group].block_tokens
            ids = list(item.block_ids)
            kind = self._options.groups[item.group].kind
            require(kind == "state" or item.first_block * bt >= hbm, "a block of the engine's own prefix is written")
            require(list(tables[item.group][item.first_block : item.first_block + len(ids)]) == ids, "not its blocks")
            require(NULL not in ids, "the null block is written")
            for block in ids:
                require(self._pool.is_private(block), f"block {block} is written and is not the request's alone")
        self._is_of_its_tiers(life, order)
        life.retrieving, life.answer = order.job, None
        self.jobs[order.job] = life, order

    def stores(self, life: Life, order: StoreOrder, computed: int) -> None:
        self._new_number(order.job)
        end = order.first_chunk + order.chunks
        require(order.request == life.name and life.keyed and self._options.stores, "may not be stored")
        require(order.chunks > 0 and cut(order.keys) == life.keys[order.first_chunk : end], "stored under other keys")
        parent = life.keys[order.first_chunk - 1] if order.first_chunk else b""
        require(order.parent == parent, "stored behind another chunk")
        require(end * self._options.chunk_tokens <= computed, "stored before it is computed")
        require(order.first_chunk >= life.floor, f"chunk {order.first_chunk} is stored again: floor {life.floor}")
        require(order.first_chunk <= max(life.sent, life.floor), "a hole is left before what is stored")
        require(not life.retrieving, "stored while a retrieve writes the blocks")
        for index, group in enumerate(self._options.groups):
            if group.kind == "full":
                brought = [len(item.block_ids) for item in order.blocks if item.group == index]
                require(
                    brought == [order.chunks * self._options.chunk_tokens // group.block_tokens], "a group is short"
                )
        storing = [job for job, (_, other) in self.jobs.items() if isinstance(other, StoreOrder)]
        require(len(storing) < self._options.stores_max, "too many stores")
        self.jobs[order.job] = life, order
        require(self._chunks_storing() <= self._options.store_chunks_max, "too many chunks in flight")
        life.storing[order.job] = life.floor = end
        life.sent = max(life.sent, end)

    def retrieve_ended(self, order: RetrieveOrder, *, ok: bool, all_ok: bool) -> None:
        life, _ = self.jobs.pop(order.job)
        require(ok == all_ok, "a failure on a rank is the job's, and nothing else is")
        key = (order.lease.incarnation, order.lease.number)
        if key in self._lent:
            self._lent[key] = "answer"
            if ok:
                del self._lent[key]
        if ok:
            tokens = order.end_tokens - order.hbm_tokens
            self.brought = self.brought[0] + tokens, self.brought[1] + order.disk_tokens
        if life.retrieving == order.job:
            life.retrieving = 0
            if not ok:
                life.failed, life.floor = True, order.hbm_tokens // self._options.chunk_tokens

    def store_ended(self, order: StoreOrder) -> None:
        life, _ = self.jobs.pop(order.job)
        del life.storing[order.job]

    def stored(self, order: StoreOrder, chunks: int) -> None:
        life, _ = self.jobs[order.job]
        life.stored_since_asked = max(life.stored_since_asked, order.first_chunk + chunks)
        if chunks < order.chunks:
            life.was_short = True
            if life.unsure is not None:
                life.floor = min(life.floor, life.unsure)

    def preempted(self, life: Life) -> None:
        life.answer, life.question, life.retrieving = None, 0, 0
        life.from_disk.clear()
        life.perhaps_from_disk.clear()
        life.questions, life.queued_s = 0, None

    def summed_up(self, summary: Summary) -> None:
        life = next((life for life in self.lives if life.name == summary.request and not life.summaries), None)
        require(life is not None, "summed up twice")
        assert life is not None
        life.summaries += 1

    # ---------------------------------------------------------------- helpers

    def _is_of_its_tiers(self, life: Life, order: RetrieveOrder) -> None:
        tokens = set(range(order.hbm_tokens, order.end_tokens))
        surely, at_most = len(tokens & life.from_disk), len(tokens & (life.from_disk | life.perhaps_from_disk))
        require(surely <= order.disk_tokens <= at_most, f"{order.disk_tokens} from disk, expected {surely}")
        life.from_disk.clear()
        life.perhaps_from_disk.clear()

    def _new_number(self, number: int) -> None:
        require(number not in self._numbers, f"number {number} is used twice")
        self._numbers.add(number)

    def _chunks_storing(self) -> int:
        return sum(order.chunks for _, order in self.jobs.values() if isinstance(order, StoreOrder))
