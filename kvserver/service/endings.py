"""Why the prefix that a lookup found ends where it does: counted for each lookup, said in its line and by `explain`.

whole        it does not: all that was asked for is held
absent       nothing is known of the next chunk: it was never stored, or has left long ago
gone         the next chunk was held, or was being stored, and has left (departed.py says when and why)
writing      the next chunk is being stored
partial      the next chunk is held, but a window or state group of it, or of those before it, is not
declined     the rest is on disk, and reading it is slower than computing it
disk-away    the rest is on disk, which cannot be read now
namespace    nothing was ever registered here under this namespace
"""

from typing import Literal

from kvserver.index.space import READY, Space
from kvserver.service.state import Core
from kvserver.wire.messages import KEY_BYTES

Ending = Literal["whole", "absent", "gone", "writing", "partial", "declined", "disk-away", "namespace"]
"""The same as counters.LOOKUP_ENDS."""


def ending(core: Core, space: Space | None, keys: bytes, held: int) -> Ending:
    """Why no more than `held` chunks of packed keys can be served, as far as the index knows."""
    if space is None:
        return "namespace"
    if held * KEY_BYTES == len(keys):
        return "whole"
    key = keys[held * KEY_BYTES : (held + 1) * KEY_BYTES]
    node = space.nodes.get(key)
    if node is None:
        return "absent" if core.departed.get(space.digest, key) is None else "gone"
    if node.state != READY:
        return "writing"
    return "absent" if space.only_full else "partial"  # a ready chunk among full groups alone is of another chain
