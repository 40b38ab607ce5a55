"""The brain leaves nothing behind that only a full garbage collection would free, since it never runs one."""

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvserver.service.service import Service

from .ending import drain
from .world import World

PARTS = ("kvserver.service.", "kvserver.index.")


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[Service]:
    """Every service that a world has started, so that the tables of those that died are no garbage."""
    made: list[Service] = []
    init = Service.__init__

    def kept(self: Service, *args: Any, **options: Any) -> None:
        made.append(self)
        init(self, *args, **options)

    monkeypatch.setattr(Service, "__init__", kept)
    return made


@pytest.fixture
def uncollected() -> Iterator[list[Any]]:
    """What a collection at the end of the test finds; none runs before."""
    gc.collect()
    gc.disable()
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("seed", range(1, 13))
def test_no_part_of_the_tables_is_lost_in_a_cycle(seed: int, lives: list[Service], uncollected: list[Any]) -> None:
    world = World(seed)
    while world.events < 300:
        world.step()
    drain(world)
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    lost = Counter(f"{type(it).__module__}.{type(it).__name__}" for it in uncollected)
    assert lives
    assert {name: count for name, count in lost.items() if name.startswith(PARTS)} == {}
