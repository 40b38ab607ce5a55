"""A key of the configuration: how it is declared, parsed, checked and shown."""

import re
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from kvserver.config import quotas, remotes
from kvserver.errors import ConfigError
from kvserver.units import parse_bytes, show_bytes


class Within(NamedTuple):
    """The smallest and largest value of a number, in the declaration of a key."""

    least: int
    most: int


class About(NamedTuple):
    """The description of a key, and its smallest and largest value."""

    text: str
    least: int = 0
    most: int = 0


class Key(NamedTuple):
    """One key, as a field of Config declares it."""

    name: str
    kind: type[int] | type[str]
    default: int | str
    about: About
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def in_bytes(self) -> bool:
        return self.name.endswith(("_bytes", "_bytes_per_s"))

    @property
    def expected(self) -> str:
        """The expected value, in a few words."""
        if self.choices:
            return " | ".join(self.choices)
        if self.kind is str:
            return "text"
        return "bytes such as 4096 or 16GiB" if self.in_bytes else "a whole number"

    def check(self, value: object) -> None:
        """Raises ConfigError unless the value has the key's type and is within its bounds."""
        if type(value) is not self.kind:
            shown = repr(value) if isinstance(value, str | float) else msgspec.json.encode(value).decode()
            raise ConfigError("config-type", f"{self.name}={shown} must be {self.expected}")
        if isinstance(value, int):
            least, most = self.about.least, self.about.most
            if not least <= value <= most:
                limits = f"[{self.show(least)}, {self.show(most)}]"
                raise ConfigError("config-range", f"{self.name}={self.show(value)} must be in {limits}")
        elif self.choices and value not in self.choices:
            raise ConfigError("config-choice", f"{self.name}={value!r} must be {self.expected}")

    def parse(self, text: str) -> object:
        """The checked value of a flag's text. Raises ConfigError."""
        value: object = text
        if self.kind is int:
            whole = parse_bytes(text) if self.in_bytes else _parse_whole(text)
            value = text if whole is None else whole
        self.check(value)
        return value

    def read(self, value: object) -> object:
        """The checked value from a TOML file, where sizes may be text, paths a list, and quotas and remotes tables."""
        if self.name == "disk_paths" and isinstance(value, list):
            value = ",".join(map(str, value))
        if self.name in ("tenants", "disk_tenants") and isinstance(value, dict):
            value = quotas.joined(value)
        if self.name == "remotes" and isinstance(value, dict):
            value = remotes.joined(value)
        if self.in_bytes and isinstance(value, str):
            return self.parse(value)
        self.check(value)
        return value

    def show(self, value: int | str) -> str:
        """The value as people write it: 16GiB rather than 17179869184."""
        return show_bytes(value) if self.in_bytes and isinstance(value, int) else str(value)

    def toml(self, value: int | str) -> str:
        """The value as it is written in a TOML file."""
        shown = self.show(value)
        return shown if self.kind is int and not shown.endswith("iB") else msgspec.json.encode(shown).decode()


def declared(config: type[msgspec.Struct]) -> tuple[Key, ...]:
    """The keys of a struct whose fields are Annotated[type, Within (of a number), description]."""
    keys = []
    hints = get_type_hints(config, include_extras=True)
    for field in msgspec.structs.fields(config):
        kind, *within, text = get_args(hints[field.name])
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        about = About(text, *(within[0] if within else ()))
        keys.append(Key(field.name, str if choices else kind, field.default, about, choices))
    return tuple(keys)


def _parse_whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
