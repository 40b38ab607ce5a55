"""Kills and stops of the server, or of one of its processes, at random instants under load.

Everything that was sealed on disk must be there again. A round: loads run → a process is killed, or SIGTERM stops the
server → loads pause → all is ready again → the promises are compared with the brain's witness (disk_faults_brain.py).
The next round's load runs on what this life left."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tests.process.disk_faults.brain import Account, Name
from tests.process.disk_faults.load import TIMEOUTS, Load
from tests.process.disk_faults.scene import DiskServer, misses
from tests.process.disk_faults.stories import ALL_GROUPS, SHAPE, STORIES, bring, story
from tests.process.engine import NAMESPACE, Engine, Prompt
from tests.process.harness import is_gone, pids_below, until

LOADS = 3
UNDER_LOAD_S = 0.02, 0.3
STARTING_S = 0.0, 0.7
"""Range of delays from process start to kill, for a server that is killed while it starts."""
CHECKER_TIMEOUTS = replace(TIMEOUTS, lookup_s=20.0)
"""Patient timeouts: the checker asks when all is ready, and a timeout would look like a lost chunk."""
COMPARED = 5
"""Stories that are retrieved and compared after each restart, in addition to those that the loads compare."""
STOPS = ("stop", "stop, told twice")
TARGETS = {
    "server": 45,
    "every process": 10,
    "server while it starts": 10,
    "brain": 12,
    "disk mover": 12,
    "mover": 6,
    **dict.fromkeys(STOPS, 5),
}
"""Relative frequencies, out of 105."""
TOLD_AGAIN_S = 0.0, 0.3


class Campaign:
    """State of a campaign; create it with open_campaign()."""

    def __init__(self, server: DiskServer, loads: list[Load], checker: Engine, seed: int) -> None:
        self.server = server
        self.seen: Counter[str] = Counter()
        self.longest_s = 0.0
        """Longest round, from the kill to the end of its checks."""
        self.ready_s: list[float] = []
        """Times from the kill to a disk tier that is ready."""
        self._loads = loads
        self._checker = checker
        self._random = random.Random(seed)

    def round(self, target: str = "") -> None:
        """Runs one round. `target` is a key of TARGETS; empty picks one at random."""
        for load in self._loads:
            load.go()
        time.sleep(self._random.uniform(*UNDER_LOAD_S))
        target = target or self._random.choices(list(TARGETS), list(TARGETS.values()))[0]
        began_s = time.monotonic()
        whole_server = target not in ("brain", "disk mover", "mover")
        at_death = self._kill_server(target) if whole_server else self._kill_child(target)
        for load in self._loads:
            load.ask_pause()
        for load in self._loads:
            self.seen += load.paused()
        self._see(target, at_death)
        if whole_server:
            self._verify()
            self._start(target)
        self.server.disk_ready()
        self.ready_s.append(time.monotonic() - began_s)
        if target not in ("disk mover", "mover"):
            self._assert_taken_in(at_death)
        self._compare()
        status = self.server.status()
        assert not misses(status), f"a device that works was misread: {misses(status)}"
        assert not status.disks[0].problem
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    # ---------------------------------------------------------------- kills

    def _kill_server(self, target: str) -> Account:
        if target in STOPS:
            return self._stop_server(told_twice=target != STOPS[0])
        if target == "every process":  # random order, not from the top down
            pids = [self.server.pid, *pids_below(self.server.pid)]
            self._random.shuffle(pids)
            for pid in pids:
                with suppress(ProcessLookupError):  # it may have died with another one already
                    os.kill(pid, signal.SIGKILL)
            until("every process to end", lambda: all(is_gone(pid) for pid in pids))
        self.server.kill()
        return self.server.account()

    def _stop_server(self, *, told_twice: bool) -> Account:
        """Sends SIGTERM under load. Running work gets its time, unless a second SIGTERM follows."""
        below = pids_below(self.server.pid)
        assert self.server.process is not None
        self.server.process.terminate()
        if told_twice:
            time.sleep(self._random.uniform(*TOLD_AGAIN_S))
        status = self.server.stop()
        assert status == 0, f"exit status {status}"
        assert all(is_gone(pid) for pid in below), "nothing outlives a server that was stopped"
        return self.server.account()

    def _kill_child(self, target: str) -> Account:
        """Kills a child process and waits for its replacement; returns the account from before the replacement."""
        find = {
            "brain": self.server.brain_pid,
            "disk mover": self.server.disk_mover_pid_now,
            "mover": self.server.mover_pid_now,
        }[target]
        pid = until(f"a {target}", find)
        os.kill(pid, signal.SIGKILL)
        until(f"the {target} to end", lambda: is_gone(pid))
        account = self.server.account()
        if target != "mover":  # started by the first registration
            until(f"another {target}", lambda: find() not in (0, pid))
        return account

    def _start(self, target: str) -> None:
        if target == "server while it starts":
            self.server.spawn()
            time.sleep(self._random.uniform(*STARTING_S))
            self.server.kill()
            self._verify()
        self.server.start()

    # ---------------------------------------------------------------- promises

    def _see(self, target: str, at_death: Account) -> None:
        self.seen[target if target in STOPS else f"killed: {target}"] += 1
        self.seen["writes in flight at a kill"] += len(at_death.writing)
        self.seen["reads in flight at a kill"] += len(at_death.reading)
        self.seen["kills with I/O in flight"] += bool(at_death.writing or at_death.reading)

    def _verify(self) -> None:
        counts = self.server.verified()
        assert set(counts) <= {"right"}, f"records that are found and not right: {counts}"
        self.seen["records verified"] += counts["right"]

    def _assert_taken_in(self, at_death: Account) -> None:
        """Checks that the new brain has each story's leading chunks that were sealed on disk when the old one died."""
        now = self.server.account()
        for number in range(STORIES):
            sealed = sealed_chunks(at_death.held, story(number))
            found = sealed_chunks(now.taken_in, story(number))
            assert found >= sealed, f"story {number}: {sealed} chunks were sealed on disk, {found} are found"
            self.seen["sealed chunks found"] += sealed

    def _compare(self) -> None:
        """Checks that every client finds what the brain holds on disk, and retrieves a sample of it.

        The brain may write chunks from the ledger meanwhile and evict others for them, so it compares with the account
        before and after."""
        before, checker = self.server.account(), self._checker.ready()
        found = [checker.lookup(story(number)) for number in range(STORIES)]
        after = self.server.account()
        for number, answer in enumerate(found):
            sealed = min(sealed_chunks(account.held, story(number)) for account in (before, after))
            assert answer.chunks >= sealed, f"story {number}: {sealed} chunks are on disk, a lookup said {answer}"
            if answer.lease is not None:
                checker.client.release(answer.lease)
        on_disk = [number for number in range(STORIES) if sealed_chunks(after.held, story(number))]
        for number in self._random.sample(on_disk, min(COMPARED, len(on_disk))):
            came = bring(checker, story(number), TIMEOUTS.retrieve_s)
            assert came is not None, "what is on disk can be retrieved"
            self.seen["chunks compared"] += came


def sealed_chunks(held: dict[Name, int], whole: Prompt) -> int:
    """The number of leading chunks that are whole on disk."""
    for chunk in range(whole.chunks):
        if held.get((NAMESPACE, whole.key(chunk)), 0) != ALL_GROUPS:
            return chunk
    return whole.chunks


@contextmanager
def open_campaign(seed: int, **settings: object) -> Iterator[Campaign]:
    loads: list[Load] = []
    with (
        DiskServer(**settings) as server,
        Engine(server.path, SHAPE, name="checker", timeouts=CHECKER_TIMEOUTS) as checker,
    ):
        try:
            loads.extend(Load(server.path, 100 * seed + number) for number in range(LOADS))
            checker.ready()
            server.disk_ready()
            yield Campaign(server, loads, checker, seed)
        finally:
            for load in loads:
                load.close()
