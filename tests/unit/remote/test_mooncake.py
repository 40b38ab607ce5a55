"""A real Mooncake Store: what its objects can do, what they cannot, and its bad days."""

import ctypes
import mmap
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kvserver.config.remotes import parse
from kvserver.movers.remote_store import open_store
from kvserver.remote.chunk_value import WrongValue
from kvserver.remote.objects.contract import CHECKS, Check, problem_of
from kvserver.remote.objects.mooncake import SCRATCH_BYTES, mooncake_store
from kvserver.remote.objects.store import NOTES
from kvserver.remote.store import Gone, StoreError
from tests.rigs.mooncake_server import (
    UNHURRIED,
    ListableObjects,
    MooncakeServer,
    mooncake_objects,
    open_mooncake,
)
from tests.rigs.remote_chunks import NAMESPACE, head_of, name_of, payloads_of, targets_of

SOON_S = 25.0
"""A call to a store that hangs ends by the client's own deadlines. Without them it takes 30 s or more."""
LISTENS = "0A"
"""State of a socket in /proc/net."""
READS, WRITES = 0, 1
"""The client's own protocol of data."""
OTHERWISE = {
    "beginnings_come_in_the_order_of_their_names": "it takes no empty object",
    "no_reader_sees_two_writes_mixed": "a reader may see parts of two writes when one is replaced",
    "a_list_tells_which_write_was_later": "it tells no times",
}
"""Checks of the contract of drivers that it does not pass, or passes by chance. A Mooncake Store needs none of them."""
KEPT = [check for check in CHECKS if check.__name__ not in OTHERWISE]


@pytest.fixture
def own_mooncake() -> Iterator[MooncakeServer]:
    """A store for one test alone."""
    with MooncakeServer() as server:
        yield server


@pytest.mark.parametrize("check", KEPT, ids=[check.__name__ for check in KEPT])
def test_its_objects_do_what_the_contract_of_drivers_says(check: Check, mooncake: MooncakeServer) -> None:
    assert problem_of(check, lambda: ListableObjects(mooncake)) == ""


def test_names_cannot_be_listed_and_the_error_says_so(mooncake: MooncakeServer) -> None:
    store = open_mooncake(mooncake)
    for lists in (store.namespaces("-"), store.values(NAMESPACE)):
        with pytest.raises(StoreError, match="cannot list names") as refused:
            list(lists)
        assert refused.value.code == "remote-refused"
    store.close()


def test_payloads_in_the_arena_go_and_come_without_a_copy(mooncake: MooncakeServer) -> None:
    arena = memoryview(mmap.mmap(-1, 1 << 20))
    objects = mooncake_objects(mooncake, arena)
    arena[7:5008] = bytes(range(1, 251)) * 20 + b"\x01"
    assert objects.create("x/own", [arena[7:5008]], within_s=9)
    assert objects.read("x/own", [(1, arena[9000:9100])], within_s=9)
    assert arena[9000:9100] == arena[8:108]
    assert (arena[8999], arena[9100]) == (0, 0)
    assert objects._idle == []
    content = random.Random(3).randbytes(SCRATCH_BYTES + 1000)
    assert objects.create("x/large", [content, arena[7:107]], within_s=9)
    assert objects.read("x/large", [(SCRATCH_BYTES + 1000, arena[20_000:20_100])], within_s=9)
    assert arena[20_000:20_100] == arena[7:107]
    elsewhere = memoryview(bytearray(len(content)))
    assert objects.read("x/large", [(0, elsewhere)], within_s=9)
    assert elsewhere == content
    assert len(objects._idle) == 1
    objects.close()


