"""Which model this is, told by its content: folders of one name may hold different weights, and one model may lie in
many places.

Read are config.json and what else shapes the computation, the name, size and header of every weight file, and samples
of the weights: a few bytes out of every tensor where the file says where its tensors lie. A fine-tuned model has the
names, sizes and headers of the model it was made of, and differs in nearly every byte of the tensors that it changed.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

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
HEADER_BYTES_MAX = 128 << 20
"""Of a safetensors file; the format's own bound is 100 MB."""
SAMPLE_BYTES = 256
TENSORS_MAX = 1 << 16
"""Of a file; of more than that some are sampled. A file of quantized experts has up to 20 thousand."""
SAMPLES_MAX = 4096
"""Of a file that does not say where its tensors lie. So many reads take 0.1 s when the pages are not in memory yet."""

_TEXT = b"kvserver.model.1\0"
LABEL_BYTES_MAX = 128
"""The server takes no longer names."""


def model_digest(folder: Path, *, settings_in: Path | None = None) -> bytes:
    """32 bytes. RequestError("model-identity") when there is nothing that identifies a model: then say an id.

    settings_in: the folder that has all but the weights, if that is another."""
    others = settings_in or folder
    settings = [others / name for name in SETTINGS if (others / name).is_file()]
    settings += sorted(others.glob("*.py"))  # a model that brings its own code
    weights = sorted(path for path in _files(folder) if path.suffix in WEIGHTS and path.name not in NOT_WEIGHTS)
    return _digest(folder, settings, weights)


def code_digest(folder: Path) -> str:
    """Of the Python files below a folder, by content; empty if there are none."""
    digest = hashlib.sha256()
    files = sorted(folder.rglob("*.py"))
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest() if files else ""


def adapter_digest(folder: Path) -> bytes:
    """Of a LoRA adapter, as model_digest()."""
    settings, weights = ([path for name in names if (path := folder / name).is_file()] for names in ADAPTER)
    return _digest(folder, settings, weights)


def adapter_looks(folder: Path) -> list[object]:
    """Differs when a file of a LoRA adapter was written anew. Reads nothing of them."""
    stats = [(path.name, path.stat()) for names in ADAPTER for name in names if (path := folder / name).is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]


def _digest(folder: Path, settings: list[Path], weights: list[Path]) -> bytes:
    if not settings or not weights:
        raise RequestError(
            "model-identity",
            f"{str(folder)!r} has {len(settings)} files of settings and {len(weights)} of weights; expected both",
        )
    digest = hashlib.sha256(_TEXT)
    for path in settings:
        _add(digest, path.name.encode(), _settings_content(path))
    for path in weights:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            _add(digest, path.relative_to(folder).as_posix().encode(), struct.pack("<Q", size))
            for piece in _weight_pieces(path, file, size):
                _add(digest, piece)
    return digest.digest()


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


def _weight_pieces(path: Path, file: BinaryIO, size: int) -> Iterator[bytes]:
    """The header, if it has one, and the samples."""
    places: Sequence[int] = ()
    if path.suffix == ".safetensors":
        header = _safetensors_header(path, file, size)
        yield header
        places = _evenly(_tensor_middles(path, header), TENSORS_MAX)
    if not places:
        places = _evenly(range(0, size, max(SAMPLE_BYTES, size // SAMPLES_MAX)), SAMPLES_MAX)
    places = sorted({min(place, max(0, size - SAMPLE_BYTES)) for place in places})
    for place in places:
        file.seek(place)
        yield file.read(SAMPLE_BYTES)


def _safetensors_header(path: Path, file: BinaryIO, size: int) -> bytes:
    """The length (u64, little-endian) and the JSON behind it."""
    file.seek(0)
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
        raise RequestError("model-identity", f"{str(path)!r} of {size} bytes has no safetensors header: {length=}")
    return head + file.read(length)


def _tensor_middles(path: Path, header: bytes) -> list[int]:
    """Offsets in the file. The middle, because the edges of some tensors are padding."""
    try:
        tensors = json.loads(header[8:])
        ends = [entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"]
        return [len(header) + (begin + end) // 2 for begin, end in ends]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise RequestError("model-identity", f"{str(path)!r} has a broken safetensors header: {problem}") from problem


def _evenly(places: Sequence[int], places_max: int) -> Sequence[int]:
    return places[:: max(1, -(-len(places) // places_max))]


def _add(digest: "hashlib._Hash", *pieces: bytes) -> None:
    """With their lengths, so that no two lists of pieces have one text."""
    for piece in pieces:
        digest.update(struct.pack("<Q", len(piece)))
        digest.update(piece)
