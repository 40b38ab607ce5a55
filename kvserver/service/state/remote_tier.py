"""One remote store: its namespaces' epochs, the prompts that are looked for in it, its jobs, and its mover process.

Stores know nothing of each other. Whoever chooses among several is in requests/pursuits.py.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvserver.config.remotes import Remote
from kvserver.index.eviction import CAME, REMOTE
from kvserver.index.space import Node, Space
from kvserver.remote.announcement import GONE, STORED, UNKNOWN, Kind, KnownChunks, foretold, mark_of
from kvserver.remote.chunk_value import Head
from kvserver.remote.epoch_lease import EpochLease
from kvserver.service.state.announcements import DOUBTED_MS, MILLISECOND_NS, Announcements
from kvserver.service.state.clears import Clear
from kvserver.service.state.foretold import Foretellings, Foretold
from kvserver.service.state.movers import Mover
from kvserver.service.state.outbox import Outbox
from kvserver.service.state.passing import Passing
from kvserver.service.state.pledges import Pledge
from kvserver.service.telling.counters import RemoteCount, RemoteCounts, RemoteWanted
from kvserver.tiers.placement import Rate
from kvserver.transfer.native import Marker
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import Order, RemoteIs

WANTED_MAX = 1 << 16
"""Keys that are looked for at a time."""
PURSUITS_MAX = 256
"""Prompts for which they are looked for."""
PUT_ASIDE_MAX = 1 << 16
"""Keys that are not asked for again for a while."""
USED_MAX = 1024
"""Used prefixes whose chunks have not been offered to be written yet."""
QUEUE_MAX = 8192
"""Chunks that wait to be written."""
MEASURED_NS = 600_000_000_000
"""A store from which nothing was read for so long is tried before the others, to be measured anew."""
NEVER_NS = 1 << 63
"""Later than any time."""
ANSWERS_KEPT = 0.7
"""Share of the time of a probe that the times before it make up."""


@dataclass(slots=True, eq=False, kw_only=True)
class Pursuit:
    """Chunks of a prompt that are not here, and may be in the store."""

    space: Space
    epoch: int
    parent: bytes
    """Key of the chunk before; empty: it begins a prompt."""
    keys: list[bytes]
    tenant: int
    moved_ns: int
    """When it last made progress."""
    is_try: bool
    """Nobody has told that the store has these chunks."""
    is_awaited: bool = False
    """Engines await them: they are read however few they are."""
    heads: list[Head] | None = None
    """Heads of the leading chunks that are in the store; None until they are known."""
    begun: int = 0
    """Leading chunks whose read was ordered, or that are here."""
    fetching: int = 0
    """Reads under way."""

    def makes_progress(self, now_ns: int) -> None:
        self.moved_ns = now_ns

    def has_heads(self, heads: list[Head]) -> None:
        """The store has these leading chunks."""
        self.heads = heads

    def begins_next(self) -> None:
        """The next chunk is being read, or is here."""
        self.begun += 1

    def read_begins(self) -> None:
        self.fetching += 1

    def read_ends(self) -> None:
        self.fetching -= 1

    def end_at(self, chunks: int) -> list[bytes]:
        """No more than so many leading chunks can come. Returns the keys of the others."""
        rest = self.keys[chunks:]
        del self.keys[chunks:]
        if self.heads is not None:
            del self.heads[chunks:]
        self.begun = min(self.begun, chunks)
        return rest

    def key_before(self, position: int) -> bytes:
        return self.keys[position - 1] if position else self.parent


@dataclass(slots=True, eq=False, kw_only=True)
class ProbeJob:
    number: int
    pursuit: Pursuit
    began_ns: int


@dataclass(slots=True, eq=False, kw_only=True)
class FetchJob:
    """A read into reserved parts of a chunk. The chunk's reservation pins it, not the job."""

    number: int
    pursuit: Pursuit
    position: int
    node: Node
    parts: list[int]
    """Those that have a slot, in the order of the head."""
    bytes: int
    began_ns: int


