"""The disk mover itself, in a thread: its findings on its devices, and its report of devices that cannot be used."""

import logging
import os
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pytest

from kvserver.config.config import Config
from kvserver.ipc.fd_sockets import Receiver, pair, send
from kvserver.ipc.inheritance import Inheritance
from kvserver.movers import disk_hits, disk_mover, disk_notes, disk_retire
from kvserver.movers.disk_hits import HitCounts
from kvserver.movers.disk_mover import DiskMover
from kvserver.movers.disk_notes import Known
from kvserver.tiers.prefix_notes import ClearedPrefix, prefix_document, prefix_note
from kvserver.tiers.records import NO_SUM, DiskRecord, Record, pack, pack_disk, unpack_disk
from kvserver.transfer.native import DiskStore, Ledger, create_memfd, digest_sum
from kvserver.wire.orders import (
    Demote,
    DeviceIs,
    DrainDevice,
    EraseDevice,
    ForgetNotes,
    FoundNote,
    FoundRecords,
    ItemFault,
    Listed,
    Moved,
    Note,
    Noted,
    NotesForgotten,
    Order,
    Promote,
    Ready,
    Recover,
    Report,
    TellRecords,
    decode_report,
    encode,
)
from tests.rigs.full_disk import fill, make_room, mounted
from tests.rigs.native_disk_rig import relabelled

WAIT_S = 30
NAMESPACE = b"n" * 32


