"""A model is told by its content: what changes KV changes the digest, what does not leaves it."""

import json
import struct
from pathlib import Path

import pytest

from kvclient.identity import SAMPLES_MAX, adapter_digest, model_digest
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
    assert model_digest(weights, settings_in=settings) == model_digest(whole)


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


@pytest.mark.parametrize("tensors", [511, 3 * SAMPLES_MAX + 5])
def test_every_tensor_is_looked_at(tmp_path: Path, tensors: int) -> None:
    """Also of quantized experts, of which a file may have many thousands."""
    contents = {f"t{number}": bytes([number % 251]) * 803 for number in range(tensors)}
    before = model_digest(write(tmp_path / "model", weights=safetensors(contents)))
    for name in ("t0", "t77", "t78", f"t{tensors - 1}"):
        changed = {**contents, name: b"\xff" * 803}
        assert model_digest(write(tmp_path / "model", weights=safetensors(changed))) != before, name


def test_weights_without_a_header_are_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(bytes(100_000))
    before = model_digest(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\1" * 100_000)
    assert model_digest(folder) != before


@pytest.mark.parametrize("weights", [b"", b"\0\0\0", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_a_broken_file_is_refused(tmp_path: Path, weights: bytes) -> None:
    with pytest.raises(RequestError, match="safetensors header"):
        model_digest(write(tmp_path / "model", weights=weights))


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="0 of weights"):
        model_digest(tmp_path)


def test_an_adapter_is_told_by_its_weights(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors({"a": bytes(70)}))
    before = adapter_digest(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors({"a": b"\1" * 70}))
    assert adapter_digest(tmp_path) != before
