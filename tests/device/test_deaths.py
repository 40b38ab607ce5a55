"""Engines and movers that die, stop or break in the middle of a transfer, on a simulated device.

A dead engine's device memory is free within five seconds by the driver's own count. Other engines go on. A dead
mover is replaced, and engines reconnect by themselves.
"""

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.device.conftest import VENDORS, DeviceServer, seen_by_children
from tests.device.engine_process import DeviceWorker
from tests.device.simulated import HANG, STICKY, Machine, Rule, Vendor
from tests.process.harness import is_gone, kill, state_of, stopped, until

FREED_S = 5.0
CHUNKS = 5
SEEDS = itertools.count(2)


class Scene(NamedTuple):
    machine: Machine
    server: DeviceServer
    engine: DeviceWorker
    """Lives through all tests; has stored prompt 1."""

    def fresh(self) -> int:
        """The seed of a prompt that nobody has stored."""
        return next(SEEDS)

    def in_flight(self) -> int:
        status = self.server.status()
        return status.stores + status.retrieves

    def is_met(self, held: Rule, timeout_s: float) -> bool:
        """Begins a retrieve with this timeout. Returns False if it ended before the rule was met.

        That may happen on a crowded machine; its blocks are then overwritten.
        """
        assert self.engine.call("begin_retrieve", 1, CHUNKS, timeout_s) == CHUNKS
        until("it to be held or to end", lambda: held.met() or self.engine.call("is_done"))
        if held.met():
            return True
        self.engine.call("outcome")
        self.engine.call("reuse")
        return False

    def wait_registered_again(self, registrations: int) -> None:
        """Waits until the engine has registered again by itself."""
        until("the engine to register again", lambda: self.engine.call("registrations") == registrations + 1)
        self.engine.call("ready")


@contextmanager
def served(vendor: Vendor, cache_dir: Path, **settings: Any) -> Iterator[Scene]:
    with (
        Machine(vendor) as machine,
        seen_by_children(machine),
        DeviceServer(machine, cache_dir, **settings) as server,
        DeviceWorker(server.path, machine, shape="kv_first", name="lives") as engine,
    ):
        engine.call("ready")
        assert engine.call("store", 1, CHUNKS)["chunks"] == CHUNKS
        yield Scene(machine, server, engine)


@pytest.fixture(scope="module", params=VENDORS)
def scene(request: pytest.FixtureRequest, cache_dir: Path) -> Iterator[Scene]:
    """One server for all tests: a fault in one test must be gone in the next."""
    with served(request.param, cache_dir) as made:
        yield made


@pytest.mark.parametrize("mode", ["staged", "server-gather", "direct"])
@pytest.mark.parametrize("verb", ["begin_store", "begin_retrieve"])
def test_memory_of_an_engine_killed_while_bytes_move_is_free_at_once(scene: Scene, mode: str, verb: str) -> None:
    """The mover's DMA hangs while the engine is killed: the copy ends, then the mappings are removed."""
    machine, server, engine = scene
    with DeviceWorker(server.path, machine, shape="kv_first", mode=mode, name="dies") as dying:
        dying.call("ready")
        assert machine.used_bytes(owner=dying.pid) > 0
        with machine.rule("run:copy", HANG, pid=server.mover_pid()) as held:
            dying.call(verb, scene.fresh() if verb == "begin_store" else 1, CHUNKS)
            until("its bytes to move", held.met)
            dying.kill()
        until("its memory to be free", lambda: machine.used_bytes(owner=dying.pid) == 0, FREED_S)
    until("its job to end", lambda: scene.in_flight() == 0)
    story = scene.fresh()
    assert engine.call("store", story, CHUNKS)["chunks"] == CHUNKS
    assert engine.call("retrieve", story, CHUNKS) == CHUNKS


@pytest.mark.parametrize("verb", ["begin_store", "begin_retrieve"])
def test_mover_killed_while_bytes_move_comes_back(scene: Scene, verb: str) -> None:
    machine, server, engine = scene
    mover, registrations = server.mover_pid(), engine.call("registrations")
    with machine.rule("run:copy", HANG, pid=mover) as held:
        engine.call(verb, scene.fresh() if verb == "begin_store" else 1, CHUNKS)
        until("its bytes to move", held.met)
        kill(mover)
    outcome = engine.call("outcome")
    assert outcome["why"]
    engine.call("reuse")
    scene.wait_registered_again(registrations)
    assert engine.call("wrong") == 0, "nobody writes the blocks any more"
    assert engine.call("retrieve", 1, CHUNKS) == CHUNKS
    assert server.mover_pid() != mover


def test_stopped_mover_is_replaced_and_nobody_writes_reused_blocks(vendor: Vendor, cache_dir: Path) -> None:
    """The mover is killed when the retrieve is overdue and the grace period is over.

    A round in which the retrieve ended before the mover was stopped shows nothing, so another round follows.
    """
    with served(vendor, cache_dir, mover_grace_ms=700) as scene:
        until("a mover to be stopped midway", lambda: is_stopped_midway(scene))
        assert scene.engine.call("wrong") == 0
        assert scene.engine.call("retrieve", 1, CHUNKS) == CHUNKS


