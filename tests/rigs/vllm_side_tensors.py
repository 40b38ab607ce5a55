"""Layers whose caches vLLM registers, with tensors beside them."""

from types import SimpleNamespace
from typing import Any

from kvclient.vllm.side_tensors import SideTensors
from tests.rigs.vllm_tensors import Tensor

BLOCKS, TOKENS, HEADS, SIZE = 57, 16, 3, 5


def cache(blocks: int = BLOCKS, tokens: int = TOKENS) -> Tensor:
    """K and V in bytes."""
    return Tensor(2, blocks, tokens, HEADS, SIZE, item_bytes=1)


def bound(**layers: Any) -> tuple[SideTensors, dict[str, Tensor]]:
    """The connector's view before vLLM has allocated, and the caches that it then registers."""
    beside = SideTensors(layers)
    caches = {name: cache() for name in layers}
    for name, layer in layers.items():
        layer.kv_cache = caches[name]
    return beside, caches


def known(beside: SideTensors, caches: dict[str, Tensor]) -> Any:
    return beside.known(caches, blocks=BLOCKS, block_tokens=[TOKENS])


def config(*names: str) -> SimpleNamespace:
    spec = type("FullAttentionSpec", (), {"block_size": TOKENS, "page_size_bytes": 2 * TOKENS * HEADS * SIZE})()
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)],
        kv_cache_tensors=[SimpleNamespace(shared_by=[name]) for name in names],
    )
