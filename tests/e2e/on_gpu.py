"""The end-to-end checks on a real GPU, unattended: one line per check, and the cost of a prefix from each place.

    python -m tests.e2e.on_gpu                      # tokens and log-probabilities, tiny model with random weights
    python -m tests.e2e.on_gpu --kinds llama fp8 latent window    # the same for several kinds of KV
    python -m tests.e2e.on_gpu --ttft 8192 32768    # time to first token: computed, from HBM, evicted from HBM;
                                                    # without a connector, with vLLM's own offloading, with a server
    python -m tests.e2e.on_gpu --misses 8192 32768  # unknown prompts, alternating between an engine without a
                                                    # connector and one with a server; both run all the time
    python -m tests.e2e.on_gpu --rounds 33000       # two GPUs, latent attention: a conversation whose second and
                                                    # third round find all earlier tokens in the server
    python -m tests.e2e.on_gpu --replicas llama-long experts    # two GPUs, data parallel: a replica finds what the
                                                    # other stored. experts: also with expert parallel
    python -m tests.e2e.on_gpu --sleep --device portable    # the driver gets the memory back, and a prompt is found
                                                    # after it
    --device portable: all bytes go through torch and the host. A second engine, which shares its memory, must find what
    the first stored. With --ttft it is an arm of its own: --arms kvserver portable
    --graphs: vLLM's usual mode, with compiled code and CUDA graphs. Otherwise eager, which starts sooner.

Needs a GPU, vLLM (0.20.2 or newer), transformers, and kvserver installed. Exit status 1 if a check failed. A kind that
this release is known not to run is skipped, with vLLM's own reason or the connector's. On a CPU it can be rehearsed:
--kinds llama groups n-grams, with asynchronous scheduling off.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tests.e2e.arena import flip_stored_bytes
from tests.e2e.checks import prompt, release, settled
from tests.e2e.endpoint import serving
from tests.e2e.engine import DEVICE, TRIES_STAGES, Answer, Engine, transfer_config
from tests.e2e.rounds import Conversation, mismatches
from tests.process.harness import Server, until

TOKENS = 16
BLOCK_TOKENS = 32
LATENT_BLOCK_TOKENS = 64
POOL_TOKENS = 11_200
FILLERS, FILLER_TOKENS = 4, 3600
"""Together these prompts push everything else out of the pool."""
CONTEXT_TOKENS = 4096
LENGTHS = (1285, 2053, 3845)
"""Five tokens more than whole chunks: the same tokens remain to be computed after a hit in HBM or in the server.

