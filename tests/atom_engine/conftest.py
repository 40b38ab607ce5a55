"""ATOM for the tests: a checkout named by ATOM_DIR, or the stand-in next to this file."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ATOM_DIR = os.environ.get("ATOM_DIR", "")
sys.path.insert(0, ATOM_DIR or str(Path(__file__).with_name("standin")))

from tests.atom_engine.rig import Rig  # noqa: E402  (it imports the connector, and that imports ATOM)
from tests.process.harness import Server  # noqa: E402


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    """One server for all tests that leave it unchanged; each test has its own namespace."""
    with Server(arena_bytes=128 << 20) as running:
        yield running


@pytest.fixture
def make_rig(shared_server: Server, request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    """Makes engines at one server, with the real scheduler if ATOM_DIR is set. Each must return all blocks."""
    with ExitStack() as stack:

        def make(server: Any = shared_server, **options: Any) -> Rig:
            options.setdefault("model", request.node.nodeid)
            return stack.enter_context(Rig(server, is_real=bool(ATOM_DIR), **options))

        yield make
