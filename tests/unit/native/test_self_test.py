"""The copy engine's self-test detects wrong bytes, failures, and copies that never end."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from kvserver.errors import DeviceError
from kvserver.transfer import self_test
from kvserver.transfer.native import CopyEngine


class Faulty:
    """A copy engine that does one thing wrong and all others right."""

    def __init__(self, *arguments: Any) -> None:
        self._engine = CopyEngine(*arguments)
        self.pool = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def map_cache(self, *arguments: Any) -> None:
        self.pool = arguments[2][0]
        self._engine.map_cache(*arguments)


class FlipsAByte(Faulty):
    """Flips a byte of the pool once the retrieve has ended."""

    where = 0
    retrieves = False

    def submit(self, *arguments: Any, digests: bool) -> None:
        self.retrieves = arguments[1] == "retrieve"
        self._engine.submit(*arguments, digests=digests)

    def completions(self, count: int) -> Any:
        if self.retrieves:
            (byte,) = os.pread(self.pool, 1, self.where)
            os.pwrite(self.pool, bytes([byte ^ 1]), self.where)
        return self._engine.completions(count)


class FlipsAByteOfABlock(FlipsAByte):
    """Flips a byte in the block that the retrieve has written; the base class hits one it should leave alone."""

    where = self_test.PAGE_BYTES + 7


class ForgetsRetrieves(Faulty):
    """Drops retrieves, and shortens the self-test's wait for them."""

    def submit(self, *arguments: Any, digests: bool) -> None:
        if arguments[1] == "store":
            self._engine.submit(*arguments, digests=digests)
        else:
            self_test.DEADLINE_MS = 50


class FailsRetrieves(Faulty):
    """Makes retrieves fail with block ids outside the pool."""

    def submit(self, *arguments: Any, digests: bool) -> None:
        *others, groups = arguments
        if arguments[1] == "retrieve":
            groups = [(group, first, b"\xff" * len(ids), *rest) for group, first, ids, *rest in groups]
        self._engine.submit(*others, groups, digests=digests)


class ComparesNothing(Faulty):
    """Copies without digests, but tells right sums of its stores."""

    def submit(self, *arguments: Any, digests: bool) -> None:
        self._engine.submit(*arguments, digests=digests and arguments[1] == "store")


def test_an_engine_that_works_passes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    self_test.self_test()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (FlipsAByte, "bytes came back wrong"),
        (FlipsAByteOfABlock, "bytes came back wrong"),
        (ForgetsRetrieves, "a retrieve did not end within 50 ms"),
        (FailsRetrieves, "a retrieve ended as "),
        (ComparesNothing, "expected .'failed', 'digest'"),
    ],
)
def test_an_engine_that_does_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, engine: Callable[..., Any], says: str
) -> None:
    monkeypatch.setattr(self_test, "CopyEngine", engine)
    monkeypatch.setattr(self_test, "DEADLINE_MS", self_test.DEADLINE_MS)  # an engine may change it
    with pytest.raises(DeviceError, match=says) as refused:
        self_test.self_test()
    assert refused.value.code == "self-test"
