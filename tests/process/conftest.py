"""Fixtures of the process tests. Whatever they start is gone when the test ends, passed or not."""

from collections.abc import Iterator

import pytest

from tests.process.harness import Server


@pytest.fixture
def server() -> Iterator[Server]:
    """A server with an arena of 64 MiB, answering."""
    with Server() as running:
        yield running
