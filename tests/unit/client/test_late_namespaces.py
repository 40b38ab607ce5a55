"""A namespace is derived once the model's files are hashed; an engine whose files reveal nothing gets its own."""

import hashlib
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvclient.identity.file_hashes import Hashes
from kvclient.identity.file_times import CLOCK_NS, doubt
from kvclient.identity.late_namespaces import in_background, namespace_of
from kvclient.identity.model_files import model_files
from kvclient.identity.processes import began_ns
from kvclient.keys import namespace_digest

WAIT_S = 60
LOG = logging.getLogger("test.kvserver")
COMMIT = "1" * 40
FACTS: dict[str, object] = {"dtype": "bfloat16"}


def write(folder: Path, fill: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + bytes([fill]) * 1003)
    return folder


def later_ns() -> int:
    """A time so late that all files written so far count as older."""
    return time.time_ns() + CLOCK_NS + 10**9


def named(folder: Path, *, life: str = "a", since_ns: int | None = None, **more: Any) -> bytes:
    """The namespace of an engine that began after all files were there, or at since_ns."""
    since = later_ns() if since_ns is None else since_ns
    more = {"log": LOG, "is_first": True} | more
    return namespace_of(FACTS, [model_files(folder)], life=life, since_ns=since, **more).result(WAIT_S)


def test_equal_files_are_one_namespace_in_any_place_and_life_and_other_files_are_another(tmp_path: Path) -> None:
    one, copy, other = write(tmp_path / "one"), write(tmp_path / "copy"), write(tmp_path / "other", 2)
    assert named(one) == named(copy, life="b", is_first=False)
    assert named(one) != named(other)


def test_without_files_it_is_there_at_once() -> None:
    found = namespace_of(FACTS, [], life="a", log=LOG, is_first=True, since_ns=0)
    assert found.done()
    assert found.result() == namespace_digest(FACTS)


def test_nobody_waits_for_a_hash(tmp_path: Path) -> None:
    begun: Future[None] = Future()
    go_on: Future[None] = Future()

    class Slow(Hashes):
        def of(self, *given: Any, **more: Any) -> Any:
            begun.set_result(None)
            go_on.result(WAIT_S)
            return Hashes.of(self, *given, **more)

    files = model_files(write(tmp_path / "m"))
    found = namespace_of(FACTS, [files], life="a", log=LOG, is_first=True, since_ns=later_ns(), hashes=Slow)
    begun.result(WAIT_S)
    assert not found.done()
    Slow.of = Hashes.of  # type: ignore[method-assign]
    go_on.set_result(None)
    assert found.result(WAIT_S) == named(tmp_path / "m")


def test_what_goes_wrong_in_the_background_is_the_answer() -> None:
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(WAIT_S)


def replace_weights(folder: Path) -> None:
    (folder / "new").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "new").replace(folder / "model.safetensors")


def write_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(500)
        file.write(b"!")


def restore_times(folder: Path) -> None:
    before = (folder / "model.safetensors").stat()
    write_weights(folder)
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_folder(folder: Path) -> None:
    folder.rename(folder.parent / "before")
    (folder.parent / "other").rename(folder)


def point_elsewhere(folder: Path) -> None:
    folder.rename(folder.parent / "v1")
    folder.symlink_to(folder.parent / "other")


def change_settings(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": 1}')


CHANGES = [replace_weights, write_weights, restore_times, replace_folder, point_elsewhere, change_settings]


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_replaced_since_the_engine_began_is_shared_with_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """Whichever files were loaded: a later engine, which loads the new ones, finds nothing of this one's."""
    monkeypatch.setattr("kvclient.identity.file_times.CLOCK_NS", 0)
    folder = write(tmp_path / "model")
    write(tmp_path / "other", 2)
    time.sleep(0.05)
    began = time.time_ns()
    time.sleep(0.05)
    before = named(folder, since_ns=began)
    change(folder)
    caplog.clear()
    doubted = named(folder, since_ns=began)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(tmp_path) in said
    assert "model_id" in said
    restarted = named(folder)
    assert len({before, doubted, restarted}) == (2 if change is replace_weights else 3)
    assert doubted not in (before, restarted)
    assert named(folder, since_ns=began, is_first=False) == doubted, "all ranks say the same"
    assert named(folder, since_ns=began, life="b") != doubted, "and no other engine does"


def test_files_that_came_beside_the_models_are_no_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.identity.file_times.CLOCK_NS", 0)
    folder = write(tmp_path / "model")
    time.sleep(0.05)
    began = time.time_ns()
    time.sleep(0.05)
    (folder / "README.md").write_text("new")
    (folder.parent / "another").mkdir()
    assert named(folder, since_ns=began) == named(folder)


def test_a_file_that_changes_while_it_is_hashed_is_shared_with_nobody(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")

    class Overtaken(Hashes):
        def of(self, *given: Any, **more: Any) -> Any:
            write_weights(folder)
            return Hashes.of(self, *given, **more)

    assert named(folder, hashes=Overtaken) != named(folder)
    assert named(folder, hashes=Overtaken, life="b") != named(folder, hashes=Overtaken, life="a")


def test_a_file_that_goes_is_shared_with_nobody_and_ends_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    files = model_files(folder)
    (folder / "model.safetensors").unlink()
    found = namespace_of(FACTS, [files], life="a", log=LOG, is_first=True, since_ns=later_ns()).result(WAIT_S)
    assert len(found) == 32


# ---------------------------------------------------------------- the hub's cache


def hub(root: Path, *, honest: bool = True, fill: int = 1) -> Path:
    """A model that was downloaded just now."""
    plain = write(root / "plain", fill)
    _only_entries_change_above(root)
    repository = root / "models--who--what"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    weights, settings = (plain / "model.safetensors").read_bytes(), (plain / "config.json").read_bytes()
    names = {
        "model.safetensors": hashlib.sha256(weights if honest else b"another").hexdigest(),
        "config.json": hashlib.sha1(b"blob %d\0" % len(settings) + settings).hexdigest(),
    }
    for name, blob in names.items():
        (repository / "blobs" / blob).write_bytes((plain / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def _only_entries_change_above(root: Path) -> None:
    """Makes and removes an entry in each folder above: test runners do so, and it must not count as a change."""
    for folder in root.parents:
        if folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK):
            with tempfile.TemporaryDirectory(dir=folder):
                pass


def test_what_an_engine_has_just_downloaded_is_told_by_its_names(tmp_path: Path) -> None:
    snapshot = hub(tmp_path)
    assert named(snapshot, since_ns=1) == named(tmp_path / "plain")


def test_a_blob_that_is_not_what_its_name_says_is_shared_with_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = hub(tmp_path, honest=False)
    assert named(snapshot, since_ns=1) != named(tmp_path / "plain")
    assert "does not hold what its name says" in caplog.text


def test_a_snapshot_whose_file_is_no_link_is_as_any_other_folder(tmp_path: Path) -> None:
    snapshot = hub(tmp_path)
    content = (snapshot / "model.safetensors").read_bytes()
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(content)
    assert named(snapshot, since_ns=1) != named(tmp_path / "plain")


def test_this_process_began_before_now_and_after_the_machine() -> None:
    a_tick_ns = 20_000_000
    assert 0 < began_ns(os.getppid()) < began_ns(os.getpid()) + a_tick_ns < time.time_ns() + a_tick_ns
    assert began_ns(1 << 30) == 0


def test_a_ring_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match=r"links|Too many|Symlink"):
        doubt(tmp_path / "a", since_ns=1 << 62)
