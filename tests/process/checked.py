"""A server whose brain checks every invariant of its state each time it is asked for its status.

    with CheckedServer(arena_bytes=64 << 20) as server:
        until("nothing to be held", lambda: settled(server))    # each status request runs the check

The simulator does the same after each event; here it runs in a process that real engines use. A brain that finds a
broken invariant ends with a traceback, and the Server then fails its test."""

import sys

from kvserver.brain import process
from kvserver.service import service
from kvserver.service.check.memory import check
from kvserver.service.report import status
from kvserver.service.state.core import Core
from kvserver.wire.status import Status
from tests.process import stand_ins
from tests.process.harness import Server

STAND_INS = {"kvserver.brain.process": "tests.process.checked"}


class CheckedServer(Server):
    PROGRAM = ("-m", *STAND_INS.values())

    def _child(self, module: str) -> int:
        return super()._child(STAND_INS.get(module, module))


def checked(core: Core, now_ns: int) -> Status:
    """Replaces report.status: checks the invariants first."""
    check(core)
    return status.status(core, now_ns)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        stand_ins.serve(STAND_INS)
    service.status = checked
    process.main()
