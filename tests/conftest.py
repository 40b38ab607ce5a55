"""Settings of all tests: no time limits inside hypothesis, because the machine may be busy with other things.

Hashes of weights are kept apart from the user's own."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from kvserver.config.paths import STORAGE_FILE_SYSTEMS, mount_of, opened

settings.register_profile("kvserver", deadline=None)
settings.load_profile("kvserver")

_cache = tempfile.TemporaryDirectory(prefix="kvserver-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A directory on ext4 or xfs that is not made yet."""
    with opened(str(tmp_path)) as descriptor:
        kind = mount_of(descriptor).file_system
    if kind not in STORAGE_FILE_SYSTEMS:
        pytest.skip(f"temporary files are on {kind}")
    return tmp_path / "arena"
