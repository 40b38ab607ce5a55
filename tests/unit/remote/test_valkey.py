"""Bad days of a Valkey: frozen, killed, full, evicting, forbidding, foreign or damaged values, one node of three."""

import gc
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from glide_shared.exceptions import ClosingError
from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress

from kvserver.errors import DeviceError
from kvserver.movers.remote_checks import CheckedSources, digest_of, sums_of
from kvserver.remote.announcement import pack
from kvserver.remote.chunk_value import ChunkName, Head, WrongValue, encode, fragments_of
from kvserver.remote.secrets import SecretSource
from kvserver.remote.store import Gone, Store, StoreError, WrongSource
from kvserver.remote.valkey import IDLE_READS, Settings, ValkeyStore
from tests.process.harness import until
from tests.rigs.fault_proxy import FaultProxy
from tests.rigs.remote_chunks import NAMESPACE, head_of, name_of, payloads_of, targets_of
from tests.rigs.tls_server import make_certificates, tls_server
from tests.rigs.valkey_server import ValkeyCluster, ValkeyServer
from tests.unit.remote.conftest import PATIENT

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "remote.md"
LARGE = (9, (8 << 20) + 3, 5001)
SHARDS = 3
PASSWORD = "k3ep-this-t0-yourself"
HASTY = {"probe_s": 0.2, "bulk_s": 0.4, "note_s": 0.3, "connect_s": 0.5}
"""Deadlines to be passed by a server that does not answer."""
LOG = ":".join((*NAMESPACE.pieces(), f"{5:016x}", "log"))
"""The announcements of epoch 5."""
AWAY = {"remote-slow", "remote-down"}
"""Codes for a node that does not answer: nobody can tell whether it is dead."""


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """One that a test may harm."""
    with ValkeyServer() as server:
        yield server


_made: list[ValkeyStore] = []


@pytest.fixture(autouse=True)
def all_are_closed() -> Iterator[None]:
    """A client of the library that is only forgotten keeps its thread and its descriptors."""
    yield
    while _made:
        _made.pop().close()


def made(settings: Settings) -> ValkeyStore:
    _made.append(ValkeyStore(settings))
    return _made[-1]


def opened(server: ValkeyServer, **settings: object) -> ValkeyStore:
    return made(Settings((("127.0.0.1", server.port),), **{**PATIENT, **settings}))


def written(store: Store, seed: int, sizes: tuple[int, ...] = (1, 4099), write: int = 1) -> Head:
    name = name_of(seed)
    head = head_of(name, sizes=sizes, write=write)
    assert store.write(name, head, payloads_of(head))
    return head


def keys(server: ValkeyServer) -> list[str]:
    return [line for line in server.ask("KEYS", "*").split("\r\n") if line[:1] not in ("*", "$", "")]


def code_of(problem: object) -> str:
    assert isinstance(problem, StoreError | WrongValue)
    return problem.code


def every_call(store: Store, head: Head) -> list[str]:
    """The code of the error that each kind of call ends with; "" for none."""
    name = name_of(1)
    other = name_of(2)
    new = head_of(other)
    calls = {
        "heads": lambda: store.heads([name], SHARDS),
        "read": lambda: store.read(name, head, targets_of(head)),
        "write": lambda: store.write(other, new, payloads_of(new)),
        "touch": lambda: store.touch(name, head),
        "notes": lambda: store.notes([NAMESPACE]),
        "make_note": lambda: store.make_note(NAMESPACE, b"note"),
        "replace_note": lambda: store.replace_note(NAMESPACE, b"note"),
        "facts": store.facts,
        "drop": lambda: store.drop(name, head),
    }
    codes = []
    for call in calls.values():
        try:
            answer = call()
            failed = answer[0] if isinstance(answer, list) else None
            codes.append(failed.code if isinstance(failed, StoreError) else "")
        except DeviceError as problem:
            codes.append(problem.code)
    return codes


def test_calls_to_a_frozen_server_end_and_the_same_connections_serve_again(server: ValkeyServer) -> None:
    store = opened(server, **HASTY)
    head = written(store, 1)
    server.stop()
    assert set(every_call(store, head)) <= AWAY
    server.go_on()
    until("it to answer again", lambda: every_call(store, written_again(store)) == [""] * 9)


