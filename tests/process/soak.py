"""Mixed traffic for an hour, with engines that come, go and are killed. Watches for wrong bytes and growing memory.

    python -m tests.process.soak --minutes 60

The server has a small arena and two disks. A few visitors at a time, each a process, look up, store and retrieve
prompts of three models. Some prompts are asked for much more often than others. A visitor lives for seconds; it closes
its client, ends without closing it, or is killed. Every retrieved byte is compared with what was stored.

Prints a line every ten seconds, then memory over time and the growth per evicted chunk. The exit status is 1 when a
byte was wrong or a process of the server was replaced."""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from kvclient import Blocks, Timeouts, namespace_digest
from kvserver.ipc.inheritance import die_with_parent
from kvserver.wire.status import Status
from tests.process.bad_input.abuse import memory_bytes
from tests.process.engine import Engine, Group, Prompt, Shape, prompt
from tests.process.harness import WAIT_S, Server, command_of, descriptors_of, pids_below

ROOT = Path(__file__).resolve().parents[2]
VISITORS = 4
LIVES_S = (3.0, 40.0)
KILLED = 0.3
"""Share of visitors that are killed; half of the others end without closing their client."""
PROMPTS = 20_000
"""Prompts per model. Arena and disks hold a part of them."""
CHUNKS_MAX = 4
EVERY_S = 10.0
TIMEOUTS = Timeouts(lookup_s=5.0, store_s=20.0, retrieve_s=20.0, backoff_first_s=0.005, backoff_max_s=0.05)
SHAPES = (
    Shape(groups=(Group(block_tokens=4, blocks=61, regions=3, page_bytes=517),)),
    Shape(groups=(Group(block_tokens=4, blocks=53, regions=2, page_bytes=2051),)),
    Shape(groups=(Group(block_tokens=6, blocks=47, regions=5, page_bytes=1031),)),
)
SETTINGS: dict[str, object] = {
    "arena_bytes": 24 << 20,
    "slab_bytes": 1 << 20,
    "disk_bytes": 96 << 20,
    "disk_segment_bytes": 2 << 20,
    "lease_ttl_ms": 2_000,
}


class Sample(NamedTuple):
    """One observation of the server."""

    at_s: float
    memory: dict[str, int]
    """Private resident memory, in bytes, by process."""
    descriptors: dict[str, int]
    evicted: int
    """Chunks evicted from DRAM and disks since the start."""


