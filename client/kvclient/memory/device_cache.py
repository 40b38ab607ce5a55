"""The GPU part of a cache: exported memory, staging with its ring, and events that jobs wait for.

register_cache() creates it in the caller's thread, where the driver may be asked for memory. Afterwards it belongs to
the loop's thread. The staging memory outlives registrations; each registration gets a new ring.

Rule 1: a ring begins only when nothing of an earlier ring can still move: no kernel of ours, and no retrieve of an
earlier mover, which writes into the same staging memory.

Rule 2: the staging memory is freed only when the server has let it go. Otherwise it stays until the process ends.
"""

import itertools
import logging
import os

from msgspec.structs import astuple

from kvclient.base.loop import Loop, Lost, Trouble, Waiter
from kvclient.memory.device import EventWatch, StagedCopier, event_watch, export, staged_copier
from kvclient.values import CacheSpec
from kvserver.errors import RequestError
from kvserver.wire.messages import STAGING_SEGMENTS, Staging

log = logging.getLogger(__name__)

RETRIEVE_LANE = 1
POLL_S = 0.001
POLL_S_MAX = 0.02

_kept: list[StagedCopier] = []
"""Copiers whose memory a mover may still have mapped."""


class DeviceCache:
    """The GPU part of one Cache. `memory` is registered with the server."""

    def __init__(self, spec: CacheSpec) -> None:
        """RequestError if the memory cannot be exported or staging is not available."""
        self.memory = export(spec)
        self._spec = spec
        self._copier = staged_copier(spec, self.memory) if spec.chosen_mode == "staged" else None
        self._loop: Loop | None = None
        self._ring = -1
        self._retrieves = 0
        self._watch: EventWatch | None = None
        self._tickets = itertools.count(1)
        self._awaited: dict[int, tuple[Waiter, object]] = {}
        """Ticket -> waiter, and the event's owner, which must live until the watch has seen the event's end."""
        if self._copier is not None:
            _log_staging(spec, self._copier)

    def attach(self, loop: Loop) -> None:
        """Hand over to the loop's thread."""
        self._loop = loop
        if self._copier is not None:
            loop.watch(self._copier.eventfd, self._copier_changed)

    # ---------------------------------------------------------------- registrations

    def begin_ring(self) -> list[int]:
        """Begin a new ring if the mode has one. Returns the descriptors to offer, which stay ours. Only while
        `free`."""
        if self._copier is None:
            return []
        if self._copier.broken:
            raise RequestError("driver", f"staging of cache {self._spec.name!r}: {self._copier.broken}")
        groups = [
            (self._spec.chunk_tokens // group.block_tokens, group.blocks, [astuple(run) for run in group.regions])
            for group in self.memory.groups
        ]
        sizes = [buffer.bytes for buffer in self.memory.buffers]
        self._ring = self._copier.begin_ring(groups, self.memory.bases, sizes)
        return [self._ring]

    def staging(self, offered: list[int]) -> list[Staging]:
        if self._copier is None:
            return []
        return [Staging(self._copier.handle, self._copier.segment_bytes, offered[0])]

    def end_ring(self) -> None:
        """Take nothing more from the ring, because the mover is gone or the cache is unregistered."""
        self._ring = -1  # closed by the copier, and its number is soon another descriptor's
        if self._copier is not None:
            self._copier.end_ring()

    @property
    def free(self) -> bool:
        """Whether a new ring may begin, or everything may be released."""
        return self._retrieves == 0 and (self._copier is None or self._copier.quiet)

    def close(self, *, let_go: bool) -> None:
        """Release the memory and the events. let_go: the server has nothing of it mapped any more."""
        watch, self._watch = self._watch, None
        if watch is not None and self._loop is not None:
            self._loop.unwatch(watch.eventfd)  # its number is soon reused for another descriptor
            for waiter, _ in self._awaited.values():  # nobody else will settle them
                self._loop.fail(waiter, Lost("closed"))
        copier, self._copier = self._copier, None
        if copier is None:
            return
        copier.end_ring()
        if self._loop is not None:
            self._loop.unwatch(copier.eventfd)
        if not (let_go and copier.quiet):
            _kept.append(copier)

    def forsake_after_fork(self) -> None:
        """Close only the ring, in a forked child. The driver must not be used there, and the native threads know it."""
        if self._copier is not None and self._ring >= 0:
            os.close(self._ring)

    # ---------------------------------------------------------------- jobs

    def retrieve_begins(self) -> None:
        self._retrieves += 1

    def retrieve_ended(self) -> None:
        self._retrieves -= 1

    async def untouched(self, loop: Loop, *, mover_gone: bool) -> None:
        """Wait until no kernel of ours writes the blocks of a retrieve whose word ended without success."""
        if self._copier is None:
            return
        if mover_gone:
            self._copier.end_ring()  # its last requests were never withdrawn
        copier, mark, pause_s = self._copier, self._copier.mark(RETRIEVE_LANE), POLL_S
        while not copier.passed(RETRIEVE_LANE, mark):
            await loop.pause(pause_s)
            pause_s = min(POLL_S_MAX, pause_s * 2)

    # ---------------------------------------------------------------- events

    async def happened(self, event: object, due_s: float) -> None:
        """Wait until an event of the engine is done. Trouble("device-error") if the driver says that it failed."""
        assert self._loop is not None
        if self._watch is None:
            await self._loop.own_thread()
        if self._watch is None:
            self._watch = event_watch(self._spec, self.memory)
            self._loop.watch(self._watch.eventfd, self._events_changed)
        ticket, waiter = next(self._tickets), Waiter(due_s)
        self._awaited[ticket] = waiter, event
        self._watch.watch(ticket, event_handle(event))
        if not await waiter:
            raise Trouble("device-error", "the event that the job was to wait for has failed")

    def _events_changed(self) -> None:
        assert self._loop is not None
        assert self._watch is not None
        os.eventfd_read(self._watch.eventfd)
        for ticket, ok in self._watch.completed():
            waiter, _ = self._awaited.pop(ticket)
            self._loop.settle(waiter, ok)

    def _copier_changed(self) -> None:
        assert self._copier is not None
        os.eventfd_read(self._copier.eventfd)
        if self._copier.broken:
            log.error("staging ended name=%s %s", self._spec.name, self._copier.broken)


def event_handle(event: object) -> int:
    """Handle of a driver's event: the number itself, or that of a torch.cuda.Event. RequestError if it is neither."""
    handle = event if isinstance(event, int) else getattr(event, "cuda_event", None)
    if isinstance(handle, int) and handle > 0:
        return handle
    raise RequestError("after", f"{event!r} is no event that was recorded; expected its address or a torch.cuda.Event")


def _log_staging(spec: CacheSpec, copier: StagedCopier) -> None:
    provider, arch, note = copier.kernels
    taken = copier.segment_bytes * STAGING_SEGMENTS
    level = logging.WARNING if note or taken < spec.staging_bytes else logging.INFO
    log.log(level, "staging taken name=%s bytes=%d kernels=%s arch=%s %s", spec.name, taken, provider, arch, note)
