"""Bad days of an object store: stopped, dead, refused, without what is needed, with foreign and damaged objects.

Most of it on a real S3 server; what no server does, on objects in memory."""

import gc
import json
import re
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore

from kvserver.movers.remote_checks import sums_of
from kvserver.remote.announcement import pack, unpack
from kvserver.remote.chunk_value import Head, WrongValue, encode, text_of
from kvserver.remote.objects import log
from kvserver.remote.objects.clouds import GAP_BYTES_MAX, STARTS_AT_A_TIME, CloudObjects, Place
from kvserver.remote.objects.driver import DigestSum, Named
from kvserver.remote.objects.store import ObjectStore, Waits
from kvserver.remote.secrets import SecretSource
from kvserver.remote.store import Gone, StoreError
from tests.rigs.remote_chunks import NAMESPACE, head_of, name_of, payloads_of, targets_of
from tests.rigs.s3_server import KEY, UNHURRIED, S3Server, s3_store

HURRIED = Waits(probe_s=0.25, bulk_s=0.35, note_s=0.3, announced_every_s=0.0)


class Watched(CloudObjects):
    """Objects in memory. Its calls are counted, and spoilt if the test says so."""

    def __init__(self, stand_in: object | None = None) -> None:
        self.memory = stand_in or MemoryStore()
        super().__init__(Place("s3", "memory"), stand_in=self.memory)
        self.calls: list[str] = []
        self.spans: list[tuple[int, int]] = []
        self.creates_anew = False
        self.forgets = False
        self.full = False

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        self.calls.append("create")
        if self.creates_anew:
            super().replace(name, b"".join(pieces), within_s=within_s)
            return True
        return super().create(name, pieces, within_s=within_s)

    def replace(self, name: str, value: bytes, *, within_s: float) -> None:
        self.calls.append("replace")
        if self.full:
            raise StoreError("remote-full", "no room")
        super().replace(name, value, within_s=within_s)

    def remove(self, names: Sequence[str], *, within_s: float) -> None:
        self.calls.append("remove")
        if not self.forgets:
            super().remove(names, within_s=within_s)

    def listed(self, beginning: str, *, within_s: float) -> object:
        self.calls.append("listed")
        return super().listed(beginning, within_s=within_s)

    def _get(self, name: str, span: tuple[int, int], within_s: float, tag: str | None = None) -> object:
        self.spans.append(span)
        return super()._get(name, span, within_s, tag)

    def names(self) -> set[str]:
        return {one["path"] for page in obstore.list(self.memory) for one in page}


def watched_store(driver: Watched, **waits: float) -> ObjectStore:
    return ObjectStore(driver, node="s3://memory", waits=UNHURRIED._replace(**waits))


def written(store: ObjectStore, seed: int, sizes: Sequence[int] = (1, 4099, 70_001)) -> Head:
    name = name_of(seed)
    head = head_of(name, sizes=sizes)
    assert store.write(name, head, payloads_of(head))
    return head


# ---------------------------------------------------------------- what is needed of a store


def test_a_store_whose_creation_replaces_what_is_there_is_refused_by_name() -> None:
    driver = Watched()
    driver.creates_anew = True
    with pytest.raises(
        StoreError, match=r"s3://memory: .*is to create an object replaces it \(If-None-Match"
    ) as refused:
        watched_store(driver)
    assert refused.value.code == "remote-refused"
    assert driver.names() == set(), "nothing is left of the trial"


def test_a_store_that_still_has_what_was_removed_is_refused_by_name() -> None:
    driver = Watched()
    driver.forgets = True
    with pytest.raises(StoreError, match="an object that was removed is still there"):
        watched_store(driver)


def test_a_look_writes_nothing_not_even_a_trial() -> None:
    driver = Watched()
    ObjectStore(driver, node="", only_looks=True).notes([NAMESPACE])
    assert driver.calls == []


def test_objects_have_the_names_of_the_format_and_notes_lie_apart_from_all_that_a_rule_removes() -> None:
    driver = Watched()
    store = watched_store(driver)
    head = head_of(name_of(4, ranks="r0"))
    store.write(name_of(4, ranks="r0"), head, payloads_of(head))
    store.replace_note(NAMESPACE, b"note")
    store.announce(NAMESPACE, 5, pack([8]))
    of = "aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dypq"
    assert {name for name in driver.names() if "announced" not in name} == {
        f"kv1.notes/-/{of}",
        f"kv1/-/{of}/fedcba9876543210/26/26sw2ph47gse3rywnenm3k5bxcurezdfipdjo6s2iowcou6pcalq.r0",
    }
    (announced,) = (name for name in driver.names() if "announced" in name)
    assert announced.startswith(f"kv1/-/{of}/announced/0000000000000005/")


