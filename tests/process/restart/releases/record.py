"""Records the files that a server leaves when it stops: its arena in a file, and a device of its disk tier.

The Python of an environment with that release runs it, outside a checkout, so that all it imports is the release's:

    cd / && RELEASE/bin/python CHECKOUT/tests/process/restart/releases/record.py COMMIT > NEW.json

The files are megabytes long and nearly all zeros. Only the bytes between the zeros are written down.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import kvserver
from kvclient import Blocks, CacheSpec, Client, HostBuffer, RegionRun, chunk_keys, full_group, namespace_digest

CHUNKS, BLOCKS_A_CHUNK, BLOCK_TOKENS, REGIONS, PAGE_BYTES = 3, 2, 4, 3, 13
BLOCKS = CHUNKS * BLOCKS_A_CHUNK
CHUNK_TOKENS = BLOCKS_A_CHUNK * BLOCK_TOKENS
TOKENS = tuple(range(7, 7 + CHUNKS * CHUNK_TOKENS + 3))
FACTS = {"model": "upgrades", "layers": 3}
POOL_BYTES = REGIONS * BLOCKS * PAGE_BYTES
CONTENT = bytes((place * place * 31 + place * 7 + 5) % 251 for place in range(POOL_BYTES))
"""What is stored: the engine's whole pool."""
SETTINGS = {
    "arena_bytes": 1 << 20,
    "slab_bytes": 256 << 10,
    "chunks_max": 100,
    "disk_bytes": 2 << 20,
    "disk_segment_bytes": 512 << 10,
    "disk_write_policy": "through",
    "http_port": 0,
}
GAP_BYTES = 32
"""So many zeros in a row are left out."""
WAIT_S = 30.0


def store(socket: Path) -> None:
    """Stores CONTENT as an engine would."""
    pool = os.memfd_create("pool")
    os.pwrite(pool, CONTENT, 0)
    pages = RegionRun(0, 0, REGIONS, BLOCKS * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
    group = full_group(block_tokens=BLOCK_TOKENS, blocks=BLOCKS, regions=[pages])
    client = Client(str(socket))
    spec = CacheSpec(
        name="kv",
        namespace=namespace_digest(FACTS),
        chunk_tokens=CHUNK_TOKENS,
        buffers=[HostBuffer(pool, POOL_BYTES)],
        groups=[group],
    )
    cache = client.register_cache(spec)
    cache.wait_registered(WAIT_S)
    keys = chunk_keys(array("I", TOKENS), CHUNK_TOKENS)
    blocks = [Blocks(0, 0, array("i", range(BLOCKS)))]
    result = client.store(cache, 0, b"", keys, blocks).result(WAIT_S)
    client.close()
    os.close(pool)
    if result.chunks != CHUNKS:
        raise SystemExit(f"{result} of {CHUNKS} chunks")


def left_by_a_server(memory: Path, disk: Path, own: Path) -> None:
    """One life of a server. Returns when it has stopped."""
    socket, log = own / "kv.sock", own / "log"
    given = {**SETTINGS, "socket": socket, "cache_dir": own, "arena_path": memory, "disk_paths": disk}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    with log.open("wb") as out:
        server = subprocess.Popen([sys.executable, "-m", "kvserver", "serve", *flags], stderr=out)
    try:
        wait("the server", lambda: "server ready" in log.read_text())
        wait("its disk", lambda: "disk recovered" in log.read_text())
        store(socket)
        wait("the chunks to be on disk", lambda: chunks_on_disk(socket) == CHUNKS)
    finally:
        server.terminate()
        status = server.wait(WAIT_S)
    if status:
        raise SystemExit(log.read_text())


def chunks_on_disk(socket: Path) -> int:
    command = [sys.executable, "-m", "kvserver", "status", "--socket", str(socket), "--json"]
    said = subprocess.run(command, capture_output=True, check=True, timeout=WAIT_S).stdout
    return int(json.loads(said)["chunks_on_disk"])


def wait(what: str, probe: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not probe():
        if time.monotonic() > until_s:
            raise SystemExit(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.05)


def written_down(root: Path) -> dict[str, object]:
    """Path -> length, mode and content of every file below `root`. Content: offset -> bytes, in hexadecimal digits."""
    files: dict[str, object] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        content = path.read_bytes()
        stretches = re.finditer(rb"[^\0](?:\0{0,%d}[^\0])*" % (GAP_BYTES - 1), content)
        files[str(path.relative_to(root))] = {
            "bytes": len(content),
            "mode": f"{path.stat().st_mode & 0o777:04o}",
            "content": {str(found.start()): found[0].hex() for found in stretches},
        }
    return files


def main() -> None:
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvserver-release-"))
    own = Path(tempfile.mkdtemp(prefix="kvserver-release-"))
    disk = own / "disk"
    disk.mkdir()
    try:
        left_by_a_server(memory, disk, own)
        recorded = {
            "release": kvserver.__version__,
            "commit": sys.argv[1],
            "memory": written_down(memory),
            "disk": written_down(disk),
        }
    finally:
        shutil.rmtree(memory)
        shutil.rmtree(own)
    print(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main()
