"""Rows in GPU memory: what torch is asked for, with a stand-in for it. Bytes are compared in tests/atom_engine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.atom.states import Plane, Rows, TorchRows
from kvclient.atom.steps import StateCopy
from kvserver.errors import RequestError

BASE = 0x7000_0000_0000


class OutOfMemoryError(RuntimeError):
    pass


class Torch:
    """The functions of torch that rows use. Copies are noted as (stream, target, source, bytes)."""

    uint8 = "uint8"

    def __init__(self, *, room: int) -> None:
        self.copies: list[tuple[str, int, int, int]] = []
        self.stream = "of another thread"
        self._room = room
        self._running = ""
        self.cuda = SimpleNamespace(
            OutOfMemoryError=OutOfMemoryError, current_stream=lambda: self.stream, stream=self._on
        )

    def empty(self, bytes_: int, *, dtype: str, device: str) -> Any:
        assert (dtype, device) == ("uint8", "cuda")
        if bytes_ > self._room:
            raise OutOfMemoryError("no such room")
        return SimpleNamespace(data_ptr=lambda: BASE, numel=lambda: bytes_)

    def as_tensor(self, memory: Any, *, device: str) -> Any:
        described = memory.__cuda_array_interface__
        (bytes_,), (address, is_read_only) = described["shape"], described["data"]
        assert (described["typestr"], is_read_only, device) == ("|u1", False, "cuda")
        view = SimpleNamespace(address=address)
        view.copy_ = lambda source, *, non_blocking: self.copies.append(
            (self._running, address, source.address, bytes_ if non_blocking else -1)
        )
        return view

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        self._running = stream
        yield
        self._running = ""


def test_planes_follow_each_other_in_a_row_and_are_copied_on_the_stream_of_the_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = Torch(room=3 * 45)
    monkeypatch.setitem(sys.modules, "torch", torch)
    planes = [Plane("k_cache", "layer_0", 1000, 34, 34), Plane("slot", "rope", 5000, -11, 11)]
    rows = Rows(planes, TorchRows(3 * 45))
    assert rows.extent == (BASE, 3 * 45)
    torch.stream = "of forwards"
    rows.note_stream()
    torch.stream = "of another thread"
    rows.keep(StateCopy(row=2, slot=3))
    rows.restore(StateCopy(row=1, slot=0))
    assert torch.copies == [
        ("of forwards", BASE + 90, 1000 + 3 * 34, 34),
        ("of forwards", BASE + 90 + 34, 5000 - 3 * 11, 11),
        ("of forwards", 1000, BASE + 45, 34),
        ("of forwards", 5000, BASE + 45 + 34, 11),
    ]


def test_rows_that_a_gpu_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(room=100))
    with pytest.raises(RequestError, match="state_rows take 101 bytes of GPU memory"):
        TorchRows(101)
