"""A model is identified by its content: changes that affect KV change the digest, others do not."""

import json
import random
import struct
from pathlib import Path

import pytest

from kvclient.identity.file_hashes import Changed, Hashes
from kvclient.identity.model_files import adapter_files, digest_of, model_digest, model_files
from kvserver.errors import RequestError

CONFIG = {"hidden_size": 48, "rope_theta": 10000.0, "transformers_version": "5.1", "_name_or_path": "/a"}


def safetensors(tensors: dict[str, bytes]) -> bytes:
    header, place = {}, 0
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [place, place + len(content)]}
        place += len(content)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def write(folder: Path, *, config: object = CONFIG, weights: bytes | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    content = weights if weights is not None else safetensors({"q": bytes(3000), "k": bytes(5000)})
    (folder / "model.safetensors").write_bytes(content)
    return folder


def adapter_digest(folder: Path) -> bytes:
    return digest_of(adapter_files(folder), Hashes())


def test_copies_of_a_model_are_one_model(tmp_path: Path) -> None:
    one = write(tmp_path / "one")
    two = write(tmp_path / "two", config={**CONFIG, "transformers_version": "6.0", "_name_or_path": "/b"})
    (two / "README.md").write_text("another text")
    assert model_digest(one) == model_digest(two)


def test_a_models_settings_may_lie_apart_from_its_weights(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole")
    settings, weights = (
        write(tmp_path / "settings", weights=safetensors({"q": b"of before"})),
        write(tmp_path / "weights"),
    )
    (settings / "modeling.py").write_text("pass")
    (whole / "modeling.py").write_text("pass")
    (weights / "config.json").unlink()
    assert digest_of(model_files(weights, settings_in=settings), Hashes()) == model_digest(whole)


@pytest.mark.parametrize("change", ["config", "one tensor", "a name", "a file more", "code", "images"])
def test_what_changes_the_bytes_changes_the_digest(tmp_path: Path, change: str) -> None:
    before = model_digest(write(tmp_path / "model"))
    match change:
        case "config":
            write(tmp_path / "model", config={**CONFIG, "rope_theta": 20000.0})
        case "one tensor":
            write(tmp_path / "model", weights=safetensors({"q": bytes(3000), "k": b"\1" * 5000}))
        case "a name":
            write(tmp_path / "model", weights=safetensors({"q": bytes(3000), "v": bytes(5000)}))
        case "a file more":
            (tmp_path / "model" / "more.safetensors").write_bytes(safetensors({"x": bytes(9)}))
        case "code":
            (tmp_path / "model" / "modeling.py").write_text("pass")
        case "images":
            (tmp_path / "model" / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    assert model_digest(tmp_path / "model") != before


ROWS, ROW = 701, 58


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "gguf", "pt"])
@pytest.mark.parametrize("changed", [[0], [350], [ROWS - 1], [row for row in range(ROWS) if row != 350]], ids=len)
def test_one_trained_row_is_another_model_and_so_is_all_but_one(
    tmp_path: Path, changed: list[int], suffix: str
) -> None:
    """Also where a file does not show the places of its tensors."""
    embedding = bytearray(random.Random(5).randbytes(ROWS * ROW))
    folder = write(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / f"model.{suffix}").write_bytes(safetensors({"embed": bytes(embedding), "q": bytes(37)}))
    before = model_digest(folder)
    for row in changed:
        embedding[row * ROW] ^= 1
    (folder / f"model.{suffix}").write_bytes(safetensors({"embed": bytes(embedding), "q": bytes(37)}))
    assert model_digest(folder) != before


def test_a_file_that_is_written_meanwhile_has_no_digest(tmp_path: Path) -> None:
    files = model_files(write(tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").write_bytes(safetensors({"q": b"another"}))
    with pytest.raises(Changed, match=r"model\.safetensors"):
        digest_of(files, Hashes())


def test_a_part_in_a_folder_of_its_own_counts(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    before = model_digest(folder)
    (folder / "vision").mkdir()
    (folder / "vision" / "model.safetensors").write_bytes(safetensors({"v": bytes(21)}))
    assert model_digest(folder) != before


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="0 of weights"):
        model_files(tmp_path)


def test_an_adapter_is_told_by_its_weights(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors({"a": bytes(7000)}))
    before = adapter_digest(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors({"a": bytes(6999) + b"\1"}))
    assert adapter_digest(tmp_path) != before
