"""Memory of a server's processes, and of an engine, over very many operations: it must stay flat.

    python -m tests.process.leaks --operations 100000

A separate process makes the operations. During a warm-up, tables, allocators and timers reach their size. After it, all
operations together may add at most GROWTH_BYTES_MAX to each process: less than one object per operation. Descriptors,
threads and mapped memory files are as many afterwards as before."""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kvclient import Blocks, Lease, Timeouts
from tests.process.bad_input.abuse import memory_bytes
from tests.process.engine import Engine, Prompt, prompt
from tests.process.harness import OBSERVER_SESSIONS, WAIT_S, Server, descriptors_of, until

GROWTH_BYTES_MAX = 2 << 20
WARM_UP = 5_000
VISITS = 10
SECONDS_MAX = 600
SETTINGS: dict[str, object] = {
    "arena_bytes": 4 << 20,
    "slab_bytes": 256 << 10,
    "lease_ttl_ms": 200,
    "lease_extended_ms": 100,
    "reserve_ttl_ms": 500,
    "chunks_max": 1024,
}
"""Room for 512 chunks, so that nearly every store evicts.

Timers end soon, because timers of the last seconds stay in memory. The table of evicted keys is just as small, so that
the warm-up fills it."""
TIMEOUTS = Timeouts(lookup_s=20.0, store_s=20.0, retrieve_s=20.0, backoff_first_s=0.005, backoff_max_s=0.05)
STORES_MAX = 6
"""Stores in flight at a time; each has its own blocks."""
KNOWN_MAX = 40
"""Prompts that are asked for again; older ones are evicted soon."""