def test_a_chunk_that_becomes_another_write_while_it_is_read_is_gone(
    mooncake: MooncakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, name = mooncake_objects(mooncake), name_of(4)
    store = mooncake_store(objects, node="", waits=UNHURRIED)
    old, new = (head_of(name, write=write) for write in (1, 2))
    store.write(name, old, payloads_of(old))
    get, left = objects._get, [new]

    def overtaken(*call: object) -> bool:
        found = get(*call)  # type: ignore[arg-type]
        if left:
            store.drop(name, old)
            store.write(name, left[0], payloads_of(left.pop()))
        return found

    monkeypatch.setattr(objects, "_get", overtaken)
    with pytest.raises(Gone):
        store.read(name, old, targets_of(old))
    targets = targets_of(new)
    store.read(name, new, targets)
    assert targets == payloads_of(new)
    store.close()


def test_a_chunk_whose_bytes_somebody_cut_is_no_chunk(mooncake: MooncakeServer) -> None:
    store, vandal, name = open_mooncake(mooncake), mooncake_objects(mooncake), name_of(3)
    head = head_of(name)
    store.write(name, head, payloads_of(head))
    (path,) = mooncake.names()
    vandal.replace(path, b"x" * 500, within_s=9)
    (found,) = store.heads([name], 3)
    assert isinstance(found, WrongValue)
    with pytest.raises(Gone):
        store.read(name, head, targets_of(head))
    vandal.close()
    store.close()


def test_a_write_that_was_never_ended_is_a_miss_and_ends_no_other(mooncake: MooncakeServer) -> None:
    program = f"""
from tests.rigs.mooncake_server import *
objects = MooncakeObjects(Place("127.0.0.1", {mooncake.port}))
assert objects._client.batch_put_session_start(["x/half", "x/other"], [100, 100]) == [0, 0]
import os
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    objects = mooncake_objects(mooncake)
    assert objects.starts(["x/half", "x/none"], 10, within_s=9) == [None, None]
    assert not objects.read("x/half", [(0, memoryview(bytearray(10)))], within_s=9)
    assert not objects.create("x/half", [b"whole"], within_s=9), "it counts as another one's for 30 s"
    with pytest.raises(StoreError) as busy:
        objects.replace("x/half", b"whole", within_s=0.2)
    assert busy.value.code == "remote-slow"
    assert objects.create("x/third", [b"whole"], within_s=9)
    objects.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_write_whose_end_the_master_did_not_answer_keeps_no_later_one_out(
    own_mooncake: MooncakeServer, ends: bool
) -> None:
    objects = mooncake_objects(own_mooncake)
    assert objects._client.batch_put_session_start(["x/note"], [5]) == [0]
    own_mooncake.master.stop()
    while not isinstance(objects.sizes(["x/none"])[0], StoreError):
        pass  # it has not stopped yet
    if ends:
        assert objects._client.batch_put_session_end(["x/note"]) != [0]
    assert objects._client.batch_put_session_revoke(["x/note"]) != [0]
    own_mooncake.master.go_on()
    for value in (b"first", b"second"):
        objects.replace("x/note", value, within_s=20)
        came = memoryview(bytearray(len(value)))
        assert objects.read("x/note", [(0, came)], within_s=9)
        assert came == value
    objects.close()


def test_a_note_outlives_what_fills_the_store(own_mooncake: MooncakeServer) -> None:
    store, objects = open_mooncake(own_mooncake), mooncake_objects(own_mooncake)
    assert store.make_note(NAMESPACE, b"note")
    assert objects.create("x/first", [b"first"], within_s=9)
    block = bytes(4 << 20)
    refused = set()
    for number in range(200):
        try:
            objects.create(f"x/{number}", [block], within_s=9)
        except StoreError as problem:
            refused.add(problem.code)
            time.sleep(0.1)
    assert refused <= {"remote-full"}
    assert store.notes([NAMESPACE]) == [b"note"]
    assert [name for name in own_mooncake.names() if name.startswith(NOTES)]
    there = [size for size in objects.sizes([f"x/{number}" for number in range(200)]) if size is not None]
    assert len(there) < 64, "the rest was evicted"
    with pytest.raises(StoreError) as full:
        objects.create("x/huge", [bytes(300 << 20)], within_s=9)
    assert full.value.code == "remote-full"
    objects.close()
    store.close()


def test_a_master_that_hangs_or_is_dead_is_told_soon_and_used_again(own_mooncake: MooncakeServer) -> None:
    store, name = open_mooncake(own_mooncake), name_of(4)
    head = head_of(name)
    store.write(name, head, payloads_of(head))
    own_mooncake.master.stop()
    assert soon(lambda: store.heads([name, name_of(5)], 3)) == ["remote-slow"] * 2
    assert soon(lambda: store.notes([NAMESPACE])) == ["remote-slow"]
    assert soon(lambda: store.write(name_of(6), head_of(name_of(6)), payloads_of(head))) == ["remote-slow"]
    own_mooncake.master.go_on()
    assert store.heads([name, name_of(5)], 3) == [head, None]
    own_mooncake.master.kill()
    for _ in range(3):
        assert soon(lambda: store.heads([name], 3)) == ["remote-down"]
        assert soon(lambda: store.drop(name, head)) == ["remote-down"]
    with pytest.raises(StoreError, match="takes no connection") as dead:
        open_mooncake(own_mooncake)
    assert dead.value.code == "remote-down"
    own_mooncake.start_master_again()
    assert store.heads([name], 3) == [None], "a master that was started again knows nothing"
    assert store.write(name, head, payloads_of(head))
    store.close()


def test_a_data_node_that_hangs_is_told_soon_however_many_are_asked_for(own_mooncake: MooncakeServer) -> None:
    store = open_mooncake(own_mooncake)
    names = [name_of(seed) for seed in range(40)]
    sizes = [257] * 90
    for name in names:
        assert store.write(name, head_of(name, sizes=sizes), payloads_of(head_of(name, sizes=sizes)))
    own_mooncake.node.stop()
    assert soon(lambda: store.heads(names, 90)) == ["remote-slow"] * 40
    head = head_of(names[0], sizes=sizes)
    assert soon(lambda: store.read(names[0], head, targets_of(head))) == ["remote-slow"]
    assert soon(lambda: store.write(name_of(99), head_of(name_of(99), sizes=sizes), payloads_of(head))) == [
        "remote-slow"
    ]
    own_mooncake.node.go_on()
    until_s = time.monotonic() + 20
    while store.heads(names[:1], 90) != [head]:
        assert time.monotonic() < until_s
    targets = targets_of(head)
    store.read(names[0], head, targets)
    assert targets == payloads_of(head)
    store.close()


def test_after_the_end_no_call_reaches_the_client_not_even_one_under_way(mooncake: MooncakeServer) -> None:
    objects = mooncake_objects(mooncake)
    assert objects.create("x/a", [b"abc"], within_s=9)
    client = objects._client
    told = client.batch_get_replica_desc(["x/a"])
    ended: list[bool] = []

    class Watched:
        """The client, which is closed while a call is under way."""

        def batch_is_exist(self, names: list[str]) -> list[int]:
            objects.close()
            assert not ended, "the call has not come back"
            return [1] * len(names)

        def batch_get_replica_desc(self, names: list[str]) -> object:
            return told

        def close(self) -> None:
            ended.append(True)
            client.close()

    objects._client = Watched()
    with pytest.raises(StoreError, match="closed"):
        objects.sizes(["x/a"])
    assert ended == [True]
    for call in (
        lambda: objects.sizes(["x/a"]),
        lambda: objects.starts(["x/a", "x/b"], 9, within_s=9),
        lambda: objects.read("x/a", [(0, memoryview(bytearray(3)))], within_s=9),
        lambda: objects.create("x/b", [b"abc"], within_s=9),
        lambda: objects.replace("x/b", b"abc", within_s=9),
        lambda: objects.touch("x/a", within_s=9),
        lambda: objects.remove(["x/a"], within_s=9),
    ):
        with pytest.raises(StoreError, match="closed") as closed:
            call()
        assert closed.value.code == "remote-down"
    objects.close()
    assert ended == [True]


@pytest.mark.parametrize("stays", [True, False])
def test_an_object_that_vanishes_between_two_calls_is_a_miss(mooncake: MooncakeServer, stays: bool) -> None:
    objects, other = mooncake_objects(mooncake), mooncake_objects(mooncake)
    names = ["x/gone", "x/stays"] if stays else ["x/gone"]
    for name in names:
        assert other.create(name, [b"abc"], within_s=9)
    client, asked = objects._client, []

    class Late:
        """The client, with another one that removes an object after it was seen."""

        def batch_is_exist(self, names: list[str]) -> object:
            codes = client.batch_is_exist(names)
            other.remove(["x/gone"], within_s=9)
            asked.append(names)
            return codes

        def __getattr__(self, call: str) -> object:
            return getattr(client, call)

    objects._client = Late()
    assert objects.sizes([*names, "x/none"]) == [None, *[3] * stays, None]
    assert len(asked) == (1 if stays else 2)
    objects.close()
    other.close()


def test_a_store_that_does_not_tell_where_an_object_lies_does_not_make_it_a_miss(mooncake: MooncakeServer) -> None:
    objects = mooncake_objects(mooncake)
    assert objects.create("x/a", [b"abc"], within_s=9)
    client = objects._client

    class Silent:
        """The client, whose call for places fails: it returns nothing then."""

        def batch_get_replica_desc(self, names: list[str]) -> dict[str, object]:
            return {}

        def __getattr__(self, call: str) -> object:
            return getattr(client, call)

    objects._client = Silent()
    missing, unknown = objects.sizes(["x/none", "x/a"])
    assert missing is None
    assert isinstance(unknown, StoreError)
    assert unknown.code == "remote-slow"
    objects.close()


@pytest.mark.parametrize("wrong", [None, [], [0, 0], 7, ["x"], {}, RuntimeError("planted")], ids=repr)
def test_what_the_client_raises_or_answers_in_another_shape_is_an_error_of_the_store(
    mooncake: MooncakeServer, wrong: object
) -> None:
    objects = mooncake_objects(mooncake)
    assert objects.create("x/a", [b"abc"], within_s=9)
    client, came = objects._client, memoryview(bytearray(3))

    class Odd:
        """The client, of which one call answers otherwise."""

        def __init__(self, call: str) -> None:
            self._call = call

        def __getattr__(self, call: str) -> object:
            return self._answer if call == self._call else getattr(client, call)

        def _answer(self, *_: object, **__: object) -> object:
            if isinstance(wrong, Exception):
                raise wrong
            return wrong

    calls = {
        "batch_is_exist": lambda: objects.sizes(["x/a"]),
        "batch_put_session_start": lambda: objects.create("x/b", [b"abc"], within_s=9),
        "batch_put_from_multi_buffer_ranges": lambda: objects.create("x/c", [b"abc"], within_s=9),
        "batch_put_session_end": lambda: objects.create("x/d", [b"abc"], within_s=9),
        "batch_remove": lambda: objects.remove(["x/a"], within_s=9),
        "get_into_ranges": lambda: objects.read("x/a", [(0, came)], within_s=9),
    }
    for call, asks in calls.items():
        objects._client = Odd(call)
        with pytest.raises(StoreError, match="its client failed") as failed:
            asks()
        assert failed.value.code == "remote-down"
    objects._client = client
    assert objects.read("x/a", [(0, came)], within_s=9)
    assert bytes(came) == b"abc"
    objects.close()


def test_a_stranger_reads_and_writes_the_arena_as_the_operator_is_told(mooncake: MooncakeServer) -> None:
    before = data_ports(set())
    arena = memoryview(mmap.mmap(-1, 1 << 20))
    objects = mooncake_objects(mooncake, arena)
    (warning,) = objects.facts().warnings
    assert "can read and write the whole arena of this server without a password" in warning
    # It is so, without a handshake or a password.
    place = ctypes.addressof(ctypes.c_char.from_buffer(arena)) + 100
    arena[100:106] = b"SECRET"
    ports = data_ports(before)
    assert len(ports) == 2
    assert b"SECRET" in [asks(port, struct.pack("<QQB7x", 6, place, READS), 6) for port in ports]
    for port in ports:
        asks(port, struct.pack("<QQB7x", 6, place, WRITES) + b"STRANG", 1)
    until_s = time.monotonic() + 20
    while bytes(arena[100:106]) != b"STRANG":
        assert time.monotonic() < until_s
    objects.close()


def test_over_tcp_nobody_reaches_the_arena(mooncake: MooncakeServer) -> None:
    before = data_ports(set())
    arena = memoryview(mmap.mmap(-1, 1 << 20))
    (remote,) = parse(f"a={mooncake.url}")
    store = open_store(remote, arena=arena)
    (warning,) = store.facts().warnings
    assert "parts of chunks that are on their way" in warning
    place = ctypes.addressof(ctypes.c_char.from_buffer(arena)) + 100
    arena[100:106] = b"SECRET"
    name = name_of(3)
    head = head_of(name, sizes=(4099,))
    assert store.write(name, head, payloads_of(head)), "its own memory is known to the client by now"
    ports = data_ports(before)
    assert len(ports) == 2
    for port in ports:
        with suppress(OSError):
            assert asks(port, struct.pack("<QQB7x", 6, place, READS), 6) != b"SECRET"
        with suppress(OSError):
            asks(port, struct.pack("<QQB7x", 6, place, WRITES) + b"STRANG", 1)
    assert bytes(arena[100:106]) == b"SECRET"
    store.close()


def test_a_client_without_a_package_has_an_unknown_version(
    mooncake: MooncakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = mooncake_objects(mooncake)

    def no_version(package: str) -> str:
        raise PackageNotFoundError(package)

    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", no_version)
        patch.setattr("importlib.metadata.packages_distributions", dict)
        assert objects.facts().version == "client of an unknown version, over tcp"
    assert objects.facts().version.startswith("client 0.")
    objects.close()


def test_a_data_node_that_was_never_reached_and_is_dead_is_slow_and_hides_nothing(own_mooncake: MooncakeServer) -> None:
    store, name = open_mooncake(own_mooncake), name_of(4)
    head, value = head_of(name), b"note"
    assert store.make_note(NAMESPACE, value)
    assert store.write(name, head, payloads_of(head))
    looks = open_mooncake(own_mooncake, only_looks=True)
    writes = mooncake_objects(own_mooncake)
    own_mooncake.node.kill()
    assert [problem_code(one) for one in looks.heads([name, name_of(5)], 3)] == ["remote-slow", ""]
    (note,) = [found for found in own_mooncake.names() if found.startswith(NOTES)]
    for call in (
        lambda: looks.notes([NAMESPACE]),
        lambda: looks.read(name, head, targets_of(head)),
        lambda: writes.read(note, [(0, memoryview(bytearray(len(value))))], within_s=9),
        lambda: writes.create("x/new", [b"new"], within_s=9),
    ):
        with pytest.raises(StoreError) as slow:
            call()
        assert slow.value.code == "remote-slow"
    assert not writes.read("x/none", [(0, memoryview(bytearray(3)))], within_s=9)
    assert not writes.read(note, [(0, memoryview(bytearray(len(value) + 1)))], within_s=9), "it is too short"
    for one in (store, looks, writes):
        one.close()


def data_ports(but: set[int]) -> set[int]:
    """The ports on which this process listens on all addresses, but for those."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own.add(str(descriptor.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            host, _, port = fields[1].rpartition(":")
            if fields[3] == LISTENS and not host.strip("0") and f"socket:[{fields[9]}]" in own:
                found.add(int(port, 16))
    return found - but


def asks(port: int, request: bytes, size: int) -> bytes:
    """What a port answers to somebody who knows nothing but an address of memory."""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as stranger:
        stranger.sendall(request)
        with suppress(OSError):
            return stranger.recv(size)
    return b""


def problem_code(found: object) -> str:
    return found.code if isinstance(found, StoreError) else ""


def soon(call: object) -> list[str]:
    """The codes of the errors that a call ends with, before the client's usual deadline."""
    assert callable(call)
    began_s = time.monotonic()
    try:
        codes = [found.code for found in call() if isinstance(found, StoreError)]
    except StoreError as problem:
        codes = [problem.code]
    assert time.monotonic() < began_s + SOON_S
    return codes
