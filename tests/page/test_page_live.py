"""The page under real traffic: each number it shows about lookups, stores and chunks equals the one in /metrics."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from tests.page.browser import Browser
from tests.process.engine import MODEL, Engine, prompt
from tests.process.harness import WAIT_S, kill, until
from tests.process.http.site import Site

DISK_MIB = 8
TURNS_MAX = 80
"""Turns in which `kvserver top` must show the lookups."""
NAMES = {"DRAM": "dram", "disk": "disk", "declined": "declined", "unwanted": "unwanted", "miss": "miss"}


@pytest.fixture(autouse=True)
def heeds_interrupts() -> Iterator[None]:
    """Restores SIGINT: background jobs of a shell ignore it, and so do their children; `kvserver top` must not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def disk_site(folder: Path) -> Site:
    """A server whose arena is smaller than the data stored."""
    site = Site()
    site.server.settings |= {
        "arena_bytes": 1 << 20,
        "slab_bytes": 1 << 18,
        "disk_paths": folder,
        "disk_bytes": DISK_MIB << 20,
        "disk_segment_bytes": 1 << 20,
    }
    return site


def total(site: Site, sample: str) -> int:
    """The value of one sample; 0 if there is none yet."""
    return int(site.sample(sample) or 0)


def tokens(site: Site, result: str) -> int:
    """Tokens that lookups asked for, of the only model."""
    return total(site, f'kvserver_lookup_tokens_total{{model="{MODEL}",result="{result}"}}')


def number(text: str) -> int:
    return int(text.replace(",", ""))


def shares(site: Site) -> list[str]:
    """Fill of the arena and the disk in percent, formatted like the page."""
    arena = [total(site, f'kvserver_arena_bytes{{state="{state}"}}') for state in ("used", "total")]
    disk = [total(site, f'kvserver_disk_{state}_bytes{{device="0"}}') for state in ("used", "total")]
    return [f"{100 * used / whole:.1f}" for used, whole in (arena, disk)]


def shown_count(browser: Browser, counter: str) -> int:
    """The count as the page shows it now."""
    return number(browser.table("#counted")[counter][1])


def settled(site: Site, browser: Browser, asked: int) -> None:
    """Waits until /metrics has counted all lookups, and the page shows them."""
    until("the lookups in /metrics", lambda: total(site, "kvserver_lookup_handle_seconds_count") == asked)
    until("the page to follow", lambda: browser.table("#counted").get("lookups", ["", ""])[1] == f"{asked:,}")


