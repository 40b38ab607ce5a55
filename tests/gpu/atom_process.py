"""`python -m tests.gpu.atom_process [--simulated]`: when does ATOM's connector let go of blocks that are stored?

Uses the rig of tests/atom_engine with its stand-in for ATOM's scheduler. Server, mover, both halves of the
connector, events and memory use a real GPU. A block is poisoned at the moment the connector lets it go; later its
prompt is loaded, and every block compared. Each control removes one mechanism that holds blocks, and must then find
poison. Prints `ok: …` or `FAILED: …`, and exits 1 if anything failed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "atom_engine" / "standin"))

from atom.kv_transfer.disaggregation.types import SaveOperationId

from kvclient.atom import connector
from kvclient.atom.states import Plane, Rows, TorchRows
from kvclient.atom.steps import StateCopy, Step
from tests.atom_engine.rig import Rig, prompt
from tests.gpu.atom_memory import DeviceMemory, Shape, SimulatedMemory, TorchMemory
from tests.gpu.scene import MIB, Gpus, GpuServer
from tests.process.harness import stopped, until

ROUNDS = 7
STAGING_MIB = 16
"""The minimum: eight pieces of 1 MiB for stores, so that most of a store's small pages are read late."""
DELAY_CYCLES = 600_000_000
"""About 300 ms of a forward that has not computed yet when its store is ordered."""
SHAPES = {
    "small pages": Shape("small pages", layers=32, heads=2, dim=64, block_tokens=16, blocks=1100),
    "large pages": Shape("large pages", layers=16, heads=8, dim=128, block_tokens=256, blocks=70),
}
"""256 KiB a block of 4 KiB pages; 16 MiB a block of 512 KiB pages."""
SIMULATED = {
    "small pages": Shape("small pages", layers=4, heads=2, dim=64, block_tokens=16, blocks=210),
    "large pages": Shape("large pages", layers=2, heads=8, dim=128, block_tokens=256, blocks=13),
}


class DeviceRig(Rig):
    """One rank on a GPU. Freed blocks are poisoned at once."""

    def __init__(self, server: Any, shape: Shape, *, simulated: bool) -> None:
        self._simulated = simulated
        self.tokens = shape.blocks * 2 // 5 * shape.block_tokens
        """Tokens of a prompt, before subtracting those that keep it from being whole chunks."""
        super().__init__(
            server,
            shape=shape,
            model=shape.name,
            chunk_tokens=256,
            max_num_batched_tokens=2 * self.tokens,
            max_model_len=4 * self.tokens,
            staging_mib=STAGING_MIB,
        )

    def __enter__(self) -> "DeviceRig":
        super().__enter__()
        blocks = self.scheduler.blocks
        free = blocks.deallocate

        def freed(seq: Any) -> None:
            table = list(seq.block_table)
            free(seq)
            assert blocks.free == blocks.total, "one request runs at a time"
            blocks.forget_prefixes()
            self.memory.poison(table)
            self.poisoned += len(table)

        blocks.deallocate = freed
        self.poisoned = 0
        return self

    @property
    def memory(self) -> DeviceMemory:
        return self.memories[0]

    def _memory_of(self, rank: int) -> Any:
        return SimulatedMemory(self.shape) if self._simulated else TorchMemory(self.shape)

    @contextmanager
    def _as_atom(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(connector, "life_of", return_value=self._life))
            if self._simulated:
                stack.enter_context(mock.patch.object(connector, "_device_kind", return_value="cuda"))
                stack.enter_context(mock.patch.object(connector, "_device_name", return_value="simulated"))
                recorded = lambda: self.memory.recorded_event()  # noqa: E731, PLW0108  (not made yet)
                stack.enter_context(mock.patch.object(connector, "_recorded_event", recorded))
            yield

    def finish(self, seed: int, *, max_tokens: int = 1) -> Any:
        """A request that has reported its last token; its blocks may or may not be poisoned already.

        With one output token its store is ordered after its end, with more tokens before.
        """
        seq = self.add(prompt(seed, self.tokens), max_tokens=max_tokens)
        self.until("its end", lambda: seq.is_finished)
        return seq

    def wrong_when_loaded(self, seed: int) -> tuple[int, int]:
        """(wrong blocks of the prompt, loaded blocks)."""
        self.orders.clear()
        before = self.memory.wrong_blocks
        self.run(prompt(seed, self.tokens))
        loaded = sum(len(order.blocks[0].block_ids) for order in self.loads())
        return self.memory.wrong_blocks - before, loaded


# ---------------------------------------------------------------- checks


def held_while_it_is_read(rig: DeviceRig, mover: int) -> bool:
    with stopped(mover):
        seq = rig.finish(1, max_tokens=3)
        for _ in range(100):
            rig.idle()
        held, poisoned = rig.connector.should_defer_free(seq), rig.poisoned
    rig.drain()
    good = say(held and not poisoned, f"a mover stands still: {len(seq.token_ids)} tokens are held after the end")
    wrong, loaded = rig.wrong_when_loaded(1)
    return good & say(
        not wrong and loaded > 0 and rig.poisoned > poisoned,
        f"poisoned when they were let go, {loaded} blocks loaded, {wrong} wrong",
    )


