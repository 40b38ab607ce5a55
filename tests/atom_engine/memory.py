"""KV memory of one rank in ATOM's layouts, on the host, with every byte known.

A token's bytes are a function of rank, layer, part and all tokens up to it, so bytes of another prefix, rank, layer
or place are noticed. No torch is needed: tensors are shapes over a memfd.
"""

import hashlib
import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from kvserver._native import create_memfd
from tests.atom_engine.states import StateMemory

POISON = 0xA5


@dataclass(frozen=True)
class Shape:
    """A model and its cache: odd sizes, pairwise different."""

    form: str = "mha"
    """mha (K, V), mha-fp8 (with scales), mha-v4 (V of four dimensions), mla, dsa (with index keys), m3 (index keys
    visible only in the regions), mimo (layers with different head counts); with slots also gdn (mha and recurrent
    layers), kda (mla and recurrent layers), v4 (regions of blocks and of slots, no tensors).
    """
    layers: int = 3
    draft_layers: int = 0
    heads: int = 2
    block_tokens: int = 32
    page_tokens: int = 16
    """Tokens of a physical page: block_ratio is block_tokens / page_tokens."""
    blocks: int = 29
    first_layer: int = 0
    contexts: int = 1
    """Ranks that share a block's tokens, one token after another (decode context parallel)."""
    slots: int = 0
    """Requests that can have a state."""
    span: int = 1
    """Entries of a recurrent layer's tensors for each of them."""

    @property
    def pages(self) -> int:
        return self.blocks * self.block_tokens // self.page_tokens


