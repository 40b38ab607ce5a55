"""Engines and movers that die, stop or break while bytes move, on a real GPU."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from urllib.error import HTTPError

from tests.device.simulated import HANG, STICKY, Machine
from tests.gpu.report import Report
from tests.gpu.scene import BACK_S, MIB, MODES, Gpus, Scene
from tests.process.harness import is_gone, kill, resume, stop, until

FREED_S = 5.0
SLACK_BYTES = 64 * MIB
"""Tolerance for other allocations on the device meanwhile."""
TRIES = 3
"""A copy takes some milliseconds, and may end before the signal arrives."""
LOOKUP_MS_MAX = 100.0
HEALTH_MS_MAX = 100.0
VERBS = ("begin_store", "begin_retrieve")
LOADED = "poison: loaded"
"""The message of poison/sitecustomize.py."""


def engine_killed(report: Report, machine: Gpus | Machine) -> None:
    """Its memory is free within five seconds by the driver's own count, and others go on."""
    with Scene(machine) as scene:
        for mode in MODES:
            with scene.worker(mode, f"first-{mode}") as first:  # memory that the mover takes at a mode's first use
                first.call("ready")
                first.call("store", scene.fresh(), scene.chunks)
                first.call("retrieve", 1, scene.chunks)
            scene.wait_alone()
            for verb in VERBS:
                _kill_engine(report, scene, mode, verb)
        story = scene.fresh()
        stored = scene.lives.call("store", story, scene.chunks)
        found = scene.lives.call("retrieve", story, scene.chunks)
        report.check(stored["chunks"] == found == scene.chunks, f"another engine stores and hits {found} chunks")


def _kill_engine(report: Report, scene: Scene, mode: str, verb: str) -> None:
    for attempt in range(1, TRIES + 1):
        before = scene.free_bytes()
        with scene.worker(mode, f"dies-{mode}-{verb}-{attempt}") as dying:
            dying.call("ready")
            taken = before - scene.free_bytes()
            slack = taken // 8
            dying.call(verb, scene.fresh() if verb == "begin_store" else 1, scene.chunks)
            met = scene.met()
            dying.process.kill()
            began = time.monotonic()
            dying.process.wait(FREED_S)
            freed = _wait_free(scene, before - slack)
            took_s = time.monotonic() - began
        scene.wait_alone()
        until("its job to end", lambda: scene.in_flight() == 0)
        if met or attempt == TRIES:
            break
    what = f"{mode} {verb}: {taken / MIB:.0f} MiB of a killed engine are free after {took_s:.2f} s"
    report.check(freed and took_s <= FREED_S and taken > 0, what)
    report.check(met, f"{mode} {verb}: its copy was under way when it was killed (try {attempt})")


def _wait_free(scene: Scene, wanted_bytes: int) -> bool:
    try:
        until("memory to be free", lambda: scene.free_bytes() >= wanted_bytes, 2 * FREED_S)
    except TimeoutError:
        return False
    return True


def mover_killed(report: Report, machine: Gpus | Machine) -> None:
    with Scene(machine) as scene:
        for verb in VERBS:
            for attempt in range(1, TRIES + 1):
                mover = scene.server.mover_pid()
                with _held(scene, mover):
                    scene.lives.call(verb, scene.fresh() if verb == "begin_store" else 1, scene.chunks)
                    met = scene.met()
                    kill(mover)
                since_s = time.monotonic()
                why = scene.lives.call("outcome")["why"]
                _everything_is_back(report, scene, f"{verb}, mover killed", mover, since_s)
                if (met and why) or attempt == TRIES:
                    break
            report.check(bool(met and why), f"{verb}: met while copying, ended as {why!r} (try {attempt})")


@contextmanager
def _held(scene: Scene, mover: int) -> Iterator[None]:
    """Makes copies of a simulated device hang; on a real one it does nothing."""
    if isinstance(scene.machine, Machine):
        with scene.machine.rule("run:copy", HANG, pid=mover):
            yield
        return
    yield


def mover_stopped(report: Report, machine: Gpus | Machine) -> None:
    """An idle stopped mover is killed and replaced at the next request; until then there is no effect."""
    with Scene(machine) as scene:
        mover, since_s = scene.server.mover_pid(), time.monotonic()
        stop(mover)
        _brain_answers(report, scene, "idle mover stopped")
        scene.lives.call("begin_retrieve", 1, scene.chunks, 0.5)
        why = scene.lives.call("outcome")["why"]
        report.check(bool(why), f"a retrieve from a stopped mover ends, as {why!r}")
        _everything_is_back(report, scene, "idle mover stopped", mover, since_s)
        for verb in VERBS:
            _stop_mover_midway(report, scene, verb)


def _stop_mover_midway(report: Report, scene: Scene, verb: str) -> None:
    for _ in range(TRIES):
        mover = scene.server.mover_pid()
        scene.lives.call(verb, scene.fresh() if verb == "begin_store" else 1, scene.chunks, 0.5)
        met = scene.met()
        stop(mover)
        since_s = time.monotonic()
        _brain_answers(report, scene, f"{verb}, mover stopped")
        why = scene.lives.call("outcome")["why"]
        if why:
            _everything_is_back(report, scene, f"{verb}, mover stopped", mover, since_s)
            break
        resume(mover)
    report.check(bool(met and why), f"{verb}: stopped while copying, ended as {why!r}")


