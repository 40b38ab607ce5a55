"""Jobs of one remote store, on threads: heads are read, chunks come into the arena and go out of it, verified.

No index and no decisions. Every job ends exactly once, and its slots are not touched afterwards. Loads and writes have
threads of their own. While a load waits, only one write is under way: more would slow loads, and none at all could wait
for ever. A node that fails again and again is left alone by its breaker: its jobs end at once, and the engine asks it
by itself until it has recovered.
"""

import os
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, Literal, NamedTuple, TypeVar

from kvserver.errors import DeviceError
from kvserver.movers.remote_checks import CheckedSources, sums_of, wrong_sums
from kvserver.remote.breaker import Breaker
from kvserver.remote.chunk_value import ChunkName, Head, NamespaceName, WrongValue
from kvserver.remote.store import Cursor, Gone, Store, StoreError, WrongSource

JOBS_MAX = 4096
"""Jobs that wait or are under way."""
PROBE_THREADS = 1
RAMP_WAIT_S = 0.2
"""For which a call waits for others to a node that recovers: few are under way at a time there, and soon all may be."""
TRY_EVERY_S = 0.05
"""How often it is looked at whether a node that is left alone should be tried."""
LISTENED_BYTES_MAX = 8192
"""A Listen gives no more at a time: the brain serves nobody while it takes them in."""
LISTENERS_MAX = 256
"""Namespaces whose announcements are read on from the last place; others begin anew."""
NODES_MAX = 1024
"""Nodes whose breakers are kept; a Valkey cluster is said to have at most about a thousand. More only take turns: then
the one that was used least recently is forgotten."""
WAITED_S_MAX = 10.0
"""A call for a note or for announcements that has waited so long behind others is not made. A store that does not
answer takes its deadline for each, and the brain kills a mover that holds an order for too long."""
LATE_EVERY_S = 2.0
"""For so long after a call for a note, or for announcements, has failed, namespaces whose last one failed wait behind
others."""
LATE_MAX = 256
"""So many of these namespaces are remembered, for each kind of call."""
ANSWERED = ("remote-full", "remote-refused")
"""Problems of a node that works."""
Fault = Literal["", "gone", "digest", "existed", "left-alone", "cancelled"] | str
"""Why a job did not do what it was to do; otherwise a code of StoreError. left-alone: the node's breaker is open.
digest: the payload is not the one that an engine stored. existed: of a write or of a first note, another one was there
first."""


class Probe(NamedTuple):
    """Reads heads."""

    job: int
    names: tuple[ChunkName, ...]
    shards: int
    """How many a head has at most."""


class Fetch(NamedTuple):
    """Reads payloads into slots. A payload that is not the stored one ends the job, and the store drops the chunk."""

    job: int
    name: ChunkName
    head: Head
    slots: tuple[int | None, ...]
    """Arena offset for each shard of the head; None: not wanted."""


class Put(NamedTuple):
    """Writes payloads from slots, unless their bytes are other ones than the head says."""

    job: int
    name: ChunkName
    head: Head
    slots: tuple[int, ...]


class ReadNote(NamedTuple):
    """Reads the note of a namespace."""

    job: int
    name: NamespaceName


class WriteNote(NamedTuple):
    """Writes the note of a namespace."""

    job: int
    name: NamespaceName
    note: bytes
    replaces: bool
    """Whether it takes the place of one that is there."""


class Announce(NamedTuple):
    """Tells other servers of chunks."""

    job: int
    of: NamespaceName
    epoch: int
    marks: bytes


class Listen(NamedTuple):
    """Reads what servers have announced since the last time; the first time, all of it."""

    job: int
    of: NamespaceName
    epoch: int


Job = Probe | Fetch | Put | ReadNote | WriteNote | Announce | Listen


Waiting = TypeVar("Waiting", bound=Job)


class Ended(NamedTuple):
    """The end of a job. Nothing of it happens any more, in the arena."""

    job: int
    fault: Fault
    heads: tuple[Head | None, ...] = ()
    """The heads of a Probe, in its order. None also where the answer is unknown; then `faults` says so."""
    faults: tuple[Fault, ...] = ()
    """For each name of a Probe: why nothing is known, or what is wrong with what is there. Empty: all is known."""
    sums: tuple[int, ...] = ()
    """The sum of each wanted shard, in their order, after a Fetch that went well."""
    note: bytes | None = None
    """The note of a ReadNote; None if there is none."""
    marks: bytes = b""
    """Marks that a Listen brought, at most LISTENED_BYTES_MAX."""
    is_all: bool = True
    """Whether a Listen has left no more."""
    io_ns: int = 0