def is_stopped_midway(scene: Scene) -> bool:
    """True if the mover was stopped during the copy; it has been replaced since."""
    machine, server, engine = scene
    mover, registrations = server.mover_pid(), engine.call("registrations")
    with machine.rule("run:copy", HANG, pid=mover) as held:
        met = scene.is_met(held, 0.3)
        if met:
            with suppress(ProcessLookupError):
                os.kill(mover, signal.SIGSTOP)
            until("it to stop, or to be gone", lambda: state_of(mover) == "T" or is_gone(mover))
        retrieves = server.status().retrieves
        lives = not is_gone(mover)
        if met and lives:
            assert retrieves == 1, "the brain answers"
    if met:
        assert engine.call("outcome")["why"]
        engine.call("reuse")
    if met or not lives:
        scene.wait_registered_again(registrations)
    return met and lives


def test_broken_device_context_ends_the_mover_alone(scene: Scene) -> None:
    machine, server, engine = scene
    mover, registrations = server.mover_pid(), engine.call("registrations")
    with machine.rule("run:copy", STICKY, code=700, pid=mover):
        engine.call("begin_retrieve", 1, CHUNKS)
        assert engine.call("outcome")["why"]
    until("the mover to end", lambda: server.mover_pid_now() != mover)
    scene.wait_registered_again(registrations)
    assert engine.call("retrieve", 1, CHUNKS) == CHUNKS
    assert "ILLEGAL_ADDRESS" in server.log() or "IllegalAddress" in server.log()


@pytest.mark.parametrize("verb", ["begin_store", "begin_retrieve"])
def test_stopped_engine_does_not_hold_up_another(scene: Scene, verb: str) -> None:
    """The engine is stopped while its ring has a segment asked for or taken; its jobs wait, another engine's do not."""
    machine, server, engine = scene
    with DeviceWorker(server.path, machine, shape="kv_first", name="stops") as stops:
        pid = stops.call("ready")
        with machine.rule("run:kernel", HANG, pid=pid) as held:
            stops.call(verb, scene.fresh() if verb == "begin_store" else 1, CHUNKS)
            until("its kernel to run", held.met)
            with stopped(pid):
                for story in (scene.fresh(), scene.fresh()):
                    assert engine.call("store", story, CHUNKS)["chunks"] == CHUNKS
                    assert engine.call("retrieve", story, CHUNKS) == CHUNKS
                assert scene.in_flight() == 1
        assert stops.call("outcome")["why"] == ""
        assert stops.call("landed") == 0
        assert stops.call("retrieve", story, CHUNKS) == CHUNKS


def test_blocks_of_a_cancelled_retrieve_stay_the_jobs_until_its_own_scatter_is_done(scene: Scene) -> None:
    machine, _, engine = scene
    pid = engine.call("ready")
    with machine.rule("run:kernel", HANG, pid=pid) as held:
        until("its scatter to run", lambda: scene.is_met(held, 0.2))
        until("the mover to let go of it", lambda: scene.in_flight() == 0)
        assert not engine.call("is_done")
    assert engine.call("outcome")["why"]
    engine.call("reuse")
    assert engine.call("retrieve", 1, CHUNKS) == CHUNKS


def test_import_that_hangs_costs_its_own_cache_only(scene: Scene) -> None:
    """The driver hangs while opening a handle: registered caches go on meanwhile."""
    machine, server, engine = scene
    with (
        machine.rule("ipc_open", HANG, pid=server.mover_pid(), times=1) as held,
        DeviceWorker(server.path, machine, shape="mla", name="waits") as waits,
    ):
        assert waits.call("is_registered") is False
        until("the import to hang", held.met)
        assert engine.call("retrieve", 1, CHUNKS) == CHUNKS
        held.remove()
        waits.call("ready")
        assert waits.call("store", 5, CHUNKS)["chunks"] == CHUNKS


def test_wedged_device_does_not_concern_another(vendor: Vendor, cache_dir: Path) -> None:
    """Two devices with an engine on each; the first mover hangs in the driver. Both engines share stored chunks."""
    with (
        Machine(vendor, devices=2) as machine,
        seen_by_children(machine),
        DeviceServer(machine, cache_dir) as server,
        DeviceWorker(server.path, machine, shape="kv_first", name="first", ordinal=0) as first,
    ):
        first.call("ready")
        wedged = server.mover_pid()
        with DeviceWorker(server.path, machine, shape="kv_first", name="second", ordinal=1) as second:
            second.call("ready")
            assert first.call("store", 1, CHUNKS)["chunks"] == CHUNKS
            assert second.call("retrieve", 1, CHUNKS) == CHUNKS
            with machine.rule("run:copy", HANG, pid=wedged) as held:
                first.call("begin_retrieve", 1, CHUNKS)
                until("the first device to hang", held.met)
                assert second.call("store", 2, CHUNKS)["chunks"] == CHUNKS
                assert second.call("retrieve", 2, CHUNKS) == CHUNKS
            assert first.call("outcome")["why"] == ""
            assert first.call("landed") == 0
            assert first.call("retrieve", 2, CHUNKS) == CHUNKS
