"""An ATOM engine's model is identified by its files, and the engine's start does not wait for their hashes."""

import itertools
import random
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvclient.atom.namespace import models_of
from kvclient.identity import file_times, late_namespaces
from kvclient.identity.file_hashes import Hashes
from kvclient.identity.model_files import digest_of
from kvserver.errors import RequestError
from tests.atom_engine.rig import Rig, prompt
from tests.process.harness import WAIT_S

MakeRig = Callable[..., Rig]
EMBEDDING = random.Random(3).randbytes(701 * 58)


def write(folder: Path, embedding: bytes = EMBEDDING) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + embedding)
    return folder


def trained_row(row: int) -> bytes:
    return EMBEDDING[: row * 58] + b"\0trained\0" + EMBEDDING[row * 58 + 9 :]


@pytest.fixture(autouse=True)
def files_were_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own process is the engine, and began before its models were written."""
    monkeypatch.setattr(late_namespaces, "doubt", lambda path, since_ns: None)


def loads(make_rig: MakeRig, model: Path, **options: Any) -> int:
    """Number of loads in an engine that gets the prompt for the first time."""
    rig = make_rig(model=str(model), by_files=True, tensor=2, **options)
    rig.run(prompt(7, 300))
    return len(rig.loads())


def test_engines_of_equal_weights_share_and_of_a_trained_row_do_not(make_rig: MakeRig, tmp_path: Path) -> None:
    assert loads(make_rig, write(tmp_path / "one")) == 0
    assert loads(make_rig, write(tmp_path / "row", trained_row(700))) == 0
    assert loads(make_rig, write(tmp_path / "copy")) == 1


def test_an_engine_starts_and_computes_while_its_weights_are_hashed_and_stores_afterwards(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    gate = threading.Event()
    of = Hashes.of

    def slow(self: Hashes, *given: Any, **more: Any) -> Any:
        assert gate.wait(WAIT_S)
        return of(self, *given, **more)

    with mock.patch.object(Hashes, "of", slow):
        rig = make_rig(model=str(write(tmp_path / "m", trained_row(5))), by_files=True, tensor=2, is_late=True)
        (seq,) = rig.run_on(prompt(1, 300))
        assert seq.is_finished
        assert rig.orders == [], "nothing is stored under no name"
        gate.set()
        rig.idle_until("the ranks' namespace to be known", lambda: rig.connector._half.namespace)
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.run(prompt(1, 300))
    assert len(rig.loads()) == 1


def test_ranks_that_do_not_say_the_same_have_no_cache(
    make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank found that its files differ from those it may have loaded."""
    once = itertools.chain([file_times.Doubt(tmp_path)], itertools.repeat(None))
    with mock.patch.object(late_namespaces, "doubt", side_effect=once):
        rig = make_rig(model=str(write(tmp_path / "m", trained_row(6))), by_files=True, tensor=2, is_late=True)
        (seq,) = rig.run_on(prompt(1, 300))
    for _ in range(30):
        rig.idle()
    assert rig.connector.has_pending_work(), "they may still come to agree"
    rig.connector._half._namespace_due_s = 0.0
    rig.run(prompt(1, 300))
    assert seq.is_finished
    assert rig.orders == []
    assert "ranks disagree" in caplog.text


# ---------------------------------------------------------------- draft models


def config(model: Path, draft: str) -> Any:
    return SimpleNamespace(
        model=str(model),
        load_dummy=None,
        hf_config=SimpleNamespace(),
        speculative_config=SimpleNamespace(method="eagle3", model=draft) if draft else None,
    )


def digests(found: Any) -> list[bytes]:
    return [digest_of(files, Hashes()) for files in models_of(found)]


def with_hub(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    def snapshot_download(name: str, **_: object) -> str:
        if name not in folders:
            raise OSError("not here")
        return str(folders[name])

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_draft_model_counts_by_content_also_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft, trained = (
        write(tmp_path / name, content)
        for name, content in (("m", EMBEDDING), ("d", trained_row(1)), ("t", trained_row(2)))
    )
    with_hub(monkeypatch, {"who/draft": draft})
    by_name = digests(config(model, "who/draft"))
    assert by_name == digests(config(model, str(draft)))
    with_hub(monkeypatch, {"who/draft": trained})
    assert digests(config(model, "who/draft")) != by_name
    assert len(digests(config(model, str(model)))) == 1, "a model that is its own draft"


def test_a_draft_model_that_is_not_here_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_hub(monkeypatch, {})
    with pytest.raises(RequestError, match="'who/draft' are not on this machine"):
        models_of(config(write(tmp_path / "m"), "who/draft"))
