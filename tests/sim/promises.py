"""The promises checked for every event and effect. The simulator keeps these books without reading the service."""

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from kvserver.config.remotes import Remote
from kvserver.service.base.effects import Answer, Effect, Instruct
from kvserver.service.operators.commands import COMMAND_ID
from kvserver.tiers.records import Record
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.admin import AnyCommand, Command, Outcome
from kvserver.wire.messages import (
    Attach,
    Attached,
    Await,
    Awaited,
    Clear,
    Cleared,
    Drain,
    Draining,
    Error,
    Explain,
    Explained,
    Found,
    Hello,
    Lane,
    LaneOpen,
    Lookup,
    Offer,
    Offered,
    Pledge,
    Pledged,
    Register,
    Registered,
    Release,
    Released,
    Reply,
    Request,
    Retrieve,
    Retrieved,
    Status,
    StatusIs,
    Store,
    Stored,
    Unpledge,
    Unpledged,
    Unregister,
    Unregistered,
    Watch,
    Watched,
    Welcome,
)
from kvserver.wire.orders import Copy, FetchRemote, PutRemote

from .content import Path, is_chain, keys_of, path_of
from .deadline_promises import DeadlinePromises, Unanswered
from .digest_promises import DigestPromises
from .disk_promises import DiskPromises, Shard
from .ledger import Both, Ledger, away_of, needed, servable, serves
from .memory import Wrong
from .operators import ANSWERS as ENDINGS
from .operators import OperatorPromises, is_below
from .pledge_promises import PledgeFacts, PledgePromises
from .quota_promises import Quotas
from .recovery_answers import RecoveryAnswers
from .shapes import Shape
from .streams import OurWord, Streams
from .tenants import tenant_of

ANSWERS: dict[type, type] = {
    Hello: Welcome,
    Attach: Attached,
    Lane: LaneOpen,
    Offer: Offered,
    Watch: Watched,
    Register: Registered,
    Unregister: Unregistered,
    Lookup: Found,
    Await: Awaited,
    Pledge: Pledged,
    Unpledge: Unpledged,
    Release: Released,
    Store: Stored,
    Retrieve: Retrieved,
    Clear: Cleared,
    Drain: Draining,
    Explain: Explained,
    Status: StatusIs,
    **ENDINGS,
}
KEY = 32
MS = 1_000_000
NO_CHAIN = "keys that are not one chain"


@dataclass(eq=False)
class EngineFacts:
    """One (engine, epoch) while it has sessions."""

    ranks: int
    sessions: int = 0
    accounts: set[str] = field(default_factory=set)
    """Accounts of the caches that it registered; used with quotas only."""


@dataclass(eq=False)
class SessionFacts:
    number: int
    name: tuple[str, int]
    engine: EngineFacts
    rank: int
    peers: list[int] = field(default_factory=list)
    attached: bool = False
    closed: bool = False


@dataclass(eq=False)
class LeaseFacts:
    engine: EngineFacts
    digest: bytes
    keys: list[bytes]
    expires_ns: int
    ranks_used: list[int] = field(default_factory=list)
    pledge: int = 0
    """The pledge on the last of its keys; 0: all were held."""
    falls_short: bool = False
    """The pledge has ended, and some of the keys did not come."""

    @property
    def is_chain(self) -> bool:
        return not self.keys or is_chain(self.keys)


@dataclass(eq=False)
class CacheFacts:
    session: SessionFacts
    digest: bytes
    shape: Shape
    rank: int


@dataclass(eq=False)
class CopyFacts:
    """A job whose copy may still run."""

    kind: str
    digest: bytes
    units: list[int]


@dataclass(eq=False)
class LookupCounts:
    request: Request | AnyCommand
    must_fail: bool
    excused: bool = False
    """The asker is gone; an answer may still come."""
    transfer: Unanswered | None = None
    """If it is a store or a retrieve."""


