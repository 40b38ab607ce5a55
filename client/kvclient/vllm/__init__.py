"""The connector for vLLM: kv_connector="KvServerConnector", kv_connector_module_path="kvclient.vllm".

docs/vllm.md is the manual. The name is looked up late, so that parts of this package can be imported without vLLM.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvclient.vllm.connector import KvServerConnector

__all__ = ["KvServerConnector"]


def __getattr__(name: str) -> object:
    if name in __all__:
        # vLLM comes here in each of its processes before it serves.
        importlib.import_module("kvclient.vllm.transfer_params").tell_dynamo(name)
        return getattr(importlib.import_module("kvclient.vllm.connector"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