@contextmanager
def traffic(engine: Engine, rounds: int) -> Iterator[None]:
    """Runs stores, lookups and retrieves during the block; all have ended at its end."""

    def work() -> None:
        for seed in range(rounds):
            story = prompt(seed, 1 + seed % 7)
            engine.store(story)
            for keys in (story.keys, prompt(seed // 2, 1 + (seed // 2) % 7).keys, prompt(10_000 + seed, 3).keys):
                found = engine.client.lookup(engine.namespace, keys)
                if found.lease is not None:
                    engine.client.release(found.lease)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        worker.join(WAIT_S)
        assert not worker.is_alive()


def test_the_pages_numbers_are_those_of_metrics_under_real_traffic(browser: Browser, tmp_path: Path) -> None:
    site = disk_site(tmp_path)
    with site.server, Engine(site.server.path, name="engine <b>&lt;</b>") as engine:
        engine.ready()
        browser.open(f"http://127.0.0.1:{site.port}/")
        until("a first sample", lambda: "·" in browser.text("#up"))
        with traffic(engine, 120):
            until("hits while traffic runs", lambda: "%" in browser.text("#hit-rate"))
        settled(site, browser, 360)
        shown = browser.table("#results")
        for name, cells in shown.items():
            if not name.startswith("all"):
                result = NAMES[name.split(":")[0]]
                assert number(cells[2]) == tokens(site, result), name
        whole = sum(tokens(site, result) for result in NAMES.values())
        assert number(shown["all that was asked for"][2]) == whole > 10_000
        assert number(shown["DRAM"][2]) > 0
        assert number(browser.text("#chunks")) == total(site, "kvserver_chunks") > 0
        counted = browser.table("#counted")
        for counter, sample in {
            "bytes_stored": 'kvserver_moved_bytes_total{direction="store",tier="dram"}',
            "stores": 'kvserver_stores_total{result="whole"}',
            "evicted_for.store": 'kvserver_evicted_chunks_total{reason="store"}',
            "lookup_ends.whole": 'kvserver_lookup_ends_total{why="whole"}',
        }.items():
            assert number(counted[counter][1]) == total(site, sample) > 0, counter
        written = 'kvserver_moved_bytes_total{direction="demote",tier="disk"}'
        until("the disk's writes", lambda: total(site, written) == shown_count(browser, "disk_written_bytes") > 0)
        until("tiers as full as in /metrics", lambda: shares(site) == re.findall(r", (\S+)\s%", browser.text("#tiers")))
        assert browser.table("#sessions")["engine <b>&lt;</b>"][2] == "attached"


def test_a_brain_that_is_killed_is_seen_and_the_page_goes_on_with_the_next(browser: Browser) -> None:
    site = Site()
    with site.server, Engine(site.server.path) as engine:
        engine.ready().store(prompt(1, 4))
        browser.open(f"http://127.0.0.1:{site.port}/")
        until("four chunks", lambda: browser.text("#chunks") == "4")
        before = browser.text("#up")
        kill(site.server.brain_pid())
        until("the next brain", lambda: browser.text("#up").split("·")[1] != before.split("·")[1])
        until("its chunks", lambda: browser.text("#chunks") == "4")
        until("all to be well", lambda: browser.text("#state") == "well")


# ---------------------------------------------------------------- in a terminal


def top(site: Site, *flags: str) -> list[str]:
    return [sys.executable, "-m", "kvserver", "top", f"--socket={site.server.path}", *flags]


def test_top_in_a_pipe_says_what_metrics_say() -> None:
    site = Site()
    with site.server, Engine(site.server.path) as engine:
        engine.ready().store(prompt(1, 4))
        with subprocess.Popen(top(site, "--refresh=0.25"), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert " incarnation " in process.stdout.readline()
            engine.client.lookup(engine.namespace, prompt(1, 4).keys)
            engine.client.lookup(engine.namespace, prompt(2, 4).keys)
            turns = islice(process.stdout, TURNS_MAX)
            said = any("hits 50.0 %  dram 50.0 %  disk 0.0 %" in line for line in turns)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
        assert said


def test_top_ends_after_as_many_turns_as_it_was_told() -> None:
    site = Site()
    with site.server:
        command = top(site, "--turns=2", "--refresh=0.1")
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
        assert " incarnation " in done.stdout


def test_top_goes_on_with_the_next_brain_and_ends_at_an_interrupt() -> None:
    site = Site()
    with site.server, subprocess.Popen(top(site, "--refresh=0.1"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        kill(site.server.brain_pid())
        for line in process.stdout:
            if " incarnation " in line:
                assert line.split()[-1] != first.split()[-1]
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


def test_top_leaves_a_terminal_as_it_was() -> None:
    site = Site()
    with site.server:
        master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color"}
        process = subprocess.Popen(top(site), stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        said = read_until(master, b"incarnation")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        said += read_until(master, b"")
        os.close(master)
        assert said.count(b"\x1b[?1049h") == said.count(b"\x1b[?1049l") == 1
        assert re.search(rb"\x1b\[\?25h", said[said.rindex(b"\x1b[?25l") :]), "the cursor is back"


def read_until(descriptor: int, mark: bytes) -> bytes:
    """A terminal's output up to that mark, or to its end if the mark is empty."""
    said = b""
    while not mark or mark not in said:
        try:
            piece = os.read(descriptor, 65_536)
        except OSError:  # the writer is gone
            break
        if not piece:
            break
        said += piece
    return said