def written_again(store: Store) -> Head:
    name = name_of(1)
    head = head_of(name, sizes=(1, 4099), write=2)
    for seed in (1, 2):
        try:
            store.drop(name_of(seed), None)
            if seed == 1:
                store.write(name, head, payloads_of(head))
        except StoreError:
            break
    return head


def test_a_killed_server_is_down_and_a_new_one_is_used_without_opening_the_store_again(server: ValkeyServer) -> None:
    store = opened(server, **HASTY)
    head = written(store, 1)
    server.kill()
    assert set(every_call(store, head)) <= AWAY
    server.start()
    until("it to answer again", lambda: every_call(store, written_again(store)) == [""] * 9)
    assert store.heads([name_of(3)], SHARDS) == [None]


def test_connections_that_lost_their_peer_are_made_anew(server: ValkeyServer) -> None:
    with FaultProxy(server.port, seed=1, chance=0) as proxy:
        store = made(Settings((("127.0.0.1", proxy.port),), **HASTY))
        head = written(store, 1)
        proxy.hush()
        assert "remote-slow" in every_call(store, head)
        until("new connections", lambda: every_call(store, written_again(store)) == [""] * 9)
        store.close()


@pytest.mark.parametrize("answer", [None, 7, b"x", [], [b"y"] * 5], ids=repr)
def test_an_answer_of_another_shape_is_an_error_of_the_store_and_ends_its_connection(
    server: ValkeyServer, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server)
    head = written(store, 1)
    asked: list[object] = []

    def wrong(client: object, *given: object, **named: object) -> object:
        asked.append(client)
        return answer

    with monkeypatch.context() as damaged:
        for command in ("exec", "get", "mget", "getrange", "info", "xrange"):
            damaged.setattr(GlideClient, command, wrong)
        for call in (
            lambda: store.heads([name_of(1), name_of(2)], SHARDS),
            lambda: store.touch(name_of(1), head),
            lambda: store.notes([NAMESPACE, NAMESPACE]),
            lambda: store.announce(NAMESPACE, 5, pack([8])),
        ):
            with pytest.raises(StoreError) as problem:
                call()
            assert problem.value.code == "remote-down"
        with pytest.raises((StoreError, Gone)):
            store.read(name_of(1), head, targets_of(head))
    assert len(set(asked)) == len(asked)
    assert every_call(store, head)[:2] == ["", ""]


@pytest.mark.parametrize(("told", "warned"), [(b"lots", False), (b"0", True), (b"", True), (b"100", False)])
def test_a_store_that_tells_its_bound_in_words_is_opened(
    server: ValkeyServer, told: bytes, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlideClient, "info", lambda *_: b"maxmemory:%s\r\nmaxmemory_policy:allkeys-lru\r\n" % told)
    assert ("maxmemory is 0" in " ".join(opened(server).facts().warnings)) == warned


@pytest.mark.parametrize("answer", [7, b"x", [], {b"5-1": 7}, {b"no id": [[b"m", b"8 bytes."]]}, {7: []}], ids=repr)
def test_announcements_of_another_shape_are_an_error_and_the_place_stays(
    server: ValkeyServer, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server)
    store.announce(NAMESPACE, 5, pack([8]))
    with monkeypatch.context() as damaged:
        damaged.setattr(GlideClient, "xrange", lambda *_: answer)
        with pytest.raises(StoreError, match="remote-down"):
            store.announced(NAMESPACE, 5, None)
    assert store.announced(NAMESPACE, 5, None).batch == pack([8])


def test_a_log_that_was_lost_and_begun_anew_by_a_clock_that_is_behind_is_read_from_its_begin(
    server: ValkeyServer,
) -> None:
    store = opened(server)
    store.announce(NAMESPACE, 5, pack([8]))
    place = store.announced(NAMESPACE, 5, None).cursor
    server.ask("DEL", LOG)
    server.ask("XADD", LOG, "7-1", "m", "8 bytes.")
    told = b""
    for _ in range(2 * IDLE_READS):
        found = store.announced(NAMESPACE, 5, place)
        told, place = told + found.batch, found.cursor
    assert told == b"8 bytes."


