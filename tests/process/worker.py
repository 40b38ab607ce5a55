"""An Engine in its own process, for tests that kill, stop or fork it.

    with Worker(server.path) as worker:
        worker.call("ready")
        worker.call("begin_store", seed, chunks)     # any method of Remote; comes back at once
        worker.call("outcome")                       # what became of it

`python -m tests.process.worker FD OPTIONS` is the process itself; it ends when its pipe closes."""

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from kvclient import Lease, PledgeResult, RequestError
from tests.process import engine as engines
from tests.process.harness import WAIT_S

SHAPES = {"small": engines.SMALL, "large": engines.LARGE}


class Worker:
    """The parent's side."""

    def __init__(
        self,
        path: Path,
        *,
        shape: str = "small",
        name: str = "worker",
        epoch: int | None = None,
        rank: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._pipe, theirs = Pipe()
        epoch = epoch if epoch is not None else random.getrandbits(40)
        options = json.dumps({"path": str(path), "shape": shape, "name": name, "epoch": epoch, "rank": rank})
        command = [sys.executable, "-m", "tests.process.worker", str(theirs.fileno()), options]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, **(environment or {})},
        )
        theirs.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, name: str, *arguments: object, within_s: float = WAIT_S) -> Any:
        """Calls a method of Remote in the worker; raises what it raised, or TimeoutError."""
        self.begin(name, *arguments)
        return self.end(within_s)

    def begin(self, name: str, *arguments: object) -> None:
        """Begins a call without waiting for its result."""
        self._pipe.send((name, arguments))

    def end(self, within_s: float = WAIT_S) -> Any:
        """The value of the call that was begun first."""
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"worker {self.pid} did not answer for {within_s:g} s")
        value, problem = self._pipe.recv()
        if problem is not None:
            raise AssertionError(f"in worker {self.pid}: {problem}")
        return value

    def has_answered(self) -> bool:
        """Whether end() would return at once."""
        return self._pipe.poll(0)

    def kill(self) -> None:
        """Sends SIGKILL; returns when the process is reaped."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        self._pipe.close()
        self.kill()


class Remote:
    """The methods that a worker can be asked to call. Prompts travel as (seed, chunks)."""

    def __init__(self, path: str, shape: str, name: str, epoch: int, rank: int) -> None:
        self._engine = engines.Engine(Path(path), SHAPES[shape], name=name, epoch=epoch, rank=rank)
        self._future: Future[Any] | None = None
        self._pledge: PledgeResult | None = None
        self._waiting: engines.Waiting | None = None

    def connected(self) -> bool:
        return self._engine.client.wait_connected(WAIT_S)

    def register(self) -> None:
        self._engine.register()

    def ready(self) -> str:
        """Waits until registered; returns the name of the pool's memfd."""
        self._engine.ready()
        return self.pool_name()

    def pool_name(self) -> str:
        return self._engine.pool.name

    def store(self, seed: int, chunks: int) -> dict[str, Any]:
        return self._engine.store(engines.prompt(seed, chunks))._asdict()

    def retrieve(self, seed: int, chunks: int) -> int:
        return self._engine.retrieve(engines.prompt(seed, chunks))

    def pledge(self, seed: int, chunks: int) -> int:
        """Pledges a prompt; returns how many chunks of it the server took."""
        self._pledge = self._engine.client.pledge(self._engine.namespace, engines.prompt(seed, chunks).keys)
        return self._pledge.chunks

    def unpledge(self) -> None:
        """Takes the last pledge back."""
        assert self._pledge is not None
        self._engine.client.unpledge(self._pledge)

    def store_piece(self, seed: int, first: int, end: int) -> int:
        """Computes and stores chunks [first, end) of a prompt."""
        return self._engine.store_piece(engines.prompt(seed, end), first)

    def begin_store(self, seed: int, chunks: int, first: int = 0) -> None:
        """Computes chunks [first, chunks) of a prompt, and begins to store them."""
        story = engines.prompt(seed, chunks)
        where = self._engine.place(story, first)
        self._engine.pool.compute(story, where)
        self._future = self._engine.begin_store(story, where, first)

    def begin_retrieve(self, seed: int, chunks: int) -> None:
        story = engines.prompt(seed, chunks)
        found = self._engine.lookup(story)
        assert found.lease is not None, found
        self._future = self._engine.begin_retrieve(found.lease, self._engine.place(story.head(found.chunks)))

    def take_lease(self, seed: int, chunks: int) -> int:
        """Takes a lease on a prompt that another engine computes. Returns how many chunks are still to come."""
        return self._engine.client.lookup(
            self._engine.namespace, engines.prompt(seed, chunks).keys, may_wait=True
        ).awaited

    def begin_await(self, seed: int, chunks: int, timeout_s: float) -> int:
        """Begins to retrieve a prompt that another engine computes. Returns how many chunks are still to come."""
        self._waiting = engines.Waiting(self._engine, engines.prompt(seed, chunks), timeout_s)
        return self._waiting.found.awaited

    def end_await(self) -> dict[str, Any]:
        """The outcome, after a comparison of the bytes."""
        assert self._waiting is not None
        return self._waiting.end()._asdict()

    def is_done(self) -> bool:
        assert self._future is not None
        return self._future.done()

    def outcome(self) -> dict[str, Any]:
        assert self._future is not None
        result: dict[str, Any] = self._future.result(WAIT_S)._asdict()
        return result

    def registrations(self) -> int:
        return self._engine.client.counters.registrations

    def hash_of_text(self) -> int:
        return hash("some text")

    def hold_the_gil(self, seconds: float) -> float:
        """Stops all Python threads of this process for that long, its client's background thread included."""
        began_s = time.monotonic()
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return time.monotonic() - began_s

    def fork_child_that_stays(self, hooks: bool) -> int:
        """Forks a child that does nothing and outlives this process; returns its pid.

        hooks: os.fork(), after which kvclient closes what the child inherited. Otherwise a fork that Python does not
        see, as a library in C makes it: the child keeps every socket open."""
        libc = ctypes.PyDLL(None)
        child = os.fork() if hooks else libc.fork()
        while child == 0:
            libc.pause()
        return int(child)

    def refusals_in_child(self) -> dict[str, str]:
        """Forks, uses the client in the child, and returns what each verb raised there."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, json.dumps(self._use_everything()).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        refusals: dict[str, str] = json.loads(text)
        return refusals

    def _use_everything(self) -> dict[str, str]:
        engine = self._engine
        story = engines.prompt(1, 1)
        lease = Lease(1, 1, 1, time.monotonic() + 1)
        verbs = {
            "lookup": lambda: engine.lookup(story),
            "store": lambda: engine.begin_store(story, engine.place(story)),
            "retrieve": lambda: engine.begin_retrieve(lease, engine.place(story)),
            "release": lambda: engine.client.release(lease),
            "register": lambda: engine.register("another"),
            "clear": lambda: engine.client.clear(engine.namespace),
            "status": engine.client.status,
        }
        said = {}
        for name, verb in verbs.items():
            try:
                verb()
                said[name] = "nothing"
            except RequestError as error:
                said[name] = error.code
        return said


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    remote = Remote(**json.loads(sys.argv[2]))
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((getattr(remote, name)(*arguments), None))
        except Exception as problem:  # report any failure to the test
            pipe.send((None, f"{type(problem).__name__}: {problem}"))


if __name__ == "__main__":
    main()
