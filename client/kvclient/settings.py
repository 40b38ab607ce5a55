"""What a user writes for a connector into its engine's configuration: unknown keys and wrong types are errors."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from kvserver.errors import RequestError

S = TypeVar("S")


def checked(kind: type[S], given: Mapping[str, object]) -> S:
    """A dataclass of str, int and bool. RequestError names the key, what was expected and what came."""
    described: Any = kind
    known = {item.name: item for item in fields(described)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise RequestError("settings", f"kv_connector_extra_config has unknown keys {unknown}; known: {sorted(known)}")
    missing = [name for name, item in known.items() if item.default is MISSING and name not in given]
    if missing:
        raise RequestError("settings", f"kv_connector_extra_config lacks {missing}; socket names the server's socket")
    for name, value in given.items():
        wanted: Any = known[name].type
        if type(value) is not wanted:  # exactly: True is no count
            raise RequestError("settings", f"{name}={value!r} must be of type {wanted.__name__}")
        if isinstance(value, int) and value < 0:
            raise RequestError("settings", f"{name}={value} must not be negative")
    return kind(**given)
