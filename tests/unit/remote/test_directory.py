"""Bad days of a shared directory: not mounted, full, read-only, without links, with foreign and damaged files."""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvserver.remote import directory
from kvserver.remote.announcement import pack, unpack
from kvserver.remote.chunk_value import Head, WrongValue, encode
from kvserver.remote.directory import ANNOUNCED, UNFINISHED, UNFINISHED_S_MAX, DirectoryStore
from kvserver.remote.directory_log import FILE_BYTES_MAX, FILES_MAX, OTHER_EPOCH_S_MAX
from kvserver.remote.store import Gone, StoreError
from tests.rigs.full_disk import mounted
from tests.rigs.remote_chunks import NAMESPACE, head_of, name_of, payloads_of, targets_of

SHARDS = 3


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(str(tmp_path))


def written(store: DirectoryStore, seed: int = 1, write: int = 1) -> Head:
    name = name_of(seed)
    head = head_of(name, write=write)
    assert store.write(name, head, payloads_of(head))
    return head


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def code_of(problem: object) -> str:
    assert isinstance(problem, StoreError | WrongValue)
    return problem.code


def test_a_directory_that_is_not_there_or_was_unmounted_is_down_and_never_a_miss(
    store: DirectoryStore, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="remote-down"):
        DirectoryStore(str(tmp_path / "nowhere"))
    head = written(store)
    tmp_path.rename(tmp_path.with_name("away"))
    tmp_path.mkdir()
    assert {code_of(found) for found in store.heads([name_of(1), name_of(2)], SHARDS)} == {"remote-down"}
    with pytest.raises(StoreError, match="remote-down"):
        store.write(name_of(2), head_of(name_of(2)), payloads_of(head_of(name_of(2))))
    assert not files(tmp_path)
    tmp_path.rmdir()
    tmp_path.with_name("away").rename(tmp_path)
    assert store.heads([name_of(1)], SHARDS) == [head]


