"""Admission of stores: none while the server is being drained, and none for a while in a namespace with new weights."""

from kvserver.errors import ResourceError
from kvserver.service.state.core import MILLISECOND_NS, Core

FENCES_MAX = 256


def check_store(core: Core, namespace: bytes, now_ns: int) -> None:
    """Raises ResourceError if nothing may be stored in the namespace now."""
    if core.operators.drain:
        raise ResourceError("draining", "the server is being drained, so that it can be stopped")
    until_ns = core.operators.fences.get(namespace)
    if until_ns is not None and now_ns < until_ns:
        left_ms = (until_ns - now_ns) // MILLISECOND_NS
        raise ResourceError("new-weights", f"the weights have changed; nothing is stored for another {left_ms} ms")


def check_fence(core: Core, namespace: bytes, now_ns: int) -> None:
    """Raises ResourceError if there can be no further fence. Fences that are over are removed."""
    fences = core.operators.fences
    for over in [digest for digest, until_ns in fences.items() if until_ns <= now_ns]:
        del fences[over]
    if len(fences) >= FENCES_MAX and namespace not in fences:
        raise ResourceError("fences", f"{FENCES_MAX} namespaces are closed to stores already")


def fence(core: Core, namespace: bytes, quiet_ms: int, now_ns: int) -> None:
    """Forbids stores in a namespace for quiet_ms. A fence is never shortened."""
    until_ns = now_ns + quiet_ms * MILLISECOND_NS
    core.operators.fences[namespace] = max(until_ns, core.operators.fences.get(namespace, 0))
