"""`kvserver serve` with two test processes in place of its own.

They are a brain with a witness, and a disk mover with planned faults. Everything else is the product's own code.

    python -m tests.process.disk_faults.program FOLDER serve --socket=...

FOLDER holds witness and plan (brain.py, mover.py)."""

import os
import sys

from tests.process import stand_ins

FOLDER = "KVSERVER_TESTS_FOLDER"
"""Environment variable that names the folder for the two processes' files."""
STAND_INS = {
    "kvserver.brain.process": "tests.process.disk_faults.brain",
    "kvserver.movers.disk_mover": "tests.process.disk_faults.mover",
}


def main() -> None:
    os.environ[FOLDER] = sys.argv.pop(1)
    stand_ins.serve(STAND_INS)


if __name__ == "__main__":
    main()
