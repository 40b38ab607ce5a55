"""The mover of a remote store at its door: orders go in, reports come out, against real stores."""

import logging
import os
import socket
import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import pytest

from kvserver.config.remotes import Remote, parse
from kvserver.errors import ConfigError
from kvserver.ipc.fd_sockets import Receiver, pair, send
from kvserver.movers import remote_store
from kvserver.movers.remote_checks import digest_of
from kvserver.movers.remote_engine import LISTENED_BYTES_MAX
from kvserver.movers.remote_mover import HEADS_BYTES_MAX, LEFT_OUT, NODES_TOLD_MAX, RemoteMover
from kvserver.movers.remote_store import check, open_store
from kvserver.remote.announcement import pack
from kvserver.remote.breaker import FAILURES_MAX
from kvserver.remote.chunk_value import ChunkName, Head, NamespaceName, Shard, decode, encode, head_bytes
from kvserver.remote.directory import DirectoryStore
from kvserver.remote.store import Facts, Store, StoreError
from kvserver.transfer.native import digest_sum
from kvserver.wire.orders import (
    ORDER_BYTES_MAX,
    AnnounceRemote,
    Cancel,
    FetchRemote,
    ListenRemote,
    Order,
    ProbeRemote,
    PutRemote,
    ReadRemoteNote,
    Ready,
    RemoteEnded,
    RemoteHeard,
    RemoteIs,
    RemoteNoteRead,
    RemoteNoteWritten,
    RemoteProbed,
    Report,
    WriteRemoteNote,
    decode_report,
)
from kvserver.wire.orders import (
    encode as packed,
)
from tests.process.harness import until
from tests.rigs.remote_chunks import EPOCH, NAMESPACE, head_of, name_of
from tests.rigs.s3_server import S3Server
from tests.rigs.valkey_server import ValkeyServer

SIZES = (7, 4099, 1)
SLOTS = (0, 8192, 16384)
BACK = (32768, 40960, 49152)
ARENA_BYTES = 65536
WAIT_S = 30