class Visitor:
    """A short-lived engine. Prints its counts every second, and WRONG when a byte differs."""

    def __init__(self, path: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._model = seed % len(SHAPES)
        namespace = namespace_digest({"model": f"soak-{self._model}"})
        self._engine = Engine(path, SHAPES[self._model], namespace, f"visitor-{self._model}", timeouts=TIMEOUTS)
        self.seen: Counter[str] = Counter()

    def live(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        told_s = 0.0
        self._engine.ready()
        while time.monotonic() < ends_s:
            self._act()
            if time.monotonic() - told_s >= 1:
                told_s = time.monotonic()
                print(json.dumps(self.seen), flush=True)
                self.seen.clear()
        print(json.dumps(self.seen), flush=True)
        if self._random.random() < 0.5:
            self._engine.close()

    def _act(self) -> None:
        chosen = self._random.random()
        story = self._story()
        if chosen < 0.55:
            self._load_or_store(story)
        elif chosen < 0.85:
            found = self._engine.lookup(story)
            self.seen["looked up"] += 1
            if found.lease is not None and self._random.random() < 0.8:
                self._engine.client.release(found.lease)
        elif chosen < 0.99:
            self._end(self._engine.begin_store(story, self._computed(story)), "stored")
        else:
            assert self._engine.cache is not None
            assert self._engine.client.unregister(self._engine.cache).result(WAIT_S)
            self._engine.register().ready()
            self.seen["registered again"] += 1

    def _load_or_store(self, story: Prompt) -> None:
        """Loads the chunks that are there, then computes and stores the rest, as an engine does."""
        engine, found = self._engine, self._engine.lookup(story)
        if found.lease is None:
            self._end(engine.begin_store(story, self._computed(story)), "stored")
            return
        held = story.head(found.chunks)
        where = engine.place(held)
        engine.pool.spoil(where)
        result = engine.begin_retrieve(found.lease, where).result(WAIT_S + 20)
        if not result.ok:
            engine.pool.spoil(where)
            self.seen[f"not retrieved: {result.why}"] += 1
            return
        engine.pool.expect(held, where)
        self.seen["chunks compared"] += found.chunks
        self.seen["retrieved"] += 1
        if wrong := engine.pool.wrong():
            print(f"WRONG {wrong} bytes of the pool of a visitor of model {self._model}", flush=True)
            os._exit(1)

    def _computed(self, story: Prompt) -> list[Blocks]:
        where = self._engine.place(story)
        self._engine.pool.compute(story, where)
        return where

    def _end(self, future: "Future[Any]", what: str) -> None:
        result = future.result(WAIT_S + 20)
        self.seen[f"{what} {result.why}".strip()] += 1

    def _story(self) -> Prompt:
        """Draws a prompt: few are asked for often, many only once."""
        number = min(int(self._random.paretovariate(0.4)), PROMPTS) * len(SHAPES) + self._model
        return prompt(number, 1 + number % CHUNKS_MAX)


class Soak:
    """The server, its visitors and the observations of both."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._born = seed * 1_000_000
        self._visitors: dict[subprocess.Popen[str], float] = {}
        """Visitor -> time at which it is to be killed."""
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[Sample] = []
        self._processes = self._pids()

    def run(self, seconds: float) -> None:
        began_s = time.monotonic()
        next_s = began_s
        while (now_s := time.monotonic()) < began_s + seconds and not self.wrong:
            while len(self._visitors) < VISITORS:
                self._invite(now_s)
            for visitor, killed_s in list(self._visitors.items()):
                if now_s >= killed_s:
                    visitor.kill()
                    self.seen["killed"] += 1
                if visitor.poll() is not None:
                    self._part(visitor)
            if now_s >= next_s:
                next_s += EVERY_S
                self._look(now_s - began_s)
            time.sleep(0.05)
        for visitor in list(self._visitors):
            visitor.kill()
            self._part(visitor)

    def _invite(self, now_s: float) -> None:
        self._born += 1
        lives_s = self._random.uniform(*LIVES_S)
        command = [sys.executable, "-m", "tests.process.soak", "--be-visitor", "--at", str(self._server.path)]
        log = self._server.folder / f"visitor-{self._born}"
        with log.open("w") as out:
            visitor = subprocess.Popen(
                [*command, "--seed", str(self._born), "--seconds", str(lives_s)], stdout=out, text=True, cwd=ROOT
            )
        killed = self._random.random() < KILLED
        self._visitors[visitor] = now_s + (self._random.uniform(0.5, lives_s) if killed else lives_s + 120)
        self.seen["visitors"] += 1
        setattr(visitor, "said", log)  # noqa: B010

    def _part(self, visitor: "subprocess.Popen[str]") -> None:
        """Takes in a visitor's output. A killed visitor may have left half a line."""
        visitor.wait()
        del self._visitors[visitor]
        log: Path = visitor.said  # type: ignore[attr-defined]
        for line in log.read_text().splitlines():
            if line.startswith("WRONG"):
                self.wrong.append(line)
            elif line.endswith("}"):
                self.seen.update(json.loads(line))
        log.unlink()
        if visitor.returncode not in (0, -9):
            self.seen[f"visitors that ended with {visitor.returncode}"] += 1

    def _look(self, at_s: float) -> None:
        status, pids = self._server.status(), self._pids()
        if not self._processes.items() <= pids.items():
            self.wrong.append(f"processes of the server were replaced: {self._processes} became {pids}")
            return
        self._processes = pids
        memory = {name: memory_bytes(pid) for name, pid in pids.items()}
        held = {name: len(descriptors_of(pid)) for name, pid in pids.items()}
        self.samples.append(Sample(at_s, memory, held, _evicted(status)))
        mib = " ".join(f"{name} {count / 2**20:.2f}" for name, count in memory.items())
        print(
            f"{at_s:6.0f} s  MiB: {mib}  descriptors {held}  sessions {status.sessions}  chunks {status.chunks}"
            f"  on disk {status.chunks_on_disk}  evicted {_evicted(status)}",
            flush=True,
        )

    def _pids(self) -> dict[str, int]:
        pids = {"supervisor": self._server.pid}
        for pid in pids_below(self._server.pid):
            words = command_of(pid).split()
            if "-m" in words:
                pids[words[words.index("-m") + 1].removeprefix("kvserver.")] = pid
        return pids


def _evicted(status: Status) -> int:
    return int(status.counters["evictions"]) + int(status.counters["disk_evictions"])


def report(soak: Soak) -> None:
    """Memory at each tenth of the time, and its slopes in the last half."""
    for name, count in sorted(soak.seen.items()):
        print(f"{count:>12}  {name}")
    samples = soak.samples
    if len(samples) < 4:
        return
    names = samples[-1].memory
    chosen = [samples[round(tenth * (len(samples) - 1) / 10)] for tenth in range(11)]
    print("\n" + "".join(f"{head:>14}" for head in ("minute", *names, "evicted")))
    for sample in chosen:
        mib = "".join(f"{sample.memory.get(name, 0) / 2**20:>14.2f}" for name in names)
        print(f"{sample.at_s / 60:>14.1f}{mib}{sample.evicted:>14}")
    first, last = samples[len(samples) // 2], samples[-1]
    minutes = (last.at_s - first.at_s) / 60
    evicted = last.evicted - first.evicted
    for name in names:
        grown = last.memory[name] - first.memory.get(name, 0)
        print(
            f"{name}: {grown / 2**20 / minutes:+.3f} MiB a minute in the last half"
            f", {grown / max(1, evicted):+.0f} bytes for each of {evicted} evicted chunks"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed traffic with engines that come and go.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--be-visitor", action="store_true", help="be a visitor of this script")
    parser.add_argument("--at", type=Path, help="the server's socket")
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    if options.be_visitor:
        die_with_parent(os.getppid())
        Visitor(options.at, options.seed).live(options.seconds)
        os._exit(0)  # without closing open resources
    server = Server(**SETTINGS)
    disks = [server.folder / name for name in ("disk-a", "disk-b")]
    for disk in disks:
        disk.mkdir(mode=0o700)
    server.settings["disk_paths"] = ",".join(map(str, disks))
    with server:
        soak = Soak(server, options.seed)
        soak.run(options.minutes * 60)
        report(soak)
    for line in soak.wrong:
        print(line)
    print(f"soak: {'FAILED' if soak.wrong else 'ok'}, {soak.seen['chunks compared']} chunks compared")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
