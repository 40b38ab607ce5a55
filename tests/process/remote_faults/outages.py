"""A store that stops answering, again and again, while two servers and their engines work.

Each engine asks as one that waits for what may come. A round: the store stops; local prompts are hit, unknown ones
are stored, and those in the store alone are missed, without a failure and without a long wait. Then the store goes on,
and its prompts come back without a restart.
"""

import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from kvclient import Found
from tests.process.campaign import counted
from tests.process.engine import Engine, Prompt, prompt
from tests.process.harness import Server, until
from tests.rigs.azure_server import AzureServer
from tests.rigs.mooncake_server import MooncakeServer, Process
from tests.rigs.s3_server import S3Server
from tests.rigs.valkey_server import ValkeyServer

CHUNKS = 5
PATIENCE_S = 0.3
"""The server's: nothing comes within it, so nothing is waited for."""
SLACK_S = 0.2
"""For this machine, which runs two servers, two engines and a store on few cores."""
BACK_WITHIN_S = 5.0
ONE_TRY_S = 0.7
"""Until the next prompt is stored in a store that may have lost all: the first ones may be dropped."""
DRAINED_WITHIN_S = 120.0
"""For the writes that wait after an outage: thousands of chunks, and one process serves all files of a directory."""
KEPT = 40
"""Prompts whose chunks fit into each arena."""


class Stoppable(Protocol):
    def stop(self) -> None: ...
    def go_on(self) -> None: ...