class Door:
    """A mover in a thread, and the brain's end of its socket."""

    def __init__(self, remote: Remote, **others: Any) -> None:
        """others: of RemoteMover."""
        self.arena = memoryview(bytearray(ARENA_BYTES))
        self._end, self._its_end = pair()
        self._end.settimeout(WAIT_S)
        self._receiver = Receiver(ORDER_BYTES_MAX)
        self.ledger: dict[bytes, bytes] = {}
        """Packed offset -> packed sum of what was stored there."""
        self._mover = RemoteMover(self._its_end, self.arena, remote, lambda slot, _: self.ledger.get(slot), **others)
        self._thread = threading.Thread(target=self._mover.run)
        self.ready: Report | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self.ready = self.next()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._mover.close()
        self._end.close()
        self._its_end.close()

    def order(self, order: Order) -> Report:
        send(self._end, packed(order))
        return self.next()

    def tell(self, order: Order) -> None:
        send(self._end, packed(order))

    def next(self) -> Report:
        frame, _, _ = self._receiver.receive(self._end)
        report: Report = decode_report(frame)
        return report

    def fill(self, seed: int, sizes: Sequence[int] = SIZES) -> Head:
        """Stores a chunk in SLOTS; returns its head."""
        name = name_of(seed)
        shards = []
        for number, (slot, size) in enumerate(zip(SLOTS, sizes, strict=True)):
            self.arena[slot : slot + size] = bytes((seed + number + at) % 251 for at in range(size))
            shard = Shard(number % 2, number // 2, size, 0)
            total = digest_of(name, shard, self.arena[slot : slot + size])
            assert total is not None
            shards.append(shard._replace(digest=total))
            self.ledger[slots(slot)] = digest_sum(self.arena[slot : slot + size], 0, size, 0)[0].to_bytes(8, "little")
        return head_of(name, write=seed, sizes=sizes)._replace(shards=tuple(shards))

    def sums_at(self, offsets: Sequence[int]) -> bytes:
        return b"".join(self.ledger[slots(offset)] for offset in offsets)

    def at(self, slots: Sequence[int]) -> list[bytes]:
        return [bytes(self.arena[slot : slot + size]) for slot, size in zip(slots, SIZES, strict=True)]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["directory", "valkey", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    if request.param == "directory":
        yield parse(f"a=file://{tmp_path}")[0]
        return
    if request.param == "s3":
        yield parse(f"a={request.getfixturevalue('s3').url(tmp_path)}")[0]
        return
    with ValkeyServer() as server:
        yield parse(f"a=valkey://127.0.0.1:{server.port}?tenant=team-7")[0]


def slots(*numbers: int) -> bytes:
    return array("q", numbers).tobytes()


def asked(*keys: bytes, shards: int = 3) -> ProbeRemote:
    return ProbeRemote(1, NAMESPACE.namespace, EPOCH, b"".join(keys), shards)


def fault_of(report: Report) -> str:
    assert isinstance(report, RemoteEnded)
    return report.fault


def test_what_one_mover_puts_another_finds_and_fetches(remote: Remote) -> None:
    with Door(remote) as one, Door(remote) as other:
        head = one.fill(3)
        assert fault_of(one.order(PutRemote(7, encode(head), slots(*SLOTS)))) == ""
        found = other.order(asked(name_of(4).key, head.key))
        assert isinstance(found, RemoteProbed)
        assert (found.job, found.faults, found.heads[0]) == (1, [], b"")
        assert decode(found.heads[1])._replace(written_s=head.written_s) == head
        fetched = other.order(FetchRemote(8, found.heads[1], slots(BACK[0], -1, BACK[2])))
        assert isinstance(fetched, RemoteEnded)
        assert (fetched.fault, fetched.sums) == ("", one.sums_at(SLOTS)[:8] + one.sums_at(SLOTS)[16:])
        assert other.at(BACK)[::2] == one.at(SLOTS)[::2]
        assert not any(other.at(BACK)[1]), "a shard that is not wanted is not written"


def test_a_second_write_of_a_chunk_is_told_and_changes_nothing(remote: Remote) -> None:
    with Door(remote) as one, Door(remote) as other:
        first = one.fill(3)
        assert fault_of(one.order(PutRemote(1, encode(first), slots(*SLOTS)))) == ""
        second = other.fill(3)._replace(write=77)
        assert fault_of(other.order(PutRemote(2, encode(second), slots(*SLOTS)))) == "existed"
        found = other.order(asked(first.key))
        assert isinstance(found, RemoteProbed)
        assert decode(found.heads[0]).write == first.write


def test_bytes_that_changed_in_dram_are_not_written(remote: Remote) -> None:
    with Door(remote) as door:
        head = door.fill(3)
        door.arena[SLOTS[1] + 4098] ^= 1
        assert fault_of(door.order(PutRemote(1, encode(head), slots(*SLOTS)))) == "digest"
        found = door.order(asked(head.key))
        assert isinstance(found, RemoteProbed)
        assert found.heads == [b""]


@pytest.mark.parametrize("known", [b"\xff" * 8, None], ids=["nobody summed it", "other payloads are there"])
def test_a_chunk_without_a_sum_is_not_written(remote: Remote, known: bytes | None) -> None:
    with Door(remote) as door:
        head = door.fill(3)
        if known is None:
            del door.ledger[slots(SLOTS[1])]
        else:
            door.ledger[slots(SLOTS[1])] = known
        assert fault_of(door.order(PutRemote(1, encode(head), slots(*SLOTS)))) == "unsummed"
        found = door.order(asked(head.key))
        assert isinstance(found, RemoteProbed)
        assert found.heads == [b""]


def test_a_chunk_that_is_not_there_any_more_is_gone(remote: Remote) -> None:
    with Door(remote) as door:
        assert fault_of(door.order(FetchRemote(1, encode(door.fill(3)), slots(*BACK)))) == "gone"


def test_what_a_store_tells_of_itself_fits_into_a_report(tmp_path: Path) -> None:
    """The brain reads no longer one, and kills the mover that sent it."""
    told = Facts("directory", "9" * ORDER_BYTES_MAX, evicts=None, warnings=("x" * ORDER_BYTES_MAX,))
    (remote,) = parse(f"a=file://{tmp_path}")
    end, other = pair()
    with end, other:
        facts = RemoteMover(end, memoryview(b""), remote, lambda *_: None)._facts(told)
    assert len(packed(Ready(1, told.kind, facts))) < ORDER_BYTES_MAX
    assert any(text.startswith("999") for _, text in facts)


class AloneStore:
    """A store whose nodes are all away. Each chunk belongs to a node of its own, with a long name."""

    long = "\U0001f4a7" * 2000

    def node_of(self, name: ChunkName) -> str:
        return name.key.hex() + self.long

    def nodes(self) -> frozenset[str]:
        return frozenset(self.node_of(name_of(seed)) for seed in range(NODES_TOLD_MAX + 9))

    def facts(self) -> Facts:
        raise StoreError("remote-down", self.long)

    def heads(self, names: Sequence[ChunkName], shards: int) -> NoReturn:
        raise StoreError("remote-down", self.long)

    def close(self) -> None: ...


def test_nodes_that_are_left_alone_fit_into_a_report_however_many_they_are_and_whatever_their_names(
    tmp_path: Path,
) -> None:
    (remote,) = parse(f"a=file://{tmp_path}")
    with Door(remote, opens=lambda _: cast(Store, AloneStore())) as door:
        keys = b"".join(name_of(seed).key for seed in range(NODES_TOLD_MAX + 9))
        for job in range(FAILURES_MAX):
            door.tell(ProbeRemote(job, NAMESPACE.namespace, EPOCH, keys, 1))
        told: Report | None = None
        while not isinstance(told, RemoteIs) or len(told.nodes_left_alone) < NODES_TOLD_MAX:
            told = door.next()
        assert len(packed(RemoteIs(AloneStore.long[:300], told.nodes_left_alone))) < ORDER_BYTES_MAX


def test_why_a_store_cannot_be_opened_fits_into_a_report(tmp_path: Path) -> None:
    def opens(_: Remote) -> Store:
        raise StoreError("remote-down", "planted " + "x" * ORDER_BYTES_MAX)

    (remote,) = parse(f"a=file://{tmp_path}")
    with Door(remote, opens=opens) as door:
        told = door.next()
        assert isinstance(told, RemoteIs)
        assert told.problem.startswith("planted")


def test_notes_are_read_made_once_and_replaced(remote: Remote) -> None:
    namespace = bytes(range(1, 33))
    with Door(remote) as one, Door(remote) as other:
        assert one.order(ReadRemoteNote(1, namespace)) == RemoteNoteRead(1, "", "absent", 0, b"")
        made = WriteRemoteNote(2, namespace, 2**64 - 1, b"what it is", replaces=False)
        assert one.order(made) == RemoteNoteWritten(2, "", is_first=True)
        late = WriteRemoteNote(3, namespace, 5, b"late", replaces=False)
        assert other.order(late) == RemoteNoteWritten(3, "", is_first=False)
        assert other.order(ReadRemoteNote(4, namespace)) == RemoteNoteRead(4, "", "here", 2**64 - 1, b"what it is")
        replaced = WriteRemoteNote(5, namespace, 9, b"", replaces=True)
        assert other.order(replaced) == RemoteNoteWritten(5, "", is_first=True)
        assert one.order(ReadRemoteNote(6, namespace)) == RemoteNoteRead(6, "", "here", 9, b"")


def test_a_note_that_lies_at_the_place_of_another_namespace_counts_as_damaged(remote: Remote) -> None:
    namespace, other = bytes(range(1, 33)), bytes(range(2, 34))
    with Door(remote) as door:
        door.order(WriteRemoteNote(1, namespace, 7, b"what it is", replaces=False))
        store = open_store(remote)
        (note,) = store.notes([NamespaceName(remote.tenant, namespace)])
        assert note is not None
        store.replace_note(NamespaceName(remote.tenant, other), note)
        store.close()
        assert door.order(ReadRemoteNote(2, namespace)) == RemoteNoteRead(2, "", "here", 7, b"what it is")
        assert door.order(ReadRemoteNote(3, other)) == RemoteNoteRead(3, "", "damaged", 0, b"")


def test_what_one_mover_announces_another_hears_once_and_one_that_comes_later_hears_all(remote: Remote) -> None:
    marks = pack([4 * number | 1 for number in range(1, 3001)])

    def heard(door: Door) -> tuple[bytes, list[int]]:
        """All that is told, and the bytes of each report."""
        found, sizes = b"", []
        while True:
            report = door.order(ListenRemote(5, NAMESPACE.namespace, EPOCH))
            assert isinstance(report, RemoteHeard)
            assert report.fault == ""
            found += report.marks
            sizes.append(len(report.marks))
            if report.is_all:
                return found, sizes

    with Door(remote) as one, Door(remote) as other:
        assert heard(other) == (b"", [0])
        assert fault_of(one.order(AnnounceRemote(7, NAMESPACE.namespace, EPOCH, marks))) == ""
        told: list[tuple[bytes, list[int]]] = []

        def is_heard() -> bool:
            told.append(heard(other))  # an object store is asked again after two seconds
            return bool(told[-1][0])

        until("the announcement to be heard", is_heard)
        found, sizes = told[-1]
        assert found == marks
        assert max(sizes) <= LISTENED_BYTES_MAX
        assert heard(other)[0] == b""
        with Door(remote) as later:
            assert heard(later)[0] == marks


def test_a_probe_leaves_out_what_does_not_fit_into_a_report(remote: Remote) -> None:
    fitting = HEADS_BYTES_MAX // head_bytes(246)
    keys = [name_of(seed).key for seed in range(fitting + 2)]
    with Door(remote) as door:
        found = door.order(asked(*keys, shards=246))
        assert isinstance(found, RemoteProbed)
        assert found.heads == [b""] * len(keys)
        assert found.faults == [""] * fitting + [LEFT_OUT] * 2


def test_a_cancel_of_a_job_that_is_over_does_nothing(remote: Remote) -> None:
    with Door(remote) as door:
        door.order(asked(name_of(1).key))
        door.tell(Cancel(1))
        assert fault_of(door.order(FetchRemote(2, encode(door.fill(3)), slots(*BACK)))) == "gone"


def test_the_first_report_names_the_store_and_what_an_operator_should_know(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[object, ...]] = []
    monkeypatch.setattr("kvserver.movers.remote_mover.logs.event", lambda *event: logged.append(event))
    with Door(remote) as door:
        assert isinstance(door.ready, Ready)
        assert door.ready.pid == os.getpid()
        facts = dict(door.ready.facts)
        assert (facts["remote"], facts["url"], facts["write"]) == ("a", remote.url, "reuse")
        said = [text for name, text in facts.items() if name.endswith(" warning")]
        assert said
    assert logged == [(logging.WARNING, "remote warning", ("remote", "a"), ("why", text)) for text in said]


def test_a_directory_that_is_missing_fails_orders_at_once_and_is_used_when_it_is_there(tmp_path: Path) -> None:
    (remote,) = parse(f"a=file://{tmp_path}/mounted?threads=2")
    with Door(remote) as door:
        told = door.next()
        assert isinstance(told, RemoteIs)
        assert "no such directory" in told.problem
        assert fault_of(door.order(PutRemote(1, encode(door.fill(3)), slots(*SLOTS)))) == "remote-down"
        (tmp_path / "mounted").mkdir()
        assert door.next() == RemoteIs("", [])
        facts = door.next()
        assert isinstance(facts, Ready)
        assert any(name.endswith(" warning") for name, _ in facts.facts), "what an operator should know comes late"
        assert fault_of(door.order(PutRemote(2, encode(door.fill(3)), slots(*SLOTS)))) == ""


def test_a_store_that_is_away_at_the_start_is_asked_for_its_facts_again_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Valkey that starts after its server. Nobody would be warned that it is never emptied."""
    monkeypatch.setattr("kvserver.movers.remote_mover.FACTS_AGAIN_S", 0.0)
    (remote,) = parse(f"a=file://{tmp_path}")
    asked_by: list[int] = []
    gate = threading.Event()

    class Late(DirectoryStore):
        def facts(self) -> Facts:
            asked_by.append(threading.get_ident())
            if len(asked_by) == 1:
                raise StoreError("remote-down", "away")
            assert gate.wait(WAIT_S)
            return super().facts()

    with Door(remote, opens=lambda _: Late(str(tmp_path))) as door:
        assert isinstance(door.ready, Ready)
        assert not any(name.endswith(" warning") for name, _ in door.ready.facts)
        until("it to be asked again", lambda: len(asked_by) > 1)
        report = door.order(asked(name_of(1).key))
        assert isinstance(report, RemoteProbed), "no order waits for what hangs"
        gate.set()
        told = door.next()
        assert isinstance(told, Ready)
        assert any(name.endswith(" warning") for name, _ in told.facts)
        for job in range(5):
            assert isinstance(door.order(asked(name_of(job).key)), RemoteProbed), "it is told once"
    assert len(asked_by) == 2


class NoCode(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(("problem", "text"), [(KeyError("planted"), "planted"), (NoCode(), "NoCode")])
def test_a_store_whose_code_fails_in_any_way_is_not_usable_and_its_mover_goes_on(
    tmp_path: Path, problem: Exception, text: str
) -> None:
    def opens(_: Remote) -> Store:
        raise problem

    (remote,) = parse(f"a=file://{tmp_path}")
    with Door(remote, opens=opens) as door:
        told = door.next()
        assert isinstance(told, RemoteIs)
        assert text in told.problem
        report = door.order(asked(name_of(1).key))
        assert isinstance(report, RemoteProbed)
        assert report.faults == ["remote-down"]


def test_a_mover_whose_store_needs_another_process_ends(tmp_path: Path) -> None:
    (remote,) = parse(f"a=file://{tmp_path}")
    why = [""]
    with Door(remote, stuck=lambda: why[0]) as door:
        assert isinstance(door.ready, Ready)
        why[0] = "planted"
        door._thread.join(WAIT_S)
        assert not door._thread.is_alive()


def test_a_valkey_that_dies_is_left_alone_and_asked_again_by_itself(tmp_path: Path) -> None:
    with ValkeyServer() as server, Door(parse(f"a=valkey://127.0.0.1:{server.port}")[0]) as door:
        head = door.fill(3)
        assert fault_of(door.order(PutRemote(1, encode(head), slots(*SLOTS)))) == ""
        server.kill()
        told: Report = RemoteIs("", [])
        for job in range(2, 200):
            told = door.order(FetchRemote(job, encode(head), slots(*BACK)))
            if isinstance(told, RemoteIs):
                break
        assert told == RemoteIs("", [f"127.0.0.1:{server.port}"])
        server.start()
        while told != RemoteIs("", []):
            told = door.next()


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [("valkey://x", "VALKEY", "valkey"), ("s3://bucket", "OBJECTS", "object-stores")],
)
def test_a_library_that_is_missing_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, url: str, library: str, extra: str
) -> None:
    needed = getattr(remote_store, library)
    monkeypatch.setattr(remote_store, library, needed._replace(module="library_that_is_not_there"))
    with pytest.raises(ConfigError, match=rf"install kvserver\[{extra}\]"):
        check(parse(f"a={url}")[0])
    check(parse("a=file:///mnt")[0])


def test_a_password_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        check(parse(f"a=valkey://x?password_file={tmp_path}/none")[0])


def test_a_valkey_with_a_password_is_opened_with_the_content_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    (tmp_path / "secret").chmod(0o600)
    with ValkeyServer("--requirepass", "hunter2") as server:
        store: Store = open_store(parse(f"a=valkey://127.0.0.1:{server.port}?password_file={tmp_path}/secret")[0])
        assert store.notes([NamespaceName("-", bytes(32))]) == [None]
        store.close()


def test_a_valkey_is_opened_with_the_user_and_the_password_of_lmcaches_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "a=valkey://127.0.0.1:{}?username_env=LMCACHE_RESP_USERNAME&password_env=LMCACHE_RESP_PASSWORD"
    monkeypatch.setenv("LMCACHE_RESP_USERNAME", "mover")
    monkeypatch.setenv("LMCACHE_RESP_PASSWORD", "hunter2")
    with ValkeyServer() as server:
        assert server.ask("ACL", "SETUSER", "mover", "on", ">hunter2", "~*", "+@all") == "+OK\r\n"
        assert server.ask("ACL", "SETUSER", "default", "off") == "+OK\r\n"
        (remote,) = parse(url.format(server.port))
        check(remote)
        store: Store = open_store(remote)
        assert store.notes([NamespaceName("-", bytes(32))]) == [None]
        store.close()


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("LMCACHE_RESP_USERNAME", r"\$LMCACHE_RESP_USERNAME: is empty or not set"),
        ("hunter2!", "username_env: is no name of an environment variable"),
    ],
)
def test_a_users_name_that_cannot_be_read_stops_the_start_unquoted(
    monkeypatch: pytest.MonkeyPatch, variable: str, said: str
) -> None:
    monkeypatch.delenv("LMCACHE_RESP_USERNAME", raising=False)
    monkeypatch.setenv("LMCACHE_RESP_PASSWORD", "hunter2")
    with pytest.raises(ConfigError, match=f"remote-secret: {said}") as refused:
        check(parse(f"a=valkey://x?username_env={variable}&password_env=LMCACHE_RESP_PASSWORD")[0])
    assert "hunter2" not in str(refused.value)


def test_lmcaches_variables_are_not_read_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_RESP_PASSWORD", "hunter2")
    with ValkeyServer("--requirepass", "hunter2") as server:
        store: Store = open_store(parse(f"a=valkey://127.0.0.1:{server.port}")[0])
        with pytest.raises(StoreError) as refused:
            store.notes([NamespaceName("-", bytes(32))])
        assert refused.value.code == "remote-denied"
        store.close()