class Brain:
    """The brain's end of the socket, with the mover at the other one."""

    def __init__(self, *directories: Path) -> None:
        self._arena = create_memfd("test-arena", 1 << 20)
        self._end, self._its_end = pair()
        self._end.settimeout(WAIT_S)
        self._receiver = Receiver(1 << 20)
        config = Config(
            disk_paths=",".join(map(str, directories)),
            arena_bytes=1 << 20,
            disk_bytes=1 << 20,
            disk_segment_bytes=64 << 10,
            cache_dir=str(directories[0].parent / "cache"),
        )
        self.ledger_fd = create_memfd("test-ledger", Ledger.file_bytes(config.ledger_span_bytes))
        self.ledger = Ledger(self.ledger_fd, config.ledger_span_bytes)
        inherited = Inheritance(
            parent=0, control=-1, arena=self._arena, ledger=self.ledger_fd, device="disk", config=config
        )
        self._mover = DiskMover(self._its_end, inherited)
        self._thread = threading.Thread(target=self._mover.run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert isinstance(self.next(), Ready)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._its_end.close()
        self.ledger.close()
        os.close(self.ledger_fd)
        os.close(self._arena)

    def lay(self, record: DiskRecord, payload: bytes) -> None:
        os.pwrite(self._arena, payload, record.arena_offset)

    def seal(self, records: Sequence[DiskRecord], sums: Sequence[int] = ()) -> None:
        """Publishes the slots of records, without sums if none are given."""
        for record, total in zip(records, sums or [NO_SUM] * len(records), strict=True):
            self.ledger.seal(pack(Record(*record[:10], total)))

    def facts(self) -> list[tuple[str, str]]:
        self._thread.start()
        ready = self.next()
        self.next()  # the device; a socket that closes before it ends the thread with an error
        self.__exit__()
        assert isinstance(ready, Ready)
        return ready.facts

    def order(self, order: Order) -> None:
        send(self._end, encode(order))

    def next(self) -> Report:
        frame, _, _ = self._receiver.receive(self._end)
        return decode_report(frame)

    def devices(self, count: int) -> list[DeviceIs]:
        told = [self.next() for _ in range(count)]
        assert all(isinstance(report, DeviceIs) for report in told)
        return told  # type: ignore[return-value]


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def blocked(directory: Path) -> None:
    """Makes notes impossible there: the notes' folder is a file."""
    (directory / disk_notes.FOLDER).touch()


def void_on(directory: Path) -> list[int]:
    return [note.void for note in disk_notes.load(str(directory))[0].values()]


def test_a_store_that_was_cut_is_a_warning_and_one_that_grew_is_none(
    places: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    def serve() -> None:
        with Brain(*places) as brain:
            assert [device.problem for device in brain.devices(2)] == ["", ""]

    caplog.set_level(logging.INFO)
    serve()
    serve()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    size = (places[1] / "kvserver.store").stat().st_size
    os.truncate(places[1] / "kvserver.store", size // 2)
    serve()
    (told,) = [record for record in caplog.records if record.levelno > logging.INFO]
    assert (told.levelname, told.getMessage()) == ("WARNING", "disk was cut")
    fields = dict(told.__dict__["fields"])
    assert (fields["directory"], fields["bytes"] - fields["from_bytes"]) == (str(places[1]), size - size // 2)
    assert fields["segments_lost"] > 5


def test_a_device_in_memory_says_so_among_its_facts() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        brain = Brain(Path(name))
        assert dict(brain.facts())["device 0 warning"].startswith("it lies on tmpfs: ")


def test_a_note_that_one_device_cannot_write_is_kept_by_the_other(places: tuple[Path, Path]) -> None:
    good, bad = places
    blocked(bad)
    with Brain(bad, good) as brain:
        assert [device.problem for device in brain.devices(2)] == ["", ""]
        brain.order(Note(NAMESPACE, b"document", 5))
        (told,) = brain.devices(1)
        assert told.device == 0
        assert "its notes cannot be written" in told.problem
        assert brain.next() == Noted(NAMESPACE, 5, kept=True)
        (bad / disk_notes.FOLDER).unlink()
        brain.order(Note(NAMESPACE, b"", 6))
        assert brain.next() == Noted(NAMESPACE, 6, kept=True)
    assert (void_on(good), void_on(bad)) == ([6], [6])


def test_a_note_that_no_device_can_write_is_not_said_to_be_kept(places: tuple[Path, Path]) -> None:
    _, bad = places
    blocked(bad)
    with Brain(bad) as brain:
        brain.devices(1)
        for void in (5, 6):
            brain.order(Note(NAMESPACE, b"document", void))
            if void == 5:
                brain.devices(1)  # once: then it is given up
            assert brain.next() == Noted(NAMESPACE, void, kept=False)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed notes are tried again almost at once."""
    monkeypatch.setattr(disk_mover, "NOTES_AGAIN_S", 0.01)
    monkeypatch.setattr(disk_mover, "NOTES_AGAIN_S_MAX", 0.02)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted("tmpfs", tmp_path, 4 << 20) as root:
        yield root


@pytest.mark.usefixtures("soon")
def test_notes_are_written_again_when_a_full_device_has_room(disk: Path) -> None:
    """The device is then reported as well, and the brain sends again the notes that are not durable."""
    with Brain(disk) as brain:
        brain.devices(1)
        fill(disk)
        for void in (5, 6):
            brain.order(Note(NAMESPACE, b"document", void))
            if void == 5:
                (told,) = brain.devices(1)
                assert told.problem == "its notes cannot be written: No space left on device"
            assert brain.next() == Noted(NAMESPACE, void, kept=False)
        make_room(disk)
        (told,) = brain.devices(1)
        assert told.problem == ""
        brain.order(Note(NAMESPACE, b"document", 6))
        assert brain.next() == Noted(NAMESPACE, 6, kept=True)
    assert void_on(disk) == [6]
    assert not list(disk.rglob("trial*"))


@pytest.mark.usefixtures("soon")
def test_notes_are_written_again_when_they_failed_for_another_reason(places: tuple[Path, Path]) -> None:
    """A device that missed some notes learns them from the others."""
    good, bad = places
    blocked(bad)
    with Brain(good, bad) as brain:
        brain.devices(2)
        brain.order(Note(NAMESPACE, b"document", 5))
        assert "its notes cannot be written" in brain.devices(1)[0].problem
        assert brain.next() == Noted(NAMESPACE, 5, kept=True)
        (bad / disk_notes.FOLDER).unlink()
        (told,) = brain.devices(1)
        assert (told.device, told.problem) == (1, "")
    assert (void_on(good), void_on(bad)) == ([5], [5])


def test_a_namespace_is_cleared_durably_on_a_full_device(disk: Path) -> None:
    with Brain(disk) as brain:
        brain.devices(1)
        brain.order(Note(NAMESPACE, b"document", 3))
        assert brain.next() == Noted(NAMESPACE, 3, kept=True)
        fill(disk)
        brain.order(Note(NAMESPACE, b"document", 7))
        assert brain.next() == Noted(NAMESPACE, 7, kept=True)
    assert disk_notes.load(str(disk))[0] == {NAMESPACE: Known(b"document", 7)}


def test_a_prefix_that_a_full_device_cannot_note_makes_its_namespace_void(disk: Path) -> None:
    prefix = ClearedPrefix(NAMESPACE, b"k" * 32)
    with Brain(disk) as brain:
        brain.devices(1)
        brain.order(Note(NAMESPACE, b"document", 3))
        assert brain.next() == Noted(NAMESPACE, 3, kept=True)
        fill(disk)
        brain.order(Note(prefix_note(prefix), prefix_document(prefix), 7))
        brain.devices(1)
        assert brain.next() == Noted(prefix_note(prefix), 7, kept=True)
    assert disk_notes.load(str(disk))[0] == {NAMESPACE: Known(b"document", 7)}


def test_a_prefix_of_which_one_device_has_a_note_costs_nothing_else(places: tuple[Path, Path]) -> None:
    good, bad = places
    prefix = ClearedPrefix(NAMESPACE, b"k" * 32)
    with Brain(good, bad) as brain:
        brain.devices(2)
        brain.order(Note(NAMESPACE, b"document", 3))
        assert brain.next() == Noted(NAMESPACE, 3, kept=True)
        (bad / disk_notes.FOLDER / f"{prefix_note(prefix).hex()}.note.new").mkdir()
        brain.order(Note(prefix_note(prefix), prefix_document(prefix), 7))
        brain.devices(1)
        assert brain.next() == Noted(prefix_note(prefix), 7, kept=True)
    assert void_on(bad) == [3]


def test_nothing_is_noted_when_every_device_was_drained(places: tuple[Path, Path]) -> None:
    place, _ = places
    with Brain(place) as brain:
        brain.devices(1)
        for order in (DrainDevice(0), EraseDevice(0)):
            brain.order(order)
            brain.devices(1)
        brain.order(Note(NAMESPACE, b"document", 5))
        assert brain.next() == Noted(NAMESPACE, 5, kept=True)
    assert os.listdir(place) == ["kvserver.drained"]


def notes_of(directory: Path) -> dict[bytes, tuple[bytes, int]]:
    return {namespace[:1]: tuple(known) for namespace, known in disk_notes.load(str(directory))[0].items()}


def found_notes(*directories: Path, forget: ForgetNotes | None = None) -> list[FoundNote]:
    """Notes that a start reports from its devices."""
    with Brain(*directories) as brain:
        brain.devices(len(directories))
        if forget is not None:
            brain.order(forget)
            assert brain.next() == NotesForgotten(forget.namespaces, kept=True)
        brain.order(Recover())
        told: list[FoundNote] = []
        while isinstance(report := brain.next(), FoundNote):
            told.append(report)
        assert isinstance(report, Listed)
        return told


def test_devices_learn_from_each_other_what_was_cleared(places: tuple[Path, Path]) -> None:
    """One of them may be gone the next time."""
    old, new = places
    for namespace, document, void in ((b"n" * 32, b"document", 7), (b"m" * 32, b"", 9)):
        disk_notes.save(str(old), namespace, document, void)
    disk_notes.save(str(new), b"n" * 32, b"", 8)
    assert found_notes(new, old) == [
        FoundNote(b"n" * 32, b"document", 8, newest=0),
        FoundNote(b"m" * 32, b"", 9, newest=0),
    ]
    assert notes_of(old) == notes_of(new) == {b"n": (b"document", 8), b"m": (b"", 9)}


def test_what_was_forgotten_is_void_also_on_a_device_that_comes_back_and_knows_it(places: tuple[Path, Path]) -> None:
    stayed, away = places
    write_a_chain(away)
    disk_notes.save(str(away), NAMESPACE, b"document", 3)
    disk_notes.save(str(stayed), NAMESPACE, b"document", 11)
    disk_notes.save(str(stayed), b"m" * 32, b"lives", 2)
    found_notes(stayed, forget=ForgetNotes([NAMESPACE], 15))
    assert notes_of(stayed) == {b"m": (b"lives", 2), disk_notes.FORGOTTEN[:1]: (b"", 15)}
    assert found_notes(away, stayed) == [
        FoundNote(b"m" * 32, b"lives", 2, newest=0),
        FoundNote(NAMESPACE, b"document", 15, newest=12),
    ]


def test_nothing_is_forgotten_where_a_note_may_be_missing(places: tuple[Path, Path]) -> None:
    """Living namespaces on that device would become void with it."""
    place, _ = places
    with Brain(place) as brain:
        brain.devices(1)
        blocked(place)
        brain.order(Note(b"m" * 32, b"lives", 0))
        brain.devices(1)
        assert brain.next() == Noted(b"m" * 32, 0, kept=False)
        (place / disk_notes.FOLDER).unlink()
        brain.order(ForgetNotes([NAMESPACE], 15))
        assert brain.next() == NotesForgotten([NAMESPACE], kept=False)
        brain.order(Note(b"k" * 32, b"", 0))
        assert isinstance(brain.next(), Noted)
    assert notes_of(place) == {b"k": (b"", 0)}


def test_what_could_not_be_opened_is_neither_marked_nor_erased(places: tuple[Path, Path]) -> None:
    foreign, _ = places
    content = b"a letter" * 2000
    (foreign / "kvserver.store").write_bytes(content)
    with Brain(foreign) as brain:
        before = brain.devices(1)
        for order in (DrainDevice(0), EraseDevice(0)):
            brain.order(order)
            assert brain.devices(1) == before
    assert os.listdir(foreign) == ["kvserver.store"]
    assert (foreign / "kvserver.store").read_bytes() == content


def test_a_drained_device_is_marked_erased_and_told(places: tuple[Path, Path]) -> None:
    place, _ = places
    with Brain(place) as brain:
        (told,) = brain.devices(1)
        assert (told.drain, told.bytes > 0) == ("", True)
        for order, drain in ((DrainDevice(0), "draining"), (EraseDevice(0), "drained")):
            brain.order(order)
            (told,) = brain.devices(1)
            assert told.drain == drain
    assert os.listdir(place) == ["kvserver.drained"]


def test_what_is_cleared_without_a_store_is_not_said_to_be_kept(places: tuple[Path, Path]) -> None:
    """The device's content is unknown, and may come back with the device."""
    foreign, _ = places
    (foreign / "kvserver.store").write_bytes(b"a letter" * 2000)
    with Brain(foreign) as brain:
        (told,) = brain.devices(1)
        assert "disk-unknown" in told.problem
        brain.order(Note(NAMESPACE, b"document", 5))
        assert brain.next() == Noted(NAMESPACE, 5, kept=False)
    assert sorted(os.listdir(foreign)) == ["kvserver.store"]


def test_an_engine_that_is_not_to_be_had_is_said_of_every_device(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example io_uring is configured by name and a container forbids it.

    The process stays, instead of being restarted every second."""

    def refused(**_: object) -> None:
        raise ValueError("disk-engine: no io_uring: Operation not permitted")

    monkeypatch.setattr(disk_mover, "DiskEngine", refused)
    with Brain(*places) as brain:
        for told in brain.devices(2):
            assert told.bytes == 0
            assert told.problem == "disk-engine: no io_uring: Operation not permitted (disk_engine=auto)"


def test_an_engine_that_fails_otherwise_is_a_bug(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**_: object) -> None:
        raise ValueError("depth=0 must be in [1, 1024]")

    monkeypatch.setattr(disk_mover, "DiskEngine", wrong)
    with pytest.raises(ValueError, match="depth"):
        Brain(*places)


def record(name: bytes, parent: bytes, *, place: int, generation: int) -> DiskRecord:
    return DiskRecord(
        arena_offset=place * 8192,
        namespace=NAMESPACE,
        key=name * 32,
        parent=parent * 32,
        group=0,
        shard=0,
        payload_bytes=5000,
        tenant=7,
        extent_bytes=8192,
        generation=generation,
        sum=NO_SUM,
        offset=place * 8192,
        device=0,
        stored_s=0,
    )


def write_a_chain(directory: Path) -> None:
    """Writes a chain: c hangs on b, b on a; they lie there in that order."""
    chain = [record(b"c", b"b", place=0, generation=12), record(b"b", b"a", place=1, generation=11)]
    chain.append(record(b"a", b"\0", place=2, generation=10))
    with Brain(directory) as brain:
        brain.devices(1)
        brain.seal(chain)
        brain.order(Demote(1, b"".join(map(pack_disk, chain))))
        moved = brain.next()
        assert isinstance(moved, Moved)
        assert (moved.faults, moved.sums) == ([], b"")


def packed_sums(*sums: int) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def test_sums_travel_from_the_ledger_to_the_device_and_back(places: tuple[Path, Path]) -> None:
    """One of the three payloads was not summed, and one has other bytes than its entry says."""
    directory, _ = places
    chain = [record(name, b"\0", place=place, generation=7) for place, name in enumerate((b"a", b"b", b"c"))]
    payloads = [bytes([place + 1]) * 5000 for place in range(3)]
    sums = [digest_sum(payload, 0, 5000, 0)[0] for payload in payloads]
    with Brain(directory) as brain:
        brain.devices(1)
        for one, payload in zip(chain, payloads, strict=True):
            brain.lay(one, payload)
        brain.seal(chain, [sums[0], NO_SUM, sums[0]])
        brain.order(Demote(1, b"".join(map(pack_disk, chain))))
        moved = brain.next()
        assert isinstance(moved, Moved)
        assert (moved.faults, moved.sums) == ([ItemFault(2, "checksum")], b"")
        order = [chain[2], chain[1], chain[0]]
        brain.order(Promote(2, b"".join(map(pack_disk, order))))
        moved = brain.next()
        assert isinstance(moved, Moved)
        assert (moved.faults, moved.sums) == ([ItemFault(0, "stale")], packed_sums(NO_SUM, sums[1], sums[0]))


def test_records_of_a_device_that_is_not_open_have_no_sums(places: tuple[Path, Path]) -> None:
    bad, good = places
    (bad / DiskStore.FILE).write_bytes(b"precious" * 5000)
    orders = b"".join(pack_disk(record(name, b"\0", place=1, generation=7)) for name in (b"a", b"b"))
    faults = [ItemFault(0, "io"), ItemFault(1, "io")]
    with Brain(bad, good) as brain:
        brain.devices(2)
        brain.order(Promote(1, orders))
        assert brain.next() == Moved(1, faults, 0, packed_sums(NO_SUM, NO_SUM))
        brain.order(Demote(2, orders))
        assert brain.next() == Moved(2, faults, 0)


def test_a_device_of_an_older_release_is_emptied_aloud(
    places: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory, _ = places
    write_a_chain(directory)
    read_thrice(directory)
    for name in disk_retire.STORE_FILES:
        relabelled(directory / name, 2)
    caplog.clear()
    assert found_notes(directory) == []
    (told,) = [record for record in caplog.records if record.levelno > logging.INFO]
    assert (told.levelname, told.getMessage()) == ("WARNING", "disk of an older release emptied")
    facts = {"directory": str(directory), "format_found": 2, "format_needed": 3}
    assert dict(told.__dict__["fields"]) == facts
    write_a_chain(directory)
    assert chunks_read(directory) == {}


@pytest.fixture
def kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_hits, "SAVE_AFTER_S", 0)


def read_thrice(directory: Path) -> None:
    """Reads chunk a three times; the second time together with a record that is not there."""
    good = record(b"a", b"\0", place=2, generation=10)
    absent = record(b"x", b"\0", place=9, generation=99)
    with Brain(directory) as brain:
        brain.devices(1)
        for job, records in enumerate(([good], [good, absent], [good]), 1):
            brain.order(Promote(job, b"".join(map(pack_disk, records))))
            moved = brain.next()
            assert isinstance(moved, Moved)
            assert len(moved.faults) == len(records) - 1
        brain.order(TellRecords())
        assert brain.next() == FoundRecords(b"")  # and earlier counts are kept


def chunks_read(directory: Path) -> dict[bytes, int]:
    return {name: hits.chunks for name, hits in HitCounts.load(str(directory)).by_namespace.items()}


@pytest.mark.usefixtures("kept_at_once")
def test_chunks_that_were_read_whole_are_counted_and_outlive_the_mover(places: tuple[Path, Path]) -> None:
    directory, _ = places
    write_a_chain(directory)
    assert chunks_read(directory) == {}
    read_thrice(directory)
    assert chunks_read(directory) == {NAMESPACE: 2}
    read_thrice(directory)
    assert chunks_read(directory) == {NAMESPACE: 4}


@pytest.mark.usefixtures("kept_at_once")
def test_chunks_that_nobody_asked_for_are_not_counted(places: tuple[Path, Path]) -> None:
    directory, _ = places
    write_a_chain(directory)
    with Brain(directory) as brain:
        brain.devices(1)
        brain.order(Promote(1, pack_disk(record(b"a", b"\0", place=2, generation=10)), asked=False))
        moved = brain.next()
        assert isinstance(moved, Moved)
        assert not moved.faults
        brain.order(TellRecords())
        assert brain.next() == FoundRecords(b"")
    assert chunks_read(directory) == {}


@pytest.mark.usefixtures("kept_at_once")
def test_a_store_that_is_made_anew_has_not_been_read(places: tuple[Path, Path]) -> None:
    directory, _ = places
    write_a_chain(directory)
    read_thrice(directory)
    for name in disk_retire.STORE_FILES:
        (directory / name).unlink()
    write_a_chain(directory)
    assert chunks_read(directory) == {}


@pytest.mark.usefixtures("kept_at_once")
def test_counts_that_cannot_be_kept_stop_no_read(places: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    directory, _ = places
    write_a_chain(directory)
    (directory / disk_hits.FILE).unlink()
    (directory / disk_hits.FILE).mkdir()
    read_thrice(directory)
    assert caplog.text.count("hits not kept") == 1


def test_what_was_written_is_told_parents_first_to_whoever_asks(places: tuple[Path, Path]) -> None:
    directory, _ = places
    write_a_chain(directory)
    disk_notes.save(str(directory), NAMESPACE, b"document", 3)
    with Brain(directory) as brain:
        brain.devices(1)
        brain.order(Recover())
        assert brain.next() == FoundNote(NAMESPACE, b"document", 3, newest=12)
        assert brain.next() == Listed(records=3, damaged=0)
        for _ in range(3):
            brain.order(TellRecords())
        told = brain.next()
        assert isinstance(told, FoundRecords)
        assert [one.key[:1] for one in unpack_disk(told.records)] == [b"a", b"b", b"c"]
        assert [brain.next(), brain.next()] == [FoundRecords(b"")] * 2


def test_records_of_a_namespace_without_a_note_are_void(places: tuple[Path, Path]) -> None:
    """No note says which of them were cleared, so they must not come back when the namespace is noted again."""
    directory, _ = places
    write_a_chain(directory)
    with Brain(directory) as brain:
        brain.devices(1)
        brain.order(Recover())
        assert brain.next() == FoundNote(NAMESPACE, b"", void=12, newest=12)
        assert brain.next() == Listed(records=3, damaged=0)


# ---------------------------------------------------------------- notes that no device could write


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Makes a folder read-only. Root ignores file modes, but not a read-only bind mount."""
    for options in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        if subprocess.run(["mount", *options, str(folder)], check=False, capture_output=True).returncode:
            pytest.skip("mounts are not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def tell(places: tuple[Path, Path], *notes: Note, bad: Sequence[Path] = ()) -> list[bool]:
    """Starts a mover, sends notes and ends it; returns which notes were kept while `bad` could not be written to."""
    kept = []
    with Brain(*places) as brain, ExitStack() as mounts:
        brain.devices(2)
        for place in bad:
            mounts.enter_context(read_only(place / disk_notes.FOLDER))
        for note in notes:
            brain.order(note)
            while isinstance(report := brain.next(), DeviceIs):
                pass
            assert isinstance(report, Noted)
            kept.append(report.kept)
    return kept


def problems(*places: Path) -> list[str]:
    """The problem of each device that a starting mover reports; empty for a sound one."""
    with Brain(*places) as brain:
        return [device.problem for device in brain.devices(len(places))]


def voids(*places: Path) -> dict[bytes, int]:
    """Void generation of each namespace, as a brain without memory is told it."""
    return {note.namespace: note.void for note in found_notes(*places)}


def test_a_device_whose_notes_cannot_be_written_at_the_start_is_not_served_from(
    places: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert tell(places, Note(NAMESPACE, b"document", 5)) == [True]
    with read_only(places[1] / disk_notes.FOLDER):
        well, problem = problems(*places)
        assert well == ""
        assert "its notes cannot be written: Read-only file system; nothing of it is served" in problem
        assert [record.getMessage() for record in caplog.records] == ["disk not usable"]
    assert problems(*places) == ["", ""]


def test_a_clear_that_no_device_could_note_holds_when_they_are_well_again(places: tuple[Path, Path]) -> None:
    others = b"o" * 32
    assert tell(places, Note(NAMESPACE, b"document", 5), Note(others, b"document", 2)) == [True, True]
    assert tell(places, Note(NAMESPACE, b"", 9), bad=places) == [False]
    assert voids(*places) == {NAMESPACE: 9, others: 2}
    for place in places:
        assert disk_notes.load(str(place))[0][NAMESPACE] == Known(b"document", 9), "and the devices know it themselves"
    assert list((places[0].parent / "cache").rglob("*.note")) == [], "nothing is kept aside for ever"


def test_what_is_kept_aside_waits_until_all_devices_know_it(places: tuple[Path, Path]) -> None:
    assert tell(places, Note(NAMESPACE, b"document", 5)) == [True]
    assert tell(places, Note(NAMESPACE, b"", 9), bad=places) == [False]
    with read_only(places[1] / disk_notes.FOLDER):
        assert voids(*places) == {NAMESPACE: 9}
    (places[0] / disk_notes.FOLDER / f"{NAMESPACE.hex()}.note").unlink()
    assert voids(*places) == {NAMESPACE: 9}
    assert (void_on(places[0]), void_on(places[1])) == ([9], [9])


def test_what_others_could_have_written_is_not_taken_for_a_clear(places: tuple[Path, Path]) -> None:
    aside = Path(disk_notes.aside_of(str(places[0].parent / "cache"), [*map(str, places)]))
    disk_notes.save_aside(str(aside), NAMESPACE, b"", 9)
    aside.chmod(0o777)
    assert voids(*places) == {}
    aside.chmod(0o700)
    assert voids(*places) == {NAMESPACE: 9}


def test_a_cleared_prefix_that_no_device_could_note_holds_too(places: tuple[Path, Path]) -> None:
    prefix = ClearedPrefix(NAMESPACE, b"k" * 32)
    assert tell(places, Note(NAMESPACE, b"document", 5)) == [True]
    assert tell(places, Note(prefix_note(prefix), prefix_document(prefix), 9), bad=places) == [False]
    assert voids(*places) == {NAMESPACE: 5, prefix_note(prefix): 9}
    assert disk_notes.load(str(places[1]))[0][prefix_note(prefix)] == Known(prefix_document(prefix), 9)