class Mount:
    """A directory behind a file system that another process serves (bindfs)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "mounted"
        (folder / "below").mkdir()
        self.path.mkdir()
        self._process = subprocess.Popen(["bindfs", "-f", str(folder / "below"), str(self.path)])
        until("the file system to be mounted", lambda: self.path.is_mount() or None)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)
        self._process.wait(10)


@contextmanager
def valkey() -> Iterator[tuple[str, Stoppable]]:
    with ValkeyServer() as server:
        yield f"valkey://127.0.0.1:{server.port}?", server


@contextmanager
def mounted() -> Iterator[tuple[str, Stoppable]]:
    folder = Path(tempfile.mkdtemp(prefix="kv-mount-"))
    mount = Mount(folder)
    try:
        yield f"file://{mount.path}?", mount
    finally:
        mount.close()
        shutil.rmtree(folder)


class Fleet:
    """Two servers with one store, an engine each, and what the engines have seen."""

    def __init__(self, one: Server, first: Engine, other: Server, second: Engine, seed: int) -> None:
        self._servers = one, other
        self._first, self._second = first, second
        self._dice = random.Random(seed)
        self._seeds = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))
        self._local: list[Prompt] = []
        self.seen: Counter[str] = Counter()
        self.waited_s: list[float] = []
        self.back_s: list[float] = []

    def round(self, store: Stoppable, stopped_s: float) -> None:
        """The second engine works throughout; the store is away for so long."""
        brains = [server.brain_pid() for server in self._servers]
        away = [self._written() for _ in range(3)]
        self._local = [*self._local, self._brought(self._written())][-KEPT:]
        store.stop()
        until_s = time.monotonic() + stopped_s
        while time.monotonic() < until_s:
            self._work(away)
        done = self._puts_done()
        store.go_on()
        began_s = time.monotonic()
        self._brought(away[0])
        until("writes to go on", lambda: self._first.store(self._new()).chunks and self._puts_done() > done)
        self.back_s.append(time.monotonic() - began_s)
        self._brought(self._written(), within_s=DRAINED_WITHIN_S)  # behind what was stored meanwhile
        assert brains == [server.brain_pid() for server in self._servers], "a brain was started again"
        assert self.back_s[-1] <= BACK_WITHIN_S, f"served again after {self.back_s[-1]:.1f} s"

    def round_that_loses_all(self, store: Stoppable, stopped_s: float) -> None:
        """The same with a store that may come back empty. Its note is lost too, so each server drops its own copies.

        If it has lost nothing, a new prompt waits behind all that was stored meanwhile, as in any other store."""
        brains = [server.brain_pid() for server in self._servers]
        away = [self._written() for _ in range(3)]
        self._local = [self._brought(self._written())]
        store.stop()
        until_s = time.monotonic() + stopped_s
        while time.monotonic() < until_s:
            self._work(away)
        done = self._puts_done()
        store.go_on()
        began_s = time.monotonic()
        until("a prompt to come", lambda: self._comes_in_time(away))
        until("writes to go on", lambda: self._first.store(self._new()).chunks and self._puts_done() > done)
        self.back_s.append(time.monotonic() - began_s)
        tried: list[Prompt] = []
        new = until("a new prompt to come", lambda: self._comes_in_time(tried), DRAINED_WITHIN_S)
        assert self._second.retrieve(new) == CHUNKS
        assert brains == [server.brain_pid() for server in self._servers], "a brain was started again"
        assert self.back_s[-1] <= BACK_WITHIN_S, f"served again after {self.back_s[-1]:.1f} s"

    def _comes_in_time(self, tried: list[Prompt]) -> Prompt | None:
        """The first engine stores one prompt more. Returns that or an earlier one, if the second engine has it from the
        store soon. None: all were dropped, or are late.

        Nothing is retrieved before: servers still drop what they have, also what a lease is for."""
        tried.append(self._new())
        self._first.store(tried[-1])
        due_s = time.monotonic() + ONE_TRY_S
        while time.monotonic() < due_s:
            for one in tried:
                if self._second.lookup(one).chunks == CHUNKS:
                    return one
            time.sleep(0.02)
        return None

    def _work(self, away: list[Prompt]) -> None:
        local = self._dice.choice(self._local)
        assert self._asked(self._second, local) == CHUNKS, "what is here is served"
        self.seen["hit"] += 1
        assert self._asked(self._second, self._dice.choice(away)) == 0
        self.seen["missed"] += 1
        new = self._new()
        engine = self._dice.choice((self._first, self._second))
        assert self._asked(engine, new) == 0
        assert engine.store(new).chunks == CHUNKS
        assert self._asked(engine, new) == CHUNKS
        self.seen["stored"] += 1
        time.sleep(0.02)

    def _asked(self, engine: Engine, wanted: Prompt) -> int:
        """Chunks that an engine gets, after it has waited for what may come."""
        began_s = time.monotonic()
        found: Found = engine.lookup(wanted)
        while found.coming:
            if found.lease is not None:
                engine.client.release(found.lease)
            time.sleep(0.002)
            found = engine.lookup(wanted)
        self.waited_s.append(time.monotonic() - began_s)
        if found.lease is not None:
            engine.client.release(found.lease)
        limit_s = PATIENCE_S + SLACK_S
        assert self.waited_s[-1] <= limit_s, f"a request waited {self.waited_s[-1]:.3f} s"
        return engine.retrieve(wanted)

    def _new(self) -> Prompt:
        return prompt(next(self._seeds), CHUNKS)

    def _written(self) -> Prompt:
        """A prompt that the first engine has stored, and the store has, too."""
        new = self._new()
        done = self._puts_done()
        assert self._first.store(new).chunks == CHUNKS
        until("the store to have it", lambda: self._is_offered(new) and self._puts_done() >= done + CHUNKS)
        return new

    def _puts_done(self) -> int:
        """Chunks that the store has taken. The next try tells of those that it took and did not answer in time."""
        counters = self._servers[0].status().counters
        return int(str(counters["remote_writes"])) + int(str(counters["remote_existed"]))

    def _is_offered(self, wanted: Prompt) -> bool:
        """The first engine uses it, so that it is offered again if the store did not take it."""
        return self._first.retrieve(wanted) == wanted.chunks

    def _brought(self, wanted: Prompt, within_s: float = 20.0) -> Prompt:
        """The second engine has it, from the store."""
        until("it to come", lambda: self._is_offered(wanted) and self._second.lookup(wanted).chunks == CHUNKS, within_s)
        assert self._second.retrieve(wanted) == CHUNKS
        return wanted


@contextmanager
def objects(starts: type[S3Server | AzureServer]) -> Iterator[tuple[str, Stoppable]]:
    with starts() as server, tempfile.TemporaryDirectory(prefix="kv-key-") as folder:
        yield f"{server.url(Path(folder))}&", server


@contextmanager
def mooncake_master() -> Iterator[tuple[str, Stoppable]]:
    with MooncakeServer() as server:
        yield f"{server.url}?", server.master


@contextmanager
def mooncake_node() -> Iterator[tuple[str, Stoppable]]:
    with MooncakeServer() as server:
        yield f"{server.url}?", server.node


class Killed:
    """A process that is killed, and started again."""

    def __init__(self, process: Process, starts: Callable[[], None]) -> None:
        self.stop = process.kill
        self.go_on = starts


@contextmanager
def mooncake_master_killed() -> Iterator[tuple[str, Stoppable]]:
    with MooncakeServer() as server:
        yield f"{server.url}?", Killed(server.master, server.start_master_again)


@contextmanager
def mooncake_node_killed() -> Iterator[tuple[str, Stoppable]]:
    with MooncakeServer() as server:
        yield f"{server.url}?", Killed(server.node, server.node.start)


KINDS = {
    "valkey": valkey,
    "directory": mounted,
    "s3": partial(objects, S3Server),
    "azure": partial(objects, AzureServer),
    "mooncake master": mooncake_master,
    "mooncake node": mooncake_node,
    "mooncake master, killed": mooncake_master_killed,
    "mooncake node, killed": mooncake_node_killed,
}
# The master forgets a data node, and all that it has, after ten seconds without a sign. One that was stopped for that
# long may take its own sleep for its nodes'.
LOSE_ALL = ("mooncake master", "mooncake node", "mooncake master, killed", "mooncake node, killed")


def run_outages(rounds: int, stopped_s: float, seed: int, *, kind: str = "valkey") -> str:
    with KINDS[kind]() as (url, store):
        remotes = f"fleet={url}tokens_min=0&write=through"
        with (
            Server(remotes=remotes, arena_bytes=512 << 20) as one,
            Server(remotes=remotes, arena_bytes=512 << 20) as other,
            Engine(one.path).ready() as first,
            Engine(other.path).ready() as second,
        ):
            fleet = Fleet(one, first, other, second, seed)
            for _ in range(rounds):
                (fleet.round_that_loses_all if kind in LOSE_ALL else fleet.round)(store, stopped_s)
            gone = sum(server.log().count("mover gone") for server in (one, other))
    waits = sorted(fleet.waited_s)
    return (
        f"{rounds} outages of {stopped_s:g} s, {counted(fleet.seen)}, waits p50 {waits[len(waits) // 2] * 1e3:.1f} ms, "
        f"p99 {waits[len(waits) * 99 // 100] * 1e3:.0f}, longest {waits[-1] * 1e3:.0f}; served again after at most "
        f"{max(fleet.back_s):.1f} s; {gone} movers ended"
    )