class Tensor:
    """The parts of torch.Tensor that the connector uses."""

    def __init__(
        self,
        memory: "Memory",
        pool: "Pool",
        offset: int,
        shape: Sequence[int],
        *,
        item_bytes: int,
        part: str,
        layer: int,
    ) -> None:
        self.pool = pool
        self.shape = tuple(shape)
        self.part, self.layer = part, layer
        self.device = SimpleNamespace(type="cpu")
        self.dtype = f"bytes{item_bytes}"
        self._memory, self._offset, self._item_bytes = memory, offset, item_bytes
        self._strides = tuple(math.prod(self.shape[nth + 1 :]) for nth in range(len(self.shape)))
        self.bytes_of_block = self._bytes() // memory.shape.blocks
        self.bytes_of_token = self.bytes_of_block // memory.shape.block_tokens
        self._places: dict[int, list[tuple[slice, slice]]] = {}
        self._from: itemgetter[Any] | None = None
        """For each byte of a block, its index in the concatenated bytes of the block's tokens."""

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return self._item_bytes

    def data_ptr(self) -> int:
        return self.pool.address + self._offset

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.pool.address, nbytes=lambda: self.pool.bytes)

    def places(self, token: int) -> list[tuple[slice, slice]]:
        """(slice of the block, slice of the token's bytes) for each piece of a token.

        Uses as few pieces as extended slices allow, because V has runs of one item each.
        """
        if token not in self._places:
            self._places[token] = list(_pieces_of(self._runs_of(token)))
        return self._places[token]

    def _runs_of(self, token: int) -> list[tuple[int, int]]:
        """(offset in the block, bytes) of each run of a token."""
        page_tokens = 1 if self._counts_tokens else self._page_tokens()
        page, inside = divmod(token, page_tokens)
        page_bytes = self._bytes() // self.shape[0]
        return [(page * page_bytes + offset, length) for offset, length in self._token_runs(inside)]

    @property
    def _counts_tokens(self) -> bool:
        """True for MLA, where a page is a token."""
        return self.part == "k_cache" and self.shape[1] == 1 and len(self.shape) == 3

    def offset_of_block(self, block: int) -> int:
        return self._offset + block * self.bytes_of_block

    def as_it_lies(self, content: bytes) -> bytes:
        """Reorders concatenated token bytes, each run after run, into a block's memory order."""
        if self._from is None:
            runs = [run for token in range(self._memory.shape.block_tokens) for run in self._runs_of(token)]
            places = [offset + inside for offset, length in runs for inside in range(length)]
            assert sorted(places) == list(range(self.bytes_of_block)), "a block is its tokens, and nothing else"
            self._from = itemgetter(*sorted(range(len(places)), key=places.__getitem__))
        return bytes(self._from(content))

    def _bytes(self) -> int:
        return self.shape[0] * self.stride()[0] * self._item_bytes

    def _page_tokens(self) -> int:
        match self.part, self.shape:
            case "k_cache", (_, _, _, tokens, _):
                return tokens
            case "v_cache", (_, _, parts, _, x):
                return parts * x
            case "v_cache", (_, _, _, tokens):
                return tokens
            case (("k_scale" | "v_scale"), (_, _, tokens)):
                return tokens
            case "index_cache", (_, tokens, _):
                return tokens
        raise AssertionError(self.part)

    def _token_runs(self, token: int) -> Iterator[tuple[int, int]]:
        item, steps = self._item_bytes, self.stride()
        match self.part, self.shape:
            case "k_cache", (_, heads, parts, _, x):
                for head, part in product(range(heads), range(parts)):
                    yield (head * steps[1] + part * steps[2] + token * steps[3]) * item, x * item
            case "v_cache", (_, heads, _, dim, x):
                for head, place in product(range(heads), range(dim)):
                    yield (head * steps[1] + token // x * steps[2] + place * steps[3] + token % x) * item, item
            case "v_cache", (_, heads, dim, _):
                for head, place in product(range(heads), range(dim)):
                    yield (head * steps[1] + place * steps[2] + token) * item, item
            case (("k_scale" | "v_scale"), (_, heads, _)):
                for head in range(heads):
                    yield (head * steps[1] + token) * item, item
            case "k_cache", (_, 1, dim):
                yield 0, dim * item
            case "index_cache", (_, _, dim):
                yield token * dim * item, dim * item


def _pieces_of(runs: list[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    """Merges runs: many runs of one length at equal distances become one piece for each of their bytes."""
    taken = 0
    while runs:
        (begin, length), alike = runs[0], 1
        step = runs[1][0] - begin if len(runs) > 1 else length
        while alike < len(runs) and runs[alike] == (begin + alike * step, length):
            alike += 1
        if alike <= length:
            alike = 1
            yield slice(begin, begin + length), slice(taken, taken + length)
        else:
            end = begin + (alike - 1) * step
            for byte in range(length):
                yield slice(begin + byte, end + byte + 1, step), slice(taken + byte, taken + alike * length, length)
        taken += alike * length
        runs = runs[alike:]


class Pool:
    """One allocation."""

    def __init__(self, address: int, bytes_: int) -> None:
        self.address = address
        """Invented: nobody reads through it."""
        self.bytes = bytes_
        self.fd = create_memfd("kvserver-atom", bytes_)
        self.map = mmap.mmap(self.fd, bytes_)
        self.map[:] = bytes([POISON]) * bytes_

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


class Memory:
    """The memory of one rank: one allocation, and another for index keys that no tensor describes."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape, self.rank = shape, rank
        plan = list(_plan(shape))
        hidden = [entry for entry in plan if entry[0] == "index_cache" and shape.form == "m3"]
        self.pools: list[Pool] = []
        self.tensors: list[Tensor] = []
        self._images: dict[bytes, list[bytes]] = {}
        """Digest of all tokens up to a block's end -> the block's bytes in each tensor. Lives as long as a test."""
        apart = [[entry] for entry in plan] if shape.form == "v4" else [[e for e in plan if e not in hidden], hidden]
        for entries in apart:
            sizes = [math.prod(dims) * item_bytes for _, _, dims, item_bytes in entries]
            if not sizes:
                continue
            pool = self._pool(sum(sizes))
            offsets = accumulate(sizes, initial=0)
            for offset, (part, layer, dims, item_bytes) in zip(offsets, entries, strict=False):
                self.tensors.append(Tensor(self, pool, offset, dims, item_bytes=item_bytes, part=part, layer=layer))
        self.states = StateMemory(shape, rank, self._pool) if shape.slots else None

    def _pool(self, bytes_: int) -> Pool:
        pool = Pool(0x7000_0000_0000 + (self.rank << 40) + (len(self.pools) << 34), bytes_)
        self.pools.append(pool)
        return pool

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def kv_caches(self) -> dict[str, Any]:
        hidden = {"index_cache"} if self.shape.form == "m3" else set()
        caches: dict[str, Any] = {}
        for name, (conv, ssm) in self.states.tensors.items() if self.states is not None else ():
            caches[name] = SimpleNamespace(
                layer_num=50, k_cache=conv, v_cache=ssm, k_scale=None, v_scale=None, index_cache=None
            )
        for tensor in self.tensors if self.shape.form != "v4" else ():
            name = f"layer_{tensor.layer}"
            cache = caches.setdefault(
                name,
                SimpleNamespace(
                    layer_num=tensor.layer, k_cache=None, v_cache=None, k_scale=None, v_scale=None, index_cache=None
                ),
            )
            if tensor.part not in hidden:
                setattr(cache, tensor.part, tensor)
        return caches

    def transfer_tensors(self) -> Any:
        regions = [
            SimpleNamespace(
                base_addr=tensor.data_ptr(),
                total_bytes=tensor._bytes(),
                unit_bytes=0,
                reverse_indexed=False,
                semantic_role=f"part_{number}",
            )
            for number, tensor in enumerate(self.tensors)
        ]
        slots = self.states.regions if self.states is not None else []
        return SimpleNamespace(
            block_regions=regions,
            slot_regions=[],
            swa_block_regions=slots,
            expected_full_slot_region_count=len(slots) or None,
        )

    def write(self, block_table: Sequence[int], tokens: Sequence[int], first: int, end: int) -> None:
        """Simulates a forward of tokens [first, end)."""
        for _, pool, place, value in self._pieces(block_table, tokens, first, end):
            pool.map[place] = value

    def wrong(self, block_table: Sequence[int], tokens: Sequence[int], first: int, end: int) -> list[str]:
        """Places where tokens [first, end) do not hold their bytes: the first wrong one of each piece."""
        found = []
        for at, pool, place, value in self._pieces(block_table, tokens, first, end):
            held = pool.map[place]
            if held != value:
                inside = next(nth for nth, (is_, must) in enumerate(zip(held, value, strict=True)) if is_ != must)
                found.append(f"rank {self.rank} token {at} offset {place.start + inside * (place.step or 1)}")
        return found

    def spoil(self, block: int) -> None:
        """Overwrites a freed block, so that a later reader gets garbage."""
        for tensor in self.tensors:
            size, begin = tensor.bytes_of_block, tensor.offset_of_block(block)
            tensor.pool.map[begin : begin + size] = bytes([POISON]) * size

    def _pieces(
        self, block_table: Sequence[int], tokens: Sequence[int], first: int, end: int
    ) -> Iterator[tuple[int, Pool, slice, bytes]]:
        """The right contents of tokens [first, end): (first token, pool, slice, bytes).

        A completely filled block is one piece per tensor. Nearly every forward checks the whole context, and equal
        tokens give equal block bytes each time, so these are cached.
        """
        span = self.shape.block_tokens * self.shape.contexts
        packed = struct.pack(f"<{end}I", *tokens[:end])
        chain = hashlib.sha256(packed[: 4 * first])
        while first < end:
            number, inside = divmod(first, span)
            until = min(end, first - inside + span)
            before, block = chain.copy(), block_table[number]
            chain.update(packed[4 * first : 4 * until])
            if until - first == span:
                images = self._images.get(chain.digest())
                if images is None:
                    own = self._own(before, packed, first, until)
                    images = self._images[chain.digest()] = self._made(own)
                for tensor, image in zip(self.tensors, images, strict=True):
                    begin = tensor.offset_of_block(block)
                    yield first, tensor.pool, slice(begin, begin + len(image)), image
            else:
                yield from self._of_tokens(block, self._own(before, packed, first, until))
            first = until

    def _own(self, chain: Any, packed: bytes, first: int, end: int) -> list[tuple[int, int, bytes]]:
        """(token, place in the block, digest) of this rank's tokens among [first, end) of one block.

        chain: hash of all tokens before them.
        """
        found = []
        for at in range(first, end):
            chain.update(packed[4 * at : 4 * at + 4])
            place, context = divmod(at % (self.shape.block_tokens * self.shape.contexts), self.shape.contexts)
            if context == self.rank % self.shape.contexts:
                found.append((at, place, chain.digest()))
        return found

    def _made(self, own: list[tuple[int, int, bytes]]) -> list[bytes]:
        """All bytes of a block in each tensor."""
        images = []
        for number, tensor in enumerate(self.tensors):
            content = b"".join(self._content(number, tensor, digest) for _, _, digest in own)
            images.append(tensor.as_it_lies(content))
        return images

    def _of_tokens(self, block: int, own: list[tuple[int, int, bytes]]) -> Iterator[tuple[int, Pool, slice, bytes]]:
        for number, tensor in enumerate(self.tensors):
            begin = tensor.offset_of_block(block)
            for at, inside, digest in own:
                content = self._content(number, tensor, digest)
                for place, which in tensor.places(inside):
                    lies = slice(begin + place.start, begin + place.stop, place.step)
                    yield at, tensor.pool, lies, content[which]

    def _content(self, number: int, tensor: Tensor, digest: bytes) -> bytes:
        """The bytes of one token, run after run."""
        # Ranks of MLA hold the same bytes, so it does not matter which of them stores a chunk.
        rank = 0 if self.shape.form in ("mla", "dsa", "kda") and self.shape.contexts == 1 else self.rank
        return hashlib.shake_128(digest + bytes([rank, number, tensor.layer])).digest(tensor.bytes_of_token)


def _plan(shape: Shape) -> Iterator[tuple[str, int, tuple[int, ...], int]]:
    """(part, layer, dimensions, bytes of an item), in ATOM's allocation order."""
    layers = range(shape.first_layer, shape.first_layer + shape.layers + shape.draft_layers)
    pages, page = shape.pages, shape.page_tokens
    if shape.form == "v4":
        yield from (("index_cache", layer, (pages, page, dim), 1) for layer, dim in enumerate((19, 7, 5, 5)))
        return
    if shape.form in ("mla", "dsa", "kda"):
        yield from (("k_cache", layer, (pages * page, 1, 37), 2) for layer in layers)
        if shape.form == "dsa":
            yield from (("index_cache", layer, (pages, page, 11), 1) for layer in layers)
        return
    item = 1 if shape.form in ("mha-fp8", "m3") else 2
    x = 16 // item
    heads = {layer: shape.heads + (layer % 2 if shape.form == "mimo" else 0) for layer in layers}
    if shape.form == "mha-v4":
        yield from (("k_cache", layer, (pages, heads[layer], 3, page, x), item) for layer in layers)
        yield from (("v_cache", layer, (pages, heads[layer], 3 * x, page), item) for layer in layers)
    elif shape.form == "mimo":  # K and V of a layer, layer after layer
        for layer in layers:
            yield "k_cache", layer, (pages, heads[layer], 3, page, x), item
            yield "v_cache", layer, (pages, heads[layer], page // x, 5, x), item
    else:
        yield from (("k_cache", layer, (pages, heads[layer], 3, page, x), item) for layer in layers)
        yield from (("v_cache", layer, (pages, heads[layer], page // x, 3 * x, x), item) for layer in layers)
    if item == 1:
        yield from (("k_scale", layer, (pages, heads[layer], page), 4) for layer in layers)
        yield from (("v_scale", layer, (pages, heads[layer], page), 4) for layer in layers)
    if shape.form == "m3":
        yield from (("index_cache", layer, (pages, page, 7), 1) for layer in list(layers)[1:])