@pytest.mark.parametrize("size", [(1 << 20) - 300, 3 << 20, 8 << 20])
def test_values_in_one_piece_are_read_whatever_their_size(server: ValkeyServer, size: int) -> None:
    store = opened(server)
    head = head_of(name_of(1), sizes=(size,))._replace(fragment_bytes=0)
    assert store.write(name_of(1), head, payloads_of(head))
    (found,) = store.heads([name_of(1)], SHARDS)
    targets = targets_of(head)
    store.read(name_of(1), found, targets)
    assert targets == payloads_of(head)


def test_foreign_entries_among_announcements_are_passed_over(server: ValkeyServer) -> None:
    store = opened(server)
    store.announce(NAMESPACE, 5, pack([8]))
    server.ask("XADD", LOG, "*", "m", "cut")
    server.ask("XADD", LOG, "*", "other", "8 bytes.")
    store.announce(NAMESPACE, 5, pack([12]))
    found = store.announced(NAMESPACE, 5, None)
    assert found.batch == pack([8, 12])
    assert store.announced(NAMESPACE, 5, found.cursor).batch == b""


def test_a_foreign_value_in_place_of_announcements_is_an_error_of_their_own(server: ValkeyServer) -> None:
    store = opened(server)
    store.announce(NAMESPACE, 5, pack([8]))
    server.ask("SET", LOG, "theirs")
    for call in (lambda: store.announce(NAMESPACE, 5, pack([12])), lambda: store.announced(NAMESPACE, 5, None)):
        with pytest.raises(StoreError, match="remote-refused"):
            call()
    assert written(store, 1) is not None


def test_announcements_end_with_the_time_to_live_after_the_last_of_them(server: ValkeyServer) -> None:
    store = opened(server, ttl_s=1000)
    store.announce(NAMESPACE, 5, pack([8]))
    server.ask("EXPIRE", LOG, "7")
    store.announce(NAMESPACE, 5, pack([12]))
    assert 7 < int(server.ask("TTL", LOG).strip(":\r\n")) <= 1000


def test_a_server_that_comes_later_is_used_then(server: ValkeyServer) -> None:
    server.kill()
    store = opened(server, **HASTY)
    assert set(every_call(store, head_of(name_of(1)))) == {"remote-down"}
    server.start()
    until("it to answer", lambda: every_call(store, written_again(store)) == [""] * 9)


def test_clients_that_never_connected_are_not_kept(server: ValkeyServer) -> None:
    server.kill()
    store = opened(server, **HASTY)
    before = clients_kept()
    assert set(every_call(store, head_of(name_of(1)))) == {"remote-down"}
    assert clients_kept() == before


def clients_kept() -> int:
    gc.collect()
    return sum(isinstance(one, GlideClient) for one in gc.get_objects())


def test_a_forked_child_connects_nothing_again(server: ValkeyServer) -> None:
    store = opened(server)
    written(store, 1)
    before = connections_ever(server)
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert connections_ever(server) == before + 1, "only the one that asks"


def connections_ever(server: ValkeyServer) -> int:
    return int(re.findall(r"total_connections_received:(\d+)", server.ask("INFO", "stats"))[0])


def test_a_full_server_refuses_writes_as_full_and_is_read_as_before() -> None:
    with ValkeyServer("--maxmemory", "6mb", "--maxmemory-policy", "noeviction") as server:
        store = opened(server)
        heads = {1: written(store, 1)}
        while (code := _write_or_code(store, 1 + len(heads), heads)) is None:
            assert len(heads) < 100
        assert code == "remote-full"
        for seed, head in heads.items():
            targets = targets_of(head)
            assert store.heads([name_of(seed)], SHARDS) == [head]
            store.read(name_of(seed), head, targets)
            assert targets == payloads_of(head)
        assert "noeviction" in " ".join(store.facts().warnings)


def _write_or_code(store: Store, seed: int, heads: dict[int, Head]) -> str | None:
    try:
        heads[seed] = written(store, seed, sizes=(300_001, 5))
    except StoreError as problem:
        return problem.code
    return None