def poisoned_as_soon_as_let_go(rig: DeviceRig, _: int) -> bool:
    """Nothing is stopped, so this tests the moment at which a store is reported as ended."""
    wrong = loaded = waited = 0
    for seed in range(100, 100 + ROUNDS):
        before = rig.poisoned
        rig.finish(seed)
        waited += rig.poisoned == before
        rig.drain()
        found = rig.wrong_when_loaded(seed)
        wrong, loaded = wrong + found[0], loaded + found[1]
    text = f"{ROUNDS} stores, {waited} that their request's blocks waited for: {loaded} blocks loaded, {wrong} wrong"
    return say(not wrong and loaded > 0 and waited == ROUNDS, text)


def stored_behind_its_forward(rig: DeviceRig, _: int) -> bool:
    """The forward is delayed on the compute stream while its store is ordered."""
    with delayed(rig):
        rig.finish(200)
        rig.drain()
    wrong, loaded = rig.wrong_when_loaded(200)
    return say(not wrong and loaded > 0, f"a forward that computes late: {loaded} blocks loaded, {wrong} wrong")


def state_copied_between_its_forwards(rig: DeviceRig, _: int) -> bool:
    """The forward before computes late, and the one after is launched at once. Slots count from their end."""
    import torch  # noqa: PLC0415  (on GPUs only)

    slot_bytes, slots = 193, 5
    memory = torch.zeros(slots * slot_bytes, dtype=torch.uint8, device="cuda")
    planes = [Plane("slot", "odd", memory.data_ptr() + (slots - 1) * slot_bytes, -slot_bytes, slot_bytes)]
    rows = Rows(planes, TorchRows(3 * slot_bytes))
    rows.note_stream()
    torch.cuda._sleep(DELAY_CYCLES)
    memory.fill_(7)
    rows.keep(StateCopy(row=2, slot=1))
    memory.fill_(9)
    rows.restore(StateCopy(row=2, slot=4))
    torch.cuda.synchronize()
    held = memory.view(slots, slot_bytes).tolist()
    right = [[7] * slot_bytes, *[[9] * slot_bytes] * (slots - 1)]
    return say(held == right, "a state goes into a row and out of it between the forwards")


# ---------------------------------------------------------------- controls


def control_without_deferral(rig: DeviceRig, mover: int) -> bool:
    with mock.patch.object(rig.connector, "should_defer_free", return_value=False):
        return _poison_is_found(rig, mover, 300, "freed at the end of the request")


def control_that_says_the_end_too_early(rig: DeviceRig, mover: int) -> bool:
    """A worker reports an order as done as soon as it gets it."""
    early: list[Any] = []

    def given(_: int, step: Step) -> Step:
        early.extend(SaveOperationId(order.request.id, order.job) for order in step.stores)
        return step

    def said(rank: int) -> Any:
        output = rig.workers[rank].get_finished()
        output.finished_saving |= set(early)
        early.clear()
        return output

    with mock.patch.object(rig, "metadata_filter", given), mock.patch.object(rig, "get_finished", said):
        return _poison_is_found(rig, mover, 400, "let go before the copy")


def control_without_an_event(rig: DeviceRig, _: int) -> bool:
    half = rig.workers[0]._worker._half
    with delayed(rig), mock.patch.object(half, "_event", return_value=None):
        rig.finish(500)
        rig.drain()
    wrong, loaded = rig.wrong_when_loaded(500)
    return say(wrong > 0, f"control, a store that waits for no event: {loaded} blocks loaded, {wrong} wrong")


def _poison_is_found(rig: DeviceRig, mover: int, seed: int, what: str) -> bool:
    before = rig.poisoned
    with stopped(mover):
        rig.finish(seed, max_tokens=3)
        rig.until("its blocks to be poisoned", lambda: rig.poisoned > before)
    rig.drain()
    rig.idle_until("its store to end", lambda: not rig.workers[0]._worker._half.ends._open)
    wrong, loaded = rig.wrong_when_loaded(seed)
    return say(wrong > 0, f"control, {what}: {loaded} blocks loaded, {wrong} wrong")


@contextmanager
def delayed(rig: DeviceRig) -> Iterator[None]:
    with mock.patch.object(rig.memory, "delay_cycles", DELAY_CYCLES):
        yield


EVERYWHERE = (
    held_while_it_is_read,
    poisoned_as_soon_as_let_go,
    control_without_deferral,
    control_that_says_the_end_too_early,
)
ON_A_GPU = (stored_behind_its_forward, state_copied_between_its_forwards, control_without_an_event)


def say(holds: bool, text: str) -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {text}", flush=True)
    return holds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulated", action="store_true", help="the simulated driver is libcuda here")
    simulated = parser.parse_args().simulated
    parts: tuple[Callable[[DeviceRig, int], bool], ...] = EVERYWHERE if simulated else EVERYWHERE + ON_A_GPU
    sizes = {"arena_bytes": 512 * MIB, "slab_bytes": 32 * MIB, "touch_threads": 1} if simulated else {}
    good = True
    with GpuServer(Gpus(), **sizes) as server:
        for name, shape in (SIMULATED if simulated else SHAPES).items():
            with DeviceRig(server, shape, simulated=simulated) as rig:
                until("the arena", lambda: server.status().arena.ready_bytes == server.status().arena.total_bytes, 120)
                print(f"{name}: {rig.tokens * shape.block_bytes // shape.block_tokens // MIB} MiB a prompt", flush=True)
                for part in parts:
                    good &= part(rig, server.mover_pid())
    sys.exit(not good)


if __name__ == "__main__":
    main()
