"""How long does a prompt's first token take if its prefix is computed, is in HBM, or comes from the server?

`python -m benchmarks.bench_ttft [--tokens 8192,32768,65536] [--rounds 5] [--json]`; needs torch and a GPU with room
for 50 GB.

The engine is this process: a decoder with the shape of Llama-3.1-8B (llama.py), 16-token blocks, K/V-first, chunks
of 256 tokens. A prompt is a prefix and 7 more tokens. Times run from the request to the first token's number on the
host:

    cold     the whole prompt is computed
    hbm      the prefix is still in its blocks, the rest is computed
    server   all blocks hold zeroes, the prefix goes to other blocks: lookup, retrieve, then the rest is computed

Ceiling of `server`: hbm + the prefix's bytes over the link, both of the same round (best of three contiguous copies
of pinned memory); a ratio of 105 % is 5 % slower than that.

Outside the timed part every retrieved byte is compared with the stored one, and all other blocks with zero. The
logits must equal those from the stored bytes, bit by bit. The logits of `cold` were rounded in another order, and
are only compared roughly.
"""

import random
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import device_cache
from benchmarks.bench_copy import Link
from benchmarks.llama import Decoder, Shape, fastest_attention
from benchmarks.rows import Rows, option_parser, say
from benchmarks.serving import serving
from kvclient import Blocks, Client, chunk_keys, namespace_digest
from kvserver.wire.messages import KEY_BYTES

MIB = 1 << 20
CHUNK_TOKENS = 256
REST_TOKENS = 7
LINK_BYTES = 256 * MIB
NEAR = 0.5
"""Limit for differences of logits, as a share of their spread.

One prompt computed in another order differs by a few hundredths; another prompt by several times the spread.
"""
NAMESPACE = namespace_digest({"model": "bench_ttft"})


class Timed(NamedTuple):
    """A first token, and its time."""

    seconds: float
    token: int
    logits: Tensor


