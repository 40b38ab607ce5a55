"""A directory that leaves the tier is marked and emptied, never half of both; and the notes beside a store."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvserver.movers import disk_hits, disk_notes, disk_retire
from kvserver.movers.disk_notes import FORGOTTEN, Known

NAMESPACE = bytes(range(32))
OURS = ("kvserver.store", "kvserver.headers", "kvserver.store.new", "kvserver.headers.new")


def device(directory: Path) -> str:
    for number, name in enumerate(OURS):
        (directory / name).write_bytes(b"x" * (number + 3))
    disk_notes.save(str(directory), NAMESPACE, b"document", 3)
    disk_hits.HitCounts.begin(str(directory)).save()
    (directory / "other").write_bytes(b"mine")
    disk_retire.mark(str(directory))
    return str(directory)


def test_an_erased_directory_holds_the_mark_and_what_is_not_ours(tmp_path: Path) -> None:
    disk_retire.erase(device(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [disk_retire.MARK, "other"]
    assert disk_retire.is_drained(str(tmp_path))


class Killed(Exception):
    pass


def test_an_erasure_that_ends_anywhere_is_whole_or_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before each of its calls in turn: a directory that counts as drained has no file of ours left."""
    calls = 0

    def dying(call: Callable[..., None], at: int) -> Callable[..., None]:
        def counted(*arguments: object) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed
            call(*arguments)

        return counted

    real = {"truncate": os.truncate, "unlink": os.unlink, "rmdir": os.rmdir}
    for at in range(1, 50):
        directory = tmp_path / str(at)
        directory.mkdir()
        path = device(directory)
        calls = 0
        with monkeypatch.context() as patch:
            for name, call in real.items():
                patch.setattr(os, name, dying(call, at))
            try:
                disk_retire.erase(path)
                break
            except Killed:
                pass
        assert not disk_retire.is_drained(path), f"files are left: {os.listdir(path)}"
        disk_retire.erase(path)
        assert sorted(os.listdir(path)) == [disk_retire.MARK, "other"]
    assert calls >= 2 * len(OURS)


def test_a_mark_is_put_once_and_stays(tmp_path: Path) -> None:
    assert not disk_retire.is_marked(str(tmp_path))
    disk_retire.mark(str(tmp_path))
    text = (tmp_path / disk_retire.MARK).read_text()
    assert "remove this file" in text
    (tmp_path / disk_retire.MARK).write_text("by hand")
    disk_retire.mark(str(tmp_path))
    assert (tmp_path / disk_retire.MARK).read_text() == "by hand"


# ---------------------------------------------------------------- notes


def noted(directory: Path) -> list[tuple[bytes, int]]:
    return list(disk_notes.load(str(directory))[0].values())


def test_a_note_keeps_the_latest_void_and_the_last_document(tmp_path: Path) -> None:
    assert disk_notes.load(str(tmp_path)) == ({}, 0)
    for document, void, kept in (
        (b"one", 5, (b"one", 5)),
        (b"", 9, (b"one", 9)),
        (b"two", 3, (b"two", 9)),
    ):
        disk_notes.save(str(tmp_path), NAMESPACE, document, void)
        assert noted(tmp_path) == [kept]


def test_a_note_that_says_it_already_is_not_written_again_but_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_notes.save(str(tmp_path), NAMESPACE, b"document", 7)
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
    disk_notes.save(str(tmp_path), NAMESPACE, b"", 5)
    assert synced == [False, True], "the file and its folder"


def test_what_a_device_has_no_note_of_is_void_as_far_as_it_has_forgotten() -> None:
    one = {b"a": Known(b"first", 3), b"b": Known(b"", 9), FORGOTTEN: Known(b"", 5)}
    other = {b"a": Known(b"", 1), b"c": Known(b"third", 4), b"d": Known(b"fourth", 6)}
    assert disk_notes.together([one, other]) == {
        b"a": Known(b"first", 3),
        b"b": Known(b"", 9),
        b"c": Known(b"third", 5),
        b"d": Known(b"fourth", 6),
        FORGOTTEN: Known(b"", 5),
    }
    assert disk_notes.together([]) == {}


def test_a_device_learns_the_forgotten_namespaces_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash before the other notes are saved must not make their namespaces void."""
    known = {FORGOTTEN: Known(b"", 5)} | {bytes([name]) * 32: Known(b"x", 1) for name in (0, 90, 255)}
    order: list[bytes] = []
    save = disk_notes.save
    monkeypatch.setattr(disk_notes, "save", lambda *args: (order.append(args[1]), save(*args)))
    disk_notes.complete(str(tmp_path), known)
    assert order[-1] == FORGOTTEN
    assert disk_notes.load(str(tmp_path))[0] == known
    disk_notes.complete(str(tmp_path), known)
    assert len(order) == len(known), "nothing is written that is there"


def test_a_damaged_or_misplaced_note_is_counted_and_not_believed(tmp_path: Path) -> None:
    disk_notes.save(str(tmp_path), NAMESPACE, b"document", 7)
    path = tmp_path / disk_notes.FOLDER / f"{NAMESPACE.hex()}.note"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert disk_notes.load(str(tmp_path)) == ({}, 1), place
        path.write_bytes(whole[:place])
        assert disk_notes.load(str(tmp_path)) == ({}, 1), place
    path.write_bytes(whole)
    path.rename(path.with_name(f"{bytes(32).hex()}.note"))
    assert disk_notes.load(str(tmp_path)) == ({}, 1)


def test_a_note_that_cannot_be_made_durable_is_an_error_and_keeps_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_notes.save(str(tmp_path), NAMESPACE, b"document", 7)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        disk_notes.save(str(tmp_path), NAMESPACE, b"later", 8)
    assert noted(tmp_path) in ([(b"document", 7)], [(b"document", 8)]), "more may be void, and nothing else is lost"
