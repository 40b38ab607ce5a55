"""How fast are a model's weights hashed? python -m benchmarks.bench_weights [--bytes N] [--folder DIR]

Rows: the first time, with and without the file in memory, and with the kept hash. One JSON object a row. CPU seconds
are shown too: on a crowded machine they are more reliable.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvclient.identity.file_hashes import Hashes, Seen, threads


def row(what: str, path: Path, call: Callable[[], object]) -> None:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    size = path.stat().st_size
    said = {"what": what, "bytes": size, "threads": threads(), "seconds": round(seconds, 4), "cpu_seconds": cpu_s}
    print(json.dumps({**said, "gb_per_s": round(size / 1e9 / seconds, 2), "load": os.getloadavg()[0]}), flush=True)


def forget(path: Path) -> None:
    """Drops the file's pages from memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--folder", help="where the file is written; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        path, kept = Path(name) / "weights", Path(name) / "kept"
        kept.mkdir(mode=0o700)
        piece = os.urandom(64 << 20)
        with path.open("wb") as file:
            for _ in range(max(1, arguments.bytes // len(piece))):
                file.write(piece)
        forget(path)
        row("cold", path, lambda: Hashes(Path(name) / "no-folder").of(Seen.at(path)))
        row("warm", path, lambda: Hashes(kept, settled_s=-3600).of(Seen.at(path)))
        row("kept", path, lambda: Hashes(kept).of(Seen.at(path)))


if __name__ == "__main__":
    main()