So even bfloat16 gives the same bits.
"""


RANKS = 2
TWO_GPUS: dict[str, object] = {
    "tensor_parallel_size": RANKS,
    "disable_custom_all_reduce": True,  # some virtual machines do not let GPUs access each other's memory
}
NO_SYMMETRIC_MEMORY = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}


class Refusal(NamedTuple):
    """What vLLM or the connector says where a release cannot run a kind."""

    text: str
    since: tuple[int, int]
    before: tuple[int, int]
    """Releases that may say so. From any other it is a failure."""


EVER, NEVER = (0, 0), (1, 0)
NO_FAILED_REQUESTS = Refusal("this release of vLLM cannot be told of failed loads of windows and states", EVER, (0, 30))
NO_RETENTION = Refusal("unexpected keyword argument 'prefix_cache_retention_interval'", EVER, (0, 30))
SAVES_EARLY = Refusal("this release of vLLM may have blocks saved before a draft model computes", EVER, (0, 31))
NO_STAGES = Refusal("pipeline_parallel_size", EVER, (0, 31))
NOT_ONE_GROUP = Refusal(
    "Hybrid KV cache manager is disabled but failed to convert the KV cache specs to one unified type", (0, 21), NEVER
)


class Kind(NamedTuple):
    """A kind of KV, or of engine."""

    model: str
    block_tokens: int = BLOCK_TOKENS
    options: Mapping[str, object] = MappingProxyType({})
    environment: Mapping[str, str] = MappingProxyType({})
    beside: str = ""
    """What is built beside the model: an adapter, or a head that drafts."""
    groups: int = 1
    """Groups of layers that take blocks for every token, all from one pool. A state takes few."""
    is_asynchronous: bool = True
    """Whether vLLM schedules it asynchronously."""
    refusals: tuple["Refusal", ...] = ()
    """Why releases are known not to start it."""

    @property
    def ranks(self) -> int:
        return self._parallel("tensor") * self._parallel("pipeline")

    @property
    def contexts(self) -> int:
        """Ranks over which vLLM deals out the tokens of a block."""
        return self._parallel("decode_context")

    def _parallel(self, kind: str) -> int:
        return int(str(self.options.get(f"{kind}_parallel_size", 1)))


KINDS = {
    "llama": Kind("llama-long"),
    "runner-v1": Kind("llama-long", environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "runner-v2": Kind("llama-long", environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "fp8": Kind("llama-long", options={"kv_cache_dtype": "fp8"}),
    "fp8-heads": Kind("llama-long", options={"kv_cache_dtype": "fp8_per_token_head"}),
    "latent": Kind("mla-long", LATENT_BLOCK_TOKENS),
    "window": Kind("gemma3", options={"disable_hybrid_kv_cache_manager": True}, refusals=(NOT_ONE_GROUP,)),
    "groups": Kind("gemma3", groups=3, refusals=(NO_FAILED_REQUESTS,)),
    "states": Kind(
        "lfm2",
        options={"prefix_cache_retention_interval": 256},
        refusals=(NO_RETENTION, NO_FAILED_REQUESTS),
    ),
    "n-grams": Kind(
        "llama-long",
        options={
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_max": 2,
                "prompt_lookup_min": 1,
            }
        },
        is_asynchronous=False,
    ),
    "head": Kind("llama", beside="head", refusals=(SAVES_EARLY,)),
    "adapter": Kind("llama", options={"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}, beside="adapter"),
    "two-gpus": Kind("llama-long", options=TWO_GPUS, environment=NO_SYMMETRIC_MEMORY),
    "contexts": Kind(
        "mla-long",
        LATENT_BLOCK_TOKENS,
        options={**TWO_GPUS, "decode_context_parallel_size": RANKS},
        environment=NO_SYMMETRIC_MEMORY,
    ),
    "stages": Kind("llama-long", options={"pipeline_parallel_size": RANKS}, refusals=(NO_STAGES,)),
}
"""window: 0.20.2 allows a connector only one group of layers, so layers with sliding windows keep the whole prompt.

groups, states: vLLM 0.30 and newer. n-grams: vLLM turns asynchronous scheduling off beside them.
"""
SLEEP_POOL_TOKENS = 1 << 18
SLEEP_POOL_MIB = SLEEP_POOL_TOKENS * 4 * 2 * 2 * 128 * 2 >> 20
"""Of llama-long: layers, K and V, heads, head size, bfloat16."""
SPARE_TOKENS = 4096
"""Free tokens in a pool sized for the longest prompt."""
LLAMA_8B_TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
OURS = {"kvserver": "", "portable": "portable"}
"""Arms with a server -> the connector's option `device`."""
ARMS = ("none", "native", *OURS)
GRAPHS: dict[str, object] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
}
"""Captures graphs also for the few tokens that remain after a hit; vLLM skips these sizes with so few sequences."""
START_S = 400.0
"""Time to start, including compilation."""
MODEL_ID: dict[str, object] = {"model_id": "dummy-8b"}
OFFLOAD_GIB = 40
MORE_TOKENS = 1000
"""New tokens in every round but the first."""
LATENT_BYTES = 5 * 576 * 2
"""Layers, latent and position, bf16; stored once for both ranks."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class NotRunHere(Exception):
    """This release is known not to run a kind, for the reason that is told."""


class Checks:
    """Runs checks, and continues after a failed one."""

    def __init__(self) -> None:
        self.failed = self.skipped = 0

    def check(self, name: str, what: Callable[[], str]) -> None:
        began_s = time.monotonic()
        try:
            told = what()
            print(f"ok: {name}: {told} ({time.monotonic() - began_s:.1f} s)", flush=True)
        except NotRunHere as reason:
            self.skipped += 1
            print(f"skipped: {name}: {reason}", flush=True)
        except Exception as problem:  # the other checks still run
            self.failed += 1
            print(f"FAILED: {name}: {type(problem).__name__}: {str(problem)[-3000:]}", flush=True)
            traceback.print_exc()


def fill(engine: Engine, seed: int) -> None:
    """Pushes everything else out of the engine's pool."""
    engine.generate([prompt(seed + filler, FILLER_TOKENS) for filler in range(FILLERS)], tokens=1)


