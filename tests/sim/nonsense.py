"""Requests that a client must not send. Each is refused with one typed error and changes nothing."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvserver.wire.messages import (
    PROTOCOL,
    Attach,
    Await,
    Buffer,
    Clear,
    GroupBlocks,
    Hello,
    Lane,
    Lookup,
    Offer,
    Pledge,
    Register,
    Release,
    Request,
    Retrieve,
    Staging,
    Store,
    Unregister,
    Watch,
)

from . import service_view
from .shapes import register_frame
from .tenants import TENANTS, tenant_of

if TYPE_CHECKING:
    from .processes import Process
    from .world import World

FOUR = bytes(4)


def send_some(world: "World", process: "Process") -> None:
    """Sends one bad request that fits the process's present state."""
    kinds: list[Callable[[World, Process], None]] = [_before_hello, _bad_hello]
    if process.session:
        kinds += [
            _bad_lookup,
            _bad_hello_again,
            _bad_attach,
            _bad_offer,
            _bad_watch,
            _bad_register,
            _bad_register,
            _bad_number,
        ]
    if process.cache:
        kinds += [_bad_transfer, _bad_transfer, _bad_register_again]
    world.rng.choice(kinds)(world, process)


def _refused(world: "World", peer: int, request: Request, descriptor: int = -1) -> None:
    world.post(peer, request, descriptor=descriptor, must_fail=True)


def _before_hello(world: "World", process: "Process") -> None:
    peer = world.new_peer(process)
    request_id = process.next_id()
    kind = world.rng.choice(("lookup", "offer", "attach", "lane"))
    if kind == "offer":
        _refused(world, peer, Offer(request_id), world.new_descriptor())
    elif kind == "lookup":
        _refused(world, peer, Lookup(request_id, bytes(32), bytes(32), 0))
    elif kind == "attach":
        _refused(world, peer, Attach(request_id, b"nobody's token.."))
    else:
        _refused(world, peer, Lane(request_id, b""))


def _bad_hello(world: "World", process: "Process") -> None:
    engine = process.engine
    good = [process.next_id(), PROTOCOL, engine.name, engine.epoch, engine.shape.ranks, process.rank, "simulated 1"]
    at, value = world.rng.choice(((1, PROTOCOL + 1), (2, ""), (2, "a\nb"), (4, 0), (5, -2), (5, 99), (6, "x" * 200)))
    good[at] = value
    _refused(world, world.new_peer(process), Hello(*good))


def _bad_hello_again(world: "World", process: "Process") -> None:
    engine = process.engine
    if world.rng.random() < 0.5:
        hello = Hello(process.next_id(), PROTOCOL, engine.name, engine.epoch, engine.shape.ranks, process.rank, "twice")
        peer = process.peer
    else:
        hello = Hello(process.next_id(), PROTOCOL, engine.name, engine.epoch, engine.shape.ranks + 1, 0, "other ranks")
        peer = world.new_peer(process)
    known = process.peer
    world.post(peer, hello, must_fail=True, only_if=lambda service: service_view.knows_peer(service, known))


def _bad_attach(world: "World", process: "Process") -> None:
    if process.board is None:
        _refused(world, world.new_peer(process), Lane(process.next_id(), b"x"))
    elif world.rng.random() < 0.5:
        _refused(world, world.new_peer(process), Attach(process.next_id(), process.token))
    else:
        _refused(world, process.peer, Attach(process.next_id(), process.token))


def _bad_offer(world: "World", process: "Process") -> None:
    if process.local_peer and process.board is not None and world.rng.random() < 0.5:
        if world.rng.random() < 0.5:
            _refused(world, process.local_peer, Offer(process.next_id()))
        else:  # valid but never used: too many of these are refused
            peer = process.local_peer
            for _ in range(3):
                world.post(peer, Offer(process.next_id()), descriptor=world.new_descriptor())
    else:
        _refused(world, process.peer, Offer(process.next_id()), world.new_descriptor())


def _bad_watch(world: "World", process: "Process") -> None:
    peer = process.local_peer if process.board is not None and world.rng.random() < 0.5 else process.peer
    _refused(world, peer, Watch(process.next_id(), 4096))


def _bad_number(world: "World", process: "Process") -> None:
    request_id = process.next_id()
    choices: tuple[Request, ...] = (
        Unregister(request_id, 4097),
        Clear(request_id, b"short"),
        Retrieve(request_id, 4098, 1, 0, 1, 10, [GroupBlocks(0, 0, FOUR)], False),
        Store(request_id, 4099, 0, 1, 10, 0, b"", bytes(32), [GroupBlocks(0, 0, FOUR)]),
    )
    _refused(world, process.quick_peer(), world.rng.choice(choices))
    world.post(process.quick_peer(), Release(process.next_id(), 1 << 40))


def _bad_lookup(world: "World", process: "Process") -> None:
    request_id, digest = process.next_id(), process.engine.digest
    choices = (
        Lookup(request_id, digest, b"", 0),
        Lookup(request_id, digest, bytes(33), 0),
        Lookup(request_id, digest, bytes(32 * 4097), 0),
        Lookup(request_id, digest[:31], bytes(32), 0),
        Await(request_id, digest, bytes(33), 0),
        Pledge(request_id, digest, b"", 100),
        Pledge(request_id, digest, bytes(32 * 4097), 100),
        Pledge(request_id, digest[:31], bytes(32), 100),
    )
    _refused(world, process.quick_peer(), world.rng.choice(choices))


