"""`kvserver serve` whose disk mover keeps its counts of reads twice a second, not every ten: for test_disk.py.

python -m tests.process.counted_soon serve --socket=...
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from kvserver import cli, disk_hits, disk_mover, supervisor

SAVE_AFTER_S = 0.5


def serve() -> None:
    spawn: Callable[..., Any] = supervisor.Supervisor._spawn

    def spawn_hasty(self: supervisor.Supervisor, module: str, *rest: object) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] = spawn(self, __spec__.name if module == disk_mover.__name__ else module, *rest)
        return child

    supervisor.Supervisor._spawn = spawn_hasty  # type: ignore[assignment,method-assign]
    cli.main()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    disk_hits.SAVE_AFTER_S = SAVE_AFTER_S
    disk_mover.main()
