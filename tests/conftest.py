"""What all tests share: no time limits inside hypothesis, because the machine may be busy with other things; hashes of
weights are kept apart from those of whoever runs the tests."""

import os
import tempfile

from hypothesis import settings

settings.register_profile("kvserver", deadline=None)
settings.load_profile("kvserver")

_cache = tempfile.TemporaryDirectory(prefix="kvserver-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
