"""Values that people type after a command: each is parsed here, and refused in words."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvserver.errors import ConfigError
from kvserver.units import parse_bytes
from kvserver.wire.messages import KEY_BYTES

TOKEN_MAX = (1 << 32) - 1


def seconds(name: str, *, least: float, most: float, unit: str = "seconds") -> Callable[[object], float]:
    """A typer parser of a time."""

    def parse(text: object) -> float:
        value = _number(str(text))
        if value is None or not least <= value <= most:
            raise ConfigError("option", f"{name}={text} must be {unit} from {least:g} to {most:.10g}")
        return value

    return parse


def whole(name: str, *, most: int) -> Callable[[object], int]:
    """A typer parser of a count."""

    def parse(text: object) -> int:
        if not re.fullmatch("[0-9]{1,19}", str(text)) or int(str(text)) > most:
            raise ConfigError("option", f"{name}={text} must be a whole number from 0 to {most}")
        return int(str(text))

    return parse


def option_value(options: type, name: str, text: str) -> Any:
    """The value of an option's text, in the type of the field with that name."""
    kind = type(getattr(options, name))
    if name in ("socket", "disk_dir"):
        return Path(text)
    if kind is str:
        return text
    value: float | None
    if name.endswith("_bytes"):
        value, expected = parse_bytes(text), "bytes such as 4096 or 16GiB"
    elif kind is int:
        value, expected = int(text) if re.fullmatch("-?[0-9]{1,18}", text) else None, "a whole number"
    else:
        value, expected = _number(text), "a number"
    if value is None:
        raise ConfigError("option", f"{name}={text!r} must be {expected}")
    return value


def _number(text: str) -> float | None:
    """A finite number; None if the text is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def plot_file(text: object) -> Path:
    """A typer parser of a file that is written at the end. Work of minutes should not end in a bad name."""
    path = Path(str(text))
    try:
        path.open("ab").close()
    except OSError as problem:
        raise ConfigError("plot", f"{path} cannot be written: {problem.strerror}") from None
    return path


def key(text: str) -> bytes:
    """A chunk's key or a namespace."""
    if not re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", text):
        raise ConfigError("key-text", f"{text[:80]!r} must be {2 * KEY_BYTES} lower-case hexadecimal digits")
    return bytes.fromhex(text)


def tokens(path: str) -> list[int]:
    """Token ids from a file or, for -, from standard input: a JSON list, or numbers with white space or commas."""
    text = file_text("/dev/stdin" if path == "-" else path, "tokens")
    if not re.fullmatch(r"\[?[\d\s,]*\]?\s*", text, re.ASCII):
        raise ConfigError("tokens", f"{path}: expected token ids, as a JSON list or with white space between them")
    words = re.findall(r"\d+", text)
    for word in words:
        if len(word) > 10 or int(word) > TOKEN_MAX:
            raise ConfigError("tokens", f"{path}: token id {word[:20]} must be from 0 to {TOKEN_MAX}")
    return [int(word) for word in words]


def file_text(path: str, code: str) -> str:
    """The content of a file that somebody has named."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigError(code, f"{path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(code, f"{path} is not text in UTF-8") from None
