"""A process that only looks up has no pool, no threads beyond its connection's, and starts no process."""

import json
import os
import subprocess
import sys

from kvclient import Client, Found, Timeouts
from kvclient.transport.inquiries import Answered
from kvserver.wire.messages import KEY_BYTES
from tests.process.engine import NAMESPACE, Engine, prompt
from tests.process.harness import OBSERVER_SESSIONS, WAIT_S, Server, stopped, until

STORY = prompt(1, chunks=5)
SCRIPT = """
import json, os, pathlib, sys, threading
from kvclient import Client, Timeouts

with Client(sys.argv[1], engine="scheduler", epoch=7, ranks=2, rank=-1, timeouts=Timeouts(lookup_s=20)) as client:
    assert client.wait_connected(20)
    found = client.lookup(bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3]))
    maps = pathlib.Path("/proc/self/maps").read_text().split()
    print(json.dumps({
        "chunks": found.chunks,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "threads of the system": len(os.listdir("/proc/self/task")),
        "shared memory": sorted(word for word in maps if word.startswith("/memfd:")),
        "server": {name: client.status()[name] for name in ("sessions", "caches", "movers")},
    }))
"""


def ask(server: Server) -> dict[str, object]:
    """Lookup results and resources of a scheduler in its own process."""
    command = [sys.executable, "-c", SCRIPT, str(server.path), NAMESPACE.hex(), STORY.keys.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_a_scheduler_costs_one_thread_and_its_sockets(server: Server) -> None:
    server.status()
    said = ask(server)
    assert said["chunks"] == 0
    assert said["threads"] == ["MainThread", "kvclient"]
    assert said["threads of the system"] == 4, "and the two that a ZeroMQ socket has"
    assert said["shared memory"] == ["/memfd:kvserver-board"], "job words: 32 KiB, of which it touches none"
    assert said["server"] == {"sessions": OBSERVER_SESSIONS + 1, "caches": 0, "movers": []}


def test_a_scheduler_finds_what_workers_stored(server: Server) -> None:
    with Engine(server.path) as engine:
        assert engine.ready().store(STORY).chunks == STORY.chunks
        assert ask(server)["chunks"] == STORY.chunks


def test_a_burst_of_long_prompts_is_answered_whole(server: Server) -> None:
    """The requests overflow the socket before the brain reads: 32 prompts of 128K tokens at once."""
    with Client(server.path, engine="scheduler", rank=-1, timeouts=Timeouts(lookup_s=WAIT_S)) as client:
        assert client.wait_connected(WAIT_S)
        inquiries, found = client.inquiries(), list[Answered]()
        with stopped(server.brain_pid()):
            for number in range(32):
                inquiries.ask(number, NAMESPACE, os.urandom(512 * KEY_BYTES))
        until("all answers", lambda: found.extend(inquiries.take()) or len(found) == 32)
        assert {answer.found for answer in found} == {Found(0, None, "")}
        assert client.counters.trips == 0
