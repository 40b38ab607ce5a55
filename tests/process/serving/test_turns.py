"""A process that asks without end, beside another one that asks now and then."""

import http.client
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvserver.wire import messages as wire
from kvserver.wire.codec import encode
from tests.process.bad_input.abuse import NAMESPACE, STORY, Victim
from tests.process.harness import free_port, until
from tests.process.raw import WAIT_S

FLOOD = """
import os, sys, time
import zmq
from kvserver.wire import messages as wire
from kvserver.wire.codec import encode

path, frame, reads = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3] == "reads"
peer = zmq.Context().socket(zmq.DEALER)
peer.setsockopt(zmq.LINGER, 0)
peer.connect("ipc://" + path)
peer.send(encode(wire.Hello(1, wire.PROTOCOL, "flood", os.getpid(), 1, -1, "tests")))
print("floods", flush=True)
due_s = time.monotonic() + 60
while time.monotonic() < due_s:
    try:
        for _ in range(100):
            peer.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        time.sleep(0.0005)
    try:
        while reads:
            peer.recv(zmq.NOBLOCK)
    except zmq.Again:
        pass
"""
LOOKUPS = 40


@contextmanager
def flood(victim: Victim, frame: bytes, reads: str) -> Iterator[int]:
    """Pid of a process that sends that frame as fast as the server takes it.

    To the server one process is one client."""
    command = [sys.executable, "-c", FLOOD, str(victim.path), frame.hex(), reads]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"floods\n"
        yield process.pid
        assert process.poll() is None, "it floods to the end"
        process.kill()


@pytest.fixture(scope="module")
def running() -> Iterator[Victim]:
    with Victim(http_port=free_port()) as victim:
        yield victim


def is_well(victim: Victim) -> bool:
    url = f"http://127.0.0.1:{victim.server.settings['http_port']}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return bool(answer.status == http.client.OK)
    except urllib.error.HTTPError:
        return False


@pytest.mark.parametrize("reads", ["reads", "reads nothing"])
@pytest.mark.parametrize(
    "frame",
    [b"\xc1" * 200, encode(wire.Status(5)), encode(wire.Lookup(5, NAMESPACE, b"k" * 32, 1))],
    ids=["garbage", "status", "lookups"],
)
def test_a_flood_keeps_nobody_from_being_served(running: Victim, frame: bytes, reads: str) -> None:
    """A lookup of the keeper waits at most 5 s, so one that finds nothing was never served."""
    client = running.keeper.client
    with flood(running, frame, reads):
        for _ in range(LOOKUPS):
            found = client.lookup(running.keeper.namespace, STORY.keys)
            assert (found.chunks, found.why) == (STORY.chunks, "")
            assert found.lease is not None
            client.release(found.lease)
        running.serves()
        until("it to say that it is well", lambda: is_well(running))  # a crowded machine may keep the brain from a tick
    running.unharmed()


def test_the_process_that_floods_is_named_in_the_log() -> None:
    with Victim() as victim, flood(victim, b"\xc1" * 200, "reads") as pid:
        until("the process to be named", lambda: "client takes much time" in victim.server.log())
        (line,) = (line for line in victim.server.log().splitlines() if "client takes much time" in line)
        assert "WARNING" in line
        assert f"pid={pid} " in line
        assert "refused_per_s=0" not in line