def test_a_reader_that_has_begun_reads_one_write_while_the_file_is_replaced(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = written(store, write=1)
    name = name_of(1)
    pread = os.pread

    def replaced_meanwhile(descriptor: int, size: int, offset: int) -> bytes:
        found = pread(descriptor, size, offset)
        monkeypatch.undo()
        store.drop(name, None)
        written(store, write=2)
        return found

    monkeypatch.setattr(os, "pread", replaced_meanwhile)
    targets = targets_of(old)
    store.read(name, old, targets)
    assert targets == payloads_of(old)
    with pytest.raises(Gone):
        store.read(name, old, targets)


def test_a_file_system_without_hard_links_is_served_too(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", no_links)
    head = written(store)
    name = name_of(1)
    assert not store.write(name, head_of(name, write=2), payloads_of(head_of(name, write=2)))
    assert store.heads([name], SHARDS) == [head]
    assert store.make_note(NAMESPACE, b"note")
    assert store.notes([NAMESPACE]) == [b"note"]


def test_a_link_that_was_made_twice_counts_as_made(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def told_twice(written: Path, path: Path, **how: bool) -> None:
        link(written, path, **how)
        link(written, path, **how)

    monkeypatch.setattr(os, "link", told_twice)
    written(store)


def test_a_full_file_system_takes_no_writes_leaves_nothing_behind_and_is_read_as_before(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path, 1 << 20) as root:
        store = DirectoryStore(str(root))
        heads = {1: written(store)}
        code = ""
        while not code:
            seed = 1 + len(heads)
            try:
                heads[seed] = written(store, seed)
            except StoreError as problem:
                code = problem.code
            assert len(heads) < 100
        assert code == "remote-full"
        assert not list((root / UNFINISHED).iterdir())
        for seed, head in heads.items():
            targets = targets_of(head)
            store.read(name_of(seed), head, targets)
            assert targets == payloads_of(head)


def test_damaged_and_foreign_files_are_no_chunks(store: DirectoryStore, tmp_path: Path) -> None:
    head = written(store)
    name = name_of(1)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    others = encode(head_of(name_of(2))) + whole[len(encode(head)) :]
    for content in (b"", b"somebody else's", whole[:-1], whole + b"!", whole[:90], others):
        path.write_bytes(content)
        assert code_of(store.heads([name], SHARDS)[0]) in ("short", "foreign", "other")
    path.write_bytes(whole[:-1])
    with pytest.raises(Gone):
        store.read(name, head, targets_of(head))
    path.unlink()
    os.mkfifo(path)
    assert code_of(store.heads([name], SHARDS)[0]) == "foreign"
    with pytest.raises(Gone):
        store.read(name, head, targets_of(head))
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert code_of(store.heads([name], SHARDS)[0]) == "remote-refused"
    assert not store.write(name, head, payloads_of(head))
    path.unlink()
    path.mkdir()
    assert code_of(store.heads([name], SHARDS)[0]) == "foreign"


def test_what_dead_writers_left_goes_at_a_start_and_what_is_being_written_stays(
    store: DirectoryStore, tmp_path: Path
) -> None:
    old, new = (tmp_path / UNFINISHED / name for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    now_s = new.stat().st_mtime
    os.utime(old, (now_s, now_s - UNFINISHED_S_MAX - 60))
    DirectoryStore(str(tmp_path))
    assert not old.exists()
    assert new.exists()


def test_use_makes_a_file_young(store: DirectoryStore, tmp_path: Path) -> None:
    head = written(store)
    (path,) = files(tmp_path)
    os.utime(path, (1000, 1000))
    store.touch(name_of(1), head)
    assert path.stat().st_mtime > 1000


def test_heads_that_come_too_late_are_slow_and_not_misses(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path), probe_s=-1)
    written(store)
    assert {code_of(found) for found in store.heads([name_of(1), name_of(2)], SHARDS)} == {"remote-slow"}


def test_files_may_be_read_and_written_by_the_group_as_the_umask_allows(tmp_path: Path, umask: None) -> None:
    written(DirectoryStore(str(tmp_path)))
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_who_only_looks_changes_nothing_and_needs_no_right_to_write(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    head = written(store)
    store.replace_note(NAMESPACE, b"note")
    old = tmp_path / UNFINISHED / "left by somebody"
    old.touch()
    os.utime(old, (1, 1))
    before = sorted(tmp_path.rglob("*"))
    looking = DirectoryStore(str(tmp_path), only_looks=True)
    assert looking.look(name_of(1)) == head
    assert [name for some in looking.namespaces("-") for name in some] == [NAMESPACE]
    assert [value.key for some in looking.values(NAMESPACE) for value in some] == [name_of(1).key]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_that_is_not_mounted_lists_nothing_and_says_why(tmp_path: Path) -> None:
    looking = DirectoryStore(str(tmp_path), only_looks=True)
    for ask in (
        lambda: looking.look(name_of(1)),
        lambda: list(looking.values(NAMESPACE)),
        lambda: list(looking.namespaces("-")),
    ):
        with pytest.raises(StoreError, match=r"remote-down.*mounted"):
            ask()
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_are_left_out_of_a_list(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    written(store)
    (chunk,) = (path for path in files(tmp_path) if "unfinished" not in str(path))
    (chunk.parent / "somebody's").touch()
    (chunk.parents[1] / "file").touch()
    (chunk.parents[2] / ("z" * 16)).mkdir()
    chunk.with_name(chunk.name[:-1]).symlink_to(chunk)
    assert [value.key for some in store.values(NAMESPACE) for value in some] == [name_of(1).key]
    (tmp_path / "kv1" / "-" / "foreign").mkdir()
    assert [name for some in store.namespaces("-") for name in some] == []


def announcements(root: Path) -> list[Path]:
    return [path for path in files(root) if path.parent.name == ANNOUNCED]


def test_a_full_file_of_announcements_is_followed_by_another_and_old_ones_go(tmp_path: Path) -> None:
    store, full = DirectoryStore(str(tmp_path)), pack([8] * (FILE_BYTES_MAX // 8))
    for number, expected in enumerate([1, 1, *range(2, FILES_MAX + 1), FILES_MAX, FILES_MAX]):
        store.announce(NAMESPACE, 5, full if number else full[8:])
        assert len(announcements(tmp_path)) == expected


def test_what_is_kept_of_announcements_is_bounded_however_many_namespaces_and_epochs_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "LOGS_MAX", 3)
    store = DirectoryStore(str(tmp_path))
    for number in range(9):
        store.announce(NAMESPACE, number, pack([8]))
        of = NAMESPACE._replace(namespace=bytes([number]) * 32)
        store.announce(of, 5, pack([12]))
        assert list(unpack(store.announced(of, 5, None).batch)) == [12]
        assert len(store._announcements) <= 3
        store.announce(NAMESPACE, number, pack([16]))
        mine = tmp_path.joinpath(*NAMESPACE.pieces())
        assert sum(path.name.startswith(f"{number:016x}") for path in announcements(mine)) == 1, "it is gone on with"
    kept = [each for each in vars(store._announcements[NAMESPACE]).values() if isinstance(each, dict | list)]
    assert not any(len(each) > 3 for each in kept)


def test_announcements_of_another_epoch_go_when_nobody_has_written_to_them_for_a_day(tmp_path: Path) -> None:
    for epoch in (5, 6):
        DirectoryStore(str(tmp_path)).announce(NAMESPACE, epoch, pack([8]))
    (old,) = (path for path in announcements(tmp_path) if path.name.startswith(f"{5:016x}"))
    begun_s = old.stat().st_mtime
    os.utime(old, (begun_s, begun_s - OTHER_EPOCH_S_MAX - 100))
    DirectoryStore(str(tmp_path)).announce(NAMESPACE, 7, pack([8]))
    assert [path.name[:16] for path in announcements(tmp_path)] == [f"{epoch:016x}" for epoch in (6, 7)]


def test_a_file_of_announcements_that_was_removed_begins_anew_and_is_read_from_its_begin(tmp_path: Path) -> None:
    store, reader = DirectoryStore(str(tmp_path)), DirectoryStore(str(tmp_path))
    store.announce(NAMESPACE, 5, pack([8, 12, 16]))
    place = reader.announced(NAMESPACE, 5, None).cursor
    (mine,) = announcements(tmp_path)
    mine.unlink()
    store.announce(NAMESPACE, 5, pack([20]))
    told: list[int] = []
    for _ in range(2):
        found = reader.announced(NAMESPACE, 5, place)
        told, place = [*told, *unpack(found.batch)], found.cursor
    assert told == [20]


def test_a_batch_that_did_not_fit_is_an_error_or_cut_and_those_behind_it_are_read_whole(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path, 1 << 20) as root:
        store, reader = DirectoryStore(str(root)), DirectoryStore(str(root))
        store.announce(NAMESPACE, 5, pack([8]))
        filler = root / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as rest:
            while rest.write(bytes(1000)):
                pass
        store.announce(NAMESPACE, 5, pack([12] * 5001))
        other = DirectoryStore(str(root))
        for _ in range(20):
            for full in (store, other):
                with pytest.raises(StoreError, match="remote-full"):
                    full.announce(NAMESPACE, 5, pack([12] * 5001))
        assert len(announcements(root)) <= 2, "not one for each batch"
        filler.unlink()
        store.announce(NAMESPACE, 5, pack([16, 20]))
        told = set(unpack(reader.announced(NAMESPACE, 5, None).batch))
        assert {8, 16, 20} <= told <= {8, 12, 16, 20}


def test_foreign_files_among_announcements_are_no_error_and_no_pipe_keeps_a_reader_waiting(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    store.announce(NAMESPACE, 5, pack([8]))
    (mine,) = announcements(tmp_path)
    os.mkfifo(mine.with_name(f"{5:016x}.pipe"))
    mine.with_name(f"{5:016x}.folder").mkdir()
    mine.with_name(f"{5:016x}.link").symlink_to(mine)
    mine.with_name(f"{5:016x}.odd").write_bytes(b"cut")
    assert list(unpack(store.announced(NAMESPACE, 5, None).batch)) == [8]


def test_on_a_slow_file_system_the_last_file_of_announcements_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = [DirectoryStore(str(tmp_path)) for _ in range(5)]
    for number, writer in enumerate(writers):
        writer.announce(NAMESPACE, 5, pack([4 * number + 8]))
    monkeypatch.setattr("kvserver.remote.directory_log.READ_S_MAX", -1.0)
    reader, place, told = DirectoryStore(str(tmp_path)), None, []
    for _ in range(len(writers) + 1):
        found = reader.announced(NAMESPACE, 5, place)
        told, place = [*told, *unpack(found.batch)], found.cursor
    assert sorted(told) == [4 * number + 8 for number in range(5)]
    assert found.is_all


def test_a_probe_counts_as_use_and_a_look_does_not(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    head = head_of(name_of(1))
    store.write(name_of(1), head, payloads_of(head))
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    old_s = time.time() - 7 * 86_400
    os.utime(file, (old_s, old_s))
    assert store.look(name_of(1)) == head
    assert file.stat().st_mtime == pytest.approx(old_s, abs=1)
    assert store.heads([name_of(1)], 3) == [head]
    assert time.time() - file.stat().st_mtime < 3600
    lately_s = time.time() - 60
    os.utime(file, (lately_s, lately_s))
    store.heads([name_of(1)], 3)
    assert file.stat().st_mtime == pytest.approx(lately_s, abs=1), "that was told"