# ---------------------------------------------------------------- reads


def test_a_whole_chunk_is_one_request_and_wanted_shards_are_read_without_what_lies_far_between() -> None:
    driver = Watched()
    store = watched_store(driver)
    head = written(store, 3, sizes=(4099, GAP_BYTES_MAX + 7, 70_001))
    driver.spans.clear()
    store.read(name_of(3), head, targets_of(head))
    assert driver.spans == [(0, len(encode(head)) + head.payload_bytes)]
    driver.spans.clear()
    targets = targets_of(head)
    store.read(name_of(3), head, [targets[0], None, targets[2]])
    end = len(encode(head)) + head.payload_bytes
    assert driver.spans == [(0, len(encode(head)) + 4099), (end - 70_001, end)]
    assert [targets[0], targets[2]] == [payloads_of(head)[0], payloads_of(head)[2]]
    assert targets[1] == targets_of(head)[1]


def test_a_head_is_told_without_a_byte_of_its_object_and_one_that_was_not_noted_is_read() -> None:
    driver = Watched()
    store = watched_store(driver)
    noted = written(store, 3)
    many = written(store, 4, sizes=(1,) * 90)
    older = head_of(name_of(5))
    path = f"kv1/{'/'.join(NAMESPACE.pieces()[1:])}/{older.epoch:016x}/{text_of(older.key)[:2]}/{text_of(older.key)}"
    driver.replace(path, encode(older) + b"".join(payloads_of(older)), within_s=9)
    driver.spans.clear()
    assert store.heads([name_of(3)], 3) == [noted]
    assert driver.spans == []
    names = [name_of(seed) for seed in (9, 5, 4, 3)]
    assert store.heads(names, 90) == [None, older, many, noted]
    assert len(driver.spans) == 3


def test_a_head_that_is_noted_of_an_object_with_other_bytes_brings_nothing() -> None:
    driver = Watched()
    store = watched_store(driver)
    head = written(store, 3)
    (path,) = driver.names()
    spoilt = bytes(len(encode(head)) + head.payload_bytes)
    first = obstore.get(driver.memory, path).attributes  # type: ignore[arg-type]
    obstore.put(driver.memory, path, spoilt, attributes=first)  # type: ignore[arg-type]
    assert store.heads([name_of(3)], 3) == [head]
    with pytest.raises(Gone):
        store.read(name_of(3), head, targets_of(head))
    obstore.put(driver.memory, path, spoilt[1:], attributes=first)  # type: ignore[arg-type]
    (found,) = store.heads([name_of(3)], 3)
    assert isinstance(found, WrongValue)


def test_payloads_are_summed_as_they_come_whatever_the_cuts(s3: S3Server, tmp_path: Path) -> None:
    store = s3_store(s3, tmp_path.name)
    head = written(store, 3, sizes=(4099, GAP_BYTES_MAX + 7, 70_001, 9, 3 << 20))
    for wanted in ((0, 1, 2, 3, 4), (0, 2, 4), (3,), ()):
        targets = [target if index in wanted else None for index, target in enumerate(targets_of(head))]
        assert store.read(name_of(3), head, targets) == sums_of(targets)
        payloads = payloads_of(head)
        assert all(target is None or target == payloads[index] for index, target in enumerate(targets))


def test_a_sum_of_fewer_bytes_than_a_payload_has_is_not_given() -> None:
    """Left out zeros would not change it."""

    class SumsLess(Watched):
        def read_summed(
            self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float
        ) -> list[DigestSum] | None:
            found = super().read_summed(name, pieces, within_s=within_s)
            return found and [*found[:-1], (found[-1][0], found[-1][1] - 1)]

    store = watched_store(SumsLess())
    head = written(store, 3)
    targets = targets_of(head)
    assert store.read(name_of(3), head, targets) is None
    assert targets == payloads_of(head)


def test_an_object_that_is_replaced_between_two_requests_of_a_read_is_gone() -> None:
    driver = Watched()
    store = watched_store(driver)
    old, new = (head_of(name_of(3), write=write, sizes=(1, GAP_BYTES_MAX + 7, 5)) for write in (1, 2))
    store.write(name_of(3), old, payloads_of(old))
    get = driver._get

    def replaced(name: str, span: tuple[int, int], within_s: float, tag: str | None = None) -> object:
        if tag is not None:
            store.drop(name_of(3), old)
            assert store.write(name_of(3), new, payloads_of(new))
        return get(name, span, within_s, tag)

    driver._get = replaced  # type: ignore[method-assign]
    targets = targets_of(old)
    with pytest.raises(Gone):
        store.read(name_of(3), old, [targets[0], None, targets[2]])


