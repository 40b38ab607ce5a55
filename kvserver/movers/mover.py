"""The mover process of the host or of one GPU: copies between registered pools and the arena, on orders of the brain.

It holds the mappings, never an index. It ends with the brain (end of its socket), with the supervisor, and at the
driver's first failure on the data path: the results of copies in a broken GPU context are unknown.
"""

import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from array import array
from typing import Never

import msgspec

from kvserver import logs
from kvserver.errors import DeviceError
from kvserver.ipc.fd_sockets import Receiver, close_all, send
from kvserver.ipc.inheritance import Inheritance, die_with_parent
from kvserver.movers.scrubbing import Scrubbing
from kvserver.transfer.device import open_device
from kvserver.transfer.native import (
    NO_DIGEST,
    Completion,
    CopyEngine,
    CopyGroup,
    DeviceEngine,
    Ledger,
    completions,
    copy_groups,
    groups,
)
from kvserver.transfer.self_test import self_test
from kvserver.wire.messages import BOARD_WORDS
from kvserver.wire.orders import (
    ORDER_BYTES_MAX,
    ArenaReady,
    Cancel,
    Copy,
    Done,
    DropBoard,
    MapBoard,
    MapCache,
    MapFailed,
    Mapped,
    Order,
    Ready,
    Report,
    Scrub,
    UnmapCache,
    Unmapped,
    decode_order,
    encode,
)

COMPLETIONS_PER_TURN = 64
SLOT_BYTES = 8
ENDS_OF_CACHES = "mapped", "refused", "unmapped"
"""Completions whose subject is a cache. Caches and jobs are numbered apart."""
NO_DEVICE = 3
"""Exit status of a mover whose device cannot be used, or no longer."""


