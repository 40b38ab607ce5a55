"""Whether stores are taken at all: not while the server is being drained, and not for a while in a namespace whose
weights have changed."""

from kvserver.errors import ResourceError
from kvserver.service.state.core import MILLISECOND_NS, Core

FENCES_MAX = 256


def check_store(core: Core, namespace: bytes, now_ns: int) -> None:
    """ResourceError where nothing is stored now."""
    if core.wishes.drain:
        raise ResourceError("draining", "the server is being drained, so that it can be stopped")
    until_ns = core.wishes.fences.get(namespace)
    if until_ns is not None and now_ns < until_ns:
        left_ms = (until_ns - now_ns) // MILLISECOND_NS
        raise ResourceError("new-weights", f"the weights have changed; nothing is stored for another {left_ms} ms")


def check_fence(core: Core, namespace: bytes, now_ns: int) -> None:
    """ResourceError where there can be no further fence. Those that are over go."""
    fences = core.wishes.fences
    for over in [digest for digest, until_ns in fences.items() if until_ns <= now_ns]:
        del fences[over]
    if len(fences) >= FENCES_MAX and namespace not in fences:
        raise ResourceError("fences", f"{FENCES_MAX} namespaces are closed to stores already")


def fence(core: Core, namespace: bytes, quiet_ms: int, now_ns: int) -> None:
    """Nothing is stored there until then. A fence is never made shorter."""
    until_ns = now_ns + quiet_ms * MILLISECOND_NS
    core.wishes.fences[namespace] = max(until_ns, core.wishes.fences.get(namespace, 0))
