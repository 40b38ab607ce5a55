"""`kvserver serve` with two processes of the tests in place of its own: a brain with a witness, and a disk mover whose
I/O goes wrong as planned. Everything else, and all that these two do, is the product's.

    python -m tests.process.disk_faults_program FOLDER serve --socket=...

FOLDER is where witness and plan are (disk_faults_brain.py, disk_faults_mover.py).
"""

import os
import sys

from tests.process import stand_ins

FOLDER = "KVSERVER_TESTS_FOLDER"
"""The environment variable that tells the two where they write and read."""
STAND_INS = {
    "kvserver.brain.process": "tests.process.disk_faults_brain",
    "kvserver.movers.disk_mover": "tests.process.disk_faults_mover",
}


def main() -> None:
    os.environ[FOLDER] = sys.argv.pop(1)
    stand_ins.serve(STAND_INS)


if __name__ == "__main__":
    main()
