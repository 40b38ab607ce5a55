"""The memory that the supervisor holds: the arena and its ledger, new or as an earlier start left them.

Kept memory is used only if it matches this configuration: the same sizes, the same kind of pages, a readable ledger,
and no process of an earlier start that may still write to it. Otherwise it is released and made anew, and the log says
why: a cache may lose chunks, but never return wrong ones.

A keeper has the memory between two starts: systemd's store, or files on a memory file system with arena_path. What
arena_path names on another medium is never kept (mapped_arena.py). A ledger describes only its own arena. So new
memory is kept only if the keeper has forgotten the old, and the ledger only if the arena is kept.
"""

import logging
import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kvserver import logs
from kvserver.config.config import PAGE_BYTES, Config
from kvserver.errors import ConfigError
from kvserver.supervisor.arena_files import ARENA, LEDGER, ArenaFiles
from kvserver.supervisor.machine_memory import RESERVE_BYTES, read_memory
from kvserver.supervisor.mapped_arena import MappedArena
from kvserver.supervisor.systemd import Manager
from kvserver.transfer.native import Ledger, create_memfd, free_huge_pages

END_S, POLL_S = 10.0, 0.05
BLOCK_BYTES = 512
"""Unit of st_blocks on every file system."""


@dataclass(frozen=True, slots=True)
class Held:
    """The descriptors of arena and ledger, and their origin."""

    arena: int
    ledger: int
    found: bool
    """Whether an earlier start left them."""


class Keeper(Protocol):
    """The owner of the memory while no server lives."""

    def take(self) -> dict[str, int]:
        """Name -> descriptor of the kept memory. The caller owns the descriptors."""

    def undead(self) -> str:
        """Why a process of an earlier start may still write to the memory; empty if none can."""

    def doubt(self) -> str:
        """Another reason not to use the memory; empty if there is none. Call undead() first."""

    def forget(self, what: str) -> bool:
        """Stops keeping a name. Whether it is certain that the next start will not get it."""

    def create(self, what: str, size: int) -> int:
        """Makes new memory. The caller owns the descriptor. Raises OSError."""

    def keep(self, what: str, descriptor: int) -> bool:
        """Keeps a descriptor. Whether the next start will get it, as far as that is known."""


class DescriptorStore:
    """The keeper of memfds in systemd's descriptor store; without systemd it keeps nothing."""

    def __init__(self, config: Config, manager: Manager) -> None:
        self._manager = manager
        self._huge_page_bytes = config.huge_page_bytes
        self._known = True
        self.take, self.forget, self.keep = manager.take, manager.forget, manager.keep

    def undead(self) -> str:
        others = self._manager.left_behind()
        self._known = others is not None
        return f"processes {others} of an earlier start have not ended, and may still write to it" if others else ""

    def doubt(self) -> str:
        if self._known:
            return ""
        return "it is not known which processes of an earlier start may still write to it: no control group is mounted"

    def create(self, what: str, size: int) -> int:
        return int(create_memfd(what, size, self._huge_page_bytes if what == ARENA else 0))


def hold(config: Config, manager: Manager, files: ArenaFiles | MappedArena | None = None) -> Held:
    """The arena and ledger, kept or new. files: the keeper with arena_path; systemd's memory is released then.

    Raises ConfigError, before any page is touched, if the machine cannot hold the arena."""
    store = DescriptorStore(config, manager)
    if files is not None and (unwanted := store.take()):
        _give_back(store, unwanted)
    keeper: Keeper = files or store
    kept = keeper.take()
    problem = (_missing(kept) or _undead(keeper) or keeper.doubt() or _problem(config, kept)) if kept else ""
    if kept and not problem:
        arena, ledger, found = kept.pop(ARENA), kept.pop(LEDGER), True
        logs.event(logging.INFO, "memory kept", ("bytes", _taken_bytes(arena)))
    else:
        arena, ledger, found = -1, -1, False
    forgotten = _give_back(keeper, kept)
    if problem:
        logs.event(logging.WARNING, "kept memory dropped", ("why", problem))
    _check_memory(config, arena, files)
    if not found:
        arena, ledger = _create(keeper, ARENA, config.arena_bytes), _create(keeper, LEDGER, _ledger_bytes(config))
    told = forgotten and keeper.keep(ARENA, arena) and keeper.keep(LEDGER, ledger)
    if not told:
        why = "systemd could not be told, so the next start of the service begins with an empty arena"
        logs.event(logging.WARNING, "memory not kept", ("why", why))
    return Held(arena, ledger, found)