class Churn:
    """An engine that does everything that engines do, in random order."""

    def __init__(self, path: Path, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._path = path
        self._random = random.Random(seed)
        self._engine = Engine(path, name="churn", timeouts=TIMEOUTS).ready()
        self._seeds = iter(range(seed, 1 << 62))
        self._known: deque[Prompt] = deque([prompt(next(self._seeds), 1)], KNOWN_MAX)
        self._stores: deque[tuple[int, Future[Any]]] = deque()
        self._acts = {
            self.look: 100,
            self.store: 40,
            self.retrieve: 25,
            self.misuse: 10,
            self.look_later: 10,
            self.register_again: 0.3,
            self.clear: 0.1,
        }

    def run(self, operations: int) -> dict[str, int]:
        """Makes that many operations, waits for all of them and returns counts of their results."""
        for act in self._random.choices(list(self._acts), list(self._acts.values()), k=operations):
            act()
        while self._stores:
            self._land()
        return dict(self.seen)

    def look(self) -> None:
        """Looks up a known or an unknown prompt; releases the lease or lets it expire."""
        found = self._engine.lookup(self._some_prompt())
        self.seen["found" if found.chunks else "not found"] += 1
        if found.lease is not None and self._random.random() < 0.9:
            self._engine.client.release(found.lease)

    def look_later(self) -> None:
        future = self._engine.client.lookup_async(self._engine.namespace, self._some_prompt().keys)
        self.seen["found later" if future.result(WAIT_S).chunks else "not found later"] += 1

    def store(self) -> None:
        """Begins a store from its own blocks, beside those already running."""
        place = len(self._stores)
        if len(self._stores) == STORES_MAX:
            place = self._land()
        elif place in {taken for taken, _ in self._stores}:
            place = min(set(range(STORES_MAX)) - {taken for taken, _ in self._stores})
        story = prompt(next(self._seeds), self._random.choice((1, 1, 2)))
        where = [Blocks(0, 0, list(range(6 * place, 6 * place + 3 * story.chunks)))]
        self._stores.append((place, self._engine.begin_store(story, where)))
        self._known.append(story)

    def retrieve(self) -> None:
        story = self._some_prompt()
        found = self._engine.lookup(story)
        if found.lease is not None:
            where = [Blocks(0, 0, list(range(37, 37 + 3 * found.chunks)))]
            result = self._engine.begin_retrieve(found.lease, where).result(WAIT_S)
            self.seen[f"retrieved {result.why}"] += 1

    def misuse(self) -> None:
        """Uses a lease that nobody granted, and blocks that do not exist."""
        found = self._engine.lookup(self._some_prompt())
        if found.lease is None:
            return
        lease = found.lease if self._random.random() < 0.5 else Lease(7, 1, found.lease.incarnation, 0.0)
        result = self._engine.begin_retrieve(lease, [Blocks(0, 0, [46, 46, 46])])
        problem = result.exception(WAIT_S)
        self.seen["refused" if problem is not None or not result.result().ok else "not refused"] += 1

    def register_again(self) -> None:
        engine = self._engine
        assert engine.cache is not None
        while self._stores:
            self._land()
        assert engine.client.unregister(engine.cache).result(WAIT_S)
        engine.register().ready()
        self.seen["registered"] += 1

    def clear(self) -> None:
        self.seen["cleared"] += self._engine.client.clear(self._engine.namespace)

    def _land(self) -> int:
        place, future = self._stores.popleft()
        self.seen[f"stored {future.result(WAIT_S).why}"] += 1
        return place

    def _some_prompt(self) -> Prompt:
        if self._random.random() < 0.3:
            return prompt(next(self._seeds), 2)
        return self._random.choice(self._known)


class Visits:
    """Engines that come, store and go. Not measured: allocators keep a varying amount of what threads leave behind."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._stories = [prompt(seed + number, 2) for number in range(7)]

    def run(self, visits: int) -> dict[str, int]:
        for visit in range(visits):
            with Engine(self._path, name="visitor", timeouts=TIMEOUTS) as visitor:
                story = self._stories[visit % len(self._stories)]
                visitor.ready().begin_store(story, visitor.place(story)).result(WAIT_S)
        return {"visited": visits}


WHO = {"churn": Churn, "visits": Visits}


class Helper:
    """A Churn or Visits in its own process, so that its memory is measured alone."""

    def __init__(self, path: Path, who: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.process.leaks", "--be", who, "--at", str(path), "--seed", str(seed)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2]
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, operations: int) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{operations}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the helping process has ended"
        seen: dict[str, int] = json.loads(line)
        return seen

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def run(operations: int, seed: int = 1) -> dict[str, Any]:
    """Counts of the operations' results, and growth in bytes by process. AssertionError when one grew too much."""
    with Server(**SETTINGS) as server:
        churn, visits = Helper(server.path, "churn", seed), Helper(server.path, "visits", seed)
        try:
            churn.run(WARM_UP)
            visits.run(VISITS)
            pids = {
                "supervisor": server.pid,
                "brain": server.brain_pid(),
                "mover": server.mover_pid(),
                "engine": churn.pid,
            }
            before = {name: _quiet_bytes(server, pid) for name, pid in pids.items()}
            held = {pid: _held(pid) for pid in pids.values()}
            seen = Counter(churn.run(operations)) + Counter(visits.run(max(VISITS, operations // 500)))
            after = {name: _quiet_bytes(server, pid) for name, pid in pids.items()}
            for name, pid in pids.items():
                until(f"the {name} to hold what it held", lambda pid=pid: _held(pid) <= held[pid])  # type: ignore[misc]
            assert (pids["brain"], pids["mover"]) == (server.brain_pid(), server.mover_pid()), "one was replaced"
        finally:
            churn.close()
            visits.close()
    growth = {name: after[name] - before[name] for name in pids}
    assert max(growth.values()) <= GROWTH_BYTES_MAX, f"{operations} operations grew by {growth} bytes: {dict(seen)}"
    return {"seen": dict(seen), "growth": growth}


def _quiet_bytes(server: Server, pid: int) -> int:
    """Memory of a process once all leases and the sessions of departed engines have ended."""

    def quiet() -> bool:
        now = server.status()
        return (now.sessions, now.leases, now.stores, now.retrieves) == (OBSERVER_SESSIONS + 1, 0, 0, 0)

    until("leases and sessions to end", quiet)
    return memory_bytes(pid)


def _held(pid: int) -> Counter[str]:
    """Counts of descriptors by kind, of threads, and of mapped memory files."""
    kinds = Counter(re.sub(r"\d+", "N", text) for text in descriptors_of(pid))
    kinds["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    kinds["mapped"] = Path(f"/proc/{pid}/maps").read_text().count("/memfd:")
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory over many operations.")
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--be", choices=WHO, help="be a helper of this script: reads counts, says what they came to")
    parser.add_argument("--at", type=Path, help="the server's socket")
    options = parser.parse_args()
    if options.be is not None:
        helper = WHO[options.be](options.at, options.seed)
        for line in sys.stdin:
            print(json.dumps(helper.run(int(line))), flush=True)
        os._exit(0)
    told = run(options.operations, options.seed)
    for name, count in sorted(told["seen"].items()):
        print(f"{count:>12}  {name}")
    print(f"{options.operations} operations, growth in bytes: {told['growth']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