def test_a_large_chunk_that_does_not_fit_leaves_no_fragments() -> None:
    with ValkeyServer("--maxmemory", "14mb", "--maxmemory-policy", "noeviction") as server:
        store = opened(server)
        name = name_of(1)
        head = head_of(name, sizes=(*LARGE, 9 << 20))
        with pytest.raises(StoreError, match="remote-full"):
            store.write(name, head, payloads_of(head))
        assert keys(server) == []


def test_a_chunk_that_waits_for_a_connection_does_not_fail_however_slow_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call ends well within its deadline, and a chunk needs more of them than fit into it."""
    with ValkeyServer() as server:
        store = opened(server, bulk_s=0.6, connections=1)
        set_at_once = GlideClient.set

        def slow(client: GlideClient, *given: object, **named: object) -> object:
            time.sleep(0.25)
            return set_at_once(client, *given, **named)

        monkeypatch.setattr(GlideClient, "set", slow)
        with ThreadPoolExecutor(4) as threads:
            heads = list(threads.map(lambda seed: written(store, seed, sizes=LARGE), range(4)))
        assert store.heads([name_of(seed) for seed in range(4)], SHARDS) == heads


def test_two_writes_are_under_way_on_one_connection_and_no_third(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server, connections=1)
    set_at_once = GlideClient.set
    met = threading.Barrier(2)
    under_way: list[GlideClient] = []
    seen: set[tuple[GlideClient, int]] = set()

    def slow(client: GlideClient, *given: object, **named: object) -> object:
        under_way.append(client)
        met.wait(timeout=20)
        seen.add((client, len(under_way)))
        met.wait(timeout=20)
        under_way.remove(client)
        return set_at_once(client, *given, **named)

    monkeypatch.setattr(GlideClient, "set", slow)
    with ThreadPoolExecutor(6) as threads:
        heads = list(threads.map(lambda seed: written(store, seed), range(6)))
    assert store.heads([name_of(seed) for seed in range(6)], SHARDS) == heads
    assert len(seen) == 1
    assert {calls for _, calls in seen} == {2}


def test_a_connection_that_one_of_its_two_writes_has_lost_serves_the_other_to_its_end(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server, connections=1)
    set_at_once = GlideClient.set
    may_go_on = threading.Event()
    clients: list[GlideClient] = []

    def set_in_turn(client: GlideClient, *given: object, **named: object) -> object:
        clients.append(client)
        if len(clients) == 1:  # it is under way while the second one is lost, and a third one is served
            assert may_go_on.wait(20)
        elif len(clients) == 2:
            raise ClosingError("lost")
        return set_at_once(client, *given, **named)

    monkeypatch.setattr(GlideClient, "set", set_in_turn)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(written, store, 1)
        until("the first to be under way", lambda: clients)
        with pytest.raises(StoreError, match="lost"):
            written(store, 2)
        head = written(store, 3)
        may_go_on.set()
        heads = [first.result(20), None, head]
    assert store.heads([name_of(seed) for seed in (1, 2, 3)], SHARDS) == heads
    assert clients[0] is clients[1]
    assert clients[2] is not clients[0]
    with pytest.raises(ClosingError):
        set_at_once(clients[0], b"x", b"y")


def test_what_a_server_evicts_is_a_miss_and_never_half_a_chunk() -> None:
    # Its own buffers for what comes count as well: some 8 MiB for each connection that brings payloads.
    with ValkeyServer("--maxmemory", "96mb", "--maxmemory-policy", "allkeys-lru") as server:
        store = opened(server)
        heads = [written(store, seed, sizes=LARGE) for seed in range(20)]
        found = store.heads([name_of(seed) for seed in range(20)], SHARDS)
        assert 0 < found.count(None) < len(found)
        for seed, head in enumerate(heads):
            if found[seed] is not None:
                assert found[seed] == head
                targets = targets_of(head)
                store.read(name_of(seed), head, targets)
                assert targets == payloads_of(head)
        facts = store.facts()
        assert facts.evicts
        assert not facts.warnings


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_head_without_one_of_its_fragments_is_a_miss_and_does_not_keep_the_chunk_out(
    server: ValkeyServer, lost: int
) -> None:
    store = opened(server)
    name = name_of(1)
    head = written(store, 1, sizes=LARGE)
    (fragment,) = [key for key in keys(server) if key.endswith(f":{head.write:016x}:{lost}")]
    server.ask("DEL", fragment)
    with pytest.raises(Gone):
        store.read(name, head, targets_of(head))
    assert store.heads([name], SHARDS) == [None]
    newer = written(store, 1, sizes=LARGE, write=2)
    assert store.heads([name], SHARDS) == [newer]


def test_the_loser_of_two_writers_of_a_large_chunk_leaves_no_fragments(server: ValkeyServer) -> None:
    store = opened(server)
    name = name_of(1)
    first, second = (head_of(name, write=write, sizes=LARGE) for write in (1, 2))

    class Beaten(ValkeyStore):
        """Another machine writes the whole chunk while this one has begun."""

        def _set_new(self, to: object, key: bytes, value: object) -> bool:
            assert store.write(name, first, payloads_of(first))
            return super()._set_new(to, key, value)  # type: ignore[arg-type]

    late = Beaten(Settings((("127.0.0.1", server.port),), **PATIENT))
    assert not late.write(name, second, payloads_of(second))
    assert len(keys(server)) == 1 + len(list(fragments_of(first)))
    assert store.heads([name], SHARDS) == [first]


def test_a_chunk_with_a_wrong_payload_is_not_written(server: ValkeyServer) -> None:
    store = opened(server)
    name = name_of(1)
    head = with_digests(name, head_of(name, sizes=(1, 4099, 70_001)))
    payloads = payloads_of(head)
    payloads[1][4098] ^= 1
    with pytest.raises(WrongSource, match=f"shard {head.shards[1].shard} of group {head.shards[1].group}"):
        store.write(name, head, CheckedSources(name, head, payloads))
    assert keys(server) == []
    payloads[1][4098] ^= 1
    assert store.write(name, head, CheckedSources(name, head, payloads))
    targets = targets_of(head)
    assert store.read(name, head, targets) == sums_of(payloads)
    assert targets == payloads


def with_digests(name: ChunkName, head: Head) -> Head:
    """The same with the digests of payloads_of()."""
    pairs = zip(head.shards, payloads_of(head), strict=True)
    return head._replace(shards=tuple(each._replace(digest=digest_of(name, each, one) or 0) for each, one in pairs))


def test_nothing_stays_of_a_large_chunk_with_a_wrong_payload(server: ValkeyServer) -> None:
    store = opened(server)
    name = name_of(1)
    head = with_digests(name, head_of(name, sizes=LARGE))
    payloads = payloads_of(head)
    payloads[-1][-1] ^= 1
    sent: list[int] = []

    class Noting(CheckedSources):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            sent.append(len(keys(server)))
            return super().__getitem__(index)

    with pytest.raises(WrongSource, match=f"shard {head.shards[-1].shard} of group {head.shards[-1].group}"):
        store.write(name, head, Noting(name, head, payloads))
    assert max(sent) > 0, "the first payload was sent before the last one was compared"
    assert keys(server) == []
    payloads[-1][-1] ^= 1
    assert store.write(name, head, CheckedSources(name, head, payloads))
    assert store.heads([name], SHARDS) == [head]


def test_fragments_live_longer_than_their_head_and_use_renews_both(server: ValkeyServer) -> None:
    store = opened(server, ttl_s=1000)
    name = name_of(1)
    head = written(store, 1, sizes=LARGE)

    def lives_s() -> dict[bool, set[int]]:
        """Seconds to live of the head (True) and of the fragments."""
        lives: dict[bool, set[int]] = {True: set(), False: set()}
        for key in keys(server):
            lives[key.endswith("}")].add(int(server.ask("TTL", key)[1:]))
        return lives

    assert min(lives_s()[False]) > max(lives_s()[True]) > 0
    for renew in (lambda: store.touch(name, head), lambda: store.heads([name], SHARDS)):
        for key in keys(server):
            server.ask("EXPIRE", key, "70")
        renew()
        assert min(lives_s()[False]) > max(lives_s()[True]) > 900


def test_foreign_and_damaged_values_are_no_heads_and_their_payloads_are_not_given(server: ValkeyServer) -> None:
    store = opened(server)
    name = name_of(1)
    head = written(store, 1)
    (key,) = keys(server)
    whole = encode(head) + b"".join(payloads_of(head))
    other = encode(head_of(name_of(2), sizes=(1, 4099))) + b"".join(payloads_of(head))
    dice = random.Random(7)
    for value in (b"", b"somebody else's", whole[:90], other, dice.randbytes(len(whole)), b"\0" + whole[1:]):
        _set(server, key, value)
        (found,) = store.heads([name], SHARDS)
        assert found is None if not value else code_of(found) in ("foreign", "short", "other")
        with pytest.raises(Gone):
            store.read(name, head, targets_of(head))
    _set(server, key, whole[:-1])
    with pytest.raises(Gone):
        store.read(name, head, targets_of(head))
    _set(server, key, whole + b"more")
    with pytest.raises(Gone):
        store.read(name, head, targets_of(head))
    server.ask("DEL", key)
    server.ask("LPUSH", key, "a list")
    assert code_of(store.heads([name], SHARDS)[0]) == "foreign"
    with pytest.raises(StoreError, match="remote-refused"):
        store.read(name, head, targets_of(head))
    assert not store.write(name, head, payloads_of(head))


def test_what_a_call_was_given_is_in_no_cycle_after_an_error(server: ValkeyServer) -> None:
    """Otherwise Python 3.12 crashes when it collects the cycle."""
    store = opened(server, **HASTY)
    name = name_of(1)
    head = written(store, 1)
    (key,) = keys(server)
    gc.disable()
    try:
        _set(server, key, b"somebody else's")
        (wrong,) = store.heads([name], SHARDS)
        assert isinstance(wrong, WrongValue)
        assert wrong.__traceback__ is None
        server.stop()
        payloads = payloads_of(head)
        kept = [weakref.ref(payload) for payload in payloads]
        with pytest.raises(StoreError) as failed:
            store.write(name_of(2), head, payloads)
        assert failed.value.__context__ is not None
        assert failed.value.__context__.__traceback__ is None
        del payloads, failed
        assert not [view for view in kept if view() is not None]
    finally:
        gc.enable()


def _set(server: ValkeyServer, key: str, value: bytes) -> None:
    client = GlideClient.create(GlideClientConfiguration([NodeAddress("127.0.0.1", server.port)]))
    client.set(key, value)
    client.close()


def test_a_wrong_password_is_denied_and_the_password_is_in_no_message(server: ValkeyServer, tmp_path: Path) -> None:
    server.ask("CONFIG", "SET", "requirepass", "another one")
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text(PASSWORD)
    store = opened(server, password=SecretSource(file=str(file)))
    with pytest.raises(StoreError, match="remote-denied") as denied:
        store.heads([name_of(1)], SHARDS)
    shown = f"{denied.value!r} {denied.value} {denied.value.__cause__!r} {denied.value.__context__!r} {vars(store)}"
    assert PASSWORD not in shown
    file.write_text("another one\n")
    assert store.heads([name_of(1)], SHARDS) == [None]


def test_a_password_that_is_rotated_in_its_file_is_used_without_a_restart(server: ValkeyServer, tmp_path: Path) -> None:
    server.ask("ACL", "SETUSER", "kvserver", "on", f">{PASSWORD}", "~*", "&*", "+@all")
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text(PASSWORD)
    store = opened(server, username="kvserver", password=SecretSource(file=str(file)))
    head = written(store, 1)
    server.ask("ACL", "SETUSER", "kvserver", "resetpass", ">the next one")
    server.ask("CLIENT", "KILL", "USER", "kvserver")
    file.write_text("the next one")
    until("the new password", lambda: store.heads([name_of(1)], SHARDS) == [head] if _answers(store) else False)


def _answers(store: Store) -> bool:
    try:
        return not isinstance(store.heads([name_of(1)], SHARDS)[0], StoreError)
    except StoreError:
        return False


def test_a_user_without_permission_for_a_tenant_is_denied_there_and_served_elsewhere(
    server: ValkeyServer, tmp_path: Path
) -> None:
    (said,) = re.findall(r"^ACL SETUSER kvserver .*$", DOCUMENT.read_text(), re.MULTILINE)
    allowed = [word for word in said.split() if word.startswith("+")]
    server.ask("ACL", "SETUSER", "team", "on", f">{PASSWORD}", "~kv1:team-7:*", *allowed)
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text(PASSWORD)
    store = opened(server, username="team", password=SecretSource(file=str(file)))
    mine = name_of(1, of=NAMESPACE._replace(tenant="team-7"))
    head = head_of(mine)
    assert store.write(mine, head, payloads_of(head))
    large = head_of(mine._replace(key=b"l" * 32), sizes=LARGE)
    assert store.write(mine._replace(key=b"l" * 32), large, payloads_of(large))
    assert store.heads([mine._replace(key=b"l" * 32)], SHARDS) == [large]
    store.touch(mine, head)
    store.read(mine, head, targets_of(head))
    assert store.make_note(mine.of, b"note")
    assert store.notes([mine.of]) == [b"note"]
    store.announce(mine.of, 5, pack([8]))
    assert store.announced(mine.of, 5, None).batch == pack([8])
    store.facts()
    theirs = name_of(1, of=NAMESPACE._replace(tenant="team-8"))
    denied, found = store.heads([theirs, mine], SHARDS)
    assert code_of(denied) == "remote-denied"
    assert found == head
    with pytest.raises(StoreError, match="remote-denied"):
        store.write(theirs, head_of(theirs), payloads_of(head_of(theirs)))
    with pytest.raises(StoreError, match="remote-denied"):
        store.make_note(theirs.of, b"note")
    with pytest.raises(StoreError, match="remote-denied"):
        store.announce(theirs.of, 5, pack([8]))
    with pytest.raises(StoreError, match="remote-denied"):
        store.announced(theirs.of, 5, None)


def test_names_are_listed_only_by_a_user_who_may_and_the_error_names_the_command(
    server: ValkeyServer, tmp_path: Path
) -> None:
    written(opened(server), 1)
    server.ask("ACL", "SETUSER", "team", "on", f">{PASSWORD}", "~kv1:*", "+@all", "-scan")
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text(PASSWORD)
    store = opened(server, username="team", password=SecretSource(file=str(file)))
    for listing in (store.values(NAMESPACE), store.namespaces("-")):
        with pytest.raises(StoreError, match=r"remote-denied.*scan") as denied:
            list(listing)
        assert PASSWORD not in str(denied.value)
    server.ask("ACL", "SETUSER", "team", "+scan")
    assert [value.key for some in store.values(NAMESPACE) for value in some] == [name_of(1).key]


def test_a_prefix_with_letters_of_a_pattern_lists_its_own_names_alone(server: ValkeyServer) -> None:
    prefixes = ("a*", "ab", "a[b]", "a?", "a\\b")
    for prefix in prefixes:
        opened(server, prefix=prefix).replace_note(NAMESPACE, b"note")
        written(opened(server, prefix=prefix), prefixes.index(prefix))
    for prefix in prefixes:
        found = opened(server, prefix=prefix)
        assert [value.key for some in found.values(NAMESPACE) for value in some] == [
            name_of(prefixes.index(prefix)).key
        ]
        assert [name for some in found.namespaces("-") for name in some] == [NAMESPACE]


def test_foreign_names_are_left_out_of_a_list(server: ValkeyServer) -> None:
    head = written(opened(server), 1)
    (ours,) = keys(server)
    for foreign in (f"{ours}:x:1:2:3", ours.replace("{", "").upper(), ours[:-30], ours[:-3] + "1}"):
        server.ask("SET", foreign, "x")
    server.ask("LPUSH", ours[:-5] + "aaaa}", "x")
    (found,) = [value for some in opened(server).values(NAMESPACE) for value in some]
    assert (found.key, found.bytes) == (name_of(1).key, len(encode(head)) + head.payload_bytes)


def test_lists_and_looks_count_as_no_use() -> None:
    """Under LFU the first use of a value always raises its count, so that it can be seen."""
    with ValkeyServer() as alone, ValkeyCluster() as cluster:
        for servers in ([alone], cluster.servers):
            for server in servers:
                server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
            addresses = tuple(("127.0.0.1", server.port) for server in servers)
            store = made(Settings(addresses, is_cluster=len(servers) > 1, **PATIENT))
            for seed in range(12):
                written(store, seed)
            before = counts_of_use(servers)
            assert len(before) == 12
            assert len([value for some in store.values(NAMESPACE) for value in some]) == 12
            assert store.look(name_of(1)) is not None
            assert counts_of_use(servers) == before
            store.notes([NAMESPACE])
            store.heads([name_of(seed) for seed in range(12)], SHARDS)
            assert counts_of_use(servers) != before, "otherwise this test sees nothing"


def counts_of_use(servers: list[ValkeyServer]) -> dict[str, str]:
    return {key: server.ask("OBJECT", "FREQ", key) for server in servers for key in keys(server)}


def test_a_look_renews_nothing_and_removes_nothing(server: ValkeyServer) -> None:
    store = opened(server)
    written(store, 1, sizes=LARGE)
    fragment = next(key for key in keys(server) if key.endswith(":0"))
    server.ask("UNLINK", fragment)
    (head_key,) = [key for key in keys(server) if key.endswith("}")]
    server.ask("EXPIRE", head_key, "50")
    assert store.look(name_of(1)) is not None
    assert server.ask("TTL", head_key) in (":50\r\n", ":49\r\n", ":48\r\n")
    server.ask("SET", head_key, "no head")
    with pytest.raises(WrongValue):
        store.look(name_of(1))


def test_one_dead_node_of_a_cluster_costs_only_its_own_chunks() -> None:
    with ValkeyCluster() as cluster:
        addresses = tuple(("127.0.0.1", server.port) for server in cluster.servers)
        store = made(Settings(addresses, is_cluster=True, **PATIENT))
        # Otherwise the others refuse all until somebody repairs the cluster.
        for server in cluster.servers:
            server.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        heads = [written(store, seed) for seed in range(24)]
        names = [name_of(seed) for seed in range(24)]
        assert store.heads(names, SHARDS) == heads
        cluster.servers[1].kill()
        one_by_one = [_head_or_code(store, seed) for seed in range(24)]
        dead = [seed for seed, found in enumerate(one_by_one) if isinstance(found, str)]
        assert 0 < len(dead) < 24
        assert {one_by_one[seed] for seed in dead} <= AWAY
        assert [found for found in one_by_one if not isinstance(found, str)] == [
            head for seed, head in enumerate(heads) if seed not in dead
        ]


def _head_or_code(store: Store, seed: int) -> object:
    try:
        (found,) = store.heads([name_of(seed)], SHARDS)
    except StoreError as problem:
        return problem.code
    return found.code if isinstance(found, StoreError) else found


def test_a_closed_store_says_so(server: ValkeyServer) -> None:
    store = opened(server)
    head = written(store, 1)
    store.close()
    assert set(every_call(store, head)) == {"remote-down"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


@pytest.fixture
def redis(certificates: Path) -> Iterator[ValkeyServer]:
    with tls_server(certificates) as server:
        yield server


def test_a_server_with_tls_is_spoken_to_if_its_certificate_is_of_the_authority(
    redis: ValkeyServer, certificates: Path
) -> None:
    store = opened(redis, uses_tls=True, ca_file=str(certificates / "ca.crt"))
    head = written(store, 1, sizes=LARGE)
    targets = targets_of(head)
    store.read(name_of(1), head, targets)
    assert targets == payloads_of(head)
    assert store.facts().version.startswith("Redis")
    for wrong in ({"ca_file": str(certificates / "other.crt")}, {"ca_file": ""}):
        stranger = opened(redis, uses_tls=True, **{**HASTY, **wrong})
        with pytest.raises(StoreError, match="remote-down"):
            stranger.heads([name_of(1)], SHARDS)
    with pytest.raises(StoreError, match=r"remote-(down|slow)"):
        opened(redis, **HASTY).heads([name_of(1)], SHARDS)


def test_a_certificate_file_that_cannot_be_read_is_said_to_be_so(server: ValkeyServer, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no\.crt"):
        opened(server, uses_tls=True, ca_file=str(tmp_path / "no.crt")).heads([name_of(1)], SHARDS)
