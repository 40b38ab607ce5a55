"""A server that believes a note of a remote store for half a second instead of five, and reads it more often."""

import sys

from kvserver.brain import process
from kvserver.remote import epoch_lease
from tests.process import stand_ins
from tests.process.harness import Server

STAND_INS = {"kvserver.brain.process": "tests.process.short_leases"}
LEASE_S, READ_EVERY_S = 0.5, 0.1


class ShortLeaseServer(Server):
    PROGRAM = ("-m", *STAND_INS.values())

    def _child(self, module: str) -> int:
        return super()._child(STAND_INS.get(module, module))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        stand_ins.serve(STAND_INS)
    epoch_lease.LEASE_S, epoch_lease.READ_EVERY_S = LEASE_S, READ_EVERY_S
    process.main()
