"""Every KV cache layout through store and retrieve, in every mode, with both drivers and both paths to the arena.

One engine retrieves another's chunks into other blocks, and no other byte of its memory changes.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.device.conftest import DeviceServer, seen_by_children
from tests.device.engine_process import DeviceWorker
from tests.device.shapes import HEADS, SHAPES
from tests.device.simulated import Machine, Vendor

MODES = ("staged", "server-gather", "direct")
PATHS = ("register", "bounce")
CHUNKS = {"large_pages": 2}
LAYOUTS = [name for name in SHAPES if name != "many_pages"]


Workers = dict[str, DeviceWorker]


@pytest.fixture(scope="module", params=[(vendor, path) for vendor in ("cuda", "rocm") for path in PATHS], ids="-".join)
def workers(request: pytest.FixtureRequest, cache_dir: Path) -> Iterator[Workers]:
    """A server, and an engine for each mode, used for all layouts in turn."""
    vendor: Vendor
    vendor, path = request.param
    with ExitStack() as stack:
        machine = stack.enter_context(seen_by_children(stack.enter_context(Machine(vendor))))
        server = stack.enter_context(DeviceServer(machine, cache_dir, arena_reach=path, log_level="debug"))
        yield {mode: stack.enter_context(DeviceWorker(server.path, machine, name=mode)) for mode in MODES}
        assert {mover.facts["arena-reach"] for mover in server.status().movers} == {path}
        for mode in MODES:
            assert f"mode={mode} " in server.log()


@pytest.mark.parametrize("shape", LAYOUTS)
def test_bytes_are_the_same(workers: Workers, shape: str) -> None:
    """There is one engine per mode; each stores a prompt, and all retrieve all prompts."""
    chunks = CHUNKS.get(shape, 5)
    for mode, worker in workers.items():
        worker.call("open", shape, mode, 13 * 16)
    for seed, worker in enumerate(workers.values()):
        worker.call("ready")
        stored = worker.call("store", seed, chunks)
        assert (stored["chunks"], stored["why"]) == (chunks, "")
    for worker in workers.values():
        for seed in range(len(MODES)):
            assert worker.call("retrieve", seed, chunks) == chunks
        worker.call("retrieve_part", 0, chunks, 2, 4)
        assert worker.call("wrong") == 0
        worker.call("close")


@pytest.mark.parametrize("shape", ["kv_first", "kv_first_hnd"])
def test_the_shards_of_a_ranks_heads_together_are_all_of_its_bytes(workers: Workers, shape: str) -> None:
    """A cache for each head, all of the same memory, each with staging and a ring of its own."""
    for mode, worker in workers.items():
        worker.call("open_in_shards", shape, mode, 13 * 16, HEADS)
    for seed, worker in enumerate(workers.values()):
        worker.call("ready")
        stored = worker.call("store", seed, 4)
        assert (stored["chunks"], stored["why"]) == (4, "")
    for worker in workers.values():
        for seed in range(len(MODES)):
            assert worker.call("retrieve", seed, 4) == 4
        worker.call("retrieve_part", 0, 4, 2, 4)
        assert worker.call("wrong") == 0
        worker.call("close")


@pytest.mark.parametrize("path", PATHS)
def test_a_segment_is_one_launch_however_many_pages_it_has(vendor: Vendor, cache_dir: Path, path: str) -> None:
    """Kernels of two processes take turns on a device, so each launch may cost the engine a turn."""
    chunks = 128
    with (
        Machine(vendor) as machine,
        seen_by_children(machine),
        DeviceServer(machine, cache_dir, arena_reach=path) as server,
        DeviceWorker(server.path, machine, shape="many_pages", mode="server-gather") as worker,
    ):
        worker.call("ready")
        launched = machine.calls("launch")
        assert worker.call("store", 1, chunks)["chunks"] == chunks
        assert machine.calls("launch") - launched == 1, "21,120 pieces: more than are expanded at a time"
        assert worker.call("retrieve", 1, chunks) == chunks
        assert machine.calls("launch") - launched == 2
        assert worker.call("wrong") == 0
