"""A file is hashed once per machine, by the first that asks; an entry that cannot be trusted is hashed again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from blake3 import blake3

from kvclient.identity import file_hashes
from kvclient.identity.file_hashes import KEPT, LOCK, Changed, Hashes, Seen, own_folder

CONTENT = bytes(range(251)) * 97


@pytest.fixture
def kept_in(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


def hashes(folder: Path) -> Hashes:
    return Hashes(folder, settled_s=-3600)


def reads(folder: Path, path: Path) -> int:
    """How many times a new process reads the file to get its hash."""
    with mock.patch.object(file_hashes, "_hash", side_effect=file_hashes._hash) as read:
        assert hashes(folder).of(Seen.at(path)).blake3 == blake3(path.read_bytes()).hexdigest()
    return int(read.call_count)


def test_another_process_finds_it_and_reads_nothing(kept_in: Path, weights: Path) -> None:
    assert reads(kept_in, weights) == 1
    assert reads(kept_in, weights) == 0
    assert (kept_in / KEPT).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["written", "replaced", "times restored", "touched"])
def test_a_file_that_was_written_to_is_hashed_again(kept_in: Path, weights: Path, how: str) -> None:
    reads(kept_in, weights)
    times = weights.stat()
    other = CONTENT[:-1] + b"!"
    if how == "replaced":
        (weights.parent / "new").write_bytes(other)
        (weights.parent / "new").replace(weights)
    elif how == "touched":
        os.utime(weights)
    else:
        weights.write_bytes(other)
    if how == "times restored":
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert reads(kept_in, weights) == 1


def test_what_may_change_again_within_a_step_of_the_clock_is_not_kept(kept_in: Path, weights: Path) -> None:
    Hashes(kept_in).of(Seen.at(weights))
    assert reads(kept_in, weights) == 1


@pytest.mark.parametrize("cut", [0, 1, 20, -3])
def test_a_damaged_file_is_hashed_again_and_mended(kept_in: Path, weights: Path, cut: int) -> None:
    reads(kept_in, weights)
    whole = (kept_in / KEPT).read_bytes()
    (kept_in / KEPT).write_bytes(whole[:cut])
    assert reads(kept_in, weights) == 1
    assert reads(kept_in, weights) == 0


@pytest.mark.parametrize("value", [None, "x", ["0" * 63, ""], ["g" * 64, ""], ["0" * 64], [5, ""], {"blake3": ""}])
def test_an_entry_that_is_no_hash_counts_for_nothing(kept_in: Path, weights: Path, value: object) -> None:
    reads(kept_in, weights)
    document = json.loads((kept_in / KEPT).read_text())
    document["files"] = dict.fromkeys(document["files"], value)
    (kept_in / KEPT).write_text(json.dumps(document))
    assert reads(kept_in, weights) == 1


@pytest.mark.parametrize("text", ["[]", "5", '{"files": []}', "[" * 100_000])
def test_a_document_of_another_kind_counts_for_nothing(kept_in: Path, weights: Path, text: str) -> None:
    (kept_in / KEPT).write_text(text)
    assert reads(kept_in, weights) == 1


@pytest.mark.parametrize("what", ["writable by others", "a link", "a pipe"])
def test_what_somebody_else_may_have_written_counts_for_nothing(kept_in: Path, weights: Path, what: str) -> None:
    reads(kept_in, weights)
    if what == "writable by others":
        (kept_in / KEPT).chmod(0o666)
    elif what == "a link":
        (kept_in / KEPT).rename(kept_in / "elsewhere")
        (kept_in / KEPT).symlink_to("elsewhere")
    else:
        (kept_in / KEPT).unlink()
        os.mkfifo(kept_in / KEPT, 0o600)
    assert reads(kept_in, weights) == 1


def test_a_folder_that_cannot_be_written_costs_a_hash_and_nothing_else(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert own_folder() is None
    assert Hashes().of(Seen.at(weights)).blake3 == blake3(CONTENT).hexdigest()


@pytest.mark.parametrize("what", ["open to others", "a link"])
def test_a_folder_that_is_not_the_users_alone_is_left_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (tmp_path / "kvserver").symlink_to("elsewhere")
    else:
        (tmp_path / "kvserver").mkdir()
        (tmp_path / "kvserver").chmod(0o770)
    assert own_folder() == tmp_path / f"kvserver-{os.geteuid()}"


def test_processes_that_ask_at_once_read_a_file_once(kept_in: Path, weights: Path) -> None:
    code = f"""if True:
        from pathlib import Path
        from kvclient.identity import file_hashes
        from kvclient.identity.file_hashes import Hashes, Seen
        real, calls = file_hashes._hash, []
        def slow(*given, **more):
            import time
            calls.append(1)
            time.sleep(0.3)
            return real(*given, **more)
        file_hashes._hash = slow
        found = Hashes(Path({str(kept_in)!r}), settled_s=-3600).of(Seen.at(Path({str(weights)!r})))
        print(len(calls), found.blake3)"""
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=100)[0].split() for process in running]
    assert sum(int(calls) for calls, _ in said) == 1
    assert {found for _, found in said} == {blake3(CONTENT).hexdigest()}


def test_a_stopped_holder_of_the_lock_is_not_waited_for_for_ever(
    kept_in: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_hashes._locked(kept_in, 1.0), file_hashes._locked(kept_in, 0.0):
        pass  # the second goes on without it
    assert (kept_in / LOCK).exists()


def test_a_file_that_is_cut_short_or_written_while_it_is_read_has_no_hash(kept_in: Path, weights: Path) -> None:
    seen = Seen.at(weights)
    weights.write_bytes(CONTENT[:100])
    with pytest.raises(Changed):
        hashes(kept_in).of(seen)
    seen = Seen.at(weights)
    with (
        mock.patch.object(os, "posix_fadvise", side_effect=lambda *_: weights.write_bytes(CONTENT[:100])),
        pytest.raises(Changed),
    ):
        hashes(kept_in).of(seen)


def test_only_so_many_are_kept(kept_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hashes, "KEPT_FILES_MAX", 3)
    paths = [tmp_path / f"{number}.bin" for number in range(5)]
    for path in paths:
        path.write_bytes(path.name.encode())
        reads(kept_in, path)
    assert [reads(kept_in, path) for path in paths[2:]] == [0, 0, 0]
    assert len(json.loads((kept_in / KEPT).read_text())["files"]) == 3
