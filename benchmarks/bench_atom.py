"""How much does the connector cost ATOM's scheduler? `python -m benchmarks.bench_atom [--json] [--smoke]`

Runs the scheduler half as ATOM constructs it, with a checkout in ATOM_DIR or the tests' stand-in. Sequences are
simulated. Microseconds on the scheduler's thread: median over the calls of a round, then over the rounds.

step: all calls in a step of 256 running sequences that decode: for each, whether it is handed over; the metadata; no
finished jobs. miss: match and allocation of a new prompt of which nothing is held; after the slash its tokens.
"absent": there is no server; "all-miss": there is one, and it holds nothing.
"""

import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, os.environ.get("ATOM_DIR") or str(ROOT / "tests" / "atom_engine" / "standin"))

from atom.kv_transfer.disaggregation.types import KVConnectorOutput, SaveOperationId  # noqa: E402

from benchmarks.rows import Rows, option_parser  # noqa: E402
from benchmarks.serving import serving  # noqa: E402
from kvclient.atom.connector import KvServerScheduler  # noqa: E402
from kvclient.atom.steps import NAMESPACE  # noqa: E402
from kvclient.atom.versions import CONFIG, PARALLEL  # noqa: E402

RUNNING = 256
LENGTHS = (1024, 8192, 131_072)
BLOCK = 16
ARENA_BYTES = 64 << 20


def scheduler_at(socket: str) -> KvServerScheduler:
    said = {
        "kv_cache_block_size": BLOCK,
        "max_num_seqs": RUNNING,
        "kv_transfer_config": {"kv_connector_extra_config": {"socket": socket, "model_id": "bench"}},
        "parallel_config": SimpleNamespace(**dict.fromkeys(PARALLEL, 0)),
    }
    half = KvServerScheduler(SimpleNamespace(**(dict.fromkeys(CONFIG) | said)))
    half.process_completions(KVConnectorOutput(finished_saving={SaveOperationId(NAMESPACE + "6e" * 32, 0)}))
    return half


def sequence(name: int, tokens: int) -> Any:
    return SimpleNamespace(
        id=name,
        status=None,
        token_ids=list(range(name, name + tokens)),
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_cached_tokens=0,
        block_table=list(range(-(-tokens // BLOCK))),
        has_per_req_cache=False,
        multimodal_data=None,
        is_finished=False,
    )


def admit(half: KvServerScheduler, seq: Any) -> float:
    began = time.perf_counter()
    tokens, waits = half.get_num_new_matched_tokens(seq)
    half.update_state_after_alloc(seq)
    took_us = (time.perf_counter() - began) * 1e6
    assert (tokens, waits) == (0, False)
    return took_us


def step(half: KvServerScheduler, running: list[Any]) -> float:
    output = KVConnectorOutput()
    began = time.perf_counter()
    for seq in running:
        half.should_park_partial_prefill_for_load(seq)
    half.build_connector_meta()
    half.process_completions(output)
    half.has_pending_work()
    return (time.perf_counter() - began) * 1e6


def measure(socket: str, *, steps: int, requests: int) -> dict[str, float]:
    """Runs one round. Returns row -> microseconds."""
    half = scheduler_at(socket)
    took: dict[str, list[float]] = defaultdict(list)
    for tokens in LENGTHS:
        for number in range(requests):
            seq = sequence(number, tokens)
            took[f"miss/{tokens}"].append(admit(half, seq))
            half.request_finished(seq)
    running = [sequence(number, 100) for number in range(RUNNING)]  # shorter than a chunk, so nothing is stored
    for seq in running:
        admit(half, seq)
        seq.num_cached_tokens = seq.num_prompt_tokens
    for _ in range(steps):
        took["step"].append(step(half, running))
    half._half.close()
    return {name: statistics.median(values) for name, values in took.items()}


def main() -> None:
    given = option_parser(__doc__, smoke="few calls").parse_args()
    steps, requests, rounds = (3, 2, 1) if given.smoke else (500, 20, 5)
    rows = Rows("atom", as_json=given.json, config=f"{RUNNING} running, {steps} steps a round, block {BLOCK}")
    with serving((), ARENA_BYTES, engine="bench", rank=-1) as (server, _):
        for name, socket in (("absent", str(server.socket) + ".none"), ("all-miss", str(server.socket))):
            runs: dict[str, list[float]] = defaultdict(list)
            for _ in range(rounds):
                for what, took_us in measure(socket, steps=steps, requests=requests).items():
                    runs[what].append(took_us)
            for what, values in runs.items():
                rows.add(f"{name} {what}", values, "us")


if __name__ == "__main__":
    main()
