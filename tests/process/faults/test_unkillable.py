"""Processes that were killed and do not end, asleep in the kernel or held by a debugger: waits for them are bounded.

No test can make a process sleep in the kernel. So these supervisors only believe that they kill: their movers are
stopped, and stay until the test kills them."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.process.engine import Engine, prompt
from tests.process.harness import Server, is_gone, kill, stop, stopped, until

PTRACE_DETACH, PTRACE_SEIZE = 17, 0x4206
WAIT_ALL = 0x40000000
"""__WALL of waitpid: any kind of child, also one that had another parent before it was traced."""

STORY = prompt(77, chunks=4)
UNDEAD = 'killed and does not end name="mover 1"'


class Powerless(Server):
    """A server whose supervisor cannot kill movers, and reports that soon."""

    PROGRAM = (
        "-c",
        "from kvserver.cli import main\nfrom kvserver.supervisor import supervisor\n"
        "kill = supervisor._Child.kill\n"
        "supervisor._Child.kill = lambda child: None if child.mover else kill(child)\n"
        "supervisor.REAP_S = 0.05\n"
        "main.main()",
    )

    def lose_brain(self) -> int:
        """Kills the brain while its mover is stopped.

        Returns the mover's pid once the supervisor has logged that it does not end."""
        mover_pid, brain_pid = self.mover_pid(), self.brain_pid()
        stop(mover_pid)
        kill(brain_pid)
        until("the supervisor to notice", lambda: UNDEAD in self.log())
        return mover_pid


def found_again(engine: Engine) -> None:
    """Waits until the engine has a brain again, and compares what was stored before."""
    until("the chunks to be found again", lambda: engine.lookup(STORY).chunks)
    assert engine.ready().retrieve(STORY) == STORY.chunks


def test_no_brain_starts_while_a_mover_of_the_last_one_may_still_write() -> None:
    with Powerless() as server, Engine(server.path) as engine:
        assert engine.ready().store(STORY).chunks == STORY.chunks
        incarnation = server.status().incarnation
        mover_pid = server.lose_brain()
        assert server.log().count("name=brain") == 1
        assert engine.lookup(STORY).chunks == 0
        kill(mover_pid)
        found_again(engine)
        assert server.status().incarnation == incarnation + 1


def test_a_stop_does_not_wait_for_ever_for_a_mover_that_does_not_end() -> None:
    with Powerless() as server, Engine(server.path) as engine:
        engine.ready()
        mover_pid = server.lose_brain()
        assert server.stop() == 0
        assert server.log().count(UNDEAD) == 2
        until("the mover to end with the supervisor", lambda: is_gone(mover_pid))


def test_others_are_served_while_a_killed_mover_does_not_end() -> None:
    with Powerless(mover_grace_ms=50) as server, Engine(server.path, name="first") as first:
        assert first.ready().store(STORY).chunks == STORY.chunks
        mover_pid = server.mover_pid()
        where = first.place(STORY)
        first.pool.compute(prompt(78, chunks=4), where)
        with stopped(mover_pid), Engine(server.path, name="second") as second:
            late = first.begin_store(prompt(78, chunks=4), where, timeout_s=0.05)
            until("the brain to have it killed", lambda: [m.state for m in server.status().movers] == ["killed"])
            assert second.ready().retrieve(STORY) == STORY.chunks
            assert [mover.state for mover in server.status().movers] == ["killed", "ready"]
            assert first.lookup(prompt(78, chunks=4)).chunks == 0
            kill(mover_pid)
            assert not late.result(10).chunks
            # While both pools are mapped: otherwise the other mover might unmap one too late and not end either.
            until("it to be forgotten", lambda: [mover.state for mover in server.status().movers] == ["ready"])
            until("the first engine to register again", lambda: server.status().caches == 2)
            assert first.ready().retrieve(STORY) == STORY.chunks


@contextmanager
def traced(pid: int) -> Iterator[None]:
    """Attaches to a process as a sleeping debugger, so that the test has to reap it after its end."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p
    if ptrace(PTRACE_SEIZE, pid, None, None) != 0:
        pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.waitpid(pid, WAIT_ALL)


def test_a_mover_that_is_killed_under_a_debugger_is_replaced_at_once(server: Server) -> None:
    with Engine(server.path) as engine:
        assert engine.ready().store(STORY).chunks == STORY.chunks
        mover_pid = server.mover_pid()
        with traced(mover_pid):
            kill(mover_pid)
            until("another mover", lambda: server.mover_pid_now() not in (0, mover_pid))
            assert engine.ready().retrieve(STORY) == STORY.chunks
        assert 'how="while it was traced"' in server.log()


def test_a_brain_that_is_killed_under_a_debugger_is_replaced_at_once(server: Server) -> None:
    with Engine(server.path) as engine:
        assert engine.ready().store(STORY).chunks == STORY.chunks
        brain_pid = server.brain_pid()
        with traced(brain_pid):
            kill(brain_pid)
            until("another brain", lambda: server.brain_pid() != brain_pid)
            found_again(engine)
