"""A benchmark's own server, and a client of it."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from benchmarks.replay.served import Served
from benchmarks.rows import say
from kvclient.client import Client
from kvclient.values import Timeouts

HOST = "127.0.0.1"
CONNECT_S = 60.0
GROW_S_MAX = 300.0
PATIENT = Timeouts(lookup_s=5.0, store_s=60.0, retrieve_s=60.0, register_s=120.0)
"""Longer than any delay of a busy machine: late answers show up as times, not as misses."""


@contextmanager
def serving(
    flags: Sequence[str], arena_bytes: int, *, engine: str, rank: int = 0, timeouts: Timeouts = PATIENT
) -> Iterator[tuple[Served, Client]]:
    """Yields both when all of the arena has been touched. Prints the end of the server's log if the benchmark fails."""
    with closing(Served(flags, arena_bytes)) as served:
        failed = True
        try:
            with Client(served.socket, engine=engine, rank=rank, timeouts=timeouts) as client:
                _wait_for_answer(served, client)
                _wait_for_arena(client)
                yield served, client
            failed = False
        finally:
            if failed:
                say(served.last_words())


def free_port() -> int:
    """A free port on HOST, for a server that is started next."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _wait_for_answer(served: Served, client: Client) -> None:
    deadline = time.monotonic() + CONNECT_S
    while not client.wait_connected(1.0):
        if problem := served.problem():
            raise RuntimeError(problem)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server did not answer within {CONNECT_S:g} s")


def _wait_for_arena(client: Client) -> None:
    """Waits for the whole arena, so that a benchmark measures neither its growth nor page faults."""
    deadline = time.monotonic() + GROW_S_MAX
    while time.monotonic() < deadline:
        arena = client.status()["arena"]
        if arena["ready_bytes"] == arena["total_bytes"]:
            return
        time.sleep(0.1)
    raise TimeoutError(f"the arena did not grow to its size within {GROW_S_MAX:g} s")
