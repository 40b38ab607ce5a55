"""Engines whose Python is blocked, engines that sleep and wake, and movers with failing driver calls.

Stored chunks stay right, and every request gets an answer.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.device.conftest import DeviceServer
from tests.device.engine_process import DeviceWorker
from tests.device.mover_rig import Halves
from tests.device.simulated import CODE, HANG, Machine
from tests.process.harness import until
from tests.process.worker import Worker

CHUNKS = 5
LAUNCH_FAILED = 719
DATA_PATH = ("copy", "event_record", "event_query", "event_create", "launch", "stream_wait")


@contextmanager
def gil_held(worker: Worker, folder: Path) -> Iterator[None]:
    """Blocks all Python threads of the worker within the block."""
    gate = folder / "gate"
    os.mkfifo(gate)
    ours = os.open(gate, os.O_RDWR)
    try:
        worker.begin("hold_the_gil", str(gate))
        until("the GIL to be held", gate.with_suffix(".held").exists)
        yield
        assert not worker.has_answered()
    finally:
        os.write(ours, b"1")
        os.close(ours)
    worker.end()


def sleeps(pid: int) -> bool:
    """True if the main thread was asleep at each of fifty looks."""
    states = []
    for _ in range(50):
        states.append(Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        time.sleep(0.001)
    return set(states) == {"S"}


def test_a_mover_looks_on_for_a_moment_and_then_sleeps(server: DeviceServer, machine: Machine) -> None:
    with DeviceWorker(server.path, machine, shape="kv_first") as worker:
        worker.call("ready")
        worker.call("store", 1, CHUNKS)
        until("the mover to sleep", lambda: sleeps(server.mover_pid()))
        assert worker.call("retrieve", 1, CHUNKS) == CHUNKS


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_packing_needs_no_python_of_the_engine(
    server: DeviceServer, machine: Machine, tmp_path: Path, verb: str
) -> None:
    """The engine's main thread holds the GIL from before its first kernel runs until the server has all bytes."""
    with DeviceWorker(server.path, machine, shape="kv_first") as worker:
        pid = worker.call("ready")
        if verb == "retrieve":
            worker.call("store", 1, CHUNKS)
        with machine.rule("run:kernel", HANG, pid=pid) as held:
            worker.call(f"begin_{verb}", 1, CHUNKS)
            until("its kernel to run", held.met)
            with gil_held(worker, tmp_path):
                held.remove()
                until("the job to end", lambda: server.status().stores + server.status().retrieves == 0)
                assert server.status().chunks == CHUNKS
        assert worker.call("outcome")["why"] == ""
        if verb == "retrieve":
            assert worker.call("landed") == 0


def test_copies_need_no_python_of_the_mover(machine: Machine, tmp_path: Path) -> None:
    with Halves(machine) as halves:
        cache = halves.map(70_001, staged=False)
        field = {"cuda": "copy_to_host", "rocm": "copy_of_kind"}[machine.vendor]

        def copies() -> int:
            return machine.calls(field)

        begun = copies()
        assert halves.wait(halves.submit("store", cache, 10, "server-gather"))[1] == "done"
        needed = copies() - begun
        assert needed > 3
        with machine.rule("run:copy", HANG, pid=halves.rig.pid) as held:
            job = halves.submit("store", cache, 10, "server-gather")
            until("a copy to run", held.met)
            with gil_held(halves.rig, tmp_path):
                held.remove()
                until("all of its copies", lambda: copies() - begun == 2 * needed)
        assert halves.wait(job)[1] == "done"


def test_an_engine_that_sleeps_gives_its_memory_back_and_hits_when_it_wakes(
    server: DeviceServer, machine: Machine
) -> None:
    with DeviceWorker(server.path, machine, shape="kv_first") as worker:
        pid = worker.call("ready")
        worker.call("store", 1, CHUNKS)
        before = machine.used_bytes(owner=pid), machine.importers().count(server.mover_pid())
        worker.call("sleep")
        assert machine.used_bytes(owner=pid) < before[0]
        assert server.mover_pid() not in machine.importers()
        worker.call("wake")
        worker.call("ready")
        assert worker.call("retrieve", 1, CHUNKS) == CHUNKS
        assert (machine.used_bytes(owner=pid), machine.importers().count(server.mover_pid())) == before
        assert server.status().caches == 1


@pytest.mark.parametrize("call", DATA_PATH)
@pytest.mark.parametrize("skip", [0, 5])
def test_a_call_of_the_mover_that_fails_costs_the_job_and_no_byte(
    server: DeviceServer, machine: Machine, call: str, skip: int
) -> None:
    """The job ends in one way or another, the mover comes back, and everything works again."""
    fields = {"cuda": ("copy_to_host", "copy_to_device"), "rocm": ("copy_of_kind",)}[machine.vendor]
    with DeviceWorker(server.path, machine, shape="kv_first", mode="server-gather") as worker:
        worker.call("ready")
        assert worker.call("store", 1, CHUNKS)["chunks"] == CHUNKS
        for field in fields if call == "copy" else (call,):
            mover, registrations = server.mover_pid(), worker.call("registrations")
            with machine.rule(field, CODE, code=LAUNCH_FAILED, pid=mover, skip=skip, times=1) as failed:
                for seed in range(2, 40):
                    move(worker, seed)
                    if failed.met():
                        break
            if not failed.met():
                continue  # this mode does not use that call
            until("the mover to end", lambda ended=mover: server.mover_pid_now() != ended)
            until("to be registered again", lambda n=registrations: worker.call("registrations") == n + 1)
            worker.call("ready")
            assert worker.call("retrieve", 1, CHUNKS) == CHUNKS
            assert worker.call("wrong") == 0


def move(worker: DeviceWorker, seed: int) -> None:
    """A store and a retrieve that may fail, but are right if they succeed."""
    stored = worker.call("store", seed, CHUNKS)
    assert stored["chunks"] == CHUNKS or stored["why"], stored
    if not worker.call("begin_retrieve", seed, CHUNKS):
        return
    if worker.call("outcome")["ok"]:
        assert worker.call("landed") == 0
    else:
        worker.call("reuse")
