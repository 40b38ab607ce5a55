"""The mover process of a remote store: heads, payloads and notes, on orders of the brain.

It holds the store's connections and maps the arena, never an index. The store's calls block, so they run on threads
(remote_engine.py), and each has a deadline. A store that cannot be opened is tried again; meanwhile orders fail at
once. The process ends with the brain, as other movers do.
"""

import gc
import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Never

import msgspec

from kvserver import logs
from kvserver.config.remotes import Remote
from kvserver.errors import ConfigError
from kvserver.ipc.fd_sockets import Receiver, close_all, send
from kvserver.ipc.inheritance import Inheritance, die_with_parent
from kvserver.movers.remote_checks import digest_from
from kvserver.movers.remote_engine import (
    Announce,
    Ended,
    Fetch,
    Job,
    Listen,
    Probe,
    Put,
    ReadNote,
    RemoteEngine,
    WriteNote,
)
from kvserver.movers.remote_store import open_store
from kvserver.remote import namespace_note
from kvserver.remote.chunk_value import KEY_BYTES, ChunkName, Head, NamespaceName, decode, encode, head_bytes
from kvserver.remote.namespace_note import NamespaceNote
from kvserver.remote.objects.plugin import stuck
from kvserver.remote.secrets import safe_text
from kvserver.remote.store import Facts, Store, StoreError
from kvserver.tiers.records import NO_SUM, names_hash
from kvserver.transfer.native import Ledger
from kvserver.wire.orders import (
    ORDER_BYTES_MAX,
    WARNING_FACT,
    AnnounceRemote,
    Cancel,
    FetchRemote,
    ListenRemote,
    Order,
    ProbeRemote,
    PutRemote,
    ReadRemoteNote,
    Ready,
    RemoteEnded,
    RemoteHeard,
    RemoteIs,
    RemoteNoteRead,
    RemoteNoteWritten,
    RemoteProbed,
    Report,
    WriteRemoteNote,
    decode_order,
)
from kvserver.wire.orders import (
    encode as packed,
)

HEADS_BYTES_MAX = 300_000
"""Bytes of the heads in one report, which has to fit into ORDER_BYTES_MAX."""
NODES_TOLD_MAX = 256
"""Nodes in one RemoteIs, which has to fit into ORDER_BYTES_MAX: each name has at most 300 letters of 4 bytes."""
LEFT_OUT = "cancelled"
"""Fault of a key that a probe has left out, because its report would be too long."""
OPEN_AGAIN_S = 2.0
FACTS_AGAIN_S = 10.0
"""A store that could not tell its facts is asked for them again."""
LOOK_MS = 500
"""Time between two looks at which nodes are left alone."""
ReportOf = Callable[[Ended], Report]


