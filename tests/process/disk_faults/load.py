"""Load for a server that is about to die: engines in their own processes.

They look up, retrieve, compare and store the stories in turn until told to pause, also across deaths of the server.
`python -m tests.process.disk_faults.load FD OPTIONS` is the process itself; it ends when its pipe closes."""

import json
import os
import random
import subprocess
import sys
import traceback
from collections import Counter
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from kvclient import Timeouts
from tests.process.disk_faults.stories import SHAPE, STORIES, bring, keep, story
from tests.process.engine import Engine

TIMEOUTS = Timeouts(lookup_s=1.0, probe_s=0.3, backoff_first_s=0.005, backoff_max_s=0.05, connect_s=2.0)
JOB_S = 3.0
AWAY_S = 0.02
PAUSE_S = 60.0
"""Longer than any step of a load: all its requests are answered or given up well before."""


class Load:
    """The parent's side of a load process. It begins paused."""

    def __init__(self, path: Path, seed: int) -> None:
        self._pipe, theirs = Pipe()
        options = json.dumps({"path": str(path), "seed": seed})
        command = [sys.executable, "-m", "tests.process.disk_faults.load", str(theirs.fileno()), options]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        theirs.close()

    def go(self) -> None:
        self._pipe.send("go")

    def ask_pause(self) -> None:
        self._pipe.send("pause")

    def paused(self) -> Counter[str]:
        """Waits until the load is idle; returns its counts since go(). AssertionError when it saw a wrong result."""
        if not self._pipe.poll(PAUSE_S):
            raise TimeoutError(f"a load does not pause within {PAUSE_S:g} s: a request is without an answer")
        did, problem = self._pipe.recv()
        assert problem is None, problem
        return Counter(did)

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def step(engine: Engine, chooser: random.Random) -> Counter[str]:
    """Serves one prompt as an engine would."""
    assert engine.cache is not None
    if not (engine.client.wait_connected(AWAY_S) and engine.cache.wait_registered(AWAY_S)):
        return Counter()
    wanted = story(chooser.randrange(STORIES))
    came = bring(engine, wanted, JOB_S)
    did = Counter({"chunks compared": came or 0, "retrieves failed": came is None})
    if came != wanted.chunks:
        did["chunks stored"] += keep(engine, wanted, JOB_S)
    return did


def main() -> None:
    pipe, options = Connection(int(sys.argv[1])), json.loads(sys.argv[2])
    chooser = random.Random(options["seed"])
    name = f"load-{options['seed']}"
    with Engine(Path(options["path"]), SHAPE, name=name, timeouts=TIMEOUTS, seed=options["seed"]) as engine:
        engine.register()
        try:
            while pipe.recv() == "go":
                did: Counter[str] = Counter()
                while not pipe.poll():
                    did += step(engine, chooser)
                assert pipe.recv() == "pause"
                pipe.send((did, None))
        except EOFError:
            os._exit(0)
        except Exception:  # report any failure to the parent
            pipe.send((None, traceback.format_exc()))


if __name__ == "__main__":
    main()