@dataclass(slots=True, eq=False, kw_only=True)
class PutJob:
    """A write of a chunk. It pins its node."""

    number: int
    space: Space
    epoch: int
    node: Node
    group: int
    """The first of its groups, for a log line."""
    bytes: int
    began_ns: int

    def move_to(self, space: Space) -> None:
        """The node was cut off, and hangs in this space now."""
        self.space = space


@dataclass(slots=True, eq=False, kw_only=True)
class NoteJob:
    """A namespace's note that is read or written."""

    number: int
    digest: bytes
    kind: Literal["read", "make", "replace", "clear"]
    epoch: int
    """The epoch that is written; 0 of a read."""
    began_ns: int


@dataclass(slots=True, eq=False, kw_only=True)
class AnnounceJob:
    """A batch of announcements that is told."""

    number: int
    digest: bytes
    chunks: int
    began_ns: int


@dataclass(slots=True, eq=False, kw_only=True)
class ListenJob:
    """Announcements of a namespace that are read."""

    number: int
    digest: bytes
    epoch: int
    is_behind: bool
    """More were left the last time, or it is the first time."""
    began_ns: int


RemoteJob = ProbeJob | FetchJob | PutJob | NoteJob | AnnounceJob | ListenJob


@dataclass(slots=True, eq=False, kw_only=True)
class NamespaceEpoch:
    """Knowledge of a namespace's epoch, and clears that the store has to learn of."""

    lease: EpochLease
    announcements: Announcements = field(default_factory=Announcements)
    has_job: bool = False
    """A note of it is being read or written."""
    owes_clear: bool = False
    """It was cleared here, and the store does not know yet."""
    try_again_ns: int = 0
    """No earlier than then a clear is tried again."""
    clears: list[Clear] = field(default_factory=list)
    """Those that wait until the store knows."""
    told: list[Clear] = field(default_factory=list)
    """Those of them that the store is being told of. A Clear that comes meanwhile needs an order of its own: other
    servers may have stored since."""
    owes_again: bool = False
    """Whether that Clear has come."""
    passing: Passing | None = None
    """Which misses are passed over, as settled last; None: nothing is settled."""

    def job_begins(self) -> None:
        self.has_job = True

    def job_ends(self) -> None:
        """In the same event its answer may change the epoch."""
        self.has_job, self.passing = False, None

    def settles(self, passing: Passing | None) -> None:
        self.passing = passing

    def mover_ended(self) -> None:
        self.announcements.mover_ended()
        self.passing = None

    def is_doubtful(self, now_ns: int) -> None:
        """The store has a chunk of which nobody has told."""
        self.announcements.are_incomplete(now_ns)
        self.passing = None

    def owe(self, clear: Clear | None) -> None:
        """It was cleared here. clear: who waits for the store, if anybody does."""
        self.passing = None
        self.owes_again = self.owes_clear and self.has_job
        self.owes_clear, self.try_again_ns = True, 0
        if clear is not None:
            self.clears.append(clear)

    def tell(self) -> int:
        """The store is told now. Returns the epoch to write."""
        self.told, self.owes_again = self.clears.copy(), False
        return self.lease.clear_begins()

    def not_taken(self, try_again_ns: int) -> None:
        """The store has not taken the clear."""
        self.try_again_ns = try_again_ns

    def taken(self) -> list[Clear]:
        """The store knows what it was told. Returns those that waited for it."""
        self.owes_clear = self.owes_again
        told = [clear for clear in self.told if clear in self.clears]
        self.clears = [clear for clear in self.clears if clear not in told]
        return told


class PutAside(NamedTuple):
    """A chunk that is not asked for now."""

    until_ns: int
    was_absent: bool
    """The store said that it is not there. It is asked again when a server tells that it is."""


