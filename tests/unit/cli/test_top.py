"""`kvserver top`: its screen, its lines, and its end."""

import io
import re
from collections.abc import Callable, Iterator

import msgspec
import pytest
from rich.console import Console

from kvserver.cli.status_text import overview
from kvserver.cli.top import GIVE_UP_S, spark, top
from kvserver.errors import ResourceError
from kvserver.service.telling.counters import Counters, RemoteCounts
from kvserver.wire.status import DiskStatus, SessionStatus, Status
from tests.rigs.status_document import a_remote, a_status

COUNTED = RemoteCounts().plain

TURN_S = 2.0


def second_turn(**changes: object) -> Status:
    """Two seconds after a_status(), with traffic in between."""
    counters = Counters()
    counters.lookups = 14
    counters.lookup_tokens_of("").update(dram=300, miss=100)
    counters.bytes_retrieved, counters.disk_read_bytes = 3_000_000_000, 500_000
    status = a_status()
    return msgspec.structs.replace(status, uptime_s=status.uptime_s + TURN_S, counters=counters.totals(), **changes)


class Terminal:
    """Runs top over prepared answers, and keeps its output."""

    def __init__(self, *, terminal: bool) -> None:
        self._text = io.StringIO()
        self._console = Console(file=self._text, force_terminal=terminal, width=150, height=60, _environ={})
        self._now_s = 50.0

    def show(self, *answers: Status | None) -> str:
        told: Iterator[Status | None] = iter(answers)
        top(
            lambda: next(told),
            self._console,
            refresh_s=TURN_S,
            turns=len(answers),
            wait=self._pass_time,
            clock_s=lambda: self._now_s,
        )
        return self._text.getvalue()

    def until(self, ask: Callable[[], Status | None]) -> None:
        top(ask, self._console, refresh_s=TURN_S, wait=self._pass_time, clock_s=lambda: self._now_s)

    def _pass_time(self, seconds: float) -> None:
        self._now_s += seconds


def lines(*answers: Status | None) -> list[str]:
    """The lines without their times."""
    text = Terminal(terminal=False).show(*answers)
    assert "\x1b" not in text
    assert all(re.match(r"\d\d:\d\d:\d\d  ", line) for line in text.splitlines())
    return [line[10:] for line in text.splitlines()]


def screen(*answers: Status | None) -> str:
    """The last screen, without colours."""
    text = Terminal(terminal=True).show(*answers)
    assert text.startswith("\x1b[?1049h"), "a screen of its own"
    assert "\x1b[?1049l" in text, "which is gone at the end"
    last = text[: text.rindex("\x1b[?1049l")].rpartition("\x1b[H")[2]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last)


def test_the_first_line_says_which_brain_and_the_next_what_it_did() -> None:
    first, second = lines(a_status(), second_turn())
    assert first == "kvserver 7.5.3, up 0 min 1 s, incarnation 11"
    parts = second.split("  ")
    assert parts[:4] == ["hits 75.0 %", "dram 75.0 %", "disk 0.0 %", "lookups 7/s"]
    assert {"retrieve 1.5 GB/s", "promote 250 kB/s", "store 0 B/s", "arena 10.0 %", "sessions 2", "jobs 3"} < set(parts)


def test_what_has_become_wrong_has_a_line_once() -> None:
    wrong = second_turn(warnings=["seven is wrong"], troubles={"movers ended": 2})
    said = lines(a_status(), wrong, wrong)
    assert said[1:3] == ["WARNING: seven is wrong", "WARNING: movers ended"]
    assert [line for line in said if "WARNING" in line] == said[1:3]


def test_silence_and_another_brain_are_told() -> None:
    other = msgspec.structs.replace(a_status(), incarnation=12)
    said = lines(a_status(), None, None, other)
    assert said[1:] == ["no answer for 2 s", "no answer for 4 s", "kvserver 7.5.3, up 0 min 1 s, incarnation 12"]