def _give_back(keeper: Keeper, kept: dict[str, int]) -> bool:
    """Releases kept memory. Whether it is certain that the next start will not get it."""
    forgotten = [keeper.forget(name) for name in kept]
    for name, descriptor in kept.items():
        if name in (ARENA, LEDGER):
            _empty(descriptor)
        os.close(descriptor)
    return all(forgotten)


def _empty(descriptor: int) -> None:
    """Frees the memory of a file at once: systemd closes its descriptor later, and the next arena needs the room."""
    with suppress(OSError, ValueError), mmap.mmap(descriptor, 0) as mapped:
        mapped.madvise(mmap.MADV_REMOVE)


def _undead(keeper: Keeper) -> str:
    """Waits up to END_S for undead() to become empty: a process with a GPU driver may need a moment to end."""
    until = time.monotonic() + END_S
    while (others := keeper.undead()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return others


def _missing(kept: dict[str, int]) -> str:
    if kept.keys() >= {ARENA, LEDGER}:
        return ""
    return f"there is {', '.join(sorted(kept))}; expected {ARENA} and {LEDGER}"


def _problem(config: Config, kept: dict[str, int]) -> str:
    """Why the kept memory cannot be used; empty if it can."""
    page_bytes = os.fstatvfs(kept[ARENA]).f_bsize
    if page_bytes != (config.huge_page_bytes or PAGE_BYTES):
        return f"it is on pages of {page_bytes} bytes, huge_page_bytes={config.huge_page_bytes}"
    sizes = {ARENA: config.arena_bytes, LEDGER: _ledger_bytes(config)}
    for name, size in sizes.items():
        came = os.fstat(kept[name]).st_size
        if came != size:
            return f"{name} has {came} bytes, this configuration makes {size}"
    try:
        Ledger(kept[LEDGER], config.ledger_span_bytes)
    except (OSError, ValueError) as error:
        return f"its ledger cannot be read: {error}"
    return ""


def _taken_bytes(descriptor: int) -> int:
    """Bytes of memory that the file takes already."""
    return os.fstat(descriptor).st_blocks * BLOCK_BYTES


def _ledger_bytes(config: Config) -> int:
    return int(Ledger.file_bytes(config.ledger_span_bytes))


def _create(keeper: Keeper, what: str, size: int) -> int:
    try:
        return keeper.create(what, size)
    except OSError as problem:
        raise ConfigError("arena-memory", f"{what} of {size} bytes cannot be made: {problem.strerror}") from problem


def _check_memory(config: Config, arena: int, files: ArenaFiles | MappedArena | None) -> None:
    """Raises ConfigError if the machine cannot hold the arena, before a page is touched. arena: the kept one, or -1."""
    taken_bytes = _taken_bytes(arena) if arena >= 0 else 0
    missing_bytes = max(0, config.arena_bytes - taken_bytes)
    if files is not None:
        files.check_room({ARENA: missing_bytes, LEDGER: 0 if arena >= 0 else _ledger_bytes(config)})
        missing_bytes = missing_bytes if files.takes_memory else 0
    if config.huge_page_bytes:
        free = free_huge_pages(config.huge_page_bytes) * config.huge_page_bytes
        if free < missing_bytes:
            raise ConfigError(
                "arena-memory",
                f"arena_bytes={config.arena_bytes} needs as much in free huge pages of {config.huge_page_bytes} bytes, "
                f"there are {free + taken_bytes}",
            )
        return
    memory = read_memory()
    if not memory.fits(missing_bytes):
        raise ConfigError(
            "arena-memory",
            f"arena_bytes={config.arena_bytes} and {RESERVE_BYTES} beside it exceed the "
            f"{memory.available_bytes + taken_bytes} bytes of memory that are free",
        )