class Promises:
    """The promises of one brain's life, begun anew with each brain. Raises Wrong."""

    def __init__(
        self,
        ledger: Ledger,
        shapes: dict[bytes, Shape],
        pledges: PledgePromises,
        deadlines: DeadlinePromises,
        our_word: OurWord,
        *,
        lease_ttl_ms: int,
        lease_extended_ms: int,
    ) -> None:
        self.quotas = Quotas((), ledger, shapes)
        self.pledges = pledges
        self.deadlines = deadlines
        self.our_word = our_word
        self.begun_elsewhere = 0
        """The pledge that begins with the next answer, because another server has foretold it."""
        self.streams: dict[str, Streams] = {}
        """What other servers compute, by the name that the service gives their store."""
        self.foretold_ms = 0
        self._ledger = ledger
        self._shapes = shapes
        self._lease_ttl_ms = lease_ttl_ms
        self._lease_extended_ms = lease_extended_ms
        self.asked: dict[tuple[int, int], list[LookupCounts]] = {}
        self.engines: dict[tuple[str, int], EngineFacts] = {}
        self.sessions: dict[int, SessionFacts] = {}
        self.by_peer: dict[int, SessionFacts] = {}
        self.leases: dict[int, LeaseFacts] = {}
        self.caches: dict[int, CacheFacts] = {}
        self.copies: dict[int, CopyFacts] = {}
        self.writing: dict[int, int] = {}
        """Arena unit -> the job that may write there."""
        self.reading: dict[int, list[int]] = {}
        self._doomed: list[Record] = []
        """The ledger's records of each namespace at the moment it was cleared."""
        self._clears_asked: dict[tuple[int, int], int] = {}
        """(peer, request id) -> length of the prefix of `_doomed` that must be gone when the clear is answered."""
        self._prefixes_asked: dict[int, list[Record]] = {}
        """Operator -> the ledger's records below the prefix that it has cleared, which go step by step."""
        self.cleared_jobs: set[int] = set()
        """Jobs that were in flight when their namespace was cleared."""
        self.jobs_ever: dict[int, SessionFacts] = {}
        self.remote_jobs: dict[int, str] = {}
        """Jobs that fill slots from a remote store -> its name."""
        self.came_from: dict[int, str] = {}
        """Slot -> the remote store from which it was filled."""
        self.slot_job: dict[int, int] = {}
        """Arena offset -> the last job ordered to write there."""
        self.disk = DiskPromises(ledger, self)
        self.digests = DigestPromises(ledger, self)
        self.operators = OperatorPromises(ledger, shapes)
        self.now_ns = 0
        self.on_disk: dict[Shard, tuple[int, int]] = {}  # (extent, generation), as the service said before the event
        self.disk_readable, self.disk_recovered = False, True
        self.leases_left: set[int] = set()
        """Leases that the service has after the event."""
        self._doubts = RecoveryAnswers(ledger)
        self.may_decline = False

    # ---------------------------------------------------------------- requests and replies

    def arrived(self, peer: int, request: Request, must_fail: bool, now_ns: int) -> None:
        transfer = Unanswered(request, now_ns) if isinstance(request, Store | Retrieve) else None
        asked = LookupCounts(request, must_fail, transfer=transfer)
        self.asked.setdefault((peer, request.id), []).append(asked)

    def commanded(self, peer: int, command: AnyCommand, must_fail: bool) -> None:
        self.asked[peer, COMMAND_ID] = [LookupCounts(command, must_fail)]

    def answered(self, peer: int, reply: Reply | Outcome, now_ns: int) -> Request | AnyCommand:
        """Checks that each request gets exactly one answer of the right type; returns the request."""
        waiting = self.asked.get((peer, reply.id))
        if not waiting:
            raise Wrong(f"peer {peer} got {reply} without having asked, or twice")
        fit = [asked for asked in waiting if isinstance(reply, Error | ANSWERS[type(asked.request)])]
        if not fit:
            raise Wrong(f"peer {peer} got {reply} to {waiting[0].request}")
        asked = fit[0]
        if asked.must_fail and not isinstance(reply, Error):
            raise Wrong(f"peer {peer} got {reply} to {asked.request}, which had to be refused")
        waiting.remove(asked)
        if not waiting:
            del self.asked[peer, reply.id]
        self._check_answer(peer, asked.request, reply, now_ns)
        return asked.request

    def unanswered(self) -> list[Request | AnyCommand]:
        return [asked.request for waiting in self.asked.values() for asked in waiting if not asked.excused]

    def check_in_time(self, now_ns: int) -> None:
        """After a tick no transfer of a living asker is without its answer for too long."""
        asked = [asked for waiting in self.asked.values() for asked in waiting if not asked.excused]
        self.deadlines.check([one.transfer for one in asked if one.transfer is not None], now_ns)

    def excuse(self, peer: int) -> None:
        for (asker, _), waiting in self.asked.items():
            if asker == peer:
                for asked in waiting:
                    asked.excused = True

    def check_gone(self, peer: int, request_id: int, digests: Sequence[bytes]) -> None:
        """A clear is answered only when no later brain can find any chunk that existed when it was asked for.

        The Clear of a prefix is not counted here: namespaces that are cleared after it do not concern it."""
        count = self._clears_asked.pop((peer, request_id), 0)
        doomed = [record for record in self._doomed[:count] if record.namespace in digests]
        if any(self._ledger.records.get(record.offset) is record for record in doomed):
            raise Wrong("who cleared a namespace was answered, and the ledger still holds some of what it had")

    def check_prefix_gone(self, peer: int) -> None:
        """The same, for the Clear of a prefix."""
        if any(self._ledger.records.get(record.offset) is record for record in self._prefixes_asked.pop(peer, ())):
            raise Wrong("who cleared a prefix was answered, and the ledger still holds some of what it had")

    def _check_answer(self, peer: int, request: Request | AnyCommand, reply: Reply | Outcome, now_ns: int) -> None:
        if isinstance(request, Command):
            self.operators.answered(request, reply, now_ns)  # type: ignore[arg-type]
            return
        match request, reply:
            case Lookup(), Found():
                self._check_found(self.by_peer[peer], request, reply, now_ns)
            case Pledge(), Pledged() if reply.pledge:
                self._pledged(self.by_peer[peer], request, reply, now_ns)
            case Drain(), Draining():
                self.disk.drained.add(request.device)
            case Store(), Stored():
                self._check_stored(request, reply)
            case Release(), Released():
                lease = self.leases.pop(request.lease, None)
                if lease is not None and lease.expires_ns > now_ns and lease.engine is not self.by_peer[peer].engine:
                    raise Wrong(f"lease {request.lease} was released by another engine")

    def cleared(self, peer: int, request_id: int, namespace: bytes, *, answered: bool) -> None:
        """A Clear was accepted: no chunk of the namespace is served from now on, whenever the answer comes."""
        self._doomed += self._ledger.doom(namespace)
        self._clears_asked[peer, request_id] = len(self._doomed)
        if answered:
            self.check_gone(peer, request_id, [namespace])
        self._end_leases([n for n, lease in self.leases.items() if lease.digest == namespace])
        self.operators.cleared(namespace, ())
        self.disk.was_cleared(namespace)
        self.cleared_jobs.update(job for job, copy in self.copies.items() if copy.digest == namespace)

    def prefix_cleared(self, peer: int, namespace: bytes, key: bytes, going: Container[int], *, answered: bool) -> None:
        """Like cleared(), for a chunk and all below it. Chunks being copied now are not published: see Shell.feed()."""
        path = path_of(key)
        below = [
            record
            for offset, record in self._ledger.records.items()
            if record.namespace == namespace and is_below(path_of(record.key), path) and offset in going
        ]
        if answered and below:
            raise Wrong("who cleared a prefix was answered, and the ledger still holds some of what it had")
        self._prefixes_asked[peer] = below
        self.operators.cleared(namespace, path, going)
        self._end_leases_below(namespace, path)

    def prefix_dropped(self, namespace: bytes, path: Path) -> None:
        """A chunk was wrong and has left with all below it."""
        self.operators.dropped(namespace, path)
        self._end_leases_below(namespace, path)

    def _end_leases_below(self, namespace: bytes, path: Path) -> None:
        below = [n for n, lease in self.leases.items() if lease.digest == namespace and _ends_below(lease, path)]
        self._end_leases([n for n in below if n not in self.leases_left or not self._is_to_come(self.leases[n], path)])

    def _is_to_come(self, lease: LeaseFacts, path: Path) -> bool:
        """The lease awaits this chunk, which may not be in the index yet. Then nothing of the lease was cleared."""
        held = self._held(self._shapes[lease.digest], lease.digest, lease.keys)
        return lease.pledge in self.pledges.living and len(path) > held

    def _check_found(self, session: SessionFacts, request: Lookup, found: Found, now_ns: int) -> None:
        keys = [request.keys[at : at + KEY] for at in range(0, len(request.keys), KEY)]
        shape = self._shapes.get(request.namespace)
        sees = shape is not None and self.quotas.allow(session.engine.accounts, request.namespace)
        wanted, away = self._wanted(shape, request.namespace, keys, found) if sees else (0, 0)
        if is_chain(keys) and (found.chunks != wanted or found.chunks_on_disk != away):
            raise Wrong(f"a lookup of {len(keys)} keys found {found}; {wanted} are held, {away} of them on disk")
        hidden = bool(self.quotas) and not sees
        held = self._held(shape, request.namespace, keys) if sees and is_chain(keys) else found.chunks
        self._doubts.told(found, request.namespace, keys, held=held, recovered=self.disk_recovered, hidden=hidden)
        if not 0 <= found.chunks <= len(keys):
            raise Wrong(f"a lookup of {len(keys)} keys found {found.chunks}")
        awaited = found.awaited if isinstance(found, Awaited) else 0
        if (found.lease != 0) != (found.chunks + awaited >= max(1, request.chunks_wanted_min)):
            raise Wrong(f"{found} with chunks_wanted_min={request.chunks_wanted_min}")
        if found.lease:
            if found.lease in self.leases:
                raise Wrong(f"lease {found.lease} was granted twice")
            expires_ns = now_ns + self._lease_ttl_ms * MS
            on = keys[: found.chunks + awaited]
            lease = self.leases[found.lease] = LeaseFacts(session.engine, request.namespace, on, expires_ns)
            if isinstance(found, Awaited) and awaited:
                if self.begun_elsewhere:
                    self._begun_elsewhere(request.namespace, found, on, now_ns)
                asked = session.engine, found.producer, request.namespace
                lease.pledge = self.pledges.awaited(*asked, on, found.chunks)

    def _begun_elsewhere(self, digest: bytes, found: Awaited, keys: list[bytes], now_ns: int) -> None:
        """The word of another server is the pledge on what an engine awaits."""
        number, self.begun_elsewhere = self.begun_elsewhere, 0
        mine = keys[found.chunks :]
        self.streams[found.producer].check_awaited(digest, mine, self.foretold_ms)
        facts = PledgeFacts(
            session=0,
            engine=None,
            name="",
            tenant=tenant_of(digest),
            digest=digest,
            held=found.chunks,
            before=b"".join(keys[: found.chunks]),
            keys=mine,
            slot_bytes=len(mine) * self._shapes[digest].chunk_units() * SLOT_ALIGN,
            expires_ns=now_ns,
            moved_ns=now_ns,
            store=found.producer,
        )
        self.pledges.made(number, facts, self.pledges.ttl_ms, now_ns)

    def _pledged(self, session: SessionFacts, request: Pledge, reply: Pledged, now_ns: int) -> None:
        keys = [request.keys[at : at + KEY] for at in range(0, len(request.keys), KEY)]
        shape = self._shapes[request.namespace]
        wanted = self._held(shape, request.namespace, keys) if is_chain(keys) else reply.held
        if reply.held != wanted or not 0 < reply.chunks <= len(keys) - wanted:
            raise Wrong(f"{reply} to a pledge of {len(keys)} chunks, of which {wanted} are held")
        mine = keys[reply.held : reply.held + reply.chunks]
        for path in map(path_of, mine):
            if self._held(shape, request.namespace, keys_of(path)) == len(path):
                raise Wrong(f"{reply}: a chunk of it is held, so that it never comes")
        facts = PledgeFacts(
            session=session.number,
            engine=session.engine,
            name=session.name[0],
            tenant=tenant_of(request.namespace),
            digest=request.namespace,
            held=reply.held,
            before=b"".join(keys[: reply.held]),
            keys=mine,
            slot_bytes=len(mine) * shape.chunk_units() * SLOT_ALIGN,
            expires_ns=now_ns,
            moved_ns=now_ns,
        )
        self.pledges.made(reply.pledge, facts, request.ttl_ms, now_ns)
        self.our_word.pledged(request.namespace, keys)

    def pledges_end(self, effects: Sequence[Effect], now_ns: int) -> None:
        """Whoever awaits a pledge that has ended keeps what has come."""
        for number, came in self.pledges.ended(effects, now_ns).items():
            for lease in [lease for lease in self.leases.values() if lease.pledge == number]:
                lease.falls_short = len(lease.keys) > came
                lease.keys = lease.keys[:came]

    def _wanted(self, shape: Shape, digest: bytes, keys: list[bytes], found: Found) -> tuple[int, int]:
        """(chunks, chunks of these that need the disk) that a lookup must find.

        Chunks that cannot be read now, or only slowly, may be left out together with all that follow.
        """
        both = Both(self._ledger, set(self.on_disk))
        wanted = servable(both, shape, digest, keys)
        away = away_of(self._ledger, shape, digest, keys[:wanted])
        if not away or (self.disk_readable and not (self.may_decline and found.chunks < wanted)):
            return wanted, away
        shorter = servable(self._ledger, shape, digest, keys)
        if all(group.kind == "full" for group in shape.groups):
            return shorter, 0
        held = both if self.disk_readable else self._ledger  # a shorter read can be worth it where a longer one was not
        if serves(held, shape, digest, keys, found.chunks):
            return found.chunks, away_of(self._ledger, shape, digest, keys[: found.chunks])
        return shorter, 0

    def _held(self, shape: Shape | None, digest: bytes, keys: list[bytes]) -> int:
        """Chunks that a lookup would find if every read from disk were possible and worth it."""
        return servable(Both(self._ledger, set(self.on_disk)), shape, digest, keys) if shape is not None else 0

    def knows_disks(self, on_disk: dict[Shard, tuple[int, int]], *, readable: bool, recovered: bool) -> None:
        self._doubts.now_known(on_disk.keys(), earlier=self.on_disk.keys())
        if recovered:
            self._doubts.end()
        self.on_disk, self.disk_readable, self.disk_recovered = on_disk, readable, recovered

    def _check_stored(self, request: Store, stored: Stored) -> None:
        """Every chunk that a Stored reply counts as held is sealed in the ledger or on disk."""
        count = len(request.keys) // KEY
        if not 0 <= stored.chunks <= count or (stored.chunks < count and not stored.why):
            raise Wrong(f"{stored} to a store of {count} chunks")
        cache = self.caches[request.cache]
        for position in range(stored.chunks):
            chunk, key = request.first_chunk + position, request.keys[position * KEY : (position + 1) * KEY]
            for blocks in request.groups:
                group, per_chunk = cache.shape.groups[blocks.group], cache.shape.blocks_per_chunk(blocks.group)
                inside = blocks.first_block <= chunk * per_chunk < blocks.first_block + len(blocks.block_ids) // 4
                mine = chunk % group.writers == cache.shape.writer_of(blocks.group, cache.rank)
                shard = cache.shape.shard_of(blocks.group, cache.rank)
                name = (cache.digest, key, blocks.group, shard)
                if inside and mine and name not in self._ledger.held and name not in self.on_disk:
                    raise Wrong(
                        f"a store says that chunk {chunk} is held, but group {blocks.group} of it is not sealed"
                    )

    # ---------------------------------------------------------------- sessions and leases

    def welcomed(self, peer: int, number: int, hello: Hello) -> None:
        name = (hello.engine, hello.epoch)
        engine = self.engines.setdefault(name, EngineFacts(hello.ranks))
        engine.sessions += 1
        self.sessions[number] = SessionFacts(number, name, engine, hello.rank)
        self.joined(peer, number)

    def joined(self, peer: int, number: int) -> None:
        self.sessions[number].peers.append(peer)
        self.by_peer[peer] = self.sessions[number]

    def peer_gone(self, peer: int) -> None:
        self.excuse(peer)
        self.by_peer.pop(peer, None)

    def unheard(self, number: int) -> None:
        """The service was told that nobody knows this lease."""
        self.leases.pop(number, None)

    def closed(self, number: int) -> None:
        session = self.sessions[number]
        if session.closed:
            raise Wrong(f"session {number} was closed twice")
        session.closed = True
        for peer in session.peers:
            self.peer_gone(peer)
        session.engine.sessions -= 1
        if session.engine.sessions == 0:
            del self.engines[session.name]
            self._end_leases([n for n, lease in self.leases.items() if lease.engine is session.engine])

    def namespaces_are(self, known: Sequence[bytes]) -> None:
        """A namespace without caches and chunks leaves, with leases on what was to come. A lease whose time is over may
        still be in these books."""
        self.our_word.namespaces_are(known)
        left = [number for number, lease in self.leases.items() if lease.digest not in known]
        for lease in (self.leases[number] for number in left):
            on_chunks = not lease.pledge or self._held(self._shapes[lease.digest], lease.digest, lease.keys)
            if on_chunks and lease.expires_ns > self.now_ns:
                raise Wrong("a namespace left, and a lease was on chunks of it")
        self._end_leases(left)

    def _end_leases(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.leases[number]

    # ---------------------------------------------------------------- retrieves

    def before_retrieve(self, peer: int, request: Retrieve, now_ns: int) -> str:
        """The reason to refuse this retrieve; empty when its lease is good for it."""
        session, lease, cache = self.by_peer.get(peer), self.leases.get(request.lease), self.caches.get(request.cache)
        if session is None or cache is None or cache.session is not session:
            return "not its cache"
        if lease is None or lease.expires_ns <= now_ns:
            return "no such lease, or expired"
        if lease.engine is not session.engine:
            return "another engine's lease"
        if session.rank < 0 or session.rank in lease.ranks_used:
            return "used by this rank before"
        if lease.digest != cache.digest:
            return "another namespace"
        ends = [
            -(-(blocks.first_block + len(blocks.block_ids) // 4) // cache.shape.blocks_per_chunk(blocks.group))
            for blocks in request.groups
        ]
        if any(end > len(lease.keys) for end in ends):
            return "beyond the lease"
        asked = lease.keys[: max(ends, default=0)]
        may_hold = lease.pledge in self.pledges.living and (not asked or is_chain(asked))
        return "" if lease.is_chain or may_hold else NO_CHAIN

    def after_retrieve(
        self,
        peer: int,
        request: Retrieve,
        effects: list[Effect],
        now_ns: int,
        *,
        refusal: str,
        sound: bool,
        held: bool,
    ) -> None:
        """Checks that a retrieve was refused or begun as its lease demands.

        refusal: result of before_retrieve(). sound: nothing but the lease could be refused, and the lookup needed
        every block. held: it waits for chunks from disk, or from an engine.
        """
        errors = [e.reply.code for e in effects if isinstance(e, Answer) and isinstance(e.reply, Error)]
        if "disk-away" in errors:
            return
        if "not-coming" in errors and refusal != "beyond the lease":
            raise Wrong("a retrieve of what came is refused, as if it did not")
        begun = held or any(isinstance(effect, Instruct) and isinstance(effect.order, Copy) for effect in effects)
        lease = self.leases.get(request.lease)
        if begun and held and refusal == NO_CHAIN and lease is not None and lease.pledge in self.pledges.living:
            self._must_fail(peer, request)  # what it waits for never comes behind these keys
        elif begun and refusal:
            raise Wrong(f"a retrieve was begun in spite of its lease: {refusal}")
        if not begun and not refusal and sound and lease is not None and lease.is_chain:
            raise Wrong(f"a retrieve under a good lease was refused: {effects}")
        if begun and lease is not None:
            session = self.by_peer[peer]
            lease.expires_ns = max(lease.expires_ns, now_ns + self._lease_extended_ms * MS)
            if not request.more:
                lease.ranks_used.append(session.rank)
            if len(lease.ranks_used) == lease.engine.ranks:
                del self.leases[request.lease]

    def _must_fail(self, peer: int, request: Retrieve) -> None:
        for asked in self.asked[peer, request.id]:
            asked.must_fail = asked.must_fail or asked.request is request

    def needed_by_lookup(self, lease: LeaseFacts, shape: Shape, group: int) -> list[int]:
        return needed(shape, group, len(lease.keys))

    # ---------------------------------------------------------------- copies

    def brings_from_another_size(self, order: Copy) -> bool:
        """Whether a retrieve brings what an engine with another number of ranks stored."""
        ranks = self.caches[order.cache].session.engine.ranks
        slots = [slot for group in order.groups for slot in array("q", group.slots)]
        stored_by = [self.jobs_ever.get(self.slot_job.get(slot, 0)) for slot in slots]
        return order.kind == "retrieve" and any(by is not None and by.engine.ranks != ranks for by in stored_by)

    def copy_sent(self, order: Copy) -> None:
        """No slot is written while another job may write or read it, or while the ledger lists it as sealed."""
        cache = self.caches[order.cache]
        units: list[int] = []
        for group in order.groups:
            shard = cache.shape.shard_of(group.group, cache.rank)
            slot_units = cache.shape.slot_bytes(group.group, shard) // SLOT_ALIGN
            first = group.first_block // cache.shape.blocks_per_chunk(group.group)
            for index, offset in enumerate(array("q", group.slots)):
                if offset < 0:
                    continue
                units.extend(range(offset // SLOT_ALIGN, offset // SLOT_ALIGN + slot_units))
                if order.kind == "store":
                    self.operators.store_begins(cache.digest, self.now_ns)
                    self.slot_job[offset] = order.job
                    self._check_writer(cache, group.group, first + index)
        for unit in units:
            if unit in self.writing:
                raise Wrong(f"job {order.job} ({order.kind}) uses a slot that job {self.writing[unit]} may still write")
            if order.kind == "store" and unit in self.reading:
                raise Wrong(f"job {order.job} may write a slot that jobs {self.reading[unit]} may still read")
            if order.kind == "store" and unit in self._ledger.units:
                raise Wrong(f"job {order.job} may write a slot that the ledger says is sealed")
        for unit in units:
            if order.kind == "store":
                self.writing[unit] = order.job
            else:
                self.reading.setdefault(unit, []).append(order.job)
        self.copies[order.job] = CopyFacts(order.kind, cache.digest, units)
        self.jobs_ever[order.job] = cache.session

    def disk_reads_slot(self, job: int, units: list[int]) -> None:
        """A slot is being written to disk."""
        for unit in units:
            if unit in self.writing:
                raise Wrong(f"disk job {job} reads a slot that job {self.writing[unit]} may still write")
            self.reading.setdefault(unit, []).append(-job)
        self._also(job, "retrieve", units)

    def disk_writes_slot(self, job: int, offset: int, units: list[int]) -> None:
        """A slot is being filled from disk."""
        for unit in units:
            if unit in self.writing or unit in self.reading or unit in self._ledger.units:
                raise Wrong(f"disk job {job} may write a slot that is sealed, or that something else may use")
            self.writing[unit] = -job
        self.slot_job[offset] = -job
        self._also(job, "store", units)

    def remote_sent(
        self, order: FetchRemote | PutRemote, digest: bytes, slots: dict[int, list[int]], *, remote: Remote
    ) -> None:
        """A slot is being filled from a remote store, or written there. slots: slot -> its arena units."""
        fills = isinstance(order, FetchRemote)
        units = [unit for of_slot in slots.values() for unit in of_slot]
        for unit in units:
            if unit in self.writing:
                raise Wrong(f"remote job {order.job} uses a slot that job {self.writing[unit]} may still write")
            if fills and (unit in self.reading or unit in self._ledger.units):
                raise Wrong(f"remote job {order.job} may write a slot that is sealed, or that something else reads")
        for unit in units:
            if fills:
                self.writing[unit] = order.job
            else:
                self.reading.setdefault(unit, []).append(order.job)
        if fills:
            self.slot_job.update(dict.fromkeys(slots, order.job))
            self.remote_jobs[order.job] = remote.name
        elif not all(self._ledger.units.get(unit) in slots for unit in units):
            raise Wrong(f"remote job {order.job} writes a slot that is not sealed")
        came_from = {self.came_from[slot] for slot in slots if slot in self.came_from}
        if not fills and not came_from <= {remote.name}:
            raise Wrong(f"remote job {order.job} writes to {remote.name} what came from {came_from}")
        self.copies[order.job] = CopyFacts("store" if fills else "retrieve", digest, units)

    def remote_over(self, job: int) -> None:
        """The remote mover will not touch any byte of this job again."""
        self.copy_over(job)

    def namespace_dropped(self, namespace: bytes) -> None:
        """Another server has cleared the namespace: nothing of it is served from now on."""
        self._doomed += self._ledger.doom(namespace)
        self._end_leases([n for n, lease in self.leases.items() if lease.digest == namespace])
        self.operators.cleared(namespace, ())
        self.disk.was_cleared(namespace)
        self.cleared_jobs.update(job for job, copy in self.copies.items() if copy.digest == namespace)

    def _also(self, job: int, kind: str, units: list[int]) -> None:
        known = self.copies.setdefault(-job, CopyFacts(kind, b"", []))
        known.units.extend(units)

    def lost_leases(self, living: set[int], now_ns: int) -> None:
        """A record could not be read, which may end the leases that needed it."""
        for number in [number for number in self.leases if number not in living]:
            lease = self.leases[number]
            shape = self._shapes[lease.digest]
            waits = away_of(self._ledger, shape, lease.digest, lease.keys) or self._asks_the_disk(lease)
            if lease.expires_ns > now_ns and not waits:
                raise Wrong(f"lease {number} ended by a fault on disk, and all of it is in DRAM")
            del self.leases[number]

    def _asks_the_disk(self, lease: LeaseFacts) -> bool:
        """True if a retrieve under the lease may wait for disk: it can ask for more chunks than the boundary needs."""
        alone = {name[:2] for name in self.on_disk.keys() - self._ledger.held.keys()}
        return any((lease.digest, key) in alone for key in lease.keys)

    def copy_over(self, job: int) -> None:
        """The mover will not touch any byte of this job again."""
        copy = self.copies.pop(job, None)
        if copy is None:
            return
        for unit in copy.units:
            if copy.kind == "store":
                del self.writing[unit]
            else:
                self.reading[unit].remove(job)
                if not self.reading[unit]:
                    del self.reading[unit]

    def may_seal(self, job: int) -> bool:
        session = self.jobs_ever.get(job)
        return session is not None and not session.closed

    def sealed(self, offset: int) -> None:
        """A slot is published: the copy that filled it is over, and its session lives."""
        job = self.slot_job[offset]
        self.came_from.pop(offset, None)
        if job in self.remote_jobs:
            self.came_from[offset] = self.remote_jobs[job]
        if job in self.copies:
            raise Wrong(f"slot {offset} was published while job {job} may still write it")
        if job < 0:
            if -job in self.disk.cleared:
                raise Wrong(f"slot {offset} was filled from disk for a namespace that was cleared meanwhile")
            return
        if job in self.cleared_jobs:
            raise Wrong(f"slot {offset} was published although its namespace was cleared after job {job} had begun")
        if job in self.remote_jobs:
            return
        if self.jobs_ever[job].closed:
            raise Wrong(f"slot {offset} was published although the session of job {job} had ended")

    @staticmethod
    def _check_writer(cache: CacheFacts, group: int, chunk: int) -> None:
        writers = cache.shape.groups[group].writers
        if chunk % writers != cache.shape.writer_of(group, cache.rank):
            raise Wrong(f"rank {cache.rank} was to write chunk {chunk} of group {group}, which is another writer's")


def _ends_below(lease: LeaseFacts, path: Path) -> bool:
    return bool(lease.keys) and is_below(path_of(lease.keys[-1]), path)
