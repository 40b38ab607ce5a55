"""`kvserver serve` whose disk mover saves its read counts every half second, not every ten: for test_disk.py.

Run it as `python -m tests.process.disk.frequent_hit_counts serve --socket=...`."""

import sys

from kvserver.movers import disk_hits, disk_mover
from tests.process import stand_ins

SAVE_AFTER_S = 0.5


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        stand_ins.serve({disk_mover.__name__: __spec__.name})
    disk_hits.SAVE_AFTER_S = SAVE_AFTER_S
    disk_mover.main()
