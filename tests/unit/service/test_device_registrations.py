"""Registrations of GPU memory: the brain's refusals, and its orders to the device's mover."""

from typing import Any

import pytest

from kvserver.service.base.events import ArenaGrew
from kvserver.wire.messages import Buffer, Error, Register, Registered, Staging
from kvserver.wire.orders import ArenaReady, MapBoard, MapCache, MapFailed
from tests.rigs.bad_scene import Scene, change
from tests.rigs.brain_rig import ARENA_BYTES, BUFFER_BYTES, NAMESPACE, SLAB_BYTES, Client, Rig, is_refusal

MIB = 1 << 20
DEVICE = "00112233445566778899aabbccddeeff@0000:1b:00.0"
OTHER_DEVICE = "00112233445566778899aabbccddeeff@0000:3b:00.0"
HANDLE, STAGING_HANDLE = b"p" * 64, b"s" * 64


def registration(client: Client, **changes: Any) -> Register:
    """A staged cache's registration; the ring's number is a descriptor that was just offered."""
    buffers = [Buffer(-1, HANDLE, BUFFER_BYTES)]
    staged = change(
        client.registration(descriptors=[]),
        device="cuda",
        device_id=DEVICE,
        mode="staged",
        buffers=buffers,
        staging=[Staging(STAGING_HANDLE, 5 * MIB, client.offer())],
    )
    return change(staged, **changes)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def staging(handle: bytes = STAGING_HANDLE, segment_bytes: int = MIB, ring: int = 999_999) -> list[Staging]:
    return [Staging(handle, segment_bytes, ring)]


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"device_id": ""}, "device", "device_id='' must be 32 hexadecimal digits, '@' and a PCI bus id"),
        ({"device_id": "0"}, "device", "device_id='0' must be"),
        ({"device_id": DEVICE.upper()}, "device", "must be 32 hexadecimal digits"),
        ({"device_id": DEVICE + "\n"}, "device", "must be 32 hexadecimal digits"),
        ({"device_id": "f" * 32 + "@" + "0" * 33}, "device", "must be 32 hexadecimal digits"),
        ({"ipc_mode": "legacy"}, "ipc-mode", "ipc_mode='legacy' must be '' on cuda"),
        ({"device": "rocm"}, "ipc-mode", "ipc_mode='' must be 'legacy' or 'dmabuf' on rocm"),
        ({"device": "rocm", "ipc_mode": "x" * 99}, "ipc-mode", "must be 'legacy' or 'dmabuf' on rocm"),
        ({"buffers": [Buffer(-1, b"", 5003)]}, "handle", "buffers[0].handle has 0 bytes, an IPC handle has 64"),
        ({"buffers": [Buffer(-1, HANDLE + b"p", 5003)]}, "handle", "buffers[0].handle has 65 bytes"),
        ({"buffers": [Buffer(0, HANDLE, 5003)]}, "descriptor-unknown", "buffers[0].descriptor=0 must be -1 on cuda"),
        ({"buffers": [Buffer(-1, HANDLE, 5003)] * 2}, "layout", "2 buffers have the same handle"),
        ({"buffers": []}, "layout", "buffers=0 must be in [1, 256]"),
        ({"buffers": [Buffer(-1, HANDLE, 13)]}, "layout", "beyond its buffer of 13 bytes"),
        (
            {"mode": "engine-driven"},
            "mode",
            "'engine-driven' is not one of cuda; expected staged, direct, server-gather",
        ),
        ({"mode": "direct"}, "staging", "mode 'direct' needs 0 staging, 1 came"),
        ({"mode": "server-gather"}, "staging", "mode 'server-gather' needs 0 staging, 1 came"),
        ({"staging": []}, "staging", "mode 'staged' needs 1 staging, 0 came"),
        ({"staging": staging() * 2}, "staging", "mode 'staged' needs 1 staging, 2 came"),
        ({"staging": staging(handle=b"s")}, "handle", "staging.handle has 1 bytes"),
        ({"staging": staging(segment_bytes=0)}, "staging", "segment_bytes=0 must be a multiple of 1048576"),
        ({"staging": staging(segment_bytes=-MIB)}, "staging", f"segment_bytes={-MIB} must be"),
        ({"staging": staging(segment_bytes=17 * MIB)}, "staging", f"segment_bytes={17 * MIB} must be"),
        ({"staging": staging(segment_bytes=MIB + 4096)}, "staging", f"segment_bytes={MIB + 4096} must be"),
        ({"staging": staging(ring=-1)}, "descriptor-unknown", "descriptor -1 was not offered"),
        ({"staging": staging(ring=999_999)}, "descriptor-unknown", "descriptor 999999 was not offered"),
    ],
)
def test_a_bad_registration_is_refused(scene: Scene, changes: dict[str, Any], code: str, says: str) -> None:
    scene.refuses(registration(scene.culprit, **changes), "request", code, says)