class RemoteTier:
    """Everything that exists only with this store."""

    def __init__(self, remote: Remote, out: Outbox, now_ns: int, *, number: int = 0, name: str = "") -> None:
        """number: its place among the stores. name: its name where there are several; empty if it is the only one."""
        self.remote = remote
        self.name = name
        self.mark_bit, self.came_bit = REMOTE << number, CAME << number
        """Its bits of Node.queued."""
        self.counts = RemoteCounts()
        """The part of this store in the counters of all."""
        self._out = out
        self.mover: Mover | None = None
        self.start_at_ns = now_ns
        """The mover is started at this time."""
        self.state = RemoteIs("", [])
        """The state of the store, as the mover told it last."""
        self.epochs: dict[bytes, NamespaceEpoch] = {}
        """Namespace -> what is known of its epoch."""
        self.known = KnownChunks()
        """Servers' announcements of chunks, of all namespaces and epochs."""
        self._forgotten = 0
        self._forgot_until_ns = 0
        """Until then more was told than can be known, so nothing is taken to be absent."""
        self.pursuits: OrderedDict[Pursuit, None] = OrderedDict()
        self.wanted: dict[tuple[bytes, bytes], tuple[Pursuit, int]] = {}
        """(namespace, key) -> the pursuit that looks for it, and its position there."""
        self.put_aside: OrderedDict[tuple[bytes, bytes], PutAside] = OrderedDict()
        """(namespace, key) -> until when it is not asked for: it was not there, or could not be read."""
        self.used: deque[tuple[Space, Node]] = deque(maxlen=USED_MAX)
        """Last chunks of prefixes that were used or stored, and may have to be written."""
        self.left_out: OrderedDict[Node, int] = OrderedDict()
        """Last chunks of prefixes of which all that is not here came from another store, or continues what did -> until
        when (ns) they are not looked at again."""
        self.queue: OrderedDict[Node, Space] = OrderedDict()
        """Chunks that wait to be written, parents first."""
        self.foretellings = Foretellings()
        self.foretold = Foretold()
        self.awaited: dict[int, Pledge] = {}
        """The words of other servers that engines here rely on, by number."""
        self.jobs: dict[int, RemoteJob] = {}
        self.fetching_bytes = self.putting_bytes = 0
        """Bytes that are being read and written."""
        self.reads = Rate()
        self.answer_s = 0.0
        """How long it took lately to tell what it has, or until it was left."""
        self._left_ns: int | None = None
        """When it was left for another store the last time; None: never."""
        self.tried_ns: int | None = None
        """When chunks were read the last time, or it was asked to be measured; None: never."""

    @property
    def device(self) -> str:
        """The name in logs and metrics, beside other devices."""
        return self.name or "remote"

    @property
    def named(self) -> tuple[tuple[str, object], ...]:
        """Its name as a field of a log line, if there are several stores."""
        return (("remote", self.name),) if self.name else ()

    def count(self, what: RemoteCount, number: int = 1) -> None:
        """Counts for this store and for all together."""
        self._out.counters.add(what, number)
        self.counts.add(what, number)

    def failed(self, wanted: RemoteWanted, fault: str) -> None:
        """Counts a chunk that the store did not give or take, or a call for announcements or a note."""
        self._out.counters.remote_failed(wanted, fault)
        self.counts.failed(wanted, fault)

    def seconds_for(self, count: int, now_ns: int) -> float:
        """How long that many bytes will take to come, by its last answers and its rate, which may be a guess. 0: it is
        to be measured. A try is enough to end that: a store that brings nothing would be tried for ever."""
        if self.tried_ns is None or now_ns - self.tried_ns > MEASURED_NS:
            return 0.0
        return self.answer_s + self.reads.seconds_for(self.fetching_bytes + count)

    def was_left(self, now_ns: int) -> bool:
        """It has lately not brought something in time."""
        return self._left_ns is not None and now_ns - self._left_ns <= MEASURED_NS

    # ---------------------------------------------------------------- the mover

    def mover_started(self, mover: Mover) -> None:
        self.mover = mover

    def mover_ended(self, start_at_ns: int) -> None:
        """It has been reaped. start_at_ns: when the next one is started."""
        self.mover, self.start_at_ns = None, start_at_ns
        for known in self.epochs.values():
            known.mover_ended()
        self.state = RemoteIs("", [])

    @property
    def usable(self) -> bool:
        """The mover takes orders, and the store is open."""
        return self.mover is not None and self.mover.state == "ready" and not self.state.problem

    @property
    def is_left_alone(self) -> bool:
        """Its only node does not answer, so nothing is to be looked for."""
        return bool(self.state.nodes_left_alone) and self.remote.cluster != "yes"

    @property
    def ready(self) -> bool:
        """The mover takes orders."""
        return self.mover is not None and self.mover.state == "ready"

    def says(self, state: RemoteIs) -> None:
        self.state = state

    # ---------------------------------------------------------------- jobs

    def begin(self, job: RemoteJob, order: Order) -> None:
        """Gives the mover an order."""
        assert self.mover is not None
        self.jobs[job.number] = job
        match job:
            case FetchJob():
                job.pursuit.read_begins()
                self.fetching_bytes += job.bytes
                self.reads.began(job.began_ns)
            case PutJob():
                self.putting_bytes += job.bytes
            case NoteJob():
                self.epochs[job.digest].job_begins()
        self._out.instruct(self.mover, order)

    def end(self, job: RemoteJob, now_ns: int, *, moved: bool = False) -> None:
        """A job has ended. moved: its bytes have arrived."""
        del self.jobs[job.number]
        match job:
            case FetchJob():
                job.pursuit.read_ends()
                self.fetching_bytes -= job.bytes
                self.reads.ended(job.bytes if moved else 0, now_ns)
                self.tried_ns = now_ns if moved else self.tried_ns
            case ProbeJob() if moved:
                took_s = (now_ns - job.began_ns) / 1e9
                # The answer to a try replaces what may be hours old.
                kept = ANSWERS_KEPT if job.began_ns != self.tried_ns else 0.0
                self.answer_s = kept * self.answer_s + (1 - kept) * took_s
            case PutJob():
                self.putting_bytes -= job.bytes
            case NoteJob() if job.digest in self.epochs:
                self.epochs[job.digest].job_ends()
            case AnnounceJob() if job.digest in self.epochs:
                self.epochs[job.digest].announcements.tell_ends()
            case ListenJob() if job.digest in self.epochs:
                self.epochs[job.digest].announcements.listen_ends()

    # ---------------------------------------------------------------- what is not written

    def leave_out(self, tail: Node, until_ns: int) -> None:
        """Nothing of this prefix is to be written until then."""
        self.left_out[tail] = until_ns
        if len(self.left_out) > USED_MAX:
            self.left_out.popitem(last=False)

    def look_again(self, now_ns: int) -> None:
        """Forgets what was left out long enough."""
        while self.left_out and next(iter(self.left_out.values())) <= now_ns:
            self.left_out.popitem(last=False)

    # ---------------------------------------------------------------- epochs

    def uses(self, digest: bytes, epochs: Mapping[str, int], fresh: Callable[[], int]) -> NamespaceEpoch:
        """A namespace is used from now on. epochs: those of our own chunks, by store. Any of them stands for that of a
        store that is not among them: if it is another store, it cannot tell what was cleared meanwhile. fresh: makes
        a random one."""
        last_seen = epochs.get(self.name, next(iter(epochs.values()), None))
        known = self.epochs[digest] = NamespaceEpoch(lease=EpochLease(last_seen=last_seen, fresh=fresh))
        return known

    def forget(self, digest: bytes) -> None:
        """A namespace is not used any more."""
        del self.epochs[digest]

    def epoch_of(self, space: Space, now_ns: int) -> int | None:
        """The epoch whose chunks may be used now; None if none may be."""
        known = self.epochs.get(space.digest)
        return None if known is None or known.owes_clear else known.lease.epoch(now_ns / 1e9)

    def mark(self, space: Space, epoch: int, key: bytes) -> int:
        """The name of a chunk in announcements."""
        return mark_of(space.digest, epoch, key)

    def tell(self, space: Space, mark: int, kind: Kind) -> None:
        """This has become known of a chunk, and other servers are to be told."""
        self.known.note(mark, kind)
        if self.remote.write != "never" and (known := self.epochs.get(space.digest)) is not None:
            known.announcements.tell(mark, kind)

    def is_behind(self, space: Space) -> bool:
        """So much of a namespace waits to be told that what is foretold would be told late, and crowd out the rest."""
        known = self.epochs.get(space.digest)
        return known is not None and known.announcements.is_crowded

    def foretell(self, space: Space, marks: list[int], *, comes: bool) -> None:
        """Other servers are to be told that engines here compute these chunks, or that they come no more."""
        if (known := self.epochs.get(space.digest)) is not None:
            for mark in marks:
                known.announcements.tell(foretold(mark, comes=comes), UNKNOWN)
            self.count("remote_foretold", len(marks) if comes else 0)

    def foretells(self, space: Space, epoch: int, node: Node) -> bool:
        """Other servers are told, or will be, that the chunk comes."""
        return bool(self.foretellings.rows) and self.mark(space, epoch, node.key) in self.foretellings.marks

    def has_stored(self, space: Space, epoch: int, node: Node) -> bool:
        """A chunk was stored here, and others are told. Returns whether any server has stored it before, and nobody has
        told that it is in the store."""
        mark = self.mark(space, epoch, node.key)
        kind = self.known.kind(mark)
        if kind == UNKNOWN:
            self.tell(space, mark, STORED)
        return kind in (STORED, GONE)

    def _forgot_lately(self, now_ns: int) -> bool:
        if self.known.forgotten != self._forgotten:
            self._forgotten = self.known.forgotten
            self._forgot_until_ns = now_ns + DOUBTED_MS * MILLISECOND_NS
        return now_ns < self._forgot_until_ns

    def is_announced(self, space: Space, key: bytes, now_ns: int) -> bool:
        """It was told that the store has a chunk."""
        epoch = self.epoch_of(space, now_ns)
        return epoch is not None and self.known.is_written(self.mark(space, epoch, key))

    def may_have(self, space: Space, key: bytes, now_ns: int) -> bool:
        """The store has a chunk, or what servers have told cannot be read."""
        return not self.is_unannounced(space, key, now_ns)

    def is_unannounced(self, space: Space, key: bytes, now_ns: int) -> bool:
        """Nobody has told that the store has a chunk, and whoever has written one would have."""
        epoch = self.epoch_of(space, now_ns)
        if epoch is None or self._forgot_lately(now_ns):
            return False
        if self.epochs[space.digest].announcements.state(epoch, now_ns) != "heard":
            return False
        return not self.known.is_written(self.mark(space, epoch, key))

    def passing(self, digest: bytes, now_ns: int) -> Passing | None:
        """Which misses of a namespace are passed over; None if the store may have to be asked for each."""
        known = self.epochs.get(digest)
        if known is None:
            return None
        passing = known.passing
        if passing is None or now_ns >= passing.until_ns or passing.forgotten != self.known.forgotten:
            passing = self.look_ahead(digest, known, now_ns)
            known.settles(passing)
        return passing

    def look_ahead(self, digest: bytes, known: NamespaceEpoch, now_ns: int) -> Passing | None:
        """The same, looked at anew."""
        epoch = None if known.owes_clear else known.lease.epoch(now_ns / 1e9)
        until_ns = NEVER_NS
        if epoch is not None:
            until_ns = min(known.announcements.believed_until_ns(epoch, now_ns), int(known.lease.until_s * 1e9))
            if self._forgot_lately(now_ns) or until_ns <= now_ns:
                return None
        return Passing(
            from_ns=now_ns,
            until_ns=until_ns,
            in_store=self.known.in_store,
            forgotten=self.known.forgotten,
            announcements=known.announcements,
            counts=self.counts,
            marker=Marker(digest, epoch) if epoch is not None else None,
        )

    def passed_over(self, space: Space) -> None:
        """Counts an unannounced chunk that was looked up and not looked for."""
        self.epochs[space.digest].announcements.passed_over()
        self.counts.add("remote_unannounced", 1)

    def owe_clear(self, digest: bytes, clear: Clear | None, fresh: Callable[[], int]) -> None:
        """A namespace was cleared here: the store is to get a new epoch, and whoever waits in `clear` is told then."""
        known = self.epochs.get(digest) or self.uses(digest, {}, fresh)
        known.owe(clear)
        if clear is not None:
            clear.await_store(self.name, digest)

    @property
    def clears_owed(self) -> int:
        """Namespaces that were cleared here, and the store does not know yet."""
        return sum(known.owes_clear for known in self.epochs.values())

    @property
    def clears_waiting(self) -> int:
        """Clears that the store does not know yet, one for each namespace and each caller who waits for it."""
        return sum(max(len(known.clears), known.owes_clear) for known in self.epochs.values())

    def give_up_clear(self, number: int) -> Clear | None:
        """A clear waits no longer. The store is told all the same, when it can be."""
        found = None
        for known in self.epochs.values():
            for clear in [clear for clear in known.clears if clear.number == number]:
                known.clears.remove(clear)
                found = clear
        return found

    # ---------------------------------------------------------------- what other servers compute

    def awaits(self, pledge: Pledge) -> None:
        self.awaited[pledge.number] = pledge

    def awaits_no_more(self, pledge: Pledge) -> None:
        self.awaited.pop(pledge.number, None)

    def comes(self, mark: int, now_ns: int) -> bool:
        """Another server is believed that it will write the chunk."""
        return self.foretold.comes(mark, now_ns)

    # ---------------------------------------------------------------- pursuits

    def pursue(self, pursuit: Pursuit) -> None:
        if not self.seconds_for(0, pursuit.moved_ns):
            self.tried_ns = pursuit.moved_ns
        self.pursuits[pursuit] = None
        for position, key in enumerate(pursuit.keys):
            self.wanted[pursuit.space.digest, key] = pursuit, position

    def shorten(self, pursuit: Pursuit, chunks: int) -> None:
        """No more than so many leading chunks can come."""
        for position, key in enumerate(pursuit.end_at(chunks), chunks):
            if self.wanted.get((pursuit.space.digest, key)) == (pursuit, position):
                del self.wanted[pursuit.space.digest, key]

    def drop(self, pursuit: Pursuit) -> None:
        """Nothing of it is looked for any more. Reads under way bring their chunks all the same."""
        self.shorten(pursuit, 0)
        self.pursuits.pop(pursuit, None)

    def leave(self, pursuit: Pursuit, now_ns: int) -> None:
        """It has not brought it in time, so it counts as slow."""
        self._left_ns = now_ns
        self.answer_s = max(self.answer_s, (now_ns - pursuit.moved_ns) / 1e9)
        self.drop(pursuit)

    def set_aside(self, digest: bytes, key: bytes, until_ns: int, *, was_absent: bool = False) -> None:
        """The key is not asked for until then. was_absent: or until a server tells that the store has it."""
        self.put_aside[digest, key] = PutAside(until_ns, was_absent)
        self.put_aside.move_to_end((digest, key))
        if len(self.put_aside) > PUT_ASIDE_MAX:
            self.put_aside.popitem(last=False)

    def is_put_aside(self, space: Space, key: bytes, now_ns: int) -> bool:
        if not self.aside_ns(space, key, now_ns):
            self.put_aside.pop((space.digest, key), None)
            return False
        return True

    def aside_ns(self, space: Space, key: bytes, now_ns: int) -> int:
        """For how long the key is not asked for. The question changes nothing."""
        found = self.put_aside.get((space.digest, key))
        if found is None or (found.was_absent and self.is_announced(space, key, now_ns)):
            return 0
        return max(found.until_ns - now_ns, 0)


def split(keys: bytes) -> list[bytes]:
    """Packed keys, one by one."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
