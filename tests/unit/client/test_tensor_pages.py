"""Copies between a device and the buffer on the host, for devices that copy at the worst time.

The device is a stand-in. One queues what it is told, and does it when somebody waits for a mark, and no sooner. Another
does it at once. Memory that is used too early has wrong bytes on one of them, in every run. Needs torch, which
`make e2e` and `make e2e-ci` install.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvclient.memory import tensor_pages
from kvclient.memory.layouts import describe
from kvclient.memory.tensor_pages import Moves, TensorPages
from kvclient.values import full_group
from kvserver._native import create_memfd

torch = pytest.importorskip("torch", reason="needs torch: make e2e-ci")

BLOCKS, PER_CHUNK, CHUNKS = 13, 3, 3
SHAPES: dict[str, tuple[int, ...]] = {"five-regions": (5, BLOCKS, 24), "one-region": (1, BLOCKS, 40)}
HALVES = (24, 100, 1 << 20)
"""Bytes of a half, which is made a multiple of 64: a page or two, some blocks of a region, everything."""
FROM = [12, 3, 7, 0, 9, 5, 11]
SCATTERED, CONSECUTIVE = [8, 1, 6, 2, 0, 7, 3], [1, 2, 3, 4, 5, 6, 7]


class Device:
    """Tensors on the host that are copied at once, or as late as possible, in order."""

    is_host = False
    pins = True

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.broken_at = -1
        """Number of the copy that cannot be queued."""
        self.is_lost = False

    def host_memory(self, bytes_: int) -> Any:
        return torch.full((bytes_,), 0xEE, dtype=torch.uint8)

    def gather(self, half: Any, pages: Any, blocks: Any) -> None:
        self._append(lambda: half.copy_(pages.index_select(1, blocks)))

    def scatter(self, half: Any, pages: Any, blocks: Any) -> None:
        self._append(lambda: pages.index_copy_(1, blocks, half))

    def _append(self, copy: Callable[[], object]) -> None:
        if len(self.queue) == self.broken_at:
            raise RuntimeError("out of memory")
        self.queue.append(copy)
        if not self._is_late:
            self._run(len(self.queue))

    def mark(self) -> int:
        return len(self.queue)

    def wait(self, mark: int) -> None:
        if self.is_lost:
            raise RuntimeError("the device is lost")
        self._run(mark)

    def _run(self, mark: int) -> None:
        while self.done < mark:
            self.queue[self.done]()
            self.done += 1


class Rig:
    def __init__(self, shape: str, half_bytes: int, monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> None:
        self.device = Device(is_late=is_late)
        monkeypatch.setattr(tensor_pages, "TorchDevice", lambda name: self.device)
        monkeypatch.setattr(tensor_pages, "HALF_BYTES", half_bytes)
        size = SHAPES[shape]
        random = torch.Generator().manual_seed(5)
        self.tensor = torch.randint(0, 256, size, dtype=torch.uint8, generator=random)
        regions = describe([self.tensor], blocks=BLOCKS, block_dim=1).regions
        group = full_group(block_tokens=2, blocks=BLOCKS, regions=regions)
        self.pages = TensorPages([self.tensor], [group], chunk_tokens=2 * PER_CHUNK, chunks=CHUNKS)
        self._descriptor = create_memfd("test-portable", self.pages.bytes)
        self.pages.attach(self._descriptor)

    def moves(self, places: list[int]) -> Moves:
        return [(0, FROM, places)]

    def close(self) -> None:
        os.close(self._descriptor)

    @property
    def is_busy(self) -> bool:
        return self.device.done < len(self.device.queue)


@pytest.fixture(params=[(shape, half) for shape in SHAPES for half in HALVES], ids=str)
def sizes(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[True, False], ids=["late", "at-once"])
def rig(request: pytest.FixtureRequest, sizes: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(*sizes, monkeypatch, is_late=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("places", [SCATTERED, CONSECUTIVE], ids=["scattered", "consecutive"])
def test_bytes_come_back_whenever_the_device_copies(rig: Rig, places: list[int]) -> None:
    before = rig.tensor.clone()
    rig.pages.gather(rig.moves(places))
    assert not rig.is_busy
    rig.tensor.fill_(0x11)
    rig.pages.scatter(rig.moves(places))
    assert not rig.is_busy, "the engine's blocks are not complete when it returns"
    others = [block for block in range(BLOCKS) if block not in FROM]
    assert torch.equal(rig.tensor[:, FROM], before[:, FROM])
    assert (rig.tensor[:, others] == 0x11).all()


@pytest.mark.parametrize("verb", ["gather", "scatter"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_after_an_error_nothing_is_copied_any_more_and_the_next_copy_is_right(
    rig: Rig, verb: str, failing: int
) -> None:
    before = rig.tensor.clone()
    rig.pages.gather(rig.moves(CONSECUTIVE))
    pieces = len(rig.device.queue)
    rig.device.broken_at = pieces + min(failing, pieces - 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        getattr(rig.pages, verb)(rig.moves(CONSECUTIVE))
    assert not rig.is_busy
    rig.device.broken_at = -1
    rig.tensor.fill_(0x11)
    rig.pages.scatter(rig.moves(CONSECUTIVE))
    assert torch.equal(rig.tensor[:, FROM], before[:, FROM])


def test_a_device_that_does_not_end_its_copies_gets_no_more_until_it_does(rig: Rig) -> None:
    before = rig.tensor.clone()
    rig.pages.gather(rig.moves(CONSECUTIVE))
    rig.device.is_lost = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            rig.pages.scatter(rig.moves(CONSECUTIVE))
    queued = len(rig.device.queue)
    with pytest.raises(RuntimeError, match="lost"):
        rig.pages.gather(rig.moves(CONSECUTIVE))
    assert len(rig.device.queue) == queued
    rig.device.is_lost = False
    with pytest.raises(RuntimeError, match="has not ended"):
        rig.pages.scatter(rig.moves(CONSECUTIVE))
    rig.tensor.fill_(0x11)
    rig.pages.scatter(rig.moves(CONSECUTIVE))
    assert torch.equal(rig.tensor[:, FROM], before[:, FROM])