def ask(engine: Engine, tokens: int) -> Answer:
    return engine.generate([prompt(tokens % 97, tokens)], tokens=TOKENS)[0]


def usual(engine: Engine, *, is_asynchronous: bool = True) -> str:
    """Checks that vLLM's default features are on. Asynchronous scheduling is one, except on CPUs."""
    features = engine.call("features")
    assert all(features.values()), features
    expected = is_asynchronous and not engine.call("is_on_cpu")
    found = engine.call("is_asynchronous")
    assert found == expected, f"asynchronous scheduling is {found}; expected {expected}"
    return ", ".join([*features, "asynchronous" if found else "not asynchronous"])


def clean(engine: Engine) -> str:
    """Checks that no load failed. Answers and times would not show it, because a failed load is computed."""
    counted = engine.call("metrics")
    failures = {name: counted.get(name) for name in ("vllm:kvserver_retrieves_failed", "vllm:kvserver_bugs")}
    assert not any(value != 0 for value in failures.values()), failures
    return "no load failed"


def identity(checks: Checks, model: Path, kind: Kind, graphs: dict[str, object]) -> str:
    options = small(kind, graphs)
    if kind.beside == "head":
        options["speculative_config"] = {
            "method": "eagle",
            "model": str(model.parent / "head"),
            "num_speculative_tokens": 3,
        }
    with Server(arena_bytes=2 << 30) as server:
        with started(kind, model, server.path, environment=dict(kind.environment), **options) as engine:
            until("the cache to be registered", lambda: server.status().caches == kind.ranks, 60)
            same = Same(engine, server, kind)
            checks.check("features", partial(usual, engine, is_asynchronous=kind.is_asynchronous))
            checks.check("from HBM", same.from_hbm)
            checks.check("from the server", same.from_server)
            if kind.beside == "adapter":
                checks.check("with an adapter", partial(same.adapted, model.parent / "adapter"))
            checks.check("loads", partial(clean, engine))
        # It shares its memory, also where the first one does not.
        environment = {"PYTHONHASHSEED": "7", **kind.environment}
        shares: dict[str, object] = {"device": ""}
        with Engine(model, server.path, environment=environment, connector=shares, start_s=START_S, **options) as other:
            checks.check("a second engine", partial(same.elsewhere, other))
            checks.check("its loads", partial(clean, other))
            checks.check("changed bytes are noticed", partial(same.flipped, other))
    return "both engines started"


def started(kind: Kind, model: Path, socket: Path, *, environment: dict[str, str], **options: object) -> Engine:
    """An engine that has started. NotRunHere if the release refuses the kind as it is known to."""
    engine = Engine(model, socket, environment=environment, start_s=START_S, **options)
    try:
        engine.wait_started()
    except Exception as problem:  # why it did not start is in its text
        log = engine.log()
        engine.close()
        if why := known_refusal(kind, f"{problem} {log}", release()):
            raise NotRunHere(why) from None
        raise
    return engine


def known_refusal(kind: Kind, said: str, of: tuple[int, ...]) -> str:
    """The reason that this release is known to give for this kind. Empty if it gave none of them."""
    return next((text for text, since, before in kind.refusals if text in said and since <= of < before), "")


def small(kind: Kind, graphs: dict[str, object]) -> dict[str, object]:
    """Options of an engine with a small pool, beside which others have room on the GPU."""
    return {
        **graphs,
        **kind.options,
        "dtype": "bfloat16",
        "block_size": kind.block_tokens,
        "num_gpu_blocks_override": kind.groups * POOL_TOKENS // (kind.block_tokens * kind.contexts),
        "max_model_len": CONTEXT_TOKENS,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.1,
    }