def mover_broken(report: Report, machine: Gpus | Machine) -> None:
    """A kernel in the mover's own context writes to an invalid address: while idle, and while it copies."""
    with Scene(machine) as scene:
        for when in ("idle", *VERBS):
            mover = scene.server.mover_pid()
            _load_poison(scene, mover)
            met = False
            if when != "idle":
                scene.lives.call(when, scene.fresh() if when == "begin_store" else 1, scene.chunks)
                met = scene.met()
            since_s = time.monotonic()
            with _broken(scene, mover):
                why = scene.lives.call("outcome")["why"] if when != "idle" else ""
                noticed = "in the copy" if met and why else "at the next job"
                for _ in range(0 if why else TRIES):  # nothing calls the driver between two jobs
                    scene.lives.call("begin_retrieve", 1, scene.chunks)
                    since_s = time.monotonic()
                    why = scene.lives.call("outcome")["why"]
                    if why:
                        break
                gone = _is_gone_soon(mover)
            report.check(gone, f"{when}: the broken mover ends, noticed {noticed}; the last job ended as {why!r}")
            _everything_is_back(report, scene, f"{when}, mover broken", mover, since_s)
        said = [line for line in scene.server.log().splitlines() if "ILLEGAL_ADDRESS" in line]
        report.check(bool(said), f"the log names the error: {said[-1:]}")


@contextmanager
def _broken(scene: Scene, mover: int) -> Iterator[None]:
    """Breaks the mover's context. On a simulated device, every call of the mover fails from now on instead."""
    if isinstance(scene.machine, Machine):
        with scene.machine.rule("run:copy", STICKY, code=700, pid=mover):
            yield
        return
    os.kill(mover, signal.SIGUSR2)
    yield


def _load_poison(scene: Scene, mover: int) -> None:
    if not scene.simulated:
        before = scene.server.log().count(LOADED)
        os.kill(mover, signal.SIGUSR1)
        until("the mover to load a kernel", lambda: scene.server.log().count(LOADED) > before)


def _is_gone_soon(pid: int) -> bool:
    try:
        return bool(until("the mover to end", lambda: is_gone(pid)))
    except TimeoutError:
        return False


def engine_broken(report: Report, machine: Gpus | Machine) -> None:
    """An engine's own context breaks; no other process may be affected."""
    if isinstance(machine, Machine):
        report.skip("a simulated device runs no kernels but ours")
        return
    for mode in MODES:
        with Scene(machine, lives=mode) as scene:
            scene.lives.call("retrieve", 1, scene.chunks)  # memory that the mover takes at a mode's first use
            mover, before = scene.server.mover_pid(), scene.free_bytes()
            with scene.worker(mode, f"breaks-{mode}") as breaks:
                breaks.call("ready")
                breaks.call("retrieve", 1, scene.chunks)
                breaks.call("write_nowhere")
                breaks.call("begin_retrieve_unprepared", 1, scene.chunks, 3.0)
                outcome = breaks.call("outcome")
                report.say(f"{mode}: a retrieve into a broken engine ends as {outcome}")
                found = scene.lives.call("retrieve", 1, scene.chunks)
                report.check(found == scene.chunks, f"{mode}: another engine hits {found} chunks beside it")
            freed = _wait_free(scene, before - SLACK_BYTES)
            report.check(freed, f"{mode}: its memory is free after its end")
            report.say(f"{mode}: the mover {'lives' if scene.server.mover_pid_now() == mover else 'was replaced'}")
            found = scene.lives.call("retrieve", 1, scene.chunks)
            report.check(found == scene.chunks, f"{mode}: another engine hits {found} chunks afterwards")


# ---------------------------------------------------------------- checks after each fault


def _brain_answers(report: Report, scene: Scene, when: str) -> None:
    fewest, longest_ms = scene.lives.call("lookups", 1, scene.chunks, 50)
    report.check(fewest == scene.chunks, f"{when}: 50 lookups find {fewest} of {scene.chunks} chunks or more")
    _check_ms(report, scene, f"{when}: the slowest lookup", longest_ms, LOOKUP_MS_MAX)
    _brain_answers_health(report, scene, when)


def _brain_answers_health(report: Report, scene: Scene, when: str) -> None:
    """Checks /healthz. On a simulated device it retries, because a brain without CPU time reports itself as away."""
    if scene.simulated:
        health_ms = until("/healthz to be 200 twenty times", lambda: _health_ms(scene))
    else:
        health_ms = scene.server.health_ms(20)
    _check_ms(report, scene, f"{when}: the slowest /healthz", health_ms, HEALTH_MS_MAX)


def _health_ms(scene: Scene) -> float | None:
    """The longest answer in milliseconds; None if one was 503."""
    try:
        return scene.server.health_ms(20)
    except HTTPError as problem:
        if problem.code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return None


def _check_ms(report: Report, scene: Scene, what: str, took_ms: float, most_ms: float) -> None:
    """Checks a duration; on a simulated device only prints it."""
    text = f"{what} took {took_ms:.2f} ms"
    if scene.simulated:
        report.say(text)
    else:
        report.check(took_ms <= most_ms, text)


def _everything_is_back(report: Report, scene: Scene, when: str, old_mover: int, since_s: float) -> None:
    """Checks recovery after a failed job: its reused blocks are not written any more, and the engine hits again."""
    scene.lives.begin("reuse")
    _brain_answers_health(report, scene, when)
    scene.wait_mapped(old_mover)
    report.check(True, f"{when}: another mover has its memory {time.monotonic() - since_s:.2f} s later")
    scene.lives.end()
    scene.lives.call("ready", BACK_S)
    _brain_answers(report, scene, when)
    wrong = scene.lives.call("wrong")
    report.check(wrong == 0, f"{when}: {wrong} wrong bytes in all memory of the engine")
    found = scene.lives.call("retrieve", 1, scene.chunks)
    report.check(found == scene.chunks, f"{when}: retrieves {found} chunks, every byte compared")
