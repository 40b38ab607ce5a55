"""Kernels compared with torch: kernels scatter what index_select gathers, and index_copy_ scatters what they gather.

shapes.py defines each block byte by byte; here both implementations must agree on the place of each byte in DRAM.
Needs torch, which `make e2e` and `make e2e-ci` install.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.device.conftest import DeviceServer, seen_by_children
from tests.device.engine_process import DeviceWorker, PortableWorker
from tests.device.shapes import SHAPES
from tests.device.simulated import Machine, Vendor

pytest.importorskip("torch", reason="needs torch: make e2e-ci")

KERNELS = ("staged", "server-gather")
CHUNKS = {"large_pages": 2, "many_pages": 128}
ONE_BYTE = 1
"""Requested bytes for the buffer, which has room for two chunks anyway."""

Workers = dict[str, DeviceWorker]


@pytest.fixture(scope="module", params=["cuda", "rocm"])
def workers(request: pytest.FixtureRequest, cache_dir: Path) -> Iterator[Workers]:
    """A server, an engine for each kernel mode, and one with torch, used for all layouts in turn."""
    vendor: Vendor = request.param
    with ExitStack() as stack:
        machine = stack.enter_context(seen_by_children(stack.enter_context(Machine(vendor))))
        server = stack.enter_context(DeviceServer(machine, cache_dir))
        made: Workers = {mode: stack.enter_context(DeviceWorker(server.path, machine, name=mode)) for mode in KERNELS}
        made["engine-driven"] = stack.enter_context(PortableWorker(server.path, machine, name="torch"))
        yield made
        moved = server.status().counters["mode_bytes"]
        assert isinstance(moved, dict)
        assert all(moved[mode] for mode in made), moved


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_agree_with_torch_about_every_byte(workers: Workers, shape: str) -> None:
    chunks = CHUNKS.get(shape, 5)
    for mode, worker in workers.items():
        if mode == "engine-driven":
            worker.call("open", shape, "", 13 * 16, 1 << 20 if shape == "many_pages" else ONE_BYTE)
        else:
            worker.call("open", shape, mode, 13 * 16)
    for seed, worker in enumerate(workers.values()):
        worker.call("ready")
        stored = worker.call("store", seed, chunks)
        assert (stored["chunks"], stored["why"]) == (chunks, "")
    for worker in workers.values():
        for seed in range(len(workers)):
            assert worker.call("retrieve", seed, chunks) == chunks
        worker.call("retrieve_part", 0, chunks, 2, 4)
        assert worker.call("wrong") == 0
        worker.call("close")