def test_a_store_that_does_not_look_at_if_match_mixes_no_two_writes() -> None:
    far = GAP_BYTES_MAX + 8

    class Ignores(CloudObjects):
        def _get(self, name: str, span: tuple[int, int], within_s: float, tag: str | None = None) -> object:
            found = super()._get(name, span, within_s)
            self.replace(name, bytes(far + 7), within_s=within_s)
            return found

    objects = Ignores(Place("s3", "bucket"), stand_in=MemoryStore())
    objects.replace("a", b"1" * (far + 7), within_s=10)
    assert not objects.read("a", [(n, memoryview(bytearray(7))) for n in (0, far)], within_s=10)


class Untagged:
    """An answer of a store that tells no tag of its objects."""

    def __init__(self, found: Any) -> None:
        self.range, self.stream = found.range, found.stream
        self.meta = {**found.meta, "e_tag": None}


def test_a_read_of_two_requests_is_refused_where_no_tag_holds_them_together() -> None:
    driver = Watched()
    store = watched_store(driver)
    head = written(store, 3, sizes=(1, GAP_BYTES_MAX + 7, 5))
    get = driver._get
    driver._get = lambda *asked: Untagged(get(*asked))  # type: ignore[method-assign, assignment, return-value]
    targets = targets_of(head)
    store.read(name_of(3), head, targets)
    assert targets == payloads_of(head)
    with pytest.raises(StoreError, match="it tells no ETag"):
        store.read(name_of(3), head, [targets[0], None, targets[2]])


@pytest.mark.parametrize("kind", ["cut", "longer", "empty", "foreign"])
def test_a_damaged_object_is_no_head_and_its_reader_gets_nothing(s3: S3Server, tmp_path: Path, kind: str) -> None:
    store = s3_store(s3, tmp_path.name)
    head = written(store, 4)
    whole = encode(head) + b"".join(map(bytes, payloads_of(head)))
    spoilt = {"cut": whole[:-1], "longer": whole + b"x", "empty": b"", "foreign": b"<html>" * 100}[kind]
    path = f"kv1/-/{'/'.join(listed_path(store))}"
    store._driver.replace(path, spoilt, within_s=20)
    (found,) = store.heads([name_of(4)], 3)
    assert isinstance(found, WrongValue)
    with pytest.raises(WrongValue):
        store.look(name_of(4))
    if kind != "longer":
        with pytest.raises(Gone):
            store.read(name_of(4), head, targets_of(head))
    store.drop(name_of(4), head)
    assert store.heads([name_of(4)], 3) == [None]


def listed_path(store: ObjectStore) -> list[str]:
    """The pieces of the name of the only object, behind the tenant."""
    (one,) = (one for some in store._driver.listed("kv1/-/", within_s=20) for one in some)
    return one.name.split("/")[2:]


def test_an_empty_note_is_a_damaged_one_and_not_none(s3: S3Server, tmp_path: Path) -> None:
    store = s3_store(s3, tmp_path.name)
    store.replace_note(NAMESPACE, b"")
    assert store.notes([NAMESPACE]) == [b""]
    assert not store.make_note(NAMESPACE, b"first")


def test_a_local_store_of_the_library_lists_what_was_dropped_in_any_order(tmp_path: Path) -> None:
    driver = Watched(LocalStore(str(tmp_path)))
    store = watched_store(driver)
    for seed in (1, 2, 3):
        written(store, seed)
    values = [value for some in store.values(NAMESPACE) for value in some]
    store.drop(name_of(2), None)
    store.drop_listed(NAMESPACE, values)
    assert [value for some in store.values(NAMESPACE) for value in some] == []


def test_a_large_chunk_that_is_there_is_not_sent_again() -> None:
    driver = Watched()
    store = watched_store(driver)
    large, small = (head_of(name_of(seed), sizes=(size, 7)) for seed, size in ((1, 9 << 20), (2, 4099)))
    for head, seed, sent in ((large, 1, 1), (small, 2, 2)):
        assert store.write(name_of(seed), head, payloads_of(head))
        driver.calls.clear()
        assert not store.write(name_of(seed), head._replace(write=9), payloads_of(head))
        assert driver.calls.count("create") == sent - 1


