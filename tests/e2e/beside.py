"""Our connector in an engine whose attention keeps per-block state that vLLM does not register, and with a mistake.

vLLM loads these classes by kv_connector_module_path. They simulate a forward in a hook that vLLM calls after it.
"""

from typing import Any

import torch
from msgspec.structs import replace

from kvclient.vllm.connector import KvServerConnector


class KeepsMoreFromTheStart(KvServerConnector):
    """A layer already has an extra tensor when the caches are registered."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        keep_more(self, kv_caches)
        super().register_kv_caches(kv_caches)


class KeepsMoreLater(KvServerConnector):
    """The extra tensor appears with the first forward that computes something."""

    def wait_for_save(self) -> None:
        keep_more(self, self._kv_caches)
        super().wait_for_save()


class HasScalesLater(KvServerConnector):
    """A layer announces scales, and has them after the first forward."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.awaited = ["model.layers.0.self_attn.attn"]
        if hasattr(self, "_side_tensors"):
            self._side_tensors.awaited = lambda: self.awaited  # type: ignore[method-assign]

    def wait_for_save(self) -> None:
        self.awaited = []
        super().wait_for_save()


class ReadsItsLayoutWrong(KvServerConnector):
    """A mistake in the connector: it takes half of each page, in blocks half as far apart."""

    def _describe(self, layout: Any, known: Any) -> None:
        half = [
            [replace(run, block_stride=run.block_stride // 2, page_bytes=run.page_bytes // 2) for run in runs]
            for runs in layout.regions
        ]
        super()._describe(layout._replace(regions=half), known)


def keep_more(connector: Any, kv_caches: dict[str, Any]) -> None:
    name = sorted(kv_caches)[-1]
    layer = connector._vllm_config.compilation_config.static_forward_context[name]
    layer.impl.more = torch.zeros(connector._kv_cache_config.num_blocks, 3)
