"""The identity of a model by content: folders with one name may hold different weights, and one model may lie anywhere.

It covers config.json, other files that shape the computation, and every byte of every weight file. A model that was
trained a little may differ from its origin in a single row. Settings are small and read at once. Weights are hashed by
file_hashes.py, which takes seconds to minutes the first time.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvclient.identity.file_hashes import Hashes, Seen
from kvserver.errors import RequestError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")
SETTINGS = (
    "config.json",
    "quantize_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
    "params.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of settings. The last three change what a model sees of an image, while engines identify images by
their input."""
SETTINGS_BYTES_MAX = 16 << 20
ADAPTER = (("adapter_config.json",), ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"))
ROPES_OF_ANY_LENGTH = frozenset(
    {"default", "linear", "llama3", "yarn", "mrope", "proportional", "deepseek_yarn", "deepseek_llama_scaling"}
)
"""Position encodings that do not depend on the engine's longest prompt."""
TUNED_BY_LENGTH = frozenset({"llama4", "llama4_text"})
"""Model types whose queries vLLM scales by position only if prompts may be longer than 32K tokens. It records that in a
copy of the settings."""

_TEXT = b"kvserver.model.2\0"
LABEL_BYTES_MAX = 128
"""Longest name that the server takes."""


class ModelFiles(NamedTuple):
    """The files of a model or an adapter as they were when seen."""

    settings: tuple[tuple[Seen, bytes], ...]
    """Files with the part of their content that counts."""
    weights: tuple[tuple[Seen, str], ...]
    """Files with their names relative to the model's folder."""

    @property
    def all(self) -> list[Seen]:
        return [seen for seen, _ in (*self.settings, *self.weights)]


def model_files(folder: Path, *, settings_in: Path | None = None) -> ModelFiles:
    """The files that identify a model. RequestError("model-identity") if there are none: then the user must give an id.

    settings_in: the folder with everything but the weights, if it is another one.
    """
    others = settings_in or folder
    settings = [others / name for name in SETTINGS if (others / name).is_file()]
    settings += sorted(others.glob("*.py"))  # a model that brings its own code
    weights = sorted(path for path in _files(folder) if path.suffix in WEIGHTS and path.name not in NOT_WEIGHTS)
    return _looked_at(folder, settings, weights)


def code_digest(folder: Path) -> str:
    """Digest of the Python files below a folder, by content. Empty if there are none."""
    digest = hashlib.sha256()
    files = sorted(folder.rglob("*.py"))
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest() if files else ""


def adapter_files(folder: Path) -> ModelFiles:
    """The files of a LoRA adapter, as in model_files()."""
    settings, weights = ([path for name in names if (path := folder / name).is_file()] for names in ADAPTER)
    return _looked_at(folder, settings, weights)


def adapter_looks(folder: Path) -> list[Seen]:
    """Stat values of a LoRA adapter's files, which differ if one was written again. Reads no content."""
    return [Seen.at(path) for names in ADAPTER for name in names if (path := folder / name).is_file()]


def hub_folder(name: str, *, revision: str | None, commit: str | None, cache_folder: str | None = None) -> Path:
    """The local folder of a model from the Hugging Face hub. RequestError if it is not on this machine.

    commit: the commit whose settings the engine has read, if known. A revision may point to another commit by now.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (needed for names only, and slow to import)

    problem: Exception | None = None
    for wanted in dict.fromkeys((commit, revision) if commit else (revision,)):  # settings may be another repository's
        try:
            return Path(snapshot_download(name, revision=wanted, cache_dir=cache_folder, local_files_only=True))
        except (OSError, ValueError) as missing:
            problem = missing
    raise RequestError(
        "model-identity",
        f"the files of model {name!r} are not on this machine ({type(problem).__name__}), so nothing "
        "distinguishes it from others of that name: set model_id in kv_connector_extra_config",
    ) from problem


def digest_of(files: ModelFiles, hashes: Hashes) -> bytes:
    """A 32-byte digest. OSError if a file cannot be read, Changed if one has changed meanwhile.

    Takes as long as hashing all weights, unless that was done before.
    """
    digest = hashlib.sha256(_TEXT)
    for seen, content in files.settings:
        _add(digest, seen.path.name.encode(), content)
    for seen, name in files.weights:
        _add(digest, name.encode(), struct.pack("<Q", seen.id.bytes), bytes.fromhex(hashes.of(seen).blake3))
    return digest.digest()


def model_digest(folder: Path) -> bytes:
    """digest_of() of model_files(), with the hashes that this machine keeps. Slow the first time."""
    return digest_of(model_files(folder), Hashes())


def _looked_at(folder: Path, settings: list[Path], weights: list[Path]) -> ModelFiles:
    if not settings or not weights:
        raise RequestError(
            "model-identity",
            f"{str(folder)!r} has {len(settings)} files of settings and {len(weights)} of weights; expected both",
        )
    return ModelFiles(
        tuple((Seen.at(path), _settings_content(path)) for path in settings),
        tuple((Seen.at(path), path.relative_to(folder).as_posix()) for path in weights),
    )


def _files(folder: Path) -> Iterator[Path]:
    """Files in the folder and in its direct subfolders, where some models keep their parts."""
    for path in folder.iterdir():
        if path.is_file():
            yield path
        elif path.is_dir() and not path.name.startswith("."):
            yield from (inner for inner in path.iterdir() if inner.is_file())


def _settings_content(path: Path) -> bytes:
    """A settings file's content. JSON without notes, so that loading and saving a model keeps its identity."""
    if path.stat().st_size > SETTINGS_BYTES_MAX:
        raise RequestError("model-identity", f"{str(path)!r} is larger than {SETTINGS_BYTES_MAX} bytes")
    content = path.read_bytes()
    if path.suffix != ".json":
        return content
    try:
        parsed = json.loads(content)
    except ValueError as problem:
        raise RequestError("model-identity", f"{str(path)!r} is no JSON: {problem}") from problem
    return settings_text(parsed).encode()


def settings_text(settings: object) -> str:
    """A model's settings as text: ordered, without the notes that tools leave in them."""
    if isinstance(settings, dict):
        settings = {name: value for name, value in settings.items() if name not in _NOTES}
    return json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)


