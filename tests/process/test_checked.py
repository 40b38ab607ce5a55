"""The invariant check of real engines' servers (checked.py) can fail."""

import sys
from contextlib import closing

from kvserver.brain import process
from kvserver.service import service
from kvserver.service.state.core import Core
from kvserver.wire.status import Status
from tests.process import stand_ins
from tests.process.checked import CheckedServer, checked
from tests.process.harness import until

STAND_INS = {"kvserver.brain.process": "tests.process.test_checked"}


class MiscountingServer(CheckedServer):
    """A server whose brain counts one chunk too many."""

    PROGRAM = ("-m", *STAND_INS.values())


def miscounted(core: Core, now_ns: int) -> Status:
    core.chunks.chunks += 1
    return checked(core, now_ns)


def test_a_brain_whose_state_is_wrong_ends_with_a_traceback() -> None:
    with closing(MiscountingServer()) as wrong:
        wrong.spawn()
        until("its brain to find it", lambda: "assert total == core.chunks.chunks" in wrong.log())
        assert "Traceback" in wrong.log()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        stand_ins.serve(STAND_INS)
    service.status = miscounted
    process.main()
