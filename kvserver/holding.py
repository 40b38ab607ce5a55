"""The memory that the supervisor holds: the arena and its ledger, new or as an earlier start left them.

What was kept is used only when it is what would be made now: the same sizes on the same kind of pages, with a ledger
that reads as one, and no process of an earlier start that may still write to it. Anything else is given back and made
anew, and the log says why: a cache may lose, never lie.

An arena and the ledger of another one would be a lie. So new ones are kept only when systemd was told to forget the old
ones, and the ledger only when the arena is.
"""

import logging
import mmap
import os
import time
from contextlib import suppress
from typing import NamedTuple

from kvserver import logs
from kvserver.config import PAGE_BYTES, Config
from kvserver.errors import ConfigError
from kvserver.memory import RESERVE_BYTES, read_memory
from kvserver.systemd import Manager
from kvserver.transfer.engines import Ledger, create_memfd, free_huge_pages

ARENA, LEDGER = "kvserver-arena", "kvserver-ledger"
END_S, POLL_S = 10.0, 0.05
BLOCK_BYTES = 512
"""Of st_blocks, whatever the file system."""


class Held(NamedTuple):
    """Descriptors."""

    arena: int
    ledger: int


def hold(config: Config, manager: Manager) -> Held:
    """Raises ConfigError when the machine cannot hold the arena; nothing has been touched then."""
    kept = manager.take()
    problem = _problem(config, kept, _left_behind(manager)) if kept else ""
    if kept and not problem:
        held = Held(kept.pop(ARENA), kept.pop(LEDGER))
        logs.event(logging.INFO, "memory kept", ("bytes", _taken_bytes(held.arena)))
    else:
        held = None
    forgotten = [manager.forget(name) for name in kept]
    for name, descriptor in kept.items():
        if name in (ARENA, LEDGER):
            _empty(descriptor)
        os.close(descriptor)
    if problem:
        logs.event(logging.WARNING, "kept memory dropped", ("why", problem))
    _check_memory(config, _taken_bytes(held.arena) if held is not None else 0)
    if held is None:
        held = Held(
            _create(ARENA, config.arena_bytes, config.huge_page_bytes),
            _create(LEDGER, Ledger.file_bytes(config.ledger_span_bytes), 0),
        )
    if not (all(forgotten) and manager.keep(ARENA, held.arena) and manager.keep(LEDGER, held.ledger)):
        why = "systemd could not be told, so the next start of the service begins with an empty arena"
        logs.event(logging.WARNING, "memory not kept", ("why", why))
    return held


def _empty(descriptor: int) -> None:
    """Gives the memory of a file back at once: systemd, which has it as well, closes it whenever it comes to that, and
    until then the next arena would not fit."""
    with suppress(OSError, ValueError), mmap.mmap(descriptor, 0) as mapped:
        mapped.madvise(mmap.MADV_REMOVE)


def _left_behind(manager: Manager) -> list[int] | None:
    """Processes of an earlier start that do not end. What a driver holds may need a moment."""
    until = time.monotonic() + END_S
    while (others := manager.left_behind()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return others


def _problem(config: Config, kept: dict[str, int], left_behind: list[int] | None) -> str:
    """Why what was kept cannot be used; empty when it can."""
    if not kept.keys() >= {ARENA, LEDGER}:
        return f"there is {', '.join(sorted(kept))}; expected {ARENA} and {LEDGER}"
    if left_behind is None:
        return "it is not known which processes of an earlier start may still write to it: no control group is mounted"
    if left_behind:
        return f"processes {left_behind} of an earlier start have not ended, and may still write to it"
    page_bytes = os.fstatvfs(kept[ARENA]).f_bsize
    if page_bytes != (config.huge_page_bytes or PAGE_BYTES):
        return f"it is on pages of {page_bytes} bytes, huge_page_bytes={config.huge_page_bytes}"
    sizes = {ARENA: config.arena_bytes, LEDGER: Ledger.file_bytes(config.ledger_span_bytes)}
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


def _create(name: str, size: int, huge_page_bytes: int) -> int:
    try:
        return int(create_memfd(name, size, huge_page_bytes))
    except OSError as problem:
        raise ConfigError("arena-memory", f"{name} of {size} bytes cannot be made: {problem.strerror}") from problem


def _check_memory(config: Config, taken_bytes: int) -> None:
    """Refuses an arena that the machine cannot hold, before anything is touched. taken_bytes: it has these already."""
    missing_bytes = max(0, config.arena_bytes - taken_bytes)
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