class Mover(ABC):
    """Turns orders into calls of an engine, and completions into reports. Subclasses know the kind of engine."""

    linger_s = 0.0
    """Time that it polls after an order or a completion before it sleeps."""

    def __init__(
        self,
        brain: socket.socket,
        engine: CopyEngine | DeviceEngine,
        facts: list[tuple[str, str]],
        ledger: Ledger | None,
        scrubbing: Scrubbing | None = None,
    ) -> None:
        """ledger: the sums of what is stored; None without digests."""
        self._brain = brain
        self._ledger = ledger
        self._scrubbing = scrubbing or Scrubbing()
        self._unverified: dict[int, int] = {}
        """Retrieve -> its shards whose sum is not known."""
        self._engine = engine
        self._facts = facts
        self._receiver = Receiver(ORDER_BYTES_MAX)

    def run(self) -> None:
        """Serves until the brain's end of the socket closes."""
        self._report(Ready(os.getpid(), self._engine.backend, self._facts))
        poll = select.poll()
        poll.register(self._brain, select.POLLIN)
        poll.register(self._engine.eventfd, select.POLLIN)
        if self._scrubbing.eventfd >= 0:
            poll.register(self._scrubbing.eventfd, select.POLLIN)
        busy_until_s = 0.0
        while True:
            readable = poll.poll(0)
            if not readable:
                if time.monotonic() < busy_until_s:
                    continue
                readable = poll.poll()
            busy_until_s = time.monotonic() + self.linger_s
            for descriptor, _ in readable:
                if descriptor == self._engine.eventfd:
                    self._complete()
                elif descriptor == self._scrubbing.eventfd:
                    for report in self._scrubbing.reports():
                        self._report(report)
                elif not self._take_order():
                    return

    def _take_order(self) -> bool:
        frame, descriptors, cut = self._receiver.receive(self._brain)
        assert not cut, "the brain sends no order that is longer than ORDER_BYTES_MAX"
        if not frame:
            return False
        try:
            self._carry_out(decode_order(frame), descriptors)
        finally:
            close_all(descriptors)
        return True

    def _carry_out(self, order: Order, descriptors: list[int]) -> None:
        match order:
            case Copy():
                self._begin(order)
            case Cancel(job):
                self._engine.cancel(job)
            case MapBoard(session):
                self._engine.map_board(session, descriptors[0], BOARD_WORDS)
            case DropBoard(session):
                self._engine.drop_board(session)
            case MapCache():
                self._map(order, descriptors)
            case UnmapCache(cache):
                self._unmap_cache(cache)
            case ArenaReady(slabs):
                self._arena_ready(slabs)
            case Scrub():
                self._scrubbing.begin(order)

    def _begin(self, order: Copy) -> None:
        """Submits a copy, a retrieve with the sums that it must come to."""
        copies = copy_groups(order)
        if self._ledger is not None and order.kind == "retrieve":
            sums = [self._ledger.sums(group.slots, group.names) for group in order.groups]
            if None in sums:
                self._report(_other_names(order, sums.index(None)))
                return
            copies = [copy._replace(sums=known or b"") for copy, known in zip(copies, sums, strict=True)]
            if unknown := sum(array("Q", copy.sums).count(NO_DIGEST) for copy in copies):
                self._unverified[order.job] = unknown
        self._submit(order, copies)

    def _map(self, order: MapCache, descriptors: list[int]) -> None:
        try:
            self._map_cache(order, descriptors)
        except ValueError as refusal:
            code, _, message = str(refusal).partition(": ")
            self._report(MapFailed(cache=order.cache, code=code, message=message))
        except OSError as problem:
            self._report(MapFailed(cache=order.cache, code="descriptor", message=f"cannot be mapped: {problem}"))

    @abstractmethod
    def _submit(self, order: Copy, copies: list[CopyGroup]) -> None: ...

    @abstractmethod
    def _map_cache(self, order: MapCache, descriptors: list[int]) -> None:
        """Maps a cache. Raises ValueError("code: message") or OSError if it is refused at once."""

    @abstractmethod
    def _unmap_cache(self, cache: int) -> None:
        """Unmaps a cache, which may never have been mapped: our refusal and the brain's order can cross."""

    @abstractmethod
    def _arena_ready(self, slabs: int) -> None: ...

    def _complete(self) -> None:
        os.eventfd_read(self._engine.eventfd)
        while True:
            ends = completions(self._engine, COMPLETIONS_PER_TURN)
            for end in ends:
                unverified = 0 if end.status in ENDS_OF_CACHES else self._unverified.pop(end.subject, 0)
                self._report(_as_report(end, unverified))
            if len(ends) < COMPLETIONS_PER_TURN:
                return

    def _report(self, report: Report) -> None:
        send(self._brain, encode(report))


class HostMover(Mover):
    """The mover of the host. Its engine maps caches synchronously."""

    _engine: CopyEngine

    def __init__(
        self, brain: socket.socket, engine: CopyEngine, ledger: Ledger | None, scrubbing: Scrubbing | None = None
    ) -> None:
        super().__init__(brain, engine, [], ledger, scrubbing)
        self._mapped: set[int] = set()

    def _submit(self, order: Copy, copies: list[CopyGroup]) -> None:
        digests = self._ledger is not None
        self._engine.submit(order.job, order.kind, order.cache, order.word, order.generation, copies, digests=digests)

    def _map_cache(self, order: MapCache, descriptors: list[int]) -> None:
        sizes = [buffer.bytes for buffer in order.buffers]
        self._engine.map_cache(order.cache, order.session, descriptors, sizes, groups(order))
        self._mapped.add(order.cache)
        self._report(Mapped(order.cache))

    def _unmap_cache(self, cache: int) -> None:
        if cache in self._mapped:
            self._mapped.remove(cache)
            self._engine.unmap_cache(cache)

    def _arena_ready(self, slabs: int) -> None:
        raise AssertionError(f"the host reaches all of the arena, slabs={slabs} came")


