"""The memory that the supervisor holds: the arena and its ledger, new or as an earlier start left them.

What was kept is used only when it is what would be made now: the same sizes on the same kind of pages, with a ledger
that reads as one, and no process of an earlier start that may still write to it. Anything else is given back and made
anew, and the log says why: a cache may lose, never lie.

Where they are meanwhile is a keeper's business: systemd's store, or with arena_path files. An arena and the ledger of
another one would be a lie. So new ones are kept only when the keeper has forgotten the old ones, and the ledger only
when the arena is.
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
from kvserver.supervisor.systemd import Manager
from kvserver.transfer.native import Ledger, create_memfd, free_huge_pages

END_S, POLL_S = 10.0, 0.05
BLOCK_BYTES = 512
"""Of st_blocks, whatever the file system."""


@dataclass(frozen=True, slots=True)
class Held:
    """The descriptors, and what is before and behind them."""

    arena: int
    ledger: int
    found: bool
    """An earlier start left them."""
    kept: bool
    """The next start will find them, as far as that is known."""


class Keeper(Protocol):
    """What has the memory while no server lives."""

    def take(self) -> dict[str, int]:
        """Descriptors by name; the caller's from now on."""

    def undead(self) -> str:
        """Why somebody of an earlier start may still write to what was taken; empty when nobody can."""

    def doubt(self) -> str:
        """Any other reason, known after undead() was asked, not to use what was taken."""

    def forget(self, what: str) -> bool:
        """Whether it is certain that the next start will not be passed it."""

    def create(self, what: str, size: int) -> int:
        """A descriptor of the caller's; raises OSError."""

    def keep(self, what: str, descriptor: int) -> bool:
        """Whether the next start will be passed it, as far as that is known."""

    @property
    def lasts(self) -> bool:
        """Whether it keeps anything at all."""


class DescriptorStore:
    """systemd's, for memfds; without systemd it keeps nothing."""

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

    @property
    def lasts(self) -> bool:
        return self._manager.there

    def create(self, what: str, size: int) -> int:
        return int(create_memfd(what, size, self._huge_page_bytes if what == ARENA else 0))


def hold(config: Config, manager: Manager, files: ArenaFiles | None = None) -> Held:
    """files: with arena_path; what systemd has is given back then. Raises ConfigError when the machine cannot hold the
    arena; nothing has been touched then."""
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
    return Held(arena, ledger, found, told and keeper.lasts)


def _give_back(keeper: Keeper, kept: dict[str, int]) -> bool:
    """Whether none of it will be passed to the next start."""
    forgotten = [keeper.forget(name) for name in kept]
    for name, descriptor in kept.items():
        if name in (ARENA, LEDGER):
            _empty(descriptor)
        os.close(descriptor)
    return all(forgotten)


def _empty(descriptor: int) -> None:
    """Gives the memory of a file back at once: systemd, which has it as well, closes it whenever it comes to that, and
    until then the next arena would not fit."""
    with suppress(OSError, ValueError), mmap.mmap(descriptor, 0) as mapped:
        mapped.madvise(mmap.MADV_REMOVE)


def _undead(keeper: Keeper) -> str:
    """What a driver holds may need a moment to end."""
    until = time.monotonic() + END_S
    while (others := keeper.undead()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return others


def _missing(kept: dict[str, int]) -> str:
    if kept.keys() >= {ARENA, LEDGER}:
        return ""
    return f"there is {', '.join(sorted(kept))}; expected {ARENA} and {LEDGER}"


def _problem(config: Config, kept: dict[str, int]) -> str:
    """Why what was kept cannot be used; empty when it can."""
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
    """Memory that the file takes already."""
    return os.fstat(descriptor).st_blocks * BLOCK_BYTES


def _ledger_bytes(config: Config) -> int:
    return int(Ledger.file_bytes(config.ledger_span_bytes))


def _create(keeper: Keeper, what: str, size: int) -> int:
    try:
        return keeper.create(what, size)
    except OSError as problem:
        raise ConfigError("arena-memory", f"{what} of {size} bytes cannot be made: {problem.strerror}") from problem


def _check_memory(config: Config, arena: int, files: ArenaFiles | None) -> None:
    """Refuses an arena that the machine cannot hold, before anything is touched. arena: that which is kept, or -1."""
    taken_bytes = _taken_bytes(arena) if arena >= 0 else 0
    missing_bytes = max(0, config.arena_bytes - taken_bytes)
    if files is not None:
        files.check_room({ARENA: missing_bytes, LEDGER: 0 if arena >= 0 else _ledger_bytes(config)})
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