class Same:
    """Answers of one engine, wherever its prefixes come from."""

    def __init__(self, engine: Engine, server: Server, kind: Kind) -> None:
        self._engine = engine
        self._server = server
        self._ranks = kind.ranks
        self._drafts = kind.beside == "head"
        self._computed: dict[int, Answer] = {}
        self._local: dict[int, Answer] = {}

    def from_hbm(self) -> str:
        for tokens in LENGTHS:
            self._computed[tokens] = ask(self._engine, tokens)
            self._local[tokens] = ask(self._engine, tokens)
            # With a head vLLM does without the last block that it has.
            least = tokens - 5 - (BLOCK_TOKENS if self._drafts else 0)
            assert least <= self._local[tokens].cached_tokens <= tokens - 5, self._local[tokens]
        return f"{[answer.cached_tokens for answer in self._local.values()]} tokens"

    def from_server(self) -> str:
        self._forget(self._engine, 200)
        before = self._retrieves()
        for tokens in LENGTHS:
            self._compare(self._engine, tokens)
        retrieves = self._retrieves() - before
        assert retrieves == len(LENGTHS) * self._ranks, retrieves
        return f"{retrieves} retrieves, tokens and log-probabilities are the same"

    def adapted(self, adapter: Path) -> str:
        """With an adapter the same prompt is another, and comes back as well."""

        def asked() -> Answer:
            return self._engine.generate([prompt(tokens % 97, tokens)], tokens=TOKENS, adapter=str(adapter))[0]

        tokens = LENGTHS[0]
        self._forget(self._engine, 220)
        first = asked()
        assert first.cached_tokens == 0, first
        wanted = asked()
        assert wanted.tokens != self._local[tokens].tokens, wanted
        self._forget(self._engine, 230)
        found = asked()
        assert found == wanted, (found, wanted)
        self._compare(self._engine, tokens)
        return "it finds what it stored, with and without"

    def flipped(self, other: Engine) -> str:
        """A prompt whose load fails is computed in one step, as it was the first time: with the same bits."""
        self._forget(other, 210)
        flip_stored_bytes(self._server.mover_pid())
        for tokens in LENGTHS:
            found, wanted = ask(other, tokens), self._computed[tokens]
            assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs), (found, wanted)
        return f"{mismatches(self._server)} chunks with other bytes were noticed, and the answers are the same"

    def elsewhere(self, other: Engine) -> str:
        for tokens in LENGTHS:
            self._compare(other, tokens)
        return "another process finds what the first stored"

    def _compare(self, engine: Engine, tokens: int) -> None:
        found, wanted = ask(engine, tokens), self._local[tokens]
        if self._drafts:  # other tokens of the prompt remain to be computed, which rounds differently
            assert found.tokens == wanted.tokens, (found, wanted)
            assert found.cached_tokens >= wanted.cached_tokens, (found, wanted)
        else:
            assert found == wanted, (found, wanted)

    def _forget(self, engine: Engine, seed: int) -> None:
        until("the stores to end", lambda: settled(self._server), 60)
        fill(engine, seed)

    def _retrieves(self) -> int:
        return int(str(self._server.status().counters["retrieves"]))


def asleep(checks: Checks, model: Path) -> None:
    """Sleep gives the KV cache's memory back to the driver, which counts it."""
    kind = KINDS["llama"]
    options = {**small(kind, {}), "enable_sleep_mode": True}
    options["num_gpu_blocks_override"] = SLEEP_POOL_TOKENS // BLOCK_TOKENS
    with (
        Server(arena_bytes=2 << 30) as server,
        Engine(model, server.path, start_s=START_S, **options) as engine,
    ):
        until("the cache to be registered", lambda: server.status().caches == 1, 60)
        wanted = {}

        def gives_back() -> str:
            for tokens in LENGTHS:
                wanted[tokens] = ask(engine, tokens)
            until("the stores to end", lambda: settled(server), 60)
            awake = used_mib()
            engine.call("sleep", 1, "abort")
            sleeping = used_mib()
            assert awake - sleeping >= SLEEP_POOL_MIB, (awake, sleeping)
            assert engine.call("wake")
            return (
                f"{awake} MiB in use awake, {sleeping} asleep, {used_mib()} awake again; the pool has {SLEEP_POOL_MIB}"
            )

        def finds() -> str:
            for _ in range(2):  # vLLM before 0.33 names all chunks anew after a sleep
                for tokens in LENGTHS:
                    ask(engine, tokens)
                until("the stores to end", lambda: settled(server), 60)
                engine.evict()
            for tokens in LENGTHS:
                found = ask(engine, tokens)
                assert (found.tokens, found.cached_tokens) == (wanted[tokens].tokens, tokens - 5), (found, wanted)
            return "stored after it, and found"

        checks.check("memory", gives_back)
        checks.check("from the server", finds)
        checks.check("loads", partial(clean, engine))


