"""A restart of the whole service: kept chunks are served byte by byte, or dropped with a log line."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver.supervisor.arena_files import ARENA, LEDGER
from tests.process.harness import until
from tests.process.restart.scene import (
    ARENA_BYTES,
    BLOCKS,
    CHUNKS,
    PAGE,
    WAIT_S,
    Engine,
    Store,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


def stored(store: Store, directory: Path, *, end: int = signal.SIGTERM) -> bytes:
    """Runs a first life of the service, in which something is stored; returns the stored bytes.

    end: the signal that ends it."""
    content = os.urandom(BLOCKS * PAGE)
    with store.service(directory) as process:
        engine = Engine(directory, 1)
        engine.store(content)
        until("signs of life", lambda: store.hear("WATCHDOG=1"), WAIT_S)
        engine.close()
        process.send_signal(end)
        process.wait(WAIT_S)
    assert store.kept.keys() == {ARENA, LEDGER}
    return content


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_every_sealed_chunk_is_back_byte_by_byte(store: Store, tmp_path: Path, end: int) -> None:
    content = stored(store, tmp_path, end=end)
    with store.service(tmp_path):
        engine = Engine(tmp_path, 2)
        assert engine.held() == CHUNKS
        assert engine.bring() == content
        engine.close()
    log = (tmp_path / "log").read_text()
    assert "memory kept" in log
    assert (store.hear("STOPPING=1"), "Traceback" in log) == (True, False)


def test_memory_of_another_size_is_given_back_and_made_anew(store: Store, tmp_path: Path) -> None:
    stored(store, tmp_path)
    with store.service(tmp_path, f"--arena-bytes {2 * ARENA_BYTES}"):
        engine = Engine(tmp_path, 2)
        assert engine.held() == 0
        engine.store(os.urandom(BLOCKS * PAGE))
        engine.close()
    assert store.hear(f"FDSTOREREMOVE=1\nFDNAME={ARENA}")
    assert f'why="{ARENA} has {ARENA_BYTES} bytes' in (tmp_path / "log").read_text()
    assert store.kept.keys() == {ARENA, LEDGER}, "what was made anew is kept"


def test_a_ledger_that_is_none_is_given_back(store: Store, tmp_path: Path) -> None:
    stored(store, tmp_path)
    os.pwrite(store.kept[LEDGER], os.urandom(4096), 0)
    with store.service(tmp_path):
        engine = Engine(tmp_path, 2)
        assert engine.held() == 0
        engine.close()
    assert 'why="its ledger cannot be read' in (tmp_path / "log").read_text()
