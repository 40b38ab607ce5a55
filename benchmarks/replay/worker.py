"""The engine worker process: one engine with its paged KV, its connection to the server, and the pipe to the replay.

One thread decides (engine.py); the pipe's reader and the client's callbacks only put calls on its queue. The process
ends when the pipe closes, so it never outlives the replay.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from benchmarks.replay import pipe
from benchmarks.replay.link import ServerLink
from benchmarks.replay.options import ReplayOptions
from benchmarks.replay.pages import Pages
from benchmarks.replay.prefixes import Prefixes, replay_namespace
from kvserver.errors import KvError
from kvserver.sizing.engine import Engine
from kvserver.sizing.pool import PrefixPool

Call = Callable[[], None]


def worker_main(worker: int, options: ReplayOptions, socket: Path, connection: Connection) -> None:
    """Entry point of the process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's Ctrl-C reaches all processes; the replay ends its workers
    loop = WorkerLoop(connection)
    pages = Pages(blocks=options.pool_blocks, regions=options.regions, page_bytes=options.page_bytes)
    pool = PrefixPool(options.pool_blocks)
    namespace = replay_namespace(
        block_tokens=options.block_tokens,
        blocks_per_chunk=options.blocks_per_chunk,
        regions=options.regions,
        page_bytes=options.page_bytes,
    )
    try:
        link = ServerLink(
            worker=worker, options=options, socket=socket, namespace=namespace, pages=pages, post=loop.post
        )
    except KvError as error:
        connection.send_bytes(pipe.encode(pipe.Broken(worker, str(error))))
        return
    engine = Engine(
        worker=worker,
        block_tokens=options.block_tokens,
        blocks_per_chunk=options.blocks_per_chunk,
        prefixes=Prefixes(namespace, block_tokens=options.block_tokens, blocks_per_chunk=options.blocks_per_chunk),
        pool=pool,
        pages=pages,
        link=link,
        ended=lambda outcome: connection.send_bytes(pipe.encode(pipe.Over(outcome))),
    )
    connection.send_bytes(pipe.encode(pipe.Here(worker)))
    loop.run(engine)
    link.close()
    pages.close()
    pool.check()
    assert pool.pinned == 0
    connection.send_bytes(pipe.encode(pipe.Left(worker, pool.evictions)))


class WorkerLoop:
    """Runs calls one after another until Stop has come and every prompt has ended."""

    def __init__(self, connection: Connection) -> None:
        """Starts the thread that reads the pipe."""
        self._connection = connection
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._waiting: deque[pipe.Begin] = deque()
        """Prompts for which the pool had no room yet; the first is tried again after every call."""
        self._stopping = False
        threading.Thread(target=self._read_pipe, name="replay-pipe", daemon=True).start()

    def post(self, call: Call) -> None:
        """Queues a call. Any thread may use it."""
        self._calls.put(call)

    def run(self, engine: Engine) -> None:
        while not (self._stopping and not self._waiting and engine.active == 0):
            self._calls.get()()
            self._begin_waiting(engine)

    def _begin_waiting(self, engine: Engine) -> None:
        while self._waiting:
            prompt = self._waiting[0]
            if not engine.begin(prompt.index, prompt.tokens, prompt.blocks):
                assert engine.active > 0  # an empty pool holds any prompt: ReplayOptions checks that
                return
            self._waiting.popleft()

    def _read_pipe(self) -> None:
        while True:
            try:
                message = pipe.decode_to_worker(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)  # the replay is gone, and so is everything that the other threads may wait for
            self.post(partial(self._accept, message))
            if isinstance(message, pipe.Stop):
                return

    def _accept(self, message: pipe.ToWorker) -> None:
        match message:
            case pipe.Begin():
                self._waiting.append(message)
            case pipe.Stop():
                self._stopping = True
