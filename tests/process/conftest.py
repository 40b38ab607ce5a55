"""Fixtures of the process tests. All processes that they start are gone when the test ends, passed or failed."""

from collections.abc import Iterator

import pytest

from tests.process.harness import Server


@pytest.fixture
def server() -> Iterator[Server]:
    """A server with an arena of 64 MiB that answers requests."""
    with Server() as running:
        yield running
