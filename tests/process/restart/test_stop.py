"""Stopping a server: the first SIGTERM asks, the second one kills."""

import signal
from contextlib import suppress

from tests.process.engine import Engine, prompt
from tests.process.harness import WAIT_S, Server, is_gone, pids_below, resume, stop, until

PATIENT = "import kvserver.supervisor.supervisor as s; s.STOP_S = 3600.0; from kvserver.cli.main import main; main()"


LATE = """
import os
class Late:
    def __del__(self, tell=os.kill, pid=os.getpid()):
        tell(pid, 15)
late = Late()
from kvserver.cli.main import main
main()
"""


class LateServer(Server):
    """A server that gets another SIGTERM at the very end of its interpreter's shutdown."""

    PROGRAM = ("-c", LATE)


class PatientServer(Server):
    """A server that would wait an hour for its brain to end by itself."""

    PROGRAM = ("-c", PATIENT)


def test_the_second_sigterm_ends_a_server_whose_brain_does_not() -> None:
    with PatientServer() as server, Engine(server.path).register().ready() as engine:
        engine.store(prompt(1, 3))
        below = pids_below(server.pid)
        brain = server.brain_pid()
        stop(brain)
        assert server.process is not None
        try:
            server.process.send_signal(signal.SIGTERM)
            until("the brain to be asked", lambda: is_asked(brain))
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(WAIT_S) == 0
        finally:
            with suppress(ProcessLookupError):
                resume(brain)
        until("its processes to end", lambda: all(is_gone(pid) for pid in below))
        assert not server.path.exists()


def test_a_sigterm_that_comes_when_all_is_over_changes_nothing() -> None:
    """The interpreter has restored the default signal handlers by then."""
    with LateServer() as server:
        assert server.stop() == 0


def is_asked(pid: int) -> bool:
    """Whether a SIGTERM is pending for a stopped process."""
    with open(f"/proc/{pid}/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return pending & 1 << (signal.SIGTERM - 1) != 0
