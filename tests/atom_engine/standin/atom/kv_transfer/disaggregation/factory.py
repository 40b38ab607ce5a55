"""The registry of connectors: names to modules and classes."""

import importlib
from typing import Any, ClassVar


class KVConnectorFactory:
    known: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def register(cls, name: str, **where: Any) -> None:
        cls.known[name] = where

    @classmethod
    def canonical_name(cls, name: str) -> str:
        if name not in cls.known:
            raise ValueError(f"unknown KV connector {name!r}; available: {sorted(cls.known)}")
        return name

    @classmethod
    def create_connector(cls, config: Any, role: str = "worker") -> Any:
        where = cls.known[config.kv_transfer_config["kv_connector"]]
        return getattr(importlib.import_module(where[f"{role}_module"]), where[f"{role}_class"])(config)
