"""The engine worker processes of a replay: starts them, talks to them, ends them."""

import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.replay import pipe
from benchmarks.replay.options import ReplayOptions
from benchmarks.replay.worker import worker_main
from kvserver.errors import ResourceError

JOIN_S_MAX = 5.0


@dataclass(eq=False)
class _Member:
    process: BaseProcess
    connection: Connection
    left: bool = False


class Crew:
    """`options.workers` processes. Raises ResourceError as soon as one of them breaks or dies."""

    def __init__(self, options: ReplayOptions, socket: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._members: list[_Member] = []
        for worker in range(options.workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker_main, args=(worker, options, socket, theirs), name=f"replay-{worker}", daemon=True
            )
            process.start()
            theirs.close()  # so that a worker's death closes its pipe
            self._members.append(_Member(process, ours))

    def send(self, worker: int, message: pipe.ToWorker) -> None:
        try:
            self._members[worker].connection.send_bytes(pipe.encode(message))
        except OSError as error:
            raise self._died(worker) from error

    def receive(self, timeout_s: float) -> list[pipe.FromWorker]:
        """At most one message from each worker, as soon as there is one; none after the timeout."""
        numbers = {m.connection: i for i, m in enumerate(self._members) if not m.left}
        messages: list[pipe.FromWorker] = []
        for connection in wait(list(numbers), timeout_s):
            assert isinstance(connection, Connection)
            worker = numbers[connection]
            try:
                message = pipe.decode_from_worker(connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise self._died(worker) from error
            if isinstance(message, pipe.Broken):
                raise ResourceError("worker-broken", f"worker {worker}: {message.message}")
            self._members[worker].left = isinstance(message, pipe.Left)
            messages.append(message)
        return messages

    def close(self) -> None:
        """Closes the pipes, which ends the workers, and kills those that remain."""
        for member in self._members:
            member.connection.close()
        for member in self._members:
            member.process.join(JOIN_S_MAX)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()

    def _died(self, worker: int) -> ResourceError:
        process = self._members[worker].process
        process.join(JOIN_S_MAX)
        return ResourceError("worker-died", f"worker {worker} ended with exit code {process.exitcode}")