@pytest.mark.parametrize("changes", [{}, {"device": "rocm", "ipc_mode": "dmabuf"}], ids=["cuda", "rocm"])
def test_the_mover_gets_the_arena_the_board_and_then_the_cache(changes: dict[str, str]) -> None:
    rig = Rig()
    client = Client(rig)
    request = registration(client, **changes)
    assert isinstance(client.ask(request), Registered)
    arena, board, cache = rig.orders
    assert arena == ArenaReady(ARENA_BYTES // SLAB_BYTES)
    assert isinstance(board, MapBoard)
    assert isinstance(cache, MapCache)
    assert (cache.buffers, cache.groups) == (request.buffers, request.groups)
    assert (cache.mode, cache.ipc_mode, cache.staging) == ("staged", request.ipc_mode, request.staging)
    assert not rig.open  # the ring's descriptor went along


def test_a_mode_without_staging_takes_no_descriptor() -> None:
    rig = Rig()
    client = Client(rig)
    request = registration(client, mode="server-gather", staging=[])
    assert isinstance(client.ask(request), Registered)
    assert len(rig.open) == 1


def test_only_movers_of_gpus_hear_of_the_arena() -> None:
    rig = Rig()
    Client(rig, engine="host").register()
    assert not [order for order in rig.orders if isinstance(order, ArenaReady)]
    client = Client(rig)
    client.ask(registration(client))
    rig.handle(ArenaGrew(ARENA_BYTES // SLAB_BYTES, "all there"))
    assert rig.orders[-1] == ArenaReady(ARENA_BYTES // SLAB_BYTES)
    assert len([order for order in rig.orders if isinstance(order, ArenaReady)]) == 2


def test_each_device_has_a_mover_of_its_own() -> None:
    rig = Rig()
    for number, (device, device_id) in enumerate(
        [("cuda", DEVICE), ("cuda", OTHER_DEVICE), ("cuda", DEVICE), ("rocm", DEVICE)]
    ):
        client = Client(rig, engine=f"engine {number}")
        ipc_mode = "legacy" if device == "rocm" else ""
        client.ask(registration(client, device=device, device_id=device_id, ipc_mode=ipc_mode))
    movers = rig.service.status(rig.now_ns).movers
    assert [mover.device for mover in movers] == [f"cuda:{DEVICE}", f"cuda:{OTHER_DEVICE}", f"rocm:{DEVICE}"]
    assert [mover.caches for mover in movers] == [2, 1, 1]


def test_devices_are_the_clients_word_so_movers_are_bounded() -> None:
    rig = Rig(movers_max=2)
    clients = [Client(rig, engine=f"engine {number}") for number in range(4)]
    for client, device_id in zip(clients, (DEVICE, OTHER_DEVICE), strict=False):
        assert isinstance(client.ask(registration(client, device_id=device_id)), Registered)
    other_namespace = bytes(32)
    refused = registration(clients[2], device_id=f"{1:032x}@1", namespace=other_namespace)
    before = rig.facts()
    is_refusal(clients[2].ask(refused), "resource", "movers", "2 movers are running, at most 2 may be")
    assert rig.facts() == before
    assert isinstance(clients[3].ask(registration(clients[3])), Registered)


def test_what_the_mover_refuses_is_the_replys_code_and_text() -> None:
    rig = Rig()
    rig.movers_map = False
    client = Client(rig)
    request = registration(client)
    client.ask(request)
    (order,) = [order for order in rig.orders if isinstance(order, MapCache)]
    rig.report(1, MapFailed(order.cache, "handle-size", "the allocation has 4096 bytes"))
    answer = rig.answers[(client.peer, request.id)]
    assert answer == Error(request.id, "request", "handle-size", "the allocation has 4096 bytes")
    assert rig.facts()["caches"] == 0


def test_a_namespace_is_shared_by_hosts_and_gpus_alike() -> None:
    """Equal chunks have equal bytes wherever they came from."""
    rig = Rig()
    writer = Client(rig, engine="gpu")
    reply = writer.ask(registration(writer))
    writer.cache = reply.cache
    keys = bytes(range(96))
    writer.store(keys)
    assert Client(rig, engine="host").register().lookup(keys, NAMESPACE).chunks == 3


def test_bytes_are_counted_by_the_way_that_they_went() -> None:
    rig = Rig()
    gpu, host = Client(rig, engine="gpu"), Client(rig, engine="host").register()
    gpu.cache = gpu.ask(registration(gpu)).cache
    gpu.store(bytes(32))
    host.store(bytes(range(64)))
    modes = rig.service.counters.mode_bytes
    assert modes == {"direct": 7, "staged": 7, "server-gather": 0, "engine-driven": 0}


def test_what_clients_copy_themselves_is_called_so_though_the_mover_says_direct() -> None:
    rig = Rig()
    direct, driven = Client(rig, engine="direct").register(), Client(rig, engine="driven")
    driven.cache = driven.ask(change(driven.registration(), mode="engine-driven")).cache
    direct.store(bytes(range(64)))
    driven.store(bytes(32))
    assert rig.service.counters.mode_bytes == {"direct": 7, "staged": 0, "server-gather": 0, "engine-driven": 7}
    status = rig.service.status(rig.now_ns)
    assert (status.caches, status.caches_engine_driven) == (2, 1)
    assert [cache.mode for cache in status.shown_caches] == ["direct", "engine-driven"]