class DeviceMover(Mover):
    """The mover of a GPU. Its engine maps caches in the background and reports the end as a completion."""

    linger_s = 0.001
    """Same as in the engine's threads: 32 MiB take 0.6 ms, and waking up takes 0.1 to 0.2 ms on an idle machine."""
    _engine: DeviceEngine

    def __init__(
        self, brain: socket.socket, engine: DeviceEngine, ledger: Ledger | None, scrubbing: Scrubbing | None = None
    ) -> None:
        super().__init__(brain, engine, engine.facts, ledger, scrubbing)

    def _submit(self, order: Copy, copies: list[CopyGroup]) -> None:
        where = order.cache, order.word, order.generation
        digests = self._ledger is not None
        self._engine.submit(order.job, order.kind, *where, copies, order.mode, digests=digests)

    def _map_cache(self, order: MapCache, descriptors: list[int]) -> None:
        buffers = [(buffer.handle, buffer.bytes) for buffer in order.buffers]
        staging = [(brought.handle, brought.segment_bytes, descriptors[0]) for brought in order.staging]
        self._engine.map_cache(
            order.cache, order.session, buffers, staging[0] if staging else None, order.ipc_mode, groups(order)
        )

    def _unmap_cache(self, cache: int) -> None:
        self._engine.unmap_cache(cache)

    def _arena_ready(self, slabs: int) -> None:
        self._engine.arena_ready(slabs)


def _other_names(order: Copy, group: int) -> Done:
    """The end of a retrieve whose slots hold other chunks than the brain says."""
    slots = [len(copied.slots) // SLOT_BYTES for copied in order.groups]
    wrong = range(sum(slots[:group]), sum(slots[: group + 1]))
    return Done(
        job=order.job,
        status="failed",
        bytes=0,
        copy_ns=0,
        code="digest",
        message="the ledger has other chunks at these places",
        mode=order.mode,
        wrong=tuple(wrong),
    )


def _as_report(end: Completion, unverified: int) -> Report:
    """The report for a completion. Raises DeviceError when the device is broken."""
    match end.status:
        case "mapped":
            return Mapped(end.subject)
        case "refused":
            return MapFailed(cache=end.subject, code=end.code, message=end.message)
        case "unmapped":
            return Unmapped(end.subject)
        case "broken":
            raise DeviceError(end.code, end.message)
        case status:
            return Done(
                job=end.subject,
                status=status,
                bytes=end.bytes,
                copy_ns=end.copy_ns,
                code=end.code,
                message=end.message,
                mode=end.mode,
                sums=end.sums,
                wrong=tuple(end.wrong),
                unverified=unverified,
            )


def _open(inherited: Inheritance, brain: socket.socket) -> Mover:
    """A mover whose engine has passed its self-test. Raises DeviceError."""
    config = inherited.config
    ledger = Ledger(inherited.ledger, config.ledger_span_bytes) if config.digests == "on" else None
    scrubbing = Scrubbing(inherited)
    if inherited.device == "host":
        self_test()
        return HostMover(brain, CopyEngine(inherited.arena, config.arena_bytes, config.copy_threads), ledger, scrubbing)
    assert inherited.device != "disk"
    assert inherited.device != "remote"
    engine = open_device(inherited.device, inherited.device_id, inherited.arena, config)
    if note := dict(engine.facts)["kernels-note"]:
        logs.event(logging.WARNING, "kernels built in", ("why", " ".join(note.split())))
    return DeviceMover(brain, engine, ledger, scrubbing)


def main() -> Never:
    """The process `python -m kvserver.movers.mover INHERITANCE`, which the supervisor starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited = msgspec.json.decode(sys.argv[1], type=Inheritance)
    die_with_parent(inherited.parent)
    config = inherited.config
    logs.start(level=config.log_level, form=config.log_format, process=f"mover {inherited.mover}")
    gc.freeze()
    try:
        _open(inherited, socket.socket(fileno=inherited.control)).run()
    except (BrokenPipeError, ConnectionResetError):
        logs.event(logging.INFO, "mover ends", ("why", "the brain is gone"))
    except DeviceError as problem:
        logs.event(logging.ERROR, "mover ends", ("why", problem.message), ("code", problem.code))
        os._exit(NO_DEVICE)  # without cleanup, since a broken driver may hang in it
    os._exit(0)  # running copies need not end: their clients are told that this process is gone


if __name__ == "__main__":
    main()
