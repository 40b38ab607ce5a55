"""Clears that have begun and are not answered yet."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from kvserver.errors import DeviceError
from kvserver.index.space import Space
from kvserver.index.subtrees import Cut
from kvserver.service.base.effects import GoOn
from kvserver.service.base.timers import Timers
from kvserver.service.holdings.chunks import Chunks
from kvserver.service.state.outbox import Outbox
from kvserver.wire.admin import TenantCleared
from kvserver.wire.messages import Cleared


@dataclass(slots=True, eq=False, kw_only=True)
class Clear:
    """A clear whose caller is answered when its notes are durable and its chunks have left the index."""

    number: int
    """Number of its timer."""
    peer: int
    done: Cleared | TenantCleared
    """The answer for the caller."""
    spaces: list[Space]
    """Cleared namespaces, and cleared parts of them, whose chunks may still be leaving the index."""
    left: dict[bytes, int] = field(default_factory=dict)
    """Note -> the generation up to which records must become void. These notes are not durable yet. 0 until it is known
    what is on disk."""
    cut: Cut | None = None
    """The prefix that was cleared. How many chunks it had is known when they have gone."""
    stores: set[tuple[str, bytes]] = field(default_factory=set)
    """(remote store, namespace) of each clear that a store has not confirmed yet."""
    why: str = ""
    """Why some of the notes are not durable, or a remote store does not know; empty: all is well."""
    code: Literal["disk-clear", "remote-clear"] = "disk-clear"
    """Code of the refusal, if there is a `why`."""

    def await_notes(self, notes: Iterable[bytes]) -> None:
        self.left = dict.fromkeys(notes, 0)

    def note_says(self, note: bytes, void: int) -> None:
        """The note is written, and makes records void up to this generation. An earlier one of that clear counts."""
        self.left[note] = self.left[note] or void

    def is_kept_by(self, note: bytes, void: int) -> bool:
        """A durable note up to that generation is enough."""
        return 0 < self.left[note] <= void

    def note_ended(self, note: bytes) -> bool:
        """It waits for this note no more. Returns whether it waits for none."""
        del self.left[note]
        return not self.left

    def await_store(self, store: str, namespace: bytes) -> None:
        """A remote store has to confirm that the namespace was cleared."""
        self.stores.add((store, namespace))

    def store_knows(self, store: str, namespace: bytes) -> bool:
        """A remote store has confirmed it. Returns whether all of them have."""
        self.stores.discard((store, namespace))
        return not self.stores

    def leave_stores(self) -> None:
        """Waits for remote stores no more."""
        names = ", ".join(sorted({name for name, _ in self.stores if name}))
        self.stores.clear()
        what = f"the remote store {names}" if names else "the remote store"
        self.why, self.code = f"{what} has not confirmed it in time; it is told when it can be", "remote-clear"

    def fail(self, why: str) -> None:
        self.why = why

    @property
    def answer(self) -> Cleared | TenantCleared:
        return self.done if self.cut is None else replace(self.done, chunks=self.cut.chunks)


class Clears:
    """All of them. Their chunks leave the index in pieces, one for each GoOn."""

    def __init__(self, out: Outbox, timers: Timers, chunks: Chunks) -> None:
        self._out = out
        self._timers = timers
        self._chunks = chunks
        self.waiting: list[Clear] = []
        """Those that wait only until their chunks have left the index, and the remote stores know."""
        self._is_asked = False
        """A GoOn is under way."""

    def end(self, clear: Clear) -> None:
        """Ends a clear: all its notes are durable, or it stops waiting. Without a durable note the chunks are gone from
        memory, but they may return if the whole server restarts before the devices could be told."""
        self._timers.cancel("clear", clear.number)
        if clear.stores or any(space in self._chunks.forgetting for space in clear.spaces):
            self.waiting.append(clear)
            return
        done, why = clear.answer, clear.why
        if not why:
            self._out.answer(clear.peer, done)
            return
        self._out.log("clear not durable", ("chunks", done.chunks), ("why", why), level=logging.WARNING)
        self._out.refuse(clear.peer, done.id, DeviceError(clear.code, f"cleared in memory; {why}"))

    def go_on(self) -> None:
        """Forgets some more chunks of cleared namespaces."""
        self._is_asked = False
        self._chunks.forget_some()

    def turn(self) -> None:
        """Answers the clears whose chunks are all gone, and asks for GoOn while others are left. Called at the end of
        an event while there are any."""
        waiting, self.waiting = self.waiting, []
        for clear in waiting:
            self.end(clear)
        if self._chunks.forgetting and not self._is_asked:
            self._is_asked = True
            self._out.emit(GoOn())
