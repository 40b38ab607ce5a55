"""A system that gives no more threads: engines that cannot start say so, and the process goes on.

Each case has its own process, whose address space has room for the stacks of a few threads only.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import errno, os, resource, signal, sys
from kvserver._native import ArenaGrower, CopyEngine, DiskEngine, DiskStore, copy_seconds, create_memfd

BYTES = 1 << 20
arena = create_memfd("arena", BYTES)
store = DiskStore(sys.argv[2], device=0, capacity_bytes=8 << 20, segment_bytes=1 << 20, fingerprint=bytes(32))


def disk_engine(threads):
    return DiskEngine(
        arena_fd=arena, arena_bytes=BYTES, stores=[store], engine="threads", depth=threads, sum_threads=1
    )


START = {
    "copies": lambda threads: CopyEngine(arena, BYTES, threads),
    "growth": lambda threads: ArenaGrower(arena, BYTES, BYTES, threads),
    "disk": disk_engine,
    "rate": lambda threads: copy_seconds(arena, arena, BYTES, threads, False),
}
start = START[sys.argv[1]]
with open("/proc/self/statm") as file:
    used_bytes = int(file.read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (200 << 20), before[1]))
try:
    start(64)
except OSError as problem:
    print(problem.errno == errno.EAGAIN, sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
resource.setrlimit(resource.RLIMIT_AS, before)
print([name for name in os.listdir("/proc/self/task") if name != str(os.getpid())])
start(2)
os._exit(0)
"""


@pytest.mark.parametrize("which", ["copies", "growth", "disk", "rate"])
def test_an_engine_whose_threads_cannot_start_raises_and_leaves_none_behind(tmp_path: Path, which: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, which, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["True []", "[]"]
