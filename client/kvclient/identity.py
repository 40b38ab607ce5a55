"""Which model this is, told by its content: folders of one name may hold different weights, and one model may lie in
many places.

What counts are config.json and what else shapes the computation, and every byte of every weight file: a model that was
trained a little may differ from the one it was made of in a single row. Settings are read at once, and small; weights
are hashed by file_hashes.py, which takes seconds to minutes the first time.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvclient.file_hashes import Hashes, Seen
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
"""The last three: what a model sees of an image. Engines name images by what they were before."""
SETTINGS_BYTES_MAX = 16 << 20
ADAPTER = (("adapter_config.json",), ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"))
ROPES_OF_ANY_LENGTH = frozenset(
    {"default", "linear", "llama3", "yarn", "mrope", "proportional", "deepseek_yarn", "deepseek_llama_scaling"}
)
"""Position encodings that do not look at how long the engine lets a prompt be."""
TUNED_BY_LENGTH = frozenset({"llama4", "llama4_text"})
"""Kinds of models whose queries vLLM scales by position only where prompts may be longer than 32K tokens. It notes that
in a copy of the settings."""

_TEXT = b"kvserver.model.2\0"
LABEL_BYTES_MAX = 128
"""The server takes no longer names."""


class ModelFiles(NamedTuple):
    """The files of a model or an adapter as they were when they were looked at."""

    settings: tuple[tuple[Seen, bytes], ...]
    """With what counts of their content."""
    weights: tuple[tuple[Seen, str], ...]
    """With their names below the model's folder."""

    @property
    def all(self) -> list[Seen]:
        return [seen for seen, _ in (*self.settings, *self.weights)]


def model_files(folder: Path, *, settings_in: Path | None = None) -> ModelFiles:
    """RequestError("model-identity") when there is nothing that identifies a model: then say an id.

    settings_in: the folder that has all but the weights, if that is another."""
    others = settings_in or folder
    settings = [others / name for name in SETTINGS if (others / name).is_file()]
    settings += sorted(others.glob("*.py"))  # a model that brings its own code
    weights = sorted(path for path in _files(folder) if path.suffix in WEIGHTS and path.name not in NOT_WEIGHTS)
    return _looked_at(folder, settings, weights)


def code_digest(folder: Path) -> str:
    """Of the Python files below a folder, by content; empty if there are none."""
    digest = hashlib.sha256()
    files = sorted(folder.rglob("*.py"))
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest() if files else ""


def adapter_files(folder: Path) -> ModelFiles:
    """Of a LoRA adapter, as model_files()."""
    settings, weights = ([path for name in names if (path := folder / name).is_file()] for names in ADAPTER)
    return _looked_at(folder, settings, weights)


def adapter_looks(folder: Path) -> list[Seen]:
    """Differs when a file of a LoRA adapter was written anew. Reads nothing of them."""
    return [Seen.at(path) for names in ADAPTER for name in names if (path := folder / name).is_file()]


def hub_folder(name: str, *, revision: str | None, commit: str | None, cache_folder: str | None = None) -> Path:
    """Where this machine has a model of the Hugging Face hub. commit: the one that the engine has read the settings of,
    where that is known: what a revision names may have changed since. RequestError when it is not here."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (needed for names only, and slow to import)

    problem: Exception | None = None
    for wanted in dict.fromkeys((commit, revision) if commit else (revision,)):  # settings may be another repository's
        try:
            return Path(snapshot_download(name, revision=wanted, cache_dir=cache_folder, local_files_only=True))
        except (OSError, ValueError) as missing:
            problem = missing
    raise RequestError(
        "model-identity",
        f"the files of model {name!r} are not on this machine ({type(problem).__name__}), so that it cannot be "
        "told from others of that name: say model_id in kv_connector_extra_config",
    ) from problem


def digest_of(files: ModelFiles, hashes: Hashes) -> bytes:
    """32 bytes. OSError when a file cannot be read, Changed when one is another meanwhile; takes as long as hashing all
    of them, unless that was done before."""
    digest = hashlib.sha256(_TEXT)
    for seen, content in files.settings:
        _add(digest, seen.path.name.encode(), content)
    for seen, name in files.weights:
        _add(digest, name.encode(), struct.pack("<Q", seen.id.bytes), bytes.fromhex(hashes.of(seen).blake3))
    return digest.digest()


def model_digest(folder: Path) -> bytes:
    """For who has the time: digest_of() of model_files(), with hashes that this machine keeps."""
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
    """Of the folder and of the folders in it, which is where some models keep their parts."""
    for path in folder.iterdir():
        if path.is_file():
            yield path
        elif path.is_dir() and not path.name.startswith("."):
            yield from (inner for inner in path.iterdir() if inner.is_file())


def _settings_content(path: Path) -> bytes:
    """JSON without what does not change the computation, so that loading and saving a model keeps its identity."""
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
    """What metrics may call the model of that name or path: the end of it, where it is long."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(model or ""))
    return text.encode()[-LABEL_BYTES_MAX:].decode(errors="ignore")


def tokens_that_count(settings: object, tokens_max: int) -> int:
    """Of a model's settings: how long a prompt may be, where it is computed by that; otherwise 0, so that engines with
    other bounds share."""
    is_alike = _rope_types(settings) <= ROPES_OF_ANY_LENGTH and not is_tuned_by_length(settings)
    return 0 if is_alike else int(tokens_max)


def is_tuned_by_length(settings: object) -> bool:
    """Of a model's settings: whether it, or a part of it, is of such a kind."""
    if not isinstance(settings, dict):
        return False
    return settings.get("model_type") in TUNED_BY_LENGTH or any(map(is_tuned_by_length, settings.values()))


def _rope_types(settings: object, *, in_rope: bool = False) -> set[str]:
    """Wherever a model's settings name them: rope_parameters, rope_scaling before that, by layer kind, or inside the
    settings of its text part."""
    if not isinstance(settings, dict):
        return set()
    here = {str(settings[name]) for name in ("rope_type", "type") if in_rope and name in settings}
    return here.union(*(_rope_types(value, in_rope=in_rope or "rope" in str(name)) for name, value in settings.items()))


_NOTES = frozenset({"transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "max_model_len"})
"""The last: vLLM's, for models such as MiniMax. See tokens_that_count()."""


def _add(digest: "hashlib._Hash", *pieces: bytes) -> None:
    """With their lengths, so that no two lists of pieces have one text."""
    for piece in pieces:
        digest.update(struct.pack("<Q", len(piece)))
        digest.update(piece)
