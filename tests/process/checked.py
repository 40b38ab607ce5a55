"""A server whose brain holds all of its state against every invariant whenever it is asked for its status.

    with CheckedServer(arena_bytes=64 << 20) as server:
        until("nothing to be held", lambda: settled(server))    # each time it asks, all that is held has its owner

It is what the simulator does behind each event, in a process that real engines talk to. A brain that finds something
wrong ends with a traceback, for which a Server fails its test.
"""

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
    """What takes the place of report.status."""
    check(core)
    return status.status(core, now_ns)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        stand_ins.serve(STAND_INS)
    service.status = checked
    process.main()