def label_of(model: object) -> str:
    """A model's name in metrics: the name or path, of which only the end is kept if it is long."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(model or ""))
    return text.encode()[-LABEL_BYTES_MAX:].decode(errors="ignore")


def tokens_that_count(settings: object, tokens_max: int) -> int:
    """The longest prompt, if the model's computation depends on it. Otherwise 0, so that engines with other bounds
    share."""
    is_alike = _rope_types(settings) <= ROPES_OF_ANY_LENGTH and not is_tuned_by_length(settings)
    return 0 if is_alike else int(tokens_max)


def is_tuned_by_length(settings: object) -> bool:
    """Whether a model, or a part of it, is of a type in TUNED_BY_LENGTH."""
    if not isinstance(settings, dict):
        return False
    return settings.get("model_type") in TUNED_BY_LENGTH or any(map(is_tuned_by_length, settings.values()))


def _rope_types(settings: object, *, in_rope: bool = False) -> set[str]:
    """Rope types in a model's settings.

    They stand in rope_parameters, formerly rope_scaling, perhaps per layer kind, or inside the settings of its text
    part.
    """
    if not isinstance(settings, dict):
        return set()
    here = {str(settings[name]) for name in ("rope_type", "type") if in_rope and name in settings}
    return here.union(*(_rope_types(value, in_rope=in_rope or "rope" in str(name)) for name, value in settings.items()))


_NOTES = frozenset({"transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "max_model_len"})
"""Notes that do not change the computation. The last is vLLM's, for models such as MiniMax. See tokens_that_count()."""


def _add(digest: "hashlib._Hash", *pieces: bytes) -> None:
    """Add pieces with their lengths, so that no two lists of pieces give the same bytes."""
    for piece in pieces:
        digest.update(struct.pack("<Q", len(piece)))
        digest.update(piece)
