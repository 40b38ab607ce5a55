"""`kvserver top`: the activity of a running server over time, as a screen on a terminal, else as a line per turn.

A server that does not answer is asked again for GIVE_UP_S, since a brain that died is back within seconds. Names of
engines and devices are shown as they are, never interpreted as markup.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvserver.cli.rates import Between, History
from kvserver.cli.status_text import headline, movers, remote_said
from kvserver.errors import ResourceError
from kvserver.service.telling.counters import DIRECTIONS
from kvserver.units import duration, percent, rate, size, table
from kvserver.wire.status import Status

GIVE_UP_S = 30.0
NOW_S = 5.0
"""Period for which rates "now" are measured."""
LATELY_S = 300.0
"""Period for which hit rates are measured and troubles are shown."""
TRACE = 40
"""Number of turns shown by a line of small bars."""

LEVELS = " ▁▂▃▄▅▆▇█"
BAR = 30


def top(
    ask: Callable[[], Status | None],
    console: Console | None = None,
    *,
    refresh_s: float,
    turns: int = 0,
    wait: Callable[[float], object] = time.sleep,
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Shows the status that `ask` returns (None: no answer), each turn, until `turns` are over; 0: endless.

    Writes to standard output if no console is given. Raises ResourceError after GIVE_UP_S without an answer."""
    view = View()
    console = console or Console()
    with ExitStack() as stack:
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        answered_s, turn = clock_s(), 0
        while True:
            status, silent_s = ask(), None
            if status is not None:
                view.add(status)
                answered_s = clock_s()
            else:
                silent_s = clock_s() - answered_s
                if silent_s >= GIVE_UP_S:
                    raise ResourceError("server-absent", f"no server has answered for {GIVE_UP_S:g} s")
            if live is not None:
                live.update(view.screen(silent_s), refresh=True)
            else:
                for line in view.lines(silent_s):
                    console.print(Text(f"{time.strftime('%H:%M:%S')}  {line}"), soft_wrap=True)
            turn += 1
            if turn == turns:
                return
            wait(refresh_s)


class View:
    """The status documents seen so far, shown as a screen or as lines."""

    def __init__(self) -> None:
        self._history = History(LATELY_S)
        self._hit_shares: list[float] = []
        self._moved: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        self._alarms: list[str] = []
        self._brain = 0
        """lines() has printed these alarms, and the name of the brain with this incarnation."""

    def add(self, status: Status) -> None:
        self._history.add(status)
        now = self._history.lately(NOW_S)
        if now.seconds == 0:  # the first document of a brain says nothing of rates
            return
        self._hit_shares.append(_share(now.grown("lookup_tokens_hit"), now.grown("lookup_tokens_asked")))
        del self._hit_shares[:-TRACE]
        for direction, rates in self._moved.items():
            rates.append(now.per_s("moved_bytes", direction))
            del rates[:-TRACE]

    def lines(self, silent_s: float | None) -> Iterator[str]:
        """The lines of one turn: new alarms, then one line of figures.

        silent_s: seconds without an answer; None: the server answers."""
        status = self._history.last
        if silent_s is not None or status is None:
            yield f"no answer for {silent_s or 0:.0f} s"
            return
        now = self._history.lately(NOW_S)
        alarms = [*status.warnings, *now.troubles()]
        yield from (f"WARNING: {alarm}" for alarm in alarms if alarm not in self._alarms)
        self._alarms = alarms
        if status.incarnation != self._brain:
            self._brain = status.incarnation
            yield headline(status)
            return
        parts = [f"hits {now.tokens_of()}", *(f"{result} {now.tokens_of(result)}" for result in ("dram", "disk"))]
        parts.append(f"lookups {now.per_s('lookups'):.3g}/s")
        parts += [f"{direction} {rate(rates[-1] if rates else 0)}" for direction, rates in self._moved.items()]
        parts.append(f"arena {percent(status.arena.used_bytes, status.arena.total_bytes)}")
        parts += [f"disk{disk.device} {percent(disk.used_bytes, disk.total_bytes)}" for disk in status.disks]
        for remote in status.remotes:
            per_s = partial(now.per_s_in, remote.name)
            moved = f"{rate(per_s('read_bytes'))} in, {rate(per_s('written_bytes'))} out"
            name = f"remote {remote.name}" if status.other_remotes else "remote"
            parts.append(f"{name} {moved if remote.usable else 'not usable'}")
        parts.append(f"sessions {status.sessions}")
        parts.append(f"jobs {status.stores + status.retrieves}")
        yield "  ".join(parts)

    def screen(self, silent_s: float | None) -> Group:
        """The whole screen, most important first: the terminal cuts what does not fit at the bottom."""
        status = self._history.last
        if status is None:
            return Group(Text("no answer yet", "bold red"))
        return Group(
            *self._head(status, silent_s),
            *self._traffic(status),
            *_tiers(status),
            *self._remote(status),
            *_tables(status),
        )

    def _head(self, status: Status, silent_s: float | None) -> Iterator[Text]:
        yield Text(headline(status), "bold")
        if silent_s is not None:
            yield Text(f"no answer for {silent_s:.0f} s; what follows is the last that was said", "bold red")
        yield from (Text(warning, "red") for warning in status.warnings)
        seen = self._history.lately(LATELY_S)
        for words, count in seen.troubles().items():
            yield Text(f"{count:,} {words} (last {duration(seen.seconds)})", "yellow")
        yield Text()

    def _traffic(self, status: Status) -> Iterator[Text]:
        seen, now = self._history.lately(LATELY_S), self._history.lately(NOW_S)
        yield _hits(seen, status, self._hit_shares)
        yield Text(
            f"{'requests':10}{now.per_s('lookups'):.3g} lookups/s, {now.per_s('stores'):.3g} stores/s, "
            f"{now.per_s('retrieves'):.3g} retrieves/s; {status.stores + status.retrieves} jobs, "
            f"{status.leases} leases, {status.pins} pins"
        )
        for direction, rates in self._moved.items():
            if status.disk_state or direction in ("store", "retrieve"):
                bars = spark(rates, max(rates, default=0.0))
                yield Text.assemble(f"{direction:10}{rate(rates[-1] if rates else 0):>10}  ", (bars, "cyan"))

    def _remote(self, status: Status) -> Iterator[Text]:
        for remote in status.remotes:
            per_s = partial(self._history.lately(NOW_S).per_s_in, remote.name)
            yield Text(
                f"{'remote':10}{per_s('found'):.3g} of {per_s('probed'):.3g} chunks/s found; "
                f"read {per_s('reads'):.3g}/s, {rate(per_s('read_bytes'))}; "
                f"written {per_s('writes'):.3g}/s, {rate(per_s('written_bytes'))}; "
                f"{remote.queued_chunks:,} wait"
            )
            yield Text(f"{'':10}{remote.name}, {remote_said(remote)}", "" if remote.usable else "red")


