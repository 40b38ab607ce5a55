"""One browser for all tests of the page; without one they are skipped, with a hint what to install."""

from collections.abc import Iterator

import pytest

from tests.page.browser import MISSING, Browser


@pytest.fixture(scope="session")
def _started() -> Iterator[Browser]:
    if MISSING:
        pytest.skip(MISSING)
    with Browser() as running:
        yield running


@pytest.fixture
def browser(_started: Browser) -> Iterator[Browser]:
    """An empty browser. A test fails if the browser has complained about the page."""
    _started.resize(1280, 900)
    _started.prefer("light")
    _started.forget_scripts()
    _started.complaints()
    yield _started
    complaints = _started.complaints()
    _started.open("about:blank")
    assert complaints == []