def _bad_register(world: "World", process: "Process") -> None:
    """Sends a registration with one of all possible defects."""
    frame, rng = _frame(process, "other"), world.rng
    group, buffer, run = frame.groups[0], frame.buffers[0], frame.groups[0].regions[0]
    choices: tuple[dict[str, object], ...] = (
        {"name": ""},
        {"namespace": bytes(31)},
        {"mode": "staged" if frame.device == "host" else "engine-driven"},
        {"mode": "server-gather"},
        {"device_id": "0"},
        {"staging": [Staging(bytes(64), 1 << 20, 9_999_999)]},
        {"chunk_tokens": 0},
        {"groups": []},
        {"buffers": [Buffer(9_999_999, b"", buffer.bytes), *frame.buffers[1:]]},
        {"buffers": [buffer, Buffer(buffer.descriptor, b"", 77), *frame.buffers[1:]]},
        {"groups": [_with(group, block_tokens=frame.chunk_tokens - 1 or 7), *frame.groups[1:]]},
        {"groups": [_with(group, shard=group.shards), *frame.groups[1:]]},
        {"groups": [_with(group, blocks=0), *frame.groups[1:]]},
        {"groups": [_with(group, regions=[]), *frame.groups[1:]]},
        {"groups": [_with(group, regions=[_with(run, offset=buffer.bytes)]), *frame.groups[1:]]},
        {"groups": [_with(group, regions=[_with(run, buffer=64)]), *frame.groups[1:]]},
        {"groups": [_with(group, regions=[run, run]), *frame.groups[1:]]},
        {"groups": [_with(group, regions=[_with(run, block_stride=0)]), *frame.groups[1:]]},
        _too_large(frame),
    )
    change = rng.choice(choices)
    _refused(world, process.peer, _with(frame, **change))


def _bad_register_again(world: "World", process: "Process") -> None:
    """Registers the same name with another geometry, or the same namespace with other pages, shards or tenant.

    Skipped while an Unregister is pending: the first registration has to exist for them to conflict.
    """
    if process.asks(Unregister):
        return
    kind = world.rng.choice(("name", "pages", "shards", *(["tenant"] * 6 if world.promises.quotas else [])))
    frame = _frame(process, process.cache_name if kind == "name" else "other")
    group, run = frame.groups[0], frame.groups[0].regions[0]
    if kind == "pages":
        other = _with(group, regions=[_with(run, page_bytes=run.page_bytes - 1)])
        frame = _with(frame, groups=[other, *frame.groups[1:]])
    elif kind == "tenant":
        quotas, own = world.promises.quotas, tenant_of(process.engine.digest)
        others = [name for name in TENANTS if quotas.account(name) != quotas.account(own)]
        frame = _with(frame, tenant=world.rng.choice(others))
    elif kind == "shards":
        frame = _with(frame, groups=[_with(group, shards=group.shards + 1), *frame.groups[1:]])
    cache, peer = process.cache, process.peer
    world.post(peer, frame, must_fail=True, only_if=lambda service: service_view.has_cache(service, cache, peer))


def _bad_transfer(world: "World", process: "Process") -> None:
    """Sends a store or retrieve with wrong blocks, words, parents or leases."""
    shape, rng = process.engine.shape, world.rng
    per_chunk = shape.blocks_per_chunk(0)
    whole = GroupBlocks(0, 0, bytes(4 * per_chunk))
    store = Store(process.next_id(), process.cache, 0, 1, 10, 0, b"", b"k" * 32, [whole])
    retrieve = Retrieve(process.next_id(), process.cache, 1 << 40, 0, 1, 10, [whole], False)
    choices: tuple[Request, ...] = (
        _with(store, word=-1),
        _with(store, word=4096),
        _with(store, generation=-1),
        _with(store, parent=bytes(32)),
        _with(store, first_chunk=1),
        _with(store, first_chunk=-1),
        _with(store, keys=bytes(31)),
        _with(store, groups=[]),
        _with(store, groups=[whole, whole]),
        _with(store, groups=[GroupBlocks(7, 0, whole.block_ids)]),
        _with(store, groups=[GroupBlocks(-1, 0, whole.block_ids)]),
        _with(store, groups=[GroupBlocks(0, 0, whole.block_ids[:-1])]),
        _with(store, groups=[GroupBlocks(0, 0, b"")]),
        _with(store, groups=[GroupBlocks(0, -per_chunk, whole.block_ids)]),
        _with(store, groups=[GroupBlocks(0, per_chunk, whole.block_ids)]),
        _with(store, groups=[GroupBlocks(0, 0, whole.block_ids * 2)]),
        _with(store, groups=[GroupBlocks(0, 0, whole.block_ids + bytes(4))]),
        retrieve,
        _with(retrieve, groups=[]),
    )
    _refused(world, process.quick_peer(), rng.choice(choices))


def _frame(process: "Process", name: str) -> Register:
    spare = [*process.descriptors, *range(-1, -9, -1)]
    return register_frame(
        process.engine.shape,
        process.rank,
        request_id=process.next_id(),
        name=name,
        digest=process.engine.digest,
        blocks=13,
        descriptors=spare[: process.engine.shape.descriptors],
    )


def _too_large(frame: Register) -> dict[str, object]:
    """A registration whose shard is larger than any slab."""
    group, run = frame.groups[0], frame.groups[0].regions[0]
    large = _with(run, offset=0, page_bytes=1 << 20, block_stride=1 << 20, region_stride=1 << 30)
    return {
        "buffers": [_with(frame.buffers[0], bytes=1 << 40), *frame.buffers[1:]],
        "groups": [_with(group, regions=[large]), *frame.groups[1:]],
        "namespace": b"l" * 32,
    }


def _with(frame: object, **changes: object) -> object:
    """A copy of the frame with some fields changed."""
    fields = {name: getattr(frame, name) for name in frame.__struct_fields__}  # type: ignore[attr-defined]
    return type(frame)(**{**fields, **changes})
