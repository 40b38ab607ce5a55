"""Every layout in every mode on a real GPU, and engines that share their stored chunks."""

import importlib.util
from collections.abc import Mapping
from contextlib import ExitStack

from tests.device.engine_process import DeviceWorker, PortableWorker
from tests.device.shapes import SHAPES
from tests.device.simulated import Machine
from tests.gpu.engine_process import GpuWorker
from tests.gpu.report import Report
from tests.gpu.scene import BACK_S, MIB, MODES, Gpus, GpuServer, Scene

CHUNKS = {"large_pages": 2, "many_pages": 128}
PATHS = ("register", "bounce")
ROUNDS = 4
INSET = 13 * 16


def layouts(report: Report, machine: Gpus | Machine) -> None:
    """There is one engine per mode; each stores a prompt, and all retrieve all prompts."""
    for path in PATHS:
        with ExitStack() as stack:
            arena = {"arena_bytes": 256 * MIB, "slab_bytes": 16 * MIB}
            server = stack.enter_context(GpuServer(machine, arena_reach=path, log_level="debug", **arena))
            workers = [stack.enter_context(GpuWorker(server.path, machine, name=mode)) for mode in MODES]
            for shape in SHAPES:
                _compare_layout(report, path, shape, dict(zip(MODES, workers, strict=True)))
            facts = {mover.facts["arena-reach"] for mover in server.status().movers}
            report.check(facts == {path}, f"the arena is reached by {facts}")
            for mode in MODES:
                report.check(f"mode={mode} " in server.log(), f"{path}: some job went {mode}")


def _compare_layout(report: Report, path: str, shape: str, workers: Mapping[str, DeviceWorker]) -> None:
    chunks = CHUNKS.get(shape, 5)
    try:
        for mode, worker in workers.items():
            worker.call("open", shape, mode, INSET)
        for seed, worker in enumerate(workers.values()):
            worker.call("ready")
            stored = worker.call("store", seed, chunks)
            assert (stored["chunks"], stored["why"]) == (chunks, ""), stored
        for worker in workers.values():
            for seed in range(len(workers)):
                found = worker.call("retrieve", seed, chunks)
                assert found == chunks, found
            worker.call("retrieve_part", 0, chunks, 2, 4)
            assert worker.call("wrong") == 0
            worker.call("close")
    except (AssertionError, TimeoutError) as problem:
        report.check(False, f"{path} {shape}: {problem}")
    else:
        report.check(True, f"{path} {shape}: {len(workers) ** 2} retrieves and {len(workers)} parts, every byte equal")


def against_torch(report: Report, machine: Gpus | Machine) -> None:
    """Kernels and torch's index_select and index_copy_ on the same device retrieve each other's chunks."""
    if importlib.util.find_spec("torch") is None:
        report.skip("needs torch")
        return
    device = "cpu" if isinstance(machine, Machine) else "cuda:0"
    with GpuServer(machine, arena_bytes=256 * MIB, slab_bytes=16 * MIB) as server, ExitStack() as stack:
        workers = {
            "server-gather": stack.enter_context(GpuWorker(server.path, machine, name="kernels")),
            "": stack.enter_context(PortableWorker(server.path, machine, name="torch", torch_device=device)),
        }
        for shape in SHAPES:
            _compare_layout(report, f"torch on {device}", shape, workers)
        moved = server.status().counters["mode_bytes"]
        report.check(isinstance(moved, dict) and moved["engine-driven"] > 0, f"some bytes went engine-driven: {moved}")


def one_gpu(report: Report, machine: Gpus | Machine) -> None:
    """Two engines at the same time retrieve each other's chunks."""
    with Scene(machine) as scene, scene.worker("staged", "second") as second:
        second.call("ready")
        _share(report, scene, scene.lives, second)


def two_gpus(report: Report, machine: Gpus | Machine) -> None:
    if machine.devices < 2:
        report.skip("needs two GPUs")
        return
    with Scene(machine) as scene:
        other = GpuWorker(
            scene.server.path,
            machine,
            shape=scene.shape,
            mode="staged",
            name="second",
            staging_bytes=256 * MIB,
            ordinal=1,
        )
        with other:
            other.call("ready")
            devices = sorted({mover.device for mover in scene.server.status().movers})
            report.check(len(devices) == 2, f"a mover each: {devices}")
            _share(report, scene, scene.lives, other)


def _share(report: Report, scene: Scene, one: GpuWorker, other: GpuWorker) -> None:
    """Both store at once, then retrieve each other's prompts, then one stores while the other retrieves."""
    for number in range(ROUNDS):
        ours, theirs, third = scene.fresh(), scene.fresh(), scene.fresh()
        steps = (
            (("store", ours), ("store", theirs)),
            (("retrieve", theirs), ("retrieve", ours)),
            (("store", third), ("retrieve", theirs)),
            (("retrieve", ours), ("retrieve", third)),
        )
        for pair in steps:
            for worker, (verb, seed) in zip((one, other), pair, strict=True):
                worker.begin(verb, seed, scene.chunks)
            for worker, (verb, seed) in zip((one, other), pair, strict=True):
                result = worker.end()
                chunks = result["chunks"] if verb == "store" else result
                assert chunks == scene.chunks, f"round {number}: {verb} of prompt {seed}: {result}"
    report.check(True, f"{ROUNDS} rounds, {ROUNDS * 5 * scene.chunks} chunks retrieved, every byte equal")


def crowded(report: Report, machine: Gpus | Machine) -> None:
    """Small allocations share a block of the driver, whose handle covers all of it: served right, or refused."""
    with GpuServer(machine, arena_bytes=64 * MIB, slab_bytes=4 * MIB) as server:
        for mode in MODES:
            with GpuWorker(server.path, machine, name=f"crowded-{mode}") as worker:
                worker.call("allocate_densely")
                worker.call("open", "block_first", mode, 0)
                try:
                    worker.call("ready", BACK_S)
                except AssertionError as refusal:
                    report.check("RequestError" in str(refusal), f"{mode}: refused: {refusal}")
                    continue
                worker.call("store", 1, 5)
                found = worker.call("retrieve", 1, 5)
                report.check(
                    found == 5, f"{mode}: three tensors in small allocations, {found} chunks, every byte equal"
                )
