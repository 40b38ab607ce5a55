"""Our connector in an engine whose attention layers keep scales of their KV, as those of ATOM's plug-in for vLLM do.

With --kv-cache-dtype fp8 the plug-in's layers keep a float32 scale for each token and head beside the registered cache,
made in the first forward pass. AITER's kernels need an AMD GPU, so vLLM's own attention computes here, with KV that is
not in fp8, which few CPUs can do. Then the scales of all tokens up to each one change its output: an answer is the same
only if every block has its own tokens' scales.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvclient.vllm import KvServerConnector

ATOM_MODULE = "atom.plugin.vllm.attention.layer_mha"


class ScaledLayers(KvServerConnector):
    """Dresses the layers as the plug-in's before the connector looks at them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._dressed = []
        if role == KVConnectorRole.WORKER:
            for layer in vllm_config.compilation_config.static_forward_context.values():
                scaled = ScaledAttention(layer, kv_cache_config.num_blocks, vllm_config.cache_config.block_size)
                self._dressed.append(scaled)
        super().__init__(vllm_config, role, kv_cache_config)


class LostScales(ScaledLayers):
    """Loses all scales when it has brought a block, so that a test can see that they count."""

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        ended = super().get_finished(finished_req_ids)
        if ended[1]:
            for scaled in self._dressed:
                scaled.forget()
        return ended


class ScaledAttention:
    """The forward pass of one layer."""

    def __init__(self, layer: Any, blocks: int, block_tokens: int) -> None:
        self._layer, self._blocks, self._block_tokens = layer, blocks, block_tokens
        layer.__class__ = type("AttentionForVllmMHA", (type(layer),), {"__module__": ATOM_MODULE})
        layer.kv_cache_dtype = "fp8"
        layer.kv_scale, layer.k_scale, layer.v_scale = torch.zeros(0), None, None
        self._forward = layer.impl.forward
        layer.impl.forward = self

    def __call__(self, *given: Any, **named: Any) -> Any:
        """given: the layer, queries, keys, values, the cache, the step's metadata, perhaps where the output goes."""
        result = self._forward(*given, **named)
        _, _, key, value, _, metadata, *rest = given
        output = rest[0] if rest else named["output"]
        if metadata is not None:
            self._keep(key, value, metadata)
            for tokens, factors in self._factors(metadata):
                output[tokens] *= factors.reshape(-1, *[1] * (output.dim() - 1))
        return result

    def forget(self) -> None:
        self._layer.kv_scale.zero_()

    def _keep(self, key: Any, value: Any, metadata: Any) -> None:
        """Writes the scales of the tokens that are computed, in the plug-in's form: (K or V, blocks, heads, tokens)."""
        layer, count = self._layer, metadata.num_actual_tokens
        if layer.k_scale is None:
            layer.kv_scale = torch.zeros(2, self._blocks, key.shape[1], self._block_tokens)
            layer.k_scale, layer.v_scale = layer.kv_scale[0], layer.kv_scale[1]
        slots = metadata.slot_mapping[:count].long()
        for scales, told in ((layer.k_scale, key), (layer.v_scale, value)):
            scales[slots // self._block_tokens, :, slots % self._block_tokens] = told[:count].abs().amax(-1).float()

    def _factors(self, metadata: Any) -> Iterator[tuple[slice, Any]]:
        """For each request its tokens of this step, and a factor for each: by the mean scale of all tokens up to it."""
        starts = metadata.query_start_loc.tolist()
        for row, (begin, end) in enumerate(pairwise(starts)):
            length = int(metadata.seq_lens[row])
            used = metadata.block_table[row, : -(-length // self._block_tokens)].long()
            each = self._layer.kv_scale[:, used].mean(dim=(0, 2)).flatten()[:length].double()
            means = each.cumsum(0) / torch.arange(1, length + 1)
            yield slice(begin, end), (1 + means[length - (end - begin) :]).float()