def test_a_server_that_is_gone_ends_it_and_one_that_comes_back_in_time_does_not() -> None:
    asked = 0

    def ask() -> Status | None:
        nonlocal asked
        asked += 1
        return a_status() if asked in (1, GIVE_UP_S // TURN_S) else None

    with pytest.raises(ResourceError, match=f"no server has answered for {GIVE_UP_S:g} s"):
        Terminal(terminal=True).until(ask)
    assert asked == 2 * GIVE_UP_S // TURN_S


def test_an_interrupt_gives_the_terminal_back() -> None:
    terminal = Terminal(terminal=True)

    def ask() -> Status | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        terminal.until(ask)
    assert "\x1b[?1049l" in terminal._text.getvalue()


def test_a_screen_shows_what_is_wrong_before_anything_else() -> None:
    shown = screen(a_status(), second_turn(warnings=["seven is wrong"], troubles={"movers ended": 1_234}))
    rows = [row.rstrip() for row in shown.splitlines() if row.strip()]
    assert rows[:3] == [
        "kvserver 7.5.3, up 0 min 3 s, incarnation 11",
        "seven is wrong",
        "1,234 movers ended (last 0 min 2 s)",
    ]
    silent = screen(a_status(), None).splitlines()
    assert "no answer for 2 s" in silent[1]


def test_a_screen_shows_tiers_rates_movers_and_sessions() -> None:
    disk = DiskStatus(
        device=3,
        directory="/[bold]nvme[/bold]",
        total_bytes=4 << 30,
        used_bytes=1 << 30,
        takes_writes=False,
        problem="full",
        said="takes no writes: full",
        queued_bytes=0,
        write_bytes_per_s=5.0,
        read_bytes_per_s=11.0,
    )
    session = SessionStatus(
        session=5, engine="[red]vllm", epoch=1, rank=2, software="kvclient 7", attached=True, caches=1, jobs=4
    )
    shown = screen(a_status(), second_turn(disks=[disk], disk_state="ready", shown_sessions=[session], sessions=70))
    for text in (
        "dram 75.0 %, miss 25.0 %",
        "7 lookups/s",
        "retrieve    1.5 GB/s",
        "promote     250 kB/s",
        "4KiB of 40KiB, 24KiB ready",
        "1GiB of 4GiB, /[bold]nvme[/bold], takes no writes: full",
        "13 chunks of 17",
        "host, 2 threads",
        "[red]vllm",
        "and 69 more sessions",
    ):
        assert text in shown, text


def test_without_a_disk_tier_nothing_is_said_of_disks() -> None:
    assert "promote" not in screen(a_status(), second_turn())


def with_remote(**changes: object) -> Status:
    counters = Counters()
    counters.remote_probed, counters.remote_found, counters.remote_reads = 24, 16, 8
    counters.remote_read_bytes, counters.remote_writes, counters.remote_written_bytes = 4_000_000, 6, 3_000_000
    return msgspec.structs.replace(second_turn(remote=a_remote(**changes)), counters=counters.totals())


def test_a_remote_store_has_its_rates_and_its_state() -> None:
    shown = screen(a_status(), with_remote(nodes_left_alone=["a:1"], clears_owed=5))
    said = "remote    8 of 12 chunks/s found; read 4/s, 2 MB/s; written 3/s, 1.5 MB/s; 17 wait"
    assert said in shown
    assert "fleet, usable, left alone: a:1, 5 clears not confirmed" in shown
    assert "remote 2 MB/s in, 1.5 MB/s out" in lines(a_status(), with_remote())[1]
    assert "remote not usable" in lines(a_status(), with_remote(usable=False))[1]
    assert "fleet, not usable: its mover does not run" in screen(a_status(), with_remote(usable=False))
    assert "remote" not in screen(a_status(), second_turn())


def with_two_remotes() -> Status:
    near = a_remote(
        name="near", counted=dict.fromkeys(COUNTED, 0) | {"probed": 24, "found": 16, "read_bytes": 4_000_000}
    )
    far = a_remote(
        name="far", usable=False, counted=dict.fromkeys(COUNTED, 0) | {"writes": 6, "written_bytes": 3_000_000}
    )
    return second_turn(remote=near, other_remotes=[far])


def test_each_of_several_remote_stores_has_its_rates_and_its_state() -> None:
    shown = screen(a_status(), with_two_remotes())
    assert "8 of 12 chunks/s found; read 0/s, 2 MB/s; written 0/s, 0 B/s; 17 wait" in shown
    assert "0 of 0 chunks/s found; read 0/s, 0 B/s; written 3/s, 1.5 MB/s; 17 wait" in shown
    assert shown.index("near, usable") < shown.index("far, not usable: its mover does not run")
    (line,) = lines(a_status(), with_two_remotes())[1:]
    assert "remote near 2 MB/s in, 0 B/s out  remote far not usable" in line


def test_status_tells_of_each_of_several_remote_stores() -> None:
    said = overview(with_two_remotes())
    first = said.index("remote    near, valkey://10.0.0.7: usable")
    second = said.index("remote    far, valkey://10.0.0.7: not usable: its mover does not run")
    assert said[first + 1].strip().startswith("0 chunks read (3.81MiB), 0 written (0B) since the start")
    assert said[second + 1].strip().startswith("0 chunks read (0B), 6 written (2.86MiB) since the start")


def test_status_tells_of_a_remote_store_in_two_lines() -> None:
    said = overview(with_remote(problem="no such directory", usable=False))
    at = said.index("remote    fleet, valkey://10.0.0.7: not usable: no such directory")
    assert said[at + 1].strip() == (
        "8 chunks read (3.81MiB), 6 written (2.86MiB) since the start; 2 prompts are looked for, "
        "17 chunks wait to be written"
    )
    assert not any(line.startswith("remote ") for line in overview(a_status()))


def test_bars_stand_for_shares_of_the_highest() -> None:
    assert spark([0.0, 1.0, 2.0, 4.0, 9.0], 4.0) == " ▂▄██"
    assert spark([0.0, 0.0], 0.0) == "  "
