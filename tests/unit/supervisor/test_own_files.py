"""Our files are written safely: a link made by another user is never followed."""

import os
from pathlib import Path

import pytest

from kvserver.movers import disk_hits, disk_notes, disk_retire
from kvserver.private_files import create, write_whole

PRECIOUS = "years of work"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text(PRECIOUS)
    return path


@pytest.mark.parametrize("name", ["mine", "mine.new"])
def test_a_link_at_a_name_of_ours_is_replaced_and_not_followed(tmp_path: Path, precious: Path, name: str) -> None:
    (tmp_path / name).symlink_to(precious)
    write_whole(tmp_path / "mine", b"content", durable=True)
    assert (tmp_path / "mine").read_bytes() == b"content"
    assert not (tmp_path / "mine").is_symlink()
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600
    assert precious.read_text() == PRECIOUS
    assert sorted(os.listdir(tmp_path)) == ["mine", "precious"]


def test_a_new_file_is_never_one_that_was_there(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    for name in ("precious", "link", "dangling"):
        with pytest.raises(FileExistsError):
            create(tmp_path / name)
    assert precious.read_text() == PRECIOUS
    assert not (tmp_path / "absent").exists()


def test_what_is_kept_beside_a_store_follows_no_link(tmp_path: Path, precious: Path) -> None:
    directory = tmp_path / "disk"
    (directory / disk_notes.FOLDER).mkdir(parents=True)
    namespace = bytes(range(32))
    links = [
        directory / f"{disk_hits.FILE}.new",
        directory / f"{disk_retire.MARK}.new",
        directory / disk_notes.FOLDER / f"{namespace.hex()}.note.new",
        directory / disk_notes.FOLDER / "trial.new",
    ]
    for link in links:
        link.symlink_to(precious)
    disk_hits.HitCounts.begin(str(directory)).save()
    disk_retire.mark(str(directory))
    disk_notes.save(str(directory), namespace, b"document", 3)
    disk_notes.try_to_write(str(directory))
    assert precious.read_text() == PRECIOUS
    assert [os.path.lexists(link) for link in links] == [False] * len(links)
    assert disk_notes.load(str(directory)) == ({namespace: disk_notes.Known(b"document", 3)}, 0)


def test_an_erasure_empties_no_file_that_a_link_leads_to(tmp_path: Path, precious: Path) -> None:
    directory = tmp_path / "disk"
    directory.mkdir()
    (directory / f"{disk_retire.STORE_FILES[1]}.new").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        disk_retire.erase(str(directory))
    assert precious.read_text() == PRECIOUS