# ---------------------------------------------------------------- a store that is away


@pytest.mark.parametrize("slow", ["_told", "_get"])
def test_beginnings_that_are_not_asked_for_within_their_time_are_not_asked_for_at_all(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Watched()
    store = watched_store(driver, probe_s=0.2)
    call = getattr(driver, slow)
    asked: list[object] = []

    def late(*given: object) -> object:
        asked.append(given)
        time.sleep(0.3)
        return call(*given)

    monkeypatch.setattr(driver, slow, late)
    found = store.heads([name_of(seed) for seed in range(100)], 3)
    assert 0 < len(asked) <= STARTS_AT_A_TIME
    assert found.count(None) == (len(asked) if slow == "_get" else 0)
    assert {one.code for one in found if isinstance(one, StoreError)} == {"remote-slow"}


def test_a_stopped_store_fails_every_call_within_its_deadline_and_serves_again_by_itself(
    s3: S3Server, tmp_path: Path
) -> None:
    patient = s3_store(s3, tmp_path.name)
    head = written(patient, 4)
    store = ObjectStore(patient._driver, node="s3://kv-tests", waits=HURRIED, only_looks=True)
    store.heads([name_of(4)], 3)
    s3.stop()
    try:
        began_s = time.monotonic()
        found = store.heads([name_of(seed) for seed in range(100)], 3)
        assert {one.code for one in found if isinstance(one, StoreError)} == {"remote-slow"}
        assert len(found) == 100
        for call in (
            lambda: store.read(name_of(4), head, targets_of(head)),
            lambda: store.write(name_of(5), head, payloads_of(head)),
            lambda: store.notes([NAMESPACE]),
            lambda: store.announce(NAMESPACE, 5, pack([8])),
            lambda: store.announced(NAMESPACE, 5, None),
            lambda: store.drop(name_of(4), head),
        ):
            with pytest.raises(StoreError) as slow:
                call()
            assert slow.value.code == "remote-slow", slow.value
        assert time.monotonic() - began_s < 20, "each ends soon after its deadline; a machine may be busy"
    finally:
        s3.go_on()
    assert patient.heads([name_of(4)], 3) in ([head], [None]), "the drop may have happened all the same"


def test_what_a_call_was_given_is_in_no_cycle_after_an_error(s3: S3Server) -> None:
    """Otherwise Python 3.12 crashes when it collects the cycle: the library exports the views."""
    store = s3_store(s3, "x", port=1, only_looks=True)
    head = head_of(name_of(1))
    gc.disable()
    try:
        for call in (store.write, store.read):
            payloads = payloads_of(head)
            kept = [weakref.ref(payload) for payload in payloads]
            with pytest.raises(StoreError, match="remote-down") as failed:
                call(name_of(1), head, payloads)
            del payloads, failed
            assert not [view for view in kept if view() is not None]
    finally:
        gc.enable()


def test_calls_of_a_closed_store_end_with_an_error() -> None:
    store = watched_store(Watched())
    head = written(store, 1)
    store.close()
    for call in (
        lambda: store.heads([name_of(1), name_of(2)], 3),
        lambda: store.read(name_of(1), head, targets_of(head)),
        lambda: store.write(name_of(3), head, payloads_of(head)),
        lambda: store.notes([NAMESPACE]),
        lambda: list(store.values(NAMESPACE)),
        lambda: store.drop(name_of(1), head),
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_a_store_that_nobody_answers_for_is_down_and_cannot_be_opened(s3: S3Server) -> None:
    with pytest.raises(StoreError) as down:
        s3_store(s3, "x", port=1)
    assert down.value.code == "remote-down"
    assert "Debug source" not in down.value.message


def test_a_bucket_that_is_not_there_has_nothing_and_knows_nothing(s3: S3Server) -> None:
    store = s3_store(s3, "x", bucket="no-such-bucket", only_looks=True)
    (found,) = store.heads([name_of(1)], 3)
    assert isinstance(found, StoreError)
    assert found.code == "remote-refused"
    for call in (lambda: store.notes([NAMESPACE]), lambda: list(store.namespaces("-")), lambda: store.look(name_of(1))):
        with pytest.raises(StoreError) as refused:
            call()
        assert refused.value.code == "remote-refused"


def test_a_wrong_key_is_said_to_be_so_and_is_in_no_message(s3: S3Server, tmp_path: Path) -> None:
    wrong = SecretSource(variable="W", environment={"W": "planted-wrong-key"})
    with pytest.raises(StoreError) as denied:
        s3_store(s3, "x", password=wrong)
    assert denied.value.code == "remote-denied"
    assert "planted" not in str(denied.value)
    assert KEY not in str(denied.value)


def test_a_key_that_is_rotated_is_used_without_a_restart(s3: S3Server, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text("planted-old-key")
    store = s3_store(s3, tmp_path.name, password=SecretSource(file=str(file)), only_looks=True)
    with pytest.raises(StoreError, match="remote-denied"):
        store.notes([NAMESPACE])
    file.write_text(KEY)
    assert store.notes([NAMESPACE]) == [None]


def test_signatures_are_in_no_message() -> None:
    driver = CloudObjects(Place("az", "container"), stand_in=MemoryStore())
    said = driver._readable(
        "GET https://a.b/c?sv=1&sig=planted%2F7&x=2 X-Amz-Signature=planted X-Amz-Credential=planted"
    )
    assert "planted" not in said
    assert "sv=1" in said
    assert "x=2" in said


# ---------------------------------------------------------------- announcements


def marks_of(store: ObjectStore, after: object = None) -> tuple[list[int], object]:
    found = store.announced(NAMESPACE, 5, after)
    return list(unpack(found.batch)), found.cursor


def test_announcements_are_written_and_read_together_once_their_time_has_come() -> None:
    driver = Watched()
    store, reader = (watched_store(driver, announced_every_s=3600.0) for _ in range(2))
    driver.calls.clear()
    for number in range(2, 20):
        store.announce(NAMESPACE, 5, pack([4 * number]))
    assert driver.calls.count("replace") == 1, "the others wait"
    marks, place = marks_of(reader)
    assert marks == [8]
    calls = len(driver.calls)
    for _ in range(30):
        assert marks_of(reader, place) == ([], place)
    assert len(driver.calls) == calls, "it was read a moment ago"
    store._logs[NAMESPACE]._every_s = reader._logs[NAMESPACE]._every_s = 0.0
    assert marks_of(store, {})[0] == [4 * number for number in range(2, 20)], "what waits is written with a read"
    assert marks_of(reader, place)[0] == [4 * number for number in range(3, 20)]
    assert driver.calls.count("replace") == 2


def test_announcements_that_cannot_be_written_wait_and_are_forgotten_when_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log, "WAITING_BYTES_MAX", 5 * 8)
    driver = Watched()
    store = watched_store(driver)
    driver.full = True
    for number in (2, 3):
        with pytest.raises(StoreError, match="remote-full"):
            store.announce(NAMESPACE, 5, pack([4 * number]))
    driver.full = False
    store.announce(NAMESPACE, 5, pack([16]))
    assert marks_of(store)[0] == [8, 12, 16]
    driver.full = True
    for number in range(5, 10):
        with pytest.raises(StoreError):
            store.announce(NAMESPACE, 5, pack([4 * number]))
    driver.full = False
    store.announce(NAMESPACE, 5, pack([40]))
    assert marks_of(store)[0] == [8, 12, 16, 40]


@pytest.mark.parametrize("page", [[], [Named(f"kv1/-/{text_of(NAMESPACE.namespace)}/announced/x", 8, 0.0)]])
def test_a_list_of_announcements_that_does_not_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, page: list[Named]
) -> None:
    monkeypatch.setattr(log, "LISTED_MAX", 1000)
    monkeypatch.setattr(log, "LIST_S_MAX", 0.0 if not page else 60.0)
    driver = Watched()
    store = watched_store(driver)
    pages = 0

    def endless(beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        nonlocal pages
        while pages < 1_000_000:
            pages += 1
            yield page

    driver.listed = endless  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="remote-slow"):
        store.announced(NAMESPACE, 5, None)
    assert pages < 1_000_000


def test_a_server_begins_another_object_and_removes_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "OBJECT_BYTES_MAX", 3 * 8)
    monkeypatch.setattr(log, "OBJECTS_MAX", 4)
    driver = Watched()
    store = watched_store(driver)
    for number in range(2, 30):
        store.announce(NAMESPACE, 5, pack([4 * number]))
        time.sleep(0.002)  # the clock of the store tells which is older
    objects = [name for name in driver.names() if "announced" in name]
    assert len(objects) == 4
    assert marks_of(store)[0] == [4 * number for number in range(29 - 9, 30)]


