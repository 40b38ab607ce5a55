"""Memory of an earlier start: which of it is used again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver.config.config import Config
from kvserver.supervisor import kept_memory
from kvserver.supervisor.arena_files import ARENA, LEDGER
from kvserver.supervisor.kept_memory import Held, hold
from kvserver.supervisor.systemd import Manager
from kvserver.units import MIB
from tests.rigs.memory_keeper import Keeper

CONFIG = Config(arena_bytes=3 * MIB, slab_bytes=MIB, chunks_max=700)


@pytest.fixture
def first() -> Iterator[Held]:
    """The memory of a first start; descriptors for the second are copies."""
    held = hold(CONFIG, Manager({}))
    os.pwrite(held.arena, b"sealed", 4096)
    yield held
    for descriptor in (held.arena, held.ledger):
        os.close(descriptor)


def kept(first: Held) -> dict[str, int]:
    return {ARENA: os.dup(first.arena), LEDGER: os.dup(first.ledger)}


def content(config: Config, keeper: Keeper) -> bytes:
    """The arena's content that a start holds."""
    held = hold(config, keeper)
    found = os.pread(held.arena, 6, 4096)
    for descriptor in (held.arena, held.ledger):
        os.close(descriptor)
    return found


def test_what_fits_is_used_again_once_nobody_can_write_to_it_any_more(first: Held) -> None:
    keeper = Keeper(kept(first), looks=3)
    assert content(CONFIG, keeper) == b"sealed"
    assert keeper.looks == -1
    assert keeper.forgotten == []


def test_memory_that_an_undead_process_may_write_to_is_dropped(first: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "END_S", 0.0)
    keeper = Keeper(kept(first), looks=1_000_000)
    assert content(CONFIG, keeper) == bytes(6)
    assert set(keeper.forgotten) == {ARENA, LEDGER}


@pytest.mark.parametrize(
    "other",
    [
        Config(arena_bytes=4 * MIB, slab_bytes=MIB, chunks_max=700),
        Config(arena_bytes=3 * MIB, slab_bytes=MIB, chunks_max=70_000),
    ],
)
def test_memory_that_another_configuration_would_not_make_is_dropped(first: Held, other: Config) -> None:
    keeper = Keeper(kept(first))
    assert content(other, keeper) == bytes(6)
    assert set(keeper.forgotten) == {ARENA, LEDGER}


def test_one_without_the_other_is_dropped(first: Held) -> None:
    keeper = Keeper({ARENA: os.dup(first.arena)})
    assert content(CONFIG, keeper) == bytes(6)
    assert keeper.forgotten == [ARENA]


def test_what_is_dropped_gives_its_memory_back_before_the_new_arena_is_counted(first: Held) -> None:
    """systemd has the descriptor as well, and closes it later."""
    os.pwrite(first.arena, os.urandom(2 * MIB), 0)
    before = [os.fstat(descriptor).st_size for descriptor in (first.arena, first.ledger)]
    content(Config(arena_bytes=4 * MIB, slab_bytes=MIB, chunks_max=700), Keeper(kept(first)))
    assert os.fstat(first.arena).st_blocks == 0
    assert [os.fstat(descriptor).st_size for descriptor in (first.arena, first.ledger)] == before


def test_it_is_known_whether_memory_was_found(first: Held, tmp_path: Path) -> None:
    assert not first.found, "nobody keeps anything without systemd"
    again = hold(CONFIG, Keeper(kept(first)))
    assert again.found
    os.close(again.arena)
    os.close(again.ledger)
    told = hold(CONFIG, Manager({"NOTIFY_SOCKET": str(tmp_path / "nobody")}))
    assert not told.found, "and it could not be told"
    os.close(told.arena)
    os.close(told.ledger)


@pytest.mark.parametrize("deaf", [ARENA, LEDGER])
def test_nothing_is_kept_beside_what_could_not_be_forgotten(first: Held, deaf: str) -> None:
    """The next start would be passed an arena, and the ledger of another one."""
    keeper = Keeper({**kept(first), "other": os.dup(first.ledger)}, deaf=deaf)
    assert content(Config(arena_bytes=4 * MIB, slab_bytes=MIB, chunks_max=700), keeper) == bytes(6)
    assert keeper.keeps == []


def test_a_store_that_took_no_arena_is_given_no_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper({})
    monkeypatch.setattr(keeper, "keep", lambda name, _: keeper.keeps.append(name))
    content(CONFIG, keeper)
    assert keeper.keeps == [ARENA]


def test_memory_is_dropped_where_nobody_knows_who_may_write_to_it(first: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(kept(first))
    monkeypatch.setattr(keeper, "left_behind", lambda: None)
    assert content(CONFIG, keeper) == bytes(6)