def replicated(checks: Checks, model: Path) -> None:
    """Data parallel: two replicas, each on a GPU of its own, and one server. Experts are divided between them."""
    flags = ["--enable-expert-parallel"] if model.name == "experts" else []
    with Server(arena_bytes=2 << 30) as server:
        options: dict[str, object] = {
            "kv_transfer_config": transfer_config(server.path, {}),
            "data_parallel_size": RANKS,
            "dtype": "bfloat16",
            "max_model_len": CONTEXT_TOKENS // 2,
            "gpu_memory_utilization": 0.1,
        }
        log = Path(os.environ.get("KVSERVER_E2E_LOGS", server.folder)) / "replicas.log"

        def finds() -> str:
            with serving(model, options, workers=1, log=log, flags=flags, start_s=START_S) as running:
                until("both caches to be registered", lambda: server.status().caches == RANKS, 60)
                tokens = LENGTHS[0]
                running.complete(prompt(1, tokens), replica=0)
                until("the stores to end", lambda: settled(server), 60)
                wanted = running.complete(prompt(1, tokens), replica=0)
                found = running.complete(prompt(1, tokens), replica=1)
                brought = running.metric("vllm:external_prefix_cache_hits_total", 'engine="1"')
                assert brought == tokens - 5, brought
                assert found == wanted, (found, wanted)
                return f"replica 1 found {brought:.0f} tokens; tokens and log-probabilities are replica 0's from HBM"

        checks.check(f"{model.name}, two replicas{' with expert parallel' if flags else ''}", finds)


def used_mib() -> int:
    """Memory of all GPUs that is in use, as the driver counts it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.split()))


def rounds(checks: Checks, model: Path, tokens: int, graphs: dict[str, object]) -> None:
    """A conversation on two ranks. Between questions, other prompts push everything out of the engine's pool."""
    context = tokens + 4 * MORE_TOKENS
    options: dict[str, object] = {
        **graphs,
        "dtype": "bfloat16",
        **TWO_GPUS,
        "block_size": LATENT_BLOCK_TOKENS,
        "num_gpu_blocks_override": context // LATENT_BLOCK_TOKENS + 2,
        "max_model_len": context,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.3,
    }
    with (
        Server(arena_bytes=4 << 30) as server,
        Engine(model, server.path, environment=NO_SYMMETRIC_MEMORY, start_s=START_S, **options) as engine,
    ):
        until("both ranks to be registered", lambda: server.status().caches == RANKS, 60)
        filler_tokens = context // 2 + LATENT_BLOCK_TOKENS
        conversation = Conversation(engine, server, filler_tokens=filler_tokens, token_bytes=LATENT_BYTES, ranks=RANKS)
        checks.check("features", partial(usual, engine))
        for number, new_tokens in enumerate((tokens, MORE_TOKENS, MORE_TOKENS), 1):
            checks.check(f"round {number}", partial(conversation.round, new_tokens))
        checks.check("what is stored", conversation.stored_once)
        checks.check("loads", partial(clean, engine))
        checks.check("changed bytes are noticed", conversation.flipped)


