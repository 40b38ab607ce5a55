"""The connector for ATOM, under the name "kvserver" (kvclient.atom_hook). docs/atom.md is the manual.

The names are looked up late, so that parts of this package can be imported without ATOM.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvclient.atom.connector import KvServerConnector, KvServerScheduler

__all__ = ["KvServerConnector", "KvServerScheduler"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("kvclient.atom.connector"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