def _hits(seen: Between, status: Status, shares: Sequence[float]) -> Text:
    results = ", ".join(f"{result} {seen.tokens_of(result)}" for result, count in seen.tokens().items() if count)
    return Text.assemble(
        "hits      ",
        (f"{seen.tokens_of():>10}", "bold"),
        "  ",
        (spark(shares, 1.0), "cyan"),
        f"  last {duration(seen.seconds)}: {results or 'no lookups'}",
        *([f"\n{'':10}{status.reuse}"] if status.reuse else []),
    )


def _tiers(status: Status) -> Iterator[Text]:
    arena = status.arena
    more = [] if arena.ready_bytes == arena.total_bytes else [f"{size(arena.ready_bytes)} ready"]
    more += [f"{size(status.clean_bytes)} of it on disk as well"] if status.disk_state else []
    yield Text()
    yield _tier("DRAM", arena.used_bytes, arena.total_bytes, more)
    for disk in status.disks:
        yield _tier(f"disk {disk.device}", disk.used_bytes, disk.total_bytes, [disk.directory, disk.said])
    disks = f", {status.chunks_on_disk:,} on disk ({status.disk_state})" if status.disk_state else ""
    yield Text(f"{'index':10}{status.chunks:,} chunks of {status.chunks_max:,}{disks}, {status.namespaces} namespaces")


def _tier(name: str, used: int, total: int, more: Sequence[str]) -> Text:
    filled = round(BAR * _share(used, total))
    return Text.assemble(
        f"{name:10}",
        ("█" * filled, "cyan"),
        ("░" * (BAR - filled), "bright_black"),
        f"  {percent(used, total):>7}  {size(used)} of {size(total)}",
        *(f", {text}" for text in more),
    )


def _tables(status: Status) -> Iterator[Text]:
    ended = status.counters.get("mover_restarts", 0)
    yield from map(Text, movers(status, f"backend ({ended} ended)"))
    sessions = [
        (session.engine, str(session.rank), str(session.caches), str(session.jobs), session.software)
        for session in status.shown_sessions
    ]
    yield from map(Text, table(("session", "rank", "caches", "jobs", "software"), sessions))
    if status.sessions > len(sessions):
        yield Text(f"and {status.sessions - len(sessions)} more sessions")


def spark(values: Sequence[float], most: float) -> str:
    """A line of small bars, one for each value; `most` is a full bar."""
    steps = len(LEVELS) - 1
    return "".join(LEVELS[round(steps * min(value / most, 1.0)) if most > 0 else 0] for value in values)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