def llama_8b(folder: Path, longest: int, graphs: dict[str, object]) -> dict[str, object]:
    """Options for engines of Llama-8B's shape whose pool fits the longest prompt. Writes the model's configuration."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "block_size": BLOCK_TOKENS,
        "max_model_len": longest + 64,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": (longest + SPARE_TOKENS) // BLOCK_TOKENS,
        "kv_cache_memory_bytes": (longest + SPARE_TOKENS) * LLAMA_8B_TOKEN_BYTES,
        **graphs,
    }


def ttft(
    checks: Checks, lengths: list[int], arms: list[str], folder: Path, *, turns: int, graphs: dict[str, object]
) -> None:
    """Runs the same prompts on one engine after another: no connector, vLLM's own CPU offloading, and a server."""
    longest = max(lengths)
    options = llama_8b(folder, longest, graphs)
    options["disable_hybrid_kv_cache_manager"] = True  # 0.20.2's own offloading requires it
    with Server(arena_bytes=OFFLOAD_GIB << 30) as server:
        for arm in arms:
            if arm not in OURS:
                options["kv_transfer_config"] = None
            if arm == "native":
                options["kv_offloading_size"] = OFFLOAD_GIB
            # Each arm computes its prompts first, so it must not find another's.
            connector: dict[str, object] = {"model_id": f"dummy-8b-{arm}", "device": OURS.get(arm, "")}
            with Engine(folder, server.path, connector=connector, patient=False, start_s=START_S, **options) as engine:
                if arm in OURS:
                    until("the cache to be registered", lambda: server.status().caches == 1, 120)
                checks.check(f"{arm}: features", partial(usual, engine))
                for tokens in lengths:
                    checks.check(
                        f"{arm}: {tokens} tokens, milliseconds, median of {turns} (smallest - largest)",
                        partial(first_token, engine, server, tokens=tokens, longest=longest, turns=turns, arm=arm),
                    )
                if arm in OURS:
                    checks.check(f"{arm}: loads", partial(clean, engine))
            for option in ("kv_transfer_config", "kv_offloading_size"):
                options.pop(option, None)


def first_token(engine: Engine, server: Server, *, tokens: int, longest: int, turns: int, arm: str) -> str:
    """Time to the first token of a prompt that is unknown, in HBM (at once, and after its store), or evicted.

    Each time the source of its tokens is checked.
    """

    def found(seed: int, cached_tokens: int, from_server: int) -> float:
        before = retrieved_tokens(server)
        answer, took_ms = timed(engine, prompt(seed, tokens))
        assert cached_tokens <= answer.cached_tokens <= cached_tokens + BLOCK_TOKENS, (answer, cached_tokens)
        retrieved = retrieved_tokens(server) - before
        assert retrieved == from_server, (retrieved, from_server)
        return took_ms

    def quiet() -> None:
        until("the stores to end", lambda: settled(server), 60)
        time.sleep(0.2)  # vLLM's own offloading cannot be queried

    def push_out(turn: int) -> None:
        for filler, length in enumerate((longest, SPARE_TOKENS + BLOCK_TOKENS)):
            timed(engine, prompt(tokens * 100 + 60 + 20 * filler + turn, length))
            quiet()

    in_pool = (
        tokens - BLOCK_TOKENS
    )  # vLLM does not reuse the last block of its own pool: it needs the last token's output
    rows: dict[str, list[float]] = {"computed": [], "HBM, at once": [], "HBM, stored": [], "evicted": []}
    engine.generate(
        [prompt(tokens * 100 + 1, tokens)], tokens=2
    )  # warms up the kernels for this length and for one token
    for turn in range(turns):
        seed = tokens * 100 + 10 + turn
        rows["computed"].append(found(seed, 0, 0))
        rows["HBM, at once"].append(found(seed, in_pool, 0))
        quiet()
        rows["HBM, stored"].append(found(seed, in_pool, 0))
        if arm != "none":
            push_out(turn)
            rows["evicted"].append(found(seed, in_pool, tokens if arm in OURS else 0))
    return ", ".join(
        f"{name} {statistics.median(row):.1f} ({min(row):.1f} - {max(row):.1f})" for name, row in rows.items() if row
    )


def misses(checks: Checks, lengths: list[int], folder: Path, *, pairs: int, graphs: dict[str, object]) -> None:
    """Two engines on one GPU, only one of them busy at a time."""
    options = llama_8b(folder, max(lengths), graphs)
    options["gpu_memory_utilization"] = 0.4  # this share of the GPU's memory must be free when each starts
    with (
        Server(arena_bytes=OFFLOAD_GIB << 30) as server,
        Engine(folder, server.path, connector=MODEL_ID, patient=False, start_s=START_S, **options) as ours,
        Engine(folder, server.path, kv_transfer_config=None, start_s=START_S, **options) as bare,
    ):
        until("the cache to be registered", lambda: server.status().caches == 1, 120)
        for name, engine in (("with", ours), ("without", bare)):
            checks.check(f"{name}: features", partial(usual, engine))
        for tokens in lengths:
            checks.check(
                f"{tokens} tokens that nobody knows, milliseconds, {pairs} pairs by turns",
                partial(by_turns, bare, ours, server, tokens=tokens, pairs=pairs),
            )
        checks.check("loads", partial(clean, ours))