class Engine:
    """The decoder with a client. Its cache holds two of the longest prompts."""

    def __init__(self, client: Client, shape: Shape, *, prefix_tokens_max: int, device: str = "cuda") -> None:
        self.client = client
        self.shape = shape
        self.device = device
        tokens = prefix_tokens_max + REST_TOKENS
        self.blocks = 2 * -(-tokens // shape.block_tokens)
        attention = fastest_attention(shape, device)
        self.decoder = Decoder(shape, blocks=self.blocks, positions=tokens, attention=attention, device=device)
        self.attention = attention.__name__
        self.cache = device_cache.register(
            client,
            list(self.decoder.cache),
            namespace=NAMESPACE,
            blocks=self.blocks,
            block_dim=1,
            block_tokens=shape.block_tokens,
            chunk_tokens=CHUNK_TOKENS,
            device=device,
        )

    def first_token(self, prepare: Callable[[], None], tokens: Tensor, block_ids: Tensor, computed: int) -> Timed:
        """Time includes `prepare`. All earlier work on the device has ended."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        prepare()
        logits = self.decoder.prefill(tokens, block_ids, computed)
        token = int(logits.argmax())
        return Timed(time.perf_counter() - began, token, logits)


class Prompt:
    """A prefix that the server holds, and the rest of the prompt."""

    def __init__(self, engine: Engine, prefix_tokens: int) -> None:
        self._engine = engine
        self._shuffle = random.Random(prefix_tokens).shuffle
        ids = random.Random(prefix_tokens).choices(range(engine.shape.vocabulary), k=prefix_tokens + REST_TOKENS)
        self.prefix_tokens = prefix_tokens
        self.bytes = prefix_tokens * engine.shape.token_bytes
        self.tokens = torch.tensor(ids, device=engine.device)
        self.keys = chunk_keys(array("I", ids[:prefix_tokens]), CHUNK_TOKENS)
        self.prefix_blocks = prefix_tokens // engine.shape.block_tokens
        self._store()

    def place(self) -> Tensor:
        """Blocks for the prompt, in a new order each time."""
        order = list(range(self._engine.blocks))
        self._shuffle(order)
        needed = -(-len(self.tokens) // self._engine.shape.block_tokens)
        return torch.tensor(order[:needed], device=self._engine.device)

    def cold(self, block_ids: Tensor) -> Timed:
        return self._engine.first_token(lambda: None, self.tokens, block_ids, 0)

    def hbm(self, block_ids: Tensor) -> Timed:
        return self._engine.first_token(lambda: None, self.tokens, block_ids, self.prefix_tokens)

    def server(self, block_ids: Tensor) -> tuple[Timed, float]:
        """Also returns the time of the retrieve with its lookup."""
        self._engine.decoder.cache.zero_()
        taken = array("i", block_ids[: self.prefix_blocks].tolist())
        retrieved_s = 0.0

        def retrieve() -> None:
            nonlocal retrieved_s
            began = time.perf_counter()
            found = self._engine.client.lookup(NAMESPACE, self.keys)
            assert found.lease is not None, found
            assert found.chunks == len(self.keys) // KEY_BYTES, found
            result = self._engine.client.retrieve(self._engine.cache, found.lease, [Blocks(0, 0, taken)]).result(60)
            assert result.ok, result
            retrieved_s = time.perf_counter() - began

        return self._engine.first_token(retrieve, self.tokens, block_ids, self.prefix_tokens), retrieved_s

    def _store(self) -> None:
        """Computes the prompt once and stores it; these bytes are the truth for later comparisons."""
        block_ids, cache = self.place(), self._engine.decoder.cache
        self.cold(block_ids)
        self.expected = self.hbm(block_ids)
        self._truth = [layer[:, block_ids[: self.prefix_blocks]] for layer in cache]
        event = torch.cuda.Event()
        event.record()
        where = [Blocks(0, 0, array("i", block_ids[: self.prefix_blocks].tolist()))]
        stored = self._engine.client.store(self._engine.cache, 0, b"", self.keys, where, after=event).result(60)
        assert stored.chunks == stored.chunks_written == len(self.keys) // KEY_BYTES, stored

    # ---------------------------------------------------------------- comparisons

    def compare(self, block_ids: Tensor, came: Timed) -> None:
        """Checks the bytes and the logits after `server`."""
        kept, rest = block_ids[: self.prefix_blocks], set(range(self._engine.blocks)) - set(block_ids.tolist())
        others = torch.tensor(sorted(rest), device=self._engine.device)
        wrong = touched = 0
        for layer, truth in zip(self._engine.decoder.cache, self._truth, strict=True):
            bits = layer.view(torch.int16)
            wrong += int((bits[:, kept] != truth.view(torch.int16)).sum())
            touched += int((bits[:, others] != 0).sum())
        assert (wrong, touched) == (0, 0), f"{wrong} wrong values, {touched} in blocks that are somebody else's"
        assert torch.equal(came.logits, self.expected.logits), "equal bytes, and other logits"

    def difference(self, other: Timed) -> float:
        """The largest difference of logits, as a share of their spread."""
        return float((other.logits - self.expected.logits).abs().max() / self.expected.logits.std())


def measure(engine: Engine, rows: Rows, link: Link, *, prefix_tokens: int, rounds: int) -> None:
    prompt = Prompt(engine, prefix_tokens)
    times: dict[str, list[float]] = {kind: [] for kind in ("cold", "hbm", "server", "ceiling", "retrieve", "link")}
    for number in range(rounds + 1):
        block_ids = prompt.place()
        cold, hbm = prompt.cold(block_ids), prompt.hbm(block_ids)
        for timed in (cold, hbm):
            difference = prompt.difference(timed)
            assert difference < NEAR, f"logits differ by {difference:.1%} of their spread"
        block_ids = prompt.place()
        rate = link.sample("retrieve")
        server, retrieve_s = prompt.server(block_ids)
        prompt.compare(block_ids, server)
        say(
            f"{prefix_tokens} round {number}: cold {cold.seconds * 1e3:.1f} ms, hbm {hbm.seconds * 1e3:.1f}, server "
            f"{server.seconds * 1e3:.1f}, of which retrieve {retrieve_s * 1e3:.1f}, link {rate:.1f} GB/s; tokens "
            f"{cold.token} {hbm.token} {server.token}; cold differs by {prompt.difference(cold):.2%}"
        )
        if number:  # the first one warms up
            sample = (cold.seconds, hbm.seconds, server.seconds, hbm.seconds + prompt.bytes / rate / 1e9)
            for kind, value in zip(("cold", "hbm", "server", "ceiling"), sample, strict=True):
                times[kind].append(value * 1e3)
            times["retrieve"].append(prompt.bytes / retrieve_s / 1e9)
            times["link"].append(rate)
    name = f"{prefix_tokens // 1024}k"
    rows.add(f"cold_{name}_ms", times["cold"], "ms")
    rows.add(f"hbm_{name}_ms", times["hbm"], "ms")
    rows.add(f"server_{name}_ms", times["server"], "ms", ceilings=times["ceiling"])
    faster = [cold / server for cold, server in zip(times["cold"], times["server"], strict=True)]
    rows.add(f"server_{name}_faster_than_cold", faster, "times")
    rows.add(f"retrieve_{name}", times["retrieve"], "GB/s", ceilings=times["link"])
    engine.client.clear(NAMESPACE)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--tokens", default="8192,32768,65536")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    prefixes = [int(tokens) for tokens in given.tokens.split(",")]
    shape = Shape()
    slab = 512 * MIB
    arena = -(-max(prefixes) * shape.token_bytes // slab) * slab + 2 * slab
    torch.manual_seed(7)
    device = torch.cuda.get_device_name(0)
    with serving(("--slab-bytes", str(slab)), arena, engine="bench-ttft") as (_, client):
        engine = Engine(client, shape, prefix_tokens_max=max(prefixes))
        config = f"{device}, torch {torch.__version__}, {engine.attention}, steps of 8192, random weights"
        rows = Rows("ttft", as_json=given.json, config=config)
        link = Link(LINK_BYTES)
        for prefix_tokens in prefixes:
            measure(engine, rows, link, prefix_tokens=prefix_tokens, rounds=given.rounds)
        say(str([mover["facts"] for mover in client.status()["movers"]]))


if __name__ == "__main__":
    main()
