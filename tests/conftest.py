"""Settings of all tests: no time limits inside hypothesis, because the machine may be busy with other things.

Hashes of weights are kept apart from the user's own."""

import os
import tempfile

from hypothesis import settings

settings.register_profile("kvserver", deadline=None)
settings.load_profile("kvserver")

_cache = tempfile.TemporaryDirectory(prefix="kvserver-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