def test_announcements_of_another_epoch_are_removed_when_nobody_has_written_to_them_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Watched()
    old, store = watched_store(driver), watched_store(driver)
    old.announce(NAMESPACE, 4, pack([8]))
    store.announce(NAMESPACE, 5, pack([12]))
    assert [unpack(store.announced(NAMESPACE, epoch, None).batch)[0] for epoch in (4, 5)] == [8, 12]
    monkeypatch.setattr(log, "OTHER_EPOCH_S_MAX", -1.0)
    watched_store(driver).announce(NAMESPACE, 5, pack([16]))
    assert store.announced(NAMESPACE, 4, None).batch == b""
    assert sorted(marks_of(store)[0]) == [12, 16]


class Spoilt(Watched):
    """One object cannot be read; a replacement happens and fails, if the test says so."""

    spoilt = "no such name"
    is_lost = False

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        if self.spoilt in name:
            raise StoreError("remote-denied", "planted")
        return super().read(name, pieces, within_s=within_s)

    def replace(self, name: str, value: bytes, *, within_s: float) -> None:
        super().replace(name, value, within_s=within_s)
        if self.is_lost:
            raise StoreError("remote-slow", "planted")


def test_an_object_of_announcements_that_cannot_be_read_silences_no_other() -> None:
    driver = Spoilt()
    for number in (8, 12, 16):
        watched_store(driver).announce(NAMESPACE, 5, pack([number]))
    driver.spoilt = sorted(name for name in driver.names() if "announced" in name)[1]
    reader = watched_store(driver)
    assert len(marks_of(reader)[0]) == 2
    driver.spoilt = "announced"
    with pytest.raises(StoreError, match="planted"):
        watched_store(driver).announced(NAMESPACE, 5, None)


