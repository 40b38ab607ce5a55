"""A GPU's mover finds a bit that flipped in DRAM, in a chunk of a host engine that nobody asks for."""

import shutil
import tempfile
from pathlib import Path

from kvserver.supervisor.arena_files import ARENA
from tests.device.conftest import DeviceServer
from tests.device.engine_process import DeviceWorker
from tests.device.simulated import Machine
from tests.process.engine import SMALL, Engine, prompt
from tests.process.harness import until

CHUNKS = 5


def test_a_bit_that_flips_in_dram_is_found_by_the_mover_of_a_gpu(machine: Machine, cache_dir: Path) -> None:
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvserver-test-"))
    settings = {"arena_path": memory, "arena_bytes": 16 << 20, "chunks_max": 100, "scrub_bytes_per_s": 64 << 20}
    try:
        with DeviceServer(machine, cache_dir, **settings) as server:
            with Engine(server.path, SMALL) as engine:
                engine.ready()
                engine.store(prompt(7, chunks=CHUNKS))
            server.stop()
            flip_first(memory)
            server.start()
            assert server.status().chunks == CHUNKS
            with DeviceWorker(server.path, machine, shape="kv_first") as worker:
                worker.call("ready")
                until("the mismatch", lambda: "digest mismatch" in server.log())
                assert "mode=scrub" in server.log()
                until("it to be dropped", lambda: server.status().chunks < CHUNKS)
    finally:
        shutil.rmtree(memory)


def flip_first(memory: Path) -> None:
    """Flips a bit of the first byte in the arena that is not zero."""
    (path,) = memory.glob(f"{ARENA}.*")
    with path.open("r+b") as arena:
        content = arena.read()
        at = len(content) - len(content.lstrip(b"\0"))
        arena.seek(at)
        arena.write(bytes([content[at] ^ 16]))