def by_turns(bare: Engine, ours: Engine, server: Server, *, tokens: int, pairs: int) -> str:
    """Asks both engines the same prompt. The order alternates from pair to pair."""
    rows: dict[str, list[float]] = {"without": [], "with": []}
    for pair in range(-1, pairs):
        turn = [("without", bare), ("with", ours)]
        for name, engine in turn if pair % 2 else reversed(turn):
            answer, took_ms = timed(engine, prompt(tokens * 1000 + pair, tokens))
            assert answer.cached_tokens == 0, answer
            until("the stores to end", lambda: settled(server), 60)
            if pair >= 0:  # the first pair warms up the kernels for this length
                rows[name].append(took_ms)
    ratios = [ours_ms / bare_ms for bare_ms, ours_ms in zip(rows["without"], rows["with"], strict=True)]
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    return (
        ", ".join(
            f"{name} {statistics.median(row):.1f} ({min(row):.1f} - {max(row):.1f})" for name, row in rows.items()
        )
        + f", with / without in a pair {mean:.4f} +- {error:.4f} ({min(ratios):.3f} - {max(ratios):.3f})"
    )


def timed(engine: Engine, tokens: list[int]) -> tuple[Answer, float]:
    """The engine's first token for this prompt, and the milliseconds until it."""
    began_s = time.perf_counter()
    answer = engine.generate([tokens], tokens=1)[0]
    return answer, (time.perf_counter() - began_s) * 1e3


def retrieved_tokens(server: Server) -> int:
    count = server.status().counters["bytes_retrieved"]
    assert isinstance(count, int)
    return count // LLAMA_8B_TOKEN_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model with weights; otherwise a tiny one is built")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["llama"], metavar="KIND")
    parser.add_argument("--ttft", type=int, nargs="+", metavar="TOKENS")
    parser.add_argument("--misses", type=int, nargs="+", metavar="TOKENS")
    parser.add_argument("--pairs", type=int, default=20, help="of each length of --misses")
    parser.add_argument("--rounds", type=int, metavar="TOKENS", help="of the first round, on two GPUs")
    parser.add_argument("--replicas", nargs="+", choices=["llama-long", "experts"], metavar="MODEL", help="on two GPUs")
    parser.add_argument("--sleep", action="store_true", help="with --device portable: other memory cannot be shared")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["none", "native", "kvserver"])
    parser.add_argument("--device", choices=["portable"], help="of all engines that --ttft does not compare")
    parser.add_argument("--turns", type=int, default=5, help="of each arm and length")
    parser.add_argument("--graphs", action="store_true")
    options = parser.parse_args()
    graphs = GRAPHS if options.graphs else {}
    os.environ.setdefault(TRIES_STAGES, "1")
    if options.device:
        os.environ[DEVICE] = options.device
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="kv-model-") as folder:
        if options.ttft:
            ttft(checks, options.ttft, options.arms, Path(folder), turns=options.turns, graphs=graphs)
        elif options.misses:
            misses(checks, options.misses, Path(folder), pairs=options.pairs, graphs=graphs)
        elif options.rounds:
            rounds(checks, options.model or built(Path(folder), "mla-long"), options.rounds, graphs)
        elif options.replicas:
            for name in options.replicas:
                replicated(checks, built(Path(folder), name))
        elif options.sleep:
            asleep(checks, options.model or built(Path(folder), KINDS["llama"].model))
        else:
            for name in options.kinds:
                print(f"-- {name}", flush=True)
                kind = KINDS[name]
                model = options.model or built(Path(folder) / name, kind.model, *filter(None, [kind.beside]))
                checks.check(f"{name}, engines", partial(identity, checks, model, kind, graphs))
    if checks.skipped:
        print(f"{checks.skipped} skipped", flush=True)
    return 1 if checks.failed else 0


def built(folder: Path, name: str, *beside: str) -> Path:
    """Builds a model with random weights in another process, so that this one loads no framework."""
    subprocess.run([sys.executable, "-m", "tests.e2e.models", str(folder), name, *beside], check=True, timeout=180)
    return folder / name


if __name__ == "__main__":
    sys.exit(main())
