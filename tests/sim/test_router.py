"""What the simulated router learns from lookups."""

from collections import Counter
from typing import Any, cast

import pytest

from kvserver.wire.kv_events import Begun, ChunksStored
from kvserver.wire.messages import Found, Lookup

from .content import Path, key_of
from .router import Router
from .router_hour import DIGEST, SHAPE

HELD: list[Path] = [(0,), (0, 1), (0, 1, 0)]


@pytest.mark.parametrize("seed", range(3))
def test_keys_of_two_prompts_show_nothing_of_the_second(seed: int) -> None:
    router = Router(seed, {DIGEST: SHAPE}, Counter(), depth=3, fanout=2, is_large=True)
    stored = [ChunksStored(DIGEST, "dram", key_of(path[:-1]), [key_of(path)], SHAPE.chunk_tokens) for path in HELD]
    router.told(1, [Begun(0), *stored])
    facts = {(DIGEST, key_of(path), "dram") for path in HELD}
    router.check(facts, set())
    router.sees((1,))
    keys = b"".join(key_of(path) for path in [(0,), (1,), (0, 1, 0)])
    asker = cast(Any, object())
    router.asks(asker, 5)
    router.finds(asker, Lookup(5, DIGEST, keys, 1), Found(5, 3, 7, 900, 0, ""))
    router.check(facts, set())
