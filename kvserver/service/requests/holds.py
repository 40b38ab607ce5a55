"""Holds: prefixes that operators keep in DRAM, for a time (pin) or until they are there (warm).

A hold is one pin on the last chunk, like a lease. But it belongs to no engine: nobody retrieves under it, and it counts
among the pins and not among the leases. The number of holds and their bytes are bounded, so that stores find room
whatever operators do. A hold ends by its time, by Unpin, with its namespace or prefix, and with the brain.
"""

from typing import Literal

from kvserver.errors import DeviceError, RequestError, ResourceError
from kvserver.index.space import READY, Node, Space
from kvserver.service.state.chunk_waits import Fetch, missing
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.operator_state import Hold
from kvserver.wire.admin import TTL_MS_MAX, Held, LetGo, Pin, Unpin, Warm
from kvserver.wire.messages import CHUNKS_MAX, KEY_BYTES, NAMESPACE_BYTES

WARM_MS = 600_000
"""Time limit of a warm. After it, nothing is kept any more, and the remaining chunks are read when somebody asks for
them."""


def pin(core: Core, peer: int, request_id: int, command: Pin, now_ns: int) -> None:
    if not 1 <= command.ttl_ms <= TTL_MS_MAX:
        raise RequestError("ttl", f"ttl_ms={command.ttl_ms} must be in [1, {TTL_MS_MAX}]")
    space, tail = find(core, command.namespace, command.keys)
    hold, away = _begin(core, "pin", space, tail, ttl_ms=command.ttl_ms, now_ns=now_ns)
    held = Held(request_id, hold.number, tail.depth, away, core.operators.held_bytes, command.ttl_ms)
    core.answer(peer, held)


def warm(core: Core, peer: int, request_id: int, command: Warm, now_ns: int) -> None:
    space, tail = find(core, command.namespace, command.keys)
    if not missing(space, tail):
        core.answer(peer, Held(request_id, 0, tail.depth, 0, core.operators.held_bytes, 0))
        return
    hold, away = _begin(core, "warm", space, tail, ttl_ms=WARM_MS, now_ns=now_ns)
    core.answer(peer, Held(request_id, hold.number, tail.depth, away, core.operators.held_bytes, WARM_MS))


def unpin(core: Core, peer: int, request_id: int, command: Unpin) -> None:
    hold = core.operators.holds.get(command.hold)
    if hold is None:
        raise RequestError("hold-unknown", f"there is no hold {command.hold}: never begun, over, or of another brain")
    end(core, hold, "")
    core.answer(peer, LetGo(request_id))


def find(core: Core, namespace: bytes, keys: bytes) -> tuple[Space, Node]:
    """The last chunk of the longest held prefix of a prompt, or the chunk of a single key, wherever it is."""
    check_digest("namespace", namespace)
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or not 1 <= count <= CHUNKS_MAX:
        raise RequestError("keys", f"{len(keys)} bytes of keys; expected 1 to {CHUNKS_MAX} keys of {KEY_BYTES} bytes")
    space = core.chunks.spaces.get(namespace)
    if space is None:
        raise RequestError("namespace-unknown", f"nothing is held under namespace {namespace.hex()}")
    chunks = core.chunks.servable(space, keys) if count > 1 else 1
    node = space.find(keys[(chunks - 1) * KEY_BYTES : chunks * KEY_BYTES]) if chunks else None
    if node is None or node.state != READY:
        raise RequestError("key-unknown", f"no chunk {keys[:KEY_BYTES].hex()} is held in namespace {namespace.hex()}")
    return space, node


def check_digest(what: str, digest: bytes) -> None:
    if len(digest) != NAMESPACE_BYTES:
        raise RequestError(what, f"{len(digest)} bytes; a {what} is a digest of {NAMESPACE_BYTES} bytes")


def fetched(core: Core, hold: Hold) -> None:
    """Handles a hold whose chunks are all in DRAM."""
    hold.take_fetch()
    if hold.kind == "warm":
        end(core, hold, "")


def expire(core: Core, number: int) -> None:
    """Ends a hold whose time is over."""
    end(core, core.operators.holds[number], "its time is over")


def end(core: Core, hold: Hold, why: str) -> None:
    """Ends a hold. why: for the log; empty: nothing is logged here."""
    core.operators.end(hold)
    core.timers.cancel("hold", hold.number)
    if core.disk is not None and (fetch := hold.take_fetch()) is not None:
        core.disk.waits.end(fetch)
    core.chunks.unpin(hold.space, hold.tail)
    if why:
        core.log("hold ended", ("hold", hold.number), ("kind", hold.kind), ("why", why))


def _begin(
    core: Core, kind: Literal["pin", "warm"], space: Space, tail: Node, *, ttl_ms: int, now_ns: int
) -> tuple[Hold, int]:
    """Begins a hold. Returns it and the number of its chunks that are read to DRAM. Raises when it may not be, and then
    changes nothing."""
    operators, bounds = core.operators, core.bounds
    away = missing(space, tail)
    if away and (core.disk is None or not core.disk.readable):
        raise DeviceError("disk-away", "some of it is on disk, which cannot be read now")
    if not core.chunks.may_ever_fit(space, away):
        raise ResourceError("tenant-size", "a chunk of it, on disk, is more than its tenant may have in DRAM (tenants)")
    if len(operators.holds) >= bounds.holds_max:
        raise ResourceError("holds", f"{len(operators.holds)} prefixes are held, at most {bounds.holds_max} may be")
    chain = space.chain(tail)
    fresh = {node: space.group_bytes(node.present) for node in chain if node not in operators.held}
    held_bytes = operators.held_bytes + sum(fresh.values())
    most_bytes = bounds.arena_bytes * bounds.held_percent_max // 100
    if held_bytes > most_bytes:
        raise ResourceError(
            "held-bytes",
            f"{held_bytes} bytes would be held, at most {most_bytes} may be ({bounds.held_percent_max} % of the arena)",
        )
    hold = Hold(
        number=core.number("hold"),
        kind=kind,
        space=space,
        tail=tail,
        expires_ns=now_ns + ttl_ms * MILLISECOND_NS,
        chain=chain,
    )
    operators.begin(hold, fresh)
    core.chunks.pin(tail)
    space.touch(now_ns, tail)
    if core.disk is not None:
        core.disk.asked_for(tail)
    core.timers.set(hold.expires_ns, "hold", hold.number)
    if away:
        assert core.disk is not None
        fetch = Fetch(
            space=space,
            needs=away,
            on_ready=lambda: fetched(core, hold),
            on_failed=lambda error, _: end(core, hold, error.message),
        )
        hold.await_chunks(core.disk.waits.begin(fetch))
    return hold, len(away)