def loads_at_a_time(connections: int) -> int:
    """Threads that bring chunks: some of them compute digests meanwhile."""
    return connections + (connections + 1) // 2


def writes_at_a_time(connections: int) -> int:
    """Threads that take chunks out: of three, two have a call under way, of a payload or its head, and one computes."""
    return 3 * connections


class RemoteEngine:
    """The threads of one store. The caller reads `eventfd`, then ended()."""

    def __init__(
        self,
        store: Store,
        arena: memoryview,
        *,
        connections: int = 4,
        seed: int | None = None,
        jobs_max: int = JOBS_MAX,
        waited_s_max: float = WAITED_S_MAX,
    ) -> None:
        """connections: of the store, that bring payloads, and as many that take them out.

        There are more threads than connections, because a thread also computes digests."""
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._store = store
        self._arena = arena
        self._jobs_max = jobs_max
        self._waited_s_max = waited_s_max
        self._chance = random.Random(seed).random
        self._lock = threading.Lock()
        self._closing = threading.Condition(self._lock)
        self._call_ended = threading.Condition(self._lock)
        self._probes = _Line[Probe](self._lock)
        self._loads = _Line[Fetch](self._lock)
        self._writes = _Line[Put](self._lock)
        self._notes = _NamespaceLine[ReadNote | WriteNote](self._lock)
        self._announcements = _NamespaceLine[Announce | Listen](self._lock)
        self._listeners: OrderedDict[tuple[NamespaceName, int], _Listener] = OrderedDict()
        """Only the announcements' thread uses it."""
        self._writes_under_way = 0
        self._open: dict[int, bool] = {}
        """Job -> whether it was cancelled."""
        self._since_s: dict[int, float] = {}
        """Job -> when it came."""
        self._nodes: OrderedDict[str, _Node] = OrderedDict()
        """Those that were used, the least recently used first, without those that the store has no more."""
        self._is_closed = False
        self._failure: BaseException | None = None
        """The error that ended a thread: a mistake of ours, for stores raise StoreError alone."""
        self._ended: list[Ended] = []
        self._is_told = False
        """Whether the caller was told of ends since it took some."""
        loops: list[Callable[[], None]] = [self._probe_loop] * PROBE_THREADS
        loops += [self._load_loop] * loads_at_a_time(connections) + [self._write_loop] * writes_at_a_time(connections)
        loops += [self._note_loop, self._try_loop, self._announcement_loop]
        self._threads = [threading.Thread(target=self._watched, args=(loop,), daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    # ---------------------------------------------------------------- the caller's side

    def submit(self, job: Job) -> bool:
        """Takes a job. False: there are too many, and it was not taken."""
        with self._lock:
            if len(self._open) >= self._jobs_max or self._is_closed:
                return False
            assert job.job not in self._open, "a job's number is used once"
            self._open[job.job] = False
            self._since_s[job.job] = time.monotonic()
            match job:
                case Probe():
                    self._probes.add(job)
                case Fetch():
                    self._loads.add(job)
                case ReadNote() | WriteNote():
                    self._notes.add(job)
                case Announce() | Listen():
                    self._announcements.add(job)
                case _:
                    self._writes.add(job)
        return True

    def cancel(self, job: int) -> None:
        """Ends a job soon, if it has not begun. Its end comes all the same, once."""
        with self._lock:
            if job in self._open:
                self._open[job] = True

    def ended(self) -> list[Ended]:
        """Jobs that have ended since the last call. Raises what ended a thread."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.eventfd)
        if self._failure is not None:
            raise self._failure
        with self._lock:
            found, self._ended, self._is_told = self._ended, [], False
        return found

    def left_alone(self) -> list[str]:
        """Nodes to which no call goes now."""
        with self._lock:
            return sorted(name for name, node in self._nodes.items() if node.breaker.leaves_alone)

    def close(self) -> list[Ended]:
        """Ends the threads, after the calls that are under way. Jobs that have not begun end as cancelled. Returns the
        ends that were not read yet."""
        with self._lock:
            self._is_closed = True
            lines = (self._probes, self._loads, self._writes, self._notes, self._announcements)
            waiting = [job.job for line in lines for job in line.close()]
            self._closing.notify()
        for job in waiting:
            self._end(Ended(job, "cancelled"))
        for thread in self._threads:
            thread.join()
        ends = self.ended()
        os.close(self.eventfd)
        return ends

    # ---------------------------------------------------------------- threads

    def _watched(self, loop: Callable[[], None]) -> None:
        """A thread. If it ends by an error, the caller gets that error: jobs would never end otherwise."""
        try:
            loop()
        except BaseException as failure:  # a thread has nobody else to tell
            self._failure = failure  # raised again in ended()
            with suppress(OSError):
                os.eventfd_write(self.eventfd, 1)

    def _note_loop(self) -> None:
        while (job := self._next(self._notes)) is not None:
            self._carry_out(job)

    def _announcement_loop(self) -> None:
        """A thread of their own: notes must not wait for them."""
        while (job := self._next(self._announcements)) is not None:
            self._carry_out(job)

    def _probe_loop(self) -> None:
        while (job := self._next(self._probes)) is not None:
            self._carry_out(job)

    def _load_loop(self) -> None:
        while (job := self._next(self._loads)) is not None:
            self._carry_out(job)

    def _write_loop(self) -> None:
        while (job := self._next(self._writes)) is not None:
            self._carry_out(job)
            with self._lock:
                self._writes_under_way -= 1

    def _next(self, line: "_Line[Waiting]") -> Waiting | None:
        with self._lock:
            line.changed.wait_for(lambda: self._is_closed or (line.due and self._may_begin(line)))
            job = line.take()
            if line is self._writes and job is not None:
                self._writes_under_way += 1
            if line is self._loads and not self._loads.due and self._writes.due:
                self._writes.changed.notify_all()
            return job

    def _may_begin(self, line: object) -> bool:
        return line is not self._writes or not self._loads.due or not self._writes_under_way

    def _try_loop(self) -> None:
        """Asks nodes that are left alone, each when its time has come."""
        while True:
            with self._lock:
                if self._closing.wait_for(lambda: self._is_closed, timeout=TRY_EVERY_S):
                    return
                self._forget_nodes(self._store.nodes())
                now_s = time.monotonic()
                wanted = [node for node in self._nodes.values() if node.breaker.wants_try(now_s)]
            for node in wanted:
                code = self._try(node)
                with self._lock:
                    node.tried(code, time.monotonic())

    def _try(self, node: "_Node") -> str:
        try:
            (found,) = self._store.heads([node.known], 1)
        except StoreError as problem:
            return problem.code
        return found.code if isinstance(found, StoreError) else ""

    # ---------------------------------------------------------------- jobs

    def _carry_out(self, job: Job) -> None:
        with self._lock:
            is_cancelled = self._open[job.job]
            waited_s = time.monotonic() - self._since_s[job.job]
        if is_cancelled:
            self._end(Ended(job.job, "cancelled"))
            return
        if waited_s > self._waited_s_max and not isinstance(job, Probe | Fetch | Put):
            self._end(Ended(job.job, "remote-slow"))
            return
        begin_ns = time.monotonic_ns()
        match job:
            case Probe():
                ended = self._probe(job)
            case ReadNote() | WriteNote():
                ended = self._note(job)
                with self._lock:
                    self._notes.called(job.name, ended.fault)
            case Announce() | Listen():
                ended = self._announcement(job)
                with self._lock:
                    self._announcements.called(job.of, ended.fault)
            case _:
                ended = self._move(job)
        self._end(ended._replace(io_ns=time.monotonic_ns() - begin_ns))

    def _probe(self, job: Probe) -> Ended:
        """Asks the nodes that may be asked, each once. Names of others are unknown, and are not waited for."""
        nodes = [self._node_of(name) for name in job.names]
        begun = self._begin_calls(list(dict.fromkeys(nodes)))
        asked = [index for index, node in enumerate(nodes) if node in begun]
        try:
            found = self._store.heads([job.names[index] for index in asked], job.shards) if asked else []
        except StoreError as problem:
            found = [problem.with_traceback(None)] * len(asked)  # with its frames it would be a cycle
        heads: list[Head | None] = [None] * len(nodes)
        faults: list[Fault] = ["left-alone"] * len(nodes)
        codes = dict.fromkeys(begun, "")
        for index, answer in zip(asked, found, strict=True):
            faults[index] = answer.code if isinstance(answer, StoreError | WrongValue) else ""
            heads[index] = answer if isinstance(answer, Head) else None
            if isinstance(answer, StoreError):
                codes[nodes[index]] = answer.code
        self._end_calls(codes)
        return Ended(job.job, "", tuple(heads), tuple(faults) if any(faults) else ())

    def _note(self, job: ReadNote | WriteNote) -> Ended:
        """Notes are asked for whatever the breakers say: they are few, and a lease depends on them."""
        try:
            if isinstance(job, ReadNote):
                (found,) = self._store.notes([job.name])
                return Ended(job.job, "", note=found)
            if job.replaces:
                self._store.replace_note(job.name, job.note)
            elif not self._store.make_note(job.name, job.note):
                return Ended(job.job, "existed")
        except StoreError as problem:
            return Ended(job.job, problem.code)
        return Ended(job.job, "")

    def _announcement(self, job: Announce | Listen) -> Ended:
        try:
            if isinstance(job, Announce):
                self._store.announce(job.of, job.epoch, job.marks)
                return Ended(job.job, "")
            marks, is_all = self._listener(job).read(self._store, job)
            return Ended(job.job, "", marks=marks, is_all=is_all)
        except StoreError as problem:
            return Ended(job.job, problem.code)

    def _listener(self, job: Listen) -> "_Listener":
        name = job.of, job.epoch
        if name not in self._listeners:
            self._listeners[name] = _Listener()
            if len(self._listeners) > LISTENERS_MAX:
                self._listeners.popitem(last=False)
        self._listeners.move_to_end(name)
        return self._listeners[name]

    def _move(self, job: Fetch | Put) -> Ended:
        node = self._node_of(job.name)
        if not self._begin_calls([node]):
            return Ended(job.job, "left-alone")
        code = ""
        sums: tuple[int, ...] = ()
        try:
            fault, sums = self._moved(job)
        except Gone:
            fault = "gone"
        except StoreError as problem:
            fault = code = problem.code
        finally:
            self._end_calls({node: code})
        return Ended(job.job, fault, sums=sums)

    def _begin_calls(self, nodes: Sequence["_Node"]) -> list["_Node"]:
        """Begins a call to each node that may be asked now, or soon."""
        due_s = time.monotonic() + RAMP_WAIT_S
        with self._lock:
            for node in nodes:
                self._call_ended.wait_for(node.is_free, timeout=max(0.0, due_s - time.monotonic()))
            return [node for node in nodes if node.begin()]

    def _end_calls(self, codes: Mapping["_Node", str]) -> None:
        """codes: of their StoreErrors, empty without one."""
        with self._lock:
            for node, code in codes.items():
                node.ended(code, time.monotonic())
            self._call_ended.notify_all()

    def _moved(self, job: Fetch | Put) -> tuple[Fault, tuple[int, ...]]:
        """Carries out a job. Returns its fault and, for a Fetch without one, the sums."""
        match job:
            case Fetch(_, name, head, slots):
                targets = self._memory(head, slots)
                summed = self._store.read(name, head, targets)
                sums = sums_of(targets) if summed is None else summed
                if wrong_sums(name, head, sums):
                    with suppress(DeviceError):
                        self._store.drop(name, head)
                    return "digest", ()
                return "", tuple(each for each, target in zip(sums, targets, strict=True) if target is not None)
            case Put(_, name, head, slots):
                memory = [each for each in self._memory(head, slots) if each is not None]
                try:
                    is_first = self._store.write(name, head, CheckedSources(name, head, memory))
                except WrongSource:
                    return "digest", ()
                if not is_first:
                    return "existed", ()
        return "", ()

    def _memory(self, head: Head, slots: Sequence[int | None]) -> list[memoryview | None]:
        pairs = zip(head.shards, slots, strict=True)
        return [None if slot is None else self._arena[slot : slot + shard.payload_bytes] for shard, slot in pairs]

    def _node_of(self, name: ChunkName) -> "_Node":
        node = self._store.node_of(name)
        with self._lock:
            if node not in self._nodes:
                self._nodes[node] = _Node(self._chance)
                if len(self._nodes) > NODES_MAX:
                    self._nodes.popitem(last=False)
            self._nodes.move_to_end(node)
            self._nodes[node].known = name
            return self._nodes[node]

    def _forget_nodes(self, remaining: frozenset[str]) -> None:
        """Forgets nodes that the store has no more. Calls to them that are under way end as ever."""
        for gone in self._nodes.keys() - remaining:
            del self._nodes[gone]

    def _end(self, ended: Ended) -> None:
        with self._lock:
            del self._open[ended.job], self._since_s[ended.job]
            self._ended.append(ended)
            was_told, self._is_told = self._is_told, True
        if not was_told:
            with suppress(OSError):
                os.eventfd_write(self.eventfd, 1)


class _Line(Generic[Waiting]):
    """Jobs of one kind that wait for a thread, and what its threads wait for. Under the engine's lock.

    Kinds are woken separately: waking all threads for each job cost more than the job."""

    def __init__(self, lock: threading.Lock) -> None:
        self.due: deque[Waiting] = deque()
        self.changed = threading.Condition(lock)

    def add(self, job: Waiting) -> None:
        self.due.append(job)
        self.changed.notify()

    def take(self) -> Waiting | None:
        """The job that is to begin; None if there is none."""
        return self.due.popleft() if self.due else None

    def close(self) -> list[Waiting]:
        """Wakes all its threads. Returns the jobs, which it has no more."""
        waiting = list(self.due)
        self.due.clear()
        self.changed.notify_all()
        return waiting


class _NamespaceLine(_Line[Waiting]):
    """Jobs of namespaces, of which one thread carries out one after the other.

    A dead node of a cluster costs each namespace on it a deadline for each call. In the order of their coming, three
    such namespaces would keep all others from reading their notes before their leases end."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self._late: OrderedDict[NamespaceName, None] = OrderedDict()
        """Namespaces whose last call failed."""
        self._late_from_s = float("-inf")
        """No job of such a one goes before those of others until then."""

    def take(self) -> Waiting | None:
        if self._late and time.monotonic() < self._late_from_s:
            for at, job in enumerate(self.due):
                if _namespace_of(job) not in self._late:
                    del self.due[at]
                    return job
        return super().take()

    def called(self, name: NamespaceName, fault: Fault) -> None:
        """A call for a namespace has ended."""
        self._late.pop(name, None)
        if fault and fault not in (*ANSWERED, "existed"):
            self._late[name] = None
            self._late_from_s = time.monotonic() + LATE_EVERY_S
            if len(self._late) > LATE_MAX:
                self._late.popitem(last=False)


def _namespace_of(job: Job) -> NamespaceName | None:
    match job:
        case ReadNote() | WriteNote():
            return job.name
        case Announce() | Listen():
            return job.of
        case _:
            return None


class _Listener:
    """How far the announcements of a namespace were read."""

    def __init__(self) -> None:
        self._place: Cursor | None = None
        self._rest = b""
        """Read, and not given yet."""
        self._is_all = False
        """Whether the store had no more after the rest."""

    def read(self, store: Store, job: Listen) -> tuple[bytes, bool]:
        """The next marks, and whether there are no more. Raises StoreError."""
        if not self._rest:
            self._rest, self._place, self._is_all = store.announced(job.of, job.epoch, self._place)
        given, self._rest = self._rest[:LISTENED_BYTES_MAX], self._rest[LISTENED_BYTES_MAX:]
        return given, self._is_all and not self._rest


class _Node:
    """The state of one node of the store. Under the engine's lock."""

    known: ChunkName
    """A chunk that belongs to it, there or not: something to ask for."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self.breaker = Breaker(chance)
        self.in_flight = 0

    def is_free(self) -> bool:
        """It is of no use to wait: it may be asked, or is left alone."""
        return self.breaker.leaves_alone or self.breaker.lets_through(self.in_flight)

    def begin(self) -> bool:
        """Whether it may be asked; then it is."""
        if not self.breaker.lets_through(self.in_flight):
            return False
        self.in_flight += 1
        return True

    def ended(self, code: str, now_s: float) -> None:
        """Ends a call that has begun. code: of its StoreError, if it had one."""
        self.in_flight -= 1
        if code and code not in ANSWERED:
            self.breaker.failed(now_s)
        else:
            self.breaker.succeeded(now_s)

    def tried(self, code: str, now_s: float) -> None:
        """Ends a try of the breaker's own."""
        if code and code not in ANSWERED:
            self.breaker.try_failed(now_s)
        else:
            self.breaker.try_succeeded(now_s)