class RemoteMover:
    """Turns orders into jobs of the engine, and their ends into reports."""

    def __init__(
        self,
        brain: socket.socket,
        arena: memoryview,
        remote: Remote,
        sums: Callable[[bytes, bytes], bytes | None],
        *,
        opens: Callable[[Remote], Store] = open_store,
        stuck: Callable[[], str] = stuck,
    ) -> None:
        """sums: the sums of slots by packed offsets and hash of their names, as _native.Ledger.sums has them.

        stuck: what only a new process can use again; empty if there is nothing."""
        self._brain = brain
        self._arena = arena
        self._remote = remote
        self._sums = sums
        self._opens = opens
        self._stuck = stuck
        self._receiver = Receiver(ORDER_BYTES_MAX)
        self._engine: RemoteEngine | None = None
        self._store: Store | None = None
        self._problem: tuple[str, str] | None = None
        """Code and text of why the store could not be opened; None if it is open."""
        self._open_again_s = 0.0
        self._found: Facts | None = None
        """Facts of the store, once it has told them."""
        self._are_facts_told = False
        self._asking: threading.Thread | None = None
        self._ask_again_s = 0.0
        self._reports: dict[int, ReportOf] = {}
        """Job -> what makes its report from its end."""
        self._told = RemoteIs("", [])

    def run(self) -> None:
        """Serves until the brain's end of the socket closes, or the store needs a new process."""
        self._open()
        self._tell_facts()
        self._tell_state()
        poll = select.poll()
        poll.register(self._brain, select.POLLIN)
        watched = -1
        while True:
            if self._engine is not None and watched < 0:
                watched = self._engine.eventfd
                poll.register(watched, select.POLLIN)
            for descriptor, _ in poll.poll(LOOK_MS):
                if descriptor == watched:
                    self._complete()
                elif not self._take_order():
                    return
            if name := self._stuck():
                logs.event(logging.ERROR, "mover ends", ("why", f"calls of {name} hang; the server starts it again"))
                return
            if self._engine is None and time.monotonic() >= self._open_again_s:
                self._open()
            self._tell_state()
            self._learn_facts()

    def close(self) -> None:
        """Ends the engine's threads and the connections, after the calls that are under way."""
        if self._engine is not None:
            self._engine.close()
        if self._store is not None:
            self._store.close()

    # ---------------------------------------------------------------- the store

    def _open(self) -> None:
        """Tries to open the store, and asks what it tells of itself."""
        try:
            store = self._opens(self._remote)
        except (StoreError, ConfigError) as problem:
            self._problem = problem.code, problem.message
        except Exception as problem:  # of code that others have written; this process would only end again and again
            self._problem = "remote-down", f"{type(problem).__name__}: {safe_text(problem)}"
        else:
            self._problem = None
            self._store = store
            self._engine = RemoteEngine(store, self._arena, connections=self._remote.threads)
            self._ask_facts(store)
        self._open_again_s = time.monotonic() + OPEN_AGAIN_S

    def _ask_facts(self, store: Store) -> None:
        self._ask_again_s = time.monotonic() + FACTS_AGAIN_S
        with suppress(StoreError):
            self._found = store.facts()

    def _learn_facts(self) -> None:
        """Has the brain know the facts of a store that was away at the start.

        It may still be away, and orders must not wait for it: it is asked on a thread of its own."""
        if self._store is None or self._are_facts_told:
            return
        if self._found is not None:
            self._tell_facts()
        elif time.monotonic() >= self._ask_again_s and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._ask_facts, args=(self._store,), daemon=True)
            self._asking.start()

    def _tell_facts(self) -> None:
        facts = self._found
        for warning in facts.warnings if facts is not None else ():
            logs.event(logging.WARNING, "remote warning", ("remote", self._remote.name), ("why", warning))
        self._report(Ready(os.getpid(), facts.kind if facts else self._remote.scheme, self._facts(facts)))
        self._are_facts_told = facts is not None

    def _facts(self, facts: Facts | None) -> list[tuple[str, str]]:
        found = [("remote", self._remote.name), ("url", self._remote.url), ("write", self._remote.write)]
        if facts is not None:
            evicts = {True: "yes", False: "no", None: "unknown"}[facts.evicts]
            found += [("version", safe_text(facts.version)), ("evicts", evicts)]
            found += [(f"{number} {WARNING_FACT}", safe_text(text)) for number, text in enumerate(facts.warnings, 1)]
        return found

    def _tell_state(self) -> None:
        """Reports and logs the state of the store, if it has changed."""
        alone = self._engine.left_alone() if self._engine is not None else []
        alone = [safe_text(node) for node in alone[:NODES_TOLD_MAX]]
        problem = safe_text(self._problem[1]) if self._problem is not None else ""
        now = RemoteIs(problem, alone)
        if now == self._told:
            return
        name = ("remote", self._remote.name)
        if problem and problem != self._told.problem:
            logs.event(logging.ERROR, "remote not usable", name, ("why", problem))
        elif self._told.problem and not problem:
            logs.event(logging.INFO, "remote usable again", name)
        for node in sorted(set(alone) - set(self._told.nodes_left_alone)):
            logs.event(logging.WARNING, "remote node left alone", name, ("node", node))
        for node in sorted(set(self._told.nodes_left_alone) - set(alone)):
            logs.event(logging.INFO, "remote node asked again", name, ("node", node))
        self._told = now
        self._report(now)

    # ---------------------------------------------------------------- orders

    def _take_order(self) -> bool:
        frame, descriptors, cut = self._receiver.receive(self._brain)
        assert not cut, "the brain sends no order that is longer than ORDER_BYTES_MAX"
        if not frame:
            return False
        close_all(descriptors)
        self._carry_out(decode_order(frame))
        return True

    def _carry_out(self, order: Order) -> None:
        match order:
            case ProbeRemote():
                self._probe(order)
            case FetchRemote(job, head, slots):
                fetched = decode(head)
                wanted = tuple(slot if slot >= 0 else None for slot in array("q", slots))
                self._begin(Fetch(job, self._name_of(fetched), fetched, wanted), _moved)
            case PutRemote():
                self._put(order)
            case ReadRemoteNote(job, namespace):
                name = self._namespace(namespace)
                self._begin(ReadNote(job, name), partial(_note_read, name))
            case WriteRemoteNote():
                name = self._namespace(order.namespace)
                note = namespace_note.encode(NamespaceNote(order.epoch, order.document), name)
                self._begin(WriteNote(order.job, name, note, order.replaces), _note_written)
            case AnnounceRemote(job, namespace, epoch, marks):
                self._begin(Announce(job, self._namespace(namespace), epoch, marks), _moved)
            case ListenRemote(job, namespace, epoch):
                self._begin(Listen(job, self._namespace(namespace), epoch), _heard)
            case Cancel(job):
                if self._engine is not None:
                    self._engine.cancel(job)
            case _:
                pass  # the arena grows for all movers alike

    def _put(self, order: PutRemote) -> None:
        """Begins a write, whose head gets the digests that the ledger has for its slots."""
        known, slots = decode(order.head), array("q", order.slots)
        name = self._name_of(known)
        shards = []
        for shard, slot in zip(known.shards, slots, strict=True):
            names = names_hash(known.namespace, shard.group, shard.shard, [known.key])
            packed_sum = self._sums(slot.to_bytes(8, "little", signed=True), names)
            total = int.from_bytes(packed_sum or b"", "little")
            digest = digest_from(name, shard, total) if packed_sum and total != NO_SUM else None
            if digest is None:
                self._report(RemoteEnded(order.job, "unsummed", 0))
                return
            shards.append(shard._replace(digest=digest))
        head = known._replace(shards=tuple(shards), written_s=int(time.time()))
        self._begin(Put(order.job, name, head, tuple(slots)), _moved)

    def _probe(self, order: ProbeRemote) -> None:
        keys = [order.keys[at : at + KEY_BYTES] for at in range(0, len(order.keys), KEY_BYTES)]
        asked = keys[: HEADS_BYTES_MAX // head_bytes(order.shards)]
        of = self._namespace(order.namespace)
        names = tuple(ChunkName(of, order.epoch, key) for key in asked)
        left_out = len(keys) - len(asked)

        def probed(ended: Ended) -> Report:
            heads = [b"" if head is None else encode(head) for head in ended.heads or [None] * len(asked)]
            faults = list(ended.faults) or [ended.fault] * len(asked)
            heads, faults = heads + [b""] * left_out, faults + [LEFT_OUT] * left_out
            return RemoteProbed(ended.job, heads, faults if any(faults) else [], ended.io_ns)

        self._begin(Probe(order.job, names, order.shards), probed)

    def _begin(self, job: Job, report: ReportOf) -> None:
        if self._engine is not None and self._engine.submit(job):
            self._reports[job.job] = report
            return
        code = self._problem[0] if self._problem is not None else "cancelled"
        self._report(report(Ended(job.job, code)))

    def _complete(self) -> None:
        assert self._engine is not None
        for ended in self._engine.ended():
            self._report(self._reports.pop(ended.job)(ended))

    def _namespace(self, namespace: bytes) -> NamespaceName:
        return NamespaceName(self._remote.tenant, namespace)

    def _name_of(self, head: Head) -> ChunkName:
        return ChunkName(self._namespace(head.namespace), head.epoch, head.key)

    def _report(self, report: Report) -> None:
        send(self._brain, packed(report))


def _moved(ended: Ended) -> Report:
    return RemoteEnded(ended.job, ended.fault, ended.io_ns, array("Q", ended.sums).tobytes())


def _heard(ended: Ended) -> Report:
    return RemoteHeard(ended.job, ended.fault, ended.marks, ended.is_all)


def _note_read(of: NamespaceName, ended: Ended) -> Report:
    note = namespace_note.decode(ended.note, of)
    if note is not None:
        return RemoteNoteRead(ended.job, ended.fault, "here", note.epoch, note.document)
    return RemoteNoteRead(ended.job, ended.fault, "absent" if ended.note is None else "damaged", 0, b"")


def _note_written(ended: Ended) -> Report:
    is_first = ended.fault != "existed"
    return RemoteNoteWritten(ended.job, ended.fault if is_first else "", is_first)


def main() -> Never:
    """The process `python -m kvserver.movers.remote_mover INHERITANCE`, which the supervisor starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited = msgspec.json.decode(sys.argv[1], type=Inheritance)
    die_with_parent(inherited.parent)
    config = inherited.config
    named = inherited.device_id  # empty if there is only one
    logs.start(level=config.log_level, form=config.log_format, process=f"remote mover {named}".rstrip())
    remote = next(remote for remote in config.remote_stores if not named or remote.name == named)
    arena = memoryview(mmap.mmap(inherited.arena, config.arena_bytes))
    ledger = Ledger(inherited.ledger, config.ledger_span_bytes)
    gc.freeze()
    try:
        brain = socket.socket(fileno=inherited.control)
        RemoteMover(brain, arena, remote, ledger.sums, opens=partial(open_store, arena=arena)).run()
    except (BrokenPipeError, ConnectionResetError):
        logs.event(logging.INFO, "mover ends", ("why", "the brain is gone"))
    os._exit(0)  # calls that are under way need not end: their slots are taken until this process is reaped


if __name__ == "__main__":
    main()