def test_marks_after_a_large_write_that_failed_and_happened_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "WAITING_BYTES_MAX", 8 * 100)
    driver = Spoilt()
    store, reader = watched_store(driver), watched_store(driver)
    store.announce(NAMESPACE, 5, pack([8]))
    driver.is_lost = True
    with pytest.raises(StoreError, match="planted"):
        store.announce(NAMESPACE, 5, pack([4 * number for number in range(10, 110)]))
    driver.is_lost = False
    _, place = marks_of(reader)
    told = [4 * number for number in range(1000, 1060)]
    heard: list[int] = []
    for mark in told:
        store.announce(NAMESPACE, 5, pack([mark]))
        marks, place = marks_of(reader, place)
        heard += marks
    assert set(told) <= set(heard)


def test_announcements_are_kept_of_the_namespaces_that_were_used_last() -> None:
    driver = Watched()
    store = watched_store(driver)
    for number in range(300):
        store.announce(NAMESPACE._replace(namespace=number.to_bytes(32)), 5, pack([8]))
    assert len(store._logs) == 256
    assert store.announced(NAMESPACE._replace(namespace=bytes(32)), 5, None).batch == pack([8])


def test_a_store_that_lets_nothing_be_removed_gets_no_more_than_one_trial() -> None:
    driver = Watched()

    def refuses(names: Sequence[str], *, within_s: float) -> None:
        if driver.names():
            raise StoreError("remote-denied", "planted")

    driver.remove = refuses  # type: ignore[method-assign]
    texts = set()
    for _ in range(5):
        with pytest.raises(StoreError) as refused:
            watched_store(driver)
        texts.add(refused.value.message)
    assert (len(driver.names()), texts) == (1, {"planted"})


# ---------------------------------------------------------------- rules of a bucket


def test_the_rules_that_the_page_gives_reach_all_but_notes() -> None:
    """A rule that reached a note would clear its namespace."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "object-stores.md").read_text()
    amazon, google, azure = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    beginnings = {
        amazon["Rules"][0]["Filter"]["Prefix"],
        google["rule"][0]["condition"]["matchesPrefix"][0],
        azure["rules"][0]["definition"]["filters"]["prefixMatch"][0].removeprefix("CONTAINER/"),
    }
    assert beginnings == {"PREFIX/kv1/"}
    driver = Watched()
    store = watched_store(driver)
    written(store, 1)
    store.announce(NAMESPACE, 5, pack([8]))
    store.replace_note(NAMESPACE, b"note")
    forgetful = Watched(driver.memory)
    forgetful.forgets = True
    with pytest.raises(StoreError):
        watched_store(forgetful)  # leaves its trial behind
    assert len(driver.names()) == 4
    assert {name for name in driver.names() if not name.startswith("kv1/")} == {
        f"kv1.notes/-/{text_of(NAMESPACE.namespace)}"
    }
