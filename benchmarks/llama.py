"""A decoder with Llama-3.1-8B's shape, random weights and a paged KV cache, in plain torch: an engine's computation.

One prompt at a time, prefill only: `Decoder.prefill` returns the logits after the last token, and leaves the keys
and values of all tokens in the given blocks. Attention is torch's FlashAttention over the gathered blocks.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

STEP_TOKENS = 8192
"""Tokens of a prompt computed at a time; bounds the memory for activations."""
ROPE_BASE = 500_000.0

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [heads, new, head], keys and values [kv_heads, tokens, head] -> [heads, new, head].

The new tokens are the last ones; each sees itself and all tokens before it.
"""


class Shape(NamedTuple):
    """A decoder's dimensions. The defaults are Llama-3.1-8B's."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    inner: int = 14336
    vocabulary: int = 128_256
    block_tokens: int = 16

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, bf16."""
        return self.layers * 2 * self.kv_heads * self.head * 2


class Layer(NamedTuple):
    """Weights of one layer; matrices are applied from the right."""

    attention_norm: Tensor
    to_qkv: Tensor
    from_heads: Tensor
    inner_norm: Tensor
    to_gate_and_up: Tensor
    down: Tensor


class Decoder:
    """The decoder. `cache` is [layers, 2, blocks, block_tokens, kv_heads, head], bf16, in one allocation."""

    def __init__(self, shape: Shape, *, blocks: int, positions: int, attention: Attention, device: str) -> None:
        """positions: length of the longest prompt."""
        self.shape = shape
        self._attention = attention
        paged = (shape.layers, 2, blocks, shape.block_tokens, shape.kv_heads, shape.head)
        self.cache = torch.zeros(paged, dtype=torch.bfloat16, device=device)
        self._embedding = self._weights(shape.vocabulary, shape.width)
        self._layers = [self._layer() for _ in range(shape.layers)]
        self._norm = torch.ones(shape.width, dtype=torch.bfloat16, device=device)
        self._to_logits = self._weights(shape.width, shape.vocabulary)
        speeds = ROPE_BASE ** (-torch.arange(0, shape.head, 2, device=device, dtype=torch.float32) / shape.head)
        angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), speeds)
        self._cos, self._sin = angles.cos()[:, None], angles.sin()[:, None]

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, block_ids: Tensor, computed: int) -> Tensor:
        """Logits after the last of `tokens`; the blocks already hold the KV of the first `computed` tokens."""
        hidden = torch.empty(0)
        for begin, end in steps(computed, len(tokens)):
            hidden = self._step(tokens[begin:end], begin, block_ids)
        normed = rms_norm(hidden[-1:], (self.shape.width,), self._norm)
        return (normed @ self._to_logits)[0].float()

    def _step(self, tokens: Tensor, begin: int, block_ids: Tensor) -> Tensor:
        shape, end = self.shape, begin + len(tokens)
        positions = torch.arange(begin, end, device=tokens.device)
        slots = block_ids[positions // shape.block_tokens] * shape.block_tokens + positions % shape.block_tokens
        seen_blocks = block_ids[: -(-end // shape.block_tokens)]
        rope = self._cos[begin:end], self._sin[begin:end]
        hidden = self._embedding[tokens]
        for layer, cache in zip(self._layers, self.cache, strict=True):
            normed = rms_norm(hidden, (shape.width,), layer.attention_norm)
            counts = [shape.heads, shape.kv_heads, shape.kv_heads]
            queries, keys, values = (normed @ layer.to_qkv).view(len(tokens), -1, shape.head).split(counts, dim=1)
            seen = []
            for side, new in zip(cache, (_rotated(keys, *rope), values), strict=True):
                side.view(-1, shape.kv_heads, shape.head).index_copy_(0, slots, new)
                seen.append(side.index_select(0, seen_blocks).flatten(0, 1)[:end].transpose(0, 1))
            heads = self._attention(_rotated(queries, *rope).transpose(0, 1), *seen)
            hidden = hidden + heads.transpose(0, 1).reshape(len(tokens), -1) @ layer.from_heads
            gate, up = (rms_norm(hidden, (shape.width,), layer.inner_norm) @ layer.to_gate_and_up).chunk(2, dim=-1)
            hidden = hidden + (silu(gate) * up) @ layer.down
        return hidden

    def _layer(self) -> Layer:
        shape = self.shape
        ones = torch.ones(shape.width, dtype=torch.bfloat16, device=self.cache.device)
        return Layer(
            attention_norm=ones,
            to_qkv=self._weights(shape.width, (shape.heads + 2 * shape.kv_heads) * shape.head),
            from_heads=self._weights(shape.heads * shape.head, shape.width),
            inner_norm=ones,
            to_gate_and_up=self._weights(shape.width, 2 * shape.inner),
            down=self._weights(shape.inner, shape.width),
        )

    def _weights(self, rows: int, columns: int) -> Tensor:
        made = torch.empty((rows, columns), dtype=torch.bfloat16, device=self.cache.device)
        return made.normal_(0.0, 1 / math.sqrt(rows))


def steps(computed: int, tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of about STEP_TOKENS; a short rest is part of the last one."""
    begins = range(computed, max(computed + 1, tokens - STEP_TOKENS + 1), STEP_TOKENS)
    for begin in begins:
        yield begin, tokens if begin == begins[-1] else begin + STEP_TOKENS


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = heads.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(heads.dtype)


# ---------------------------------------------------------------- attention


def flash_grouped(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """FlashAttention with native support for shared KV heads."""
    mask = causal_lower_right(queries.shape[1], keys.shape[1])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask, enable_gqa=True)
    return out[0]


def flash_expanded(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """FlashAttention without native support for shared KV heads."""
    times = queries.shape[0] // keys.shape[0]
    keys, values = (side.repeat_interleave(times, dim=0) for side in (keys, values))
    mask = causal_lower_right(queries.shape[1], keys.shape[1])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask)[0]


def plain(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The plain formula: computes every score in float32."""
    times, new, tokens = queries.shape[0] // keys.shape[0], queries.shape[1], keys.shape[1]
    keys, values = (side.float().repeat_interleave(times, dim=0) for side in (keys, values))
    scores = queries.float() @ keys.transpose(1, 2) / math.sqrt(queries.shape[2])
    hidden = torch.ones((new, tokens), dtype=torch.bool, device=queries.device).triu(tokens - new + 1)
    return (scores.masked_fill(hidden, -math.inf).softmax(dim=-1) @ values).to(queries.dtype)


def fastest_attention(shape: Shape, device: str) -> Attention:
    """The first attention that works on this device with this torch, and agrees with `plain`."""
    problems = []
    for attention in (flash_grouped, flash_expanded):
        try:
            for new in (7, 133):
                sizes = ((shape.heads, new), (shape.kv_heads, 133), (shape.kv_heads, 133))
                made = [torch.randn((*size, shape.head), device=device, dtype=torch.bfloat16) for size in sizes]
                difference = (attention(*made).float() - plain(*made).float()).abs().max().item()
                if difference > 0.05:
                    raise RuntimeError(f"differs from the plain formula by {difference:g}")
        except RuntimeError as problem:
            problems.append(f"{attention.__name__}: {problem}")
        else:
            return attention
    raise RuntimeError(f"no FlashAttention here: {problems}")
