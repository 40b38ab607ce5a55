"""A configuration file: its values and their line numbers."""

import re
from pathlib import Path

from kvserver.errors import ConfigError
from kvserver.units import MIB, show_bytes

FILE_BYTES_MAX = MIB


def read_table(path: Path) -> dict[str, tuple[object, int]]:
    """The values at the top of a TOML file, with their lines. Raises ConfigError."""
    import tomllib  # noqa: PLC0415 - all processes have this module, and few read a file

    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        text = content.decode()
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError("config-file", f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError("config-file", f"{path}: not a TOML file: it is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config-file", f"{path}: not a TOML file: {error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError("config-file", f"{path}: larger than {show_bytes(FILE_BYTES_MAX)}")
    return {name: (value, _line_of(text, name)) for name, value in table.items()}


def _line_of(text: str, name: str) -> int:
    """The line number of a key or table; 1 if it is written in a form that is not searched for."""
    pattern = re.compile(rf"""^\s*\[*\s*["']?{re.escape(name)}["']?\s*[=.\]]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)
