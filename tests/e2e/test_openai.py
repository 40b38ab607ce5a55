"""vLLM's OpenAI server, for each shape of KV: many requests at once, the same tokens from the server, and the metrics.

Chunks are named by vLLM's block hashes.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cases import CASES, HASHES, Case
from tests.e2e.checks import CLOSE, prompt, settled, skip_what_does_not_run, whole_chunks
from tests.e2e.engine import ENVIRONMENT, transfer_config
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

START_S = 150.0
LENGTHS = (300, 520, 777, 1300)
USUAL: dict[str, object] = {
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "dtype": "float32",
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}


class Endpoint:
    """The vLLM server's HTTP API."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._process = process
        self._log = log

    def is_up(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-6000:]
        try:
            return bool(self._get("/health") == "")
        except (urllib.error.URLError, OSError):
            return False

    def complete(self, tokens: list[int]) -> tuple[list[str], list[float]]:
        """Tokens and their log-probabilities."""
        greedily = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        body = {"model": "tiny", "prompt": tokens, **greedily}
        found = json.loads(self._post("/v1/completions", body))["choices"][0]["logprobs"]
        return found["tokens"], found["token_logprobs"]

    def evict(self) -> bool:
        self._post("/reset_prefix_cache", {})
        return True

    def metric(self, name: str) -> float:
        """The metric's sum over its labels."""
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self._get("/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._base + path, timeout=60) as answer:
            return str(answer.read().decode())

    def _post(self, path: str, body: object) -> str:
        request = urllib.request.Request(
            self._base + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    skip_what_does_not_run(request.param)
    return CASES[request.param]


@pytest.fixture(scope="module")
def endpoint(case: Case, models: Path, server: Server) -> Iterator[Endpoint]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models / case.model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *flags_of({**USUAL, **case.options, **HASHES, "kv_transfer_config": transfer_config(server.path, {})}),
    ]
    ranks = case.ranks
    threads = {"VLLM_CPU_SIM_MULTI_NUMA": "1"} if ranks > 1 else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = {**os.environ, **ENVIRONMENT, **threads, "VLLM_SERVER_DEV_MODE": "1"}
    log_path = server.folder / "openai.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        running = Endpoint(port, process, log_path)
        until("the OpenAI server to be up", running.is_up, START_S)
        until("its caches to be registered", lambda: server.status().caches == ranks)
        yield running
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    until("its sessions to end", lambda: server.status().caches == 0)


def flags_of(options: dict[str, object]) -> Iterator[str]:
    for name, value in options.items():
        yield f"--{name.replace('_', '-')}"
        yield value if isinstance(value, str) else json.dumps(value)


def test_the_same_tokens_for_many_at_once(endpoint: Endpoint, case: Case, server: Server) -> None:
    prompts = [prompt(10 + place, tokens) for place, tokens in enumerate(LENGTHS)]
    held = sum(whole_chunks(tokens, case.chunk_tokens) for tokens in LENGTHS)
    computed = one_by_one(endpoint, server, prompts)
    if not case.agrees_with_itself:  # after a hit the rest is computed in another way, so compare with a hit
        computed = one_by_one(endpoint, server, prompts)
    again = one_by_one(endpoint, server, prompts)
    assert_same(again, computed)
    before = endpoint.metric("vllm:external_prefix_cache_hits_total")
    with ThreadPoolExecutor(len(prompts) * 2) as crowd:
        found = list(crowd.map(endpoint.complete, [*prompts, *prompts]))
    if case.agrees_with_itself:
        assert_same(found, [*computed, *computed])
    assert endpoint.metric("vllm:external_prefix_cache_hits_total") - before >= held
    until("the server to be at rest", lambda: settled(server))


def one_by_one(endpoint: Endpoint, server: Server, prompts: list[list[int]]) -> list[tuple[list[str], list[float]]]:
    """Answers one prompt after another. Afterwards the server holds the prompts, and the engine none."""
    answers = [endpoint.complete(item) for item in prompts]
    until("the server to be at rest", lambda: settled(server))
    until("the engine to forget its prefixes", endpoint.evict)
    return answers


def assert_same(found: list[tuple[list[str], list[float]]], wanted: list[tuple[list[str], list[float]]]) -> None:
    for (tokens, logprobs), (theirs, of_theirs) in zip(found, wanted, strict=True):
        assert tokens == theirs
        assert logprobs == pytest.approx(of_theirs, abs=CLOSE)


def test_the_connectors_counts_are_among_vllms_metrics(endpoint: Endpoint, case: Case) -> None:
    held = sum(whole_chunks(tokens, case.chunk_tokens) for tokens in LENGTHS)
    assert endpoint.metric("vllm:kvserver_tokens_stored_total") >= held
    assert endpoint.metric("vllm:kvserver_tokens_retrieved_total") >= 2 * held
    assert endpoint.metric("vllm:kvserver_retrieves_failed_total") == 0
    assert endpoint.metric("vllm:kvserver_retrieve_seconds_count") >= 2 * len(LENGTHS)
