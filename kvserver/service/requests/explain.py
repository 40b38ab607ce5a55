"""Answers `kvserver explain`: the result that a lookup would have now, and why."""

from itertools import islice

from kvserver.index.space import READY, Space
from kvserver.service.requests import lookup
from kvserver.service.requests.miss_reason import Missing, missing
from kvserver.service.requests.remote_reason import remote_reason
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.pledges import Pledge
from kvserver.service.telling.lookup_counts import Ending, LookupResult
from kvserver.wire.explanation import Explanation, encode_explanations
from kvserver.wire.messages import KEY_BYTES, Explain, Explained
from kvserver.wire.status import SHOWN_MAX


def explain(core: Core, peer: int, request: Explain, now_ns: int) -> None:
    """Explains the keys of a prompt from its beginning on, or one key from anywhere. Without a namespace it covers up
    to SHOWN_MAX of them; without keys it only describes the namespaces."""
    if request.keys:
        lookup.check_keys(request.keys)
    if request.namespace:
        lookup.check_namespace(request.namespace)
        digests = [request.namespace]
    else:
        digests = list(islice(core.chunks.spaces, SHOWN_MAX))
    found = [_explain(core, digest, request.keys, now_ns) for digest in digests]
    core.answer(peer, Explained(request.id, encode_explanations(found)))


def _explain(core: Core, digest: bytes, keys: bytes, now_ns: int) -> Explanation:
    space = core.chunks.spaces.get(digest)
    asked = len(keys) // KEY_BYTES
    single = _single(space, keys) if asked == 1 else None
    found = single or lookup.plan_lookup(core, digest, space, keys, wanted_min=0)
    chunks = found.chunks
    key = keys[chunks * KEY_BYTES : (chunks + 1) * KEY_BYTES]
    lacks = missing(core, digest, key, now_ns) if key else Missing("", "", 0.0, [])
    reasons = {tier.name: remote_reason(core, tier, digest, key, now_ns) for tier in core.remotes if key}
    remote, remote_s = reasons.pop("", ("", 0.0))
    pledge = core.pledges.of(space, key) if space is not None and key else None
    due_ns = pledge.due_ns(core.bounds.pledge_patience_ms * MILLISECOND_NS) if pledge is not None else now_ns
    return Explanation(
        namespace=digest.hex(),
        chunk_tokens=space.geometry.chunk_tokens if space is not None else 0,
        chunks_asked=asked,
        chunks=chunks,
        chunks_on_disk=len(found.away),
        why=found.why,
        key=lacks.key,
        cause=lacks.cause,
        gone_s=lacks.gone_s,
        remote=remote,
        remote_s=remote_s,
        remotes={name: (why, rest_s) for name, (why, rest_s) in reasons.items() if why},
        producer=_producer(pledge) if pledge is not None else "",
        producer_s=(due_ns - now_ns) / 1e9,
        held_in=lacks.held_in,
    )


def _producer(pledge: Pledge) -> str:
    """The engine that computes a chunk, for people."""
    return pledge.producer if pledge.session is not None else f"of another server (by the store {pledge.store})"


def _single(space: Space | None, key: bytes) -> LookupResult | None:
    """The answer for a chunk from the middle of a prompt, found by its key alone. None if it is not in the index or
    begins a prompt."""
    node = space.find(key) if space is not None else None
    if node is None or node.depth == 1:
        return None
    is_ready = node.state == READY
    away = {node: node.present & ~node.in_dram} if is_ready and node.away else {}
    chunks = int(is_ready)
    why: Ending = "whole" if is_ready else "writing"
    return LookupResult(space, key, held=chunks, chunks=chunks, away=away, leased=False, why=why)
