"""Settings of all tests: no time limits inside hypothesis, because the machine may be busy with other things.

Hashes of weights are kept apart from the user's own. Tests may leave few descriptors behind."""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvserver.config.paths import STORAGE_FILE_SYSTEMS, mount_of, opened
from tests.process.harness import descriptors_of

settings.register_profile("kvserver", deadline=None)
settings.load_profile("kvserver")

_cache = tempfile.TemporaryDirectory(prefix="kvserver-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name


DESCRIPTORS_LEFT_MAX = 300
"""All tests of a process may leave so many open. select() takes none above 1023, and each may stand for a thread or a
connection."""


BEGINS_FIRST = "tests/unit/supervisor/test_supervisor_faults.py"
"""Half a minute in one file near the end: begun in its turn, it keeps one process busy when the others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(BEGINS_FIRST))


@pytest.fixture(scope="session", autouse=True)
def _few_descriptors_are_left() -> Iterator[None]:
    yield
    gc.collect()
    kinds = Counter(target.split(":")[0] for target in descriptors_of(os.getpid()))
    assert kinds.total() <= DESCRIPTORS_LEFT_MAX, f"tests that have ended still hold {kinds.most_common(9)}"


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A directory on ext4 or xfs that is not made yet."""
    with opened(str(tmp_path)) as descriptor:
        kind = mount_of(descriptor).file_system
    if kind not in STORAGE_FILE_SYSTEMS:
        pytest.skip(f"temporary files are on {kind}")
    return tmp_path / "arena"
