"""Through vLLM's OpenAI server: many requests at once, the same tokens from the server's memory, and the metrics."""

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

from tests.e2e.checks import CLOSE, prompt, settled, whole_chunks
from tests.e2e.engine import ENVIRONMENT, transfer_config
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

START_S = 150.0
LENGTHS = (300, 520, 777, 1300)


class Endpoint:
    """The server's HTTP side."""

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
        """Summed over its labels."""
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


@pytest.fixture(scope="module")
def endpoint(models: Path, server: Server) -> Iterator[Endpoint]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models / "llama")),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", "2048", "--dtype", "float32", "--block-size", "32", "--max-num-seqs", "4"),
        *(
            "--kv-cache-memory-bytes",
            str(64 << 20),
            "--kv-transfer-config",
            json.dumps(transfer_config(server.path, {})),
        ),
        *("--prefix-caching-hash-algo", "sha256_cbor"),
    ]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    log_path = server.folder / "openai.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        running = Endpoint(port, process, log_path)
        until("the OpenAI server to be up", running.is_up, START_S)
        yield running
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def test_the_same_tokens_for_many_at_once(endpoint: Endpoint, server: Server) -> None:
    prompts = [prompt(10 + place, tokens) for place, tokens in enumerate(LENGTHS)]
    computed = [endpoint.complete(item) for item in prompts]
    until("the server to be at rest", lambda: settled(server))
    until("the engine to forget its prefixes", endpoint.evict)
    before = endpoint.metric("vllm:external_prefix_cache_hits_total")
    with ThreadPoolExecutor(len(prompts) * 2) as crowd:
        found = list(crowd.map(endpoint.complete, [*prompts, *prompts]))
    for (tokens, logprobs), (wanted, theirs) in zip(found, [*computed, *computed], strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(theirs, abs=CLOSE)
    hits = endpoint.metric("vllm:external_prefix_cache_hits_total") - before
    assert hits >= sum(map(whole_chunks, LENGTHS))
    until("the server to be at rest", lambda: settled(server))


def test_the_connectors_counts_are_among_vllms_metrics(endpoint: Endpoint) -> None:
    assert endpoint.metric("vllm:kvserver_tokens_stored_total") >= sum(map(whole_chunks, LENGTHS))
    assert endpoint.metric("vllm:kvserver_tokens_retrieved_total") >= sum(map(whole_chunks, LENGTHS))
    assert endpoint.metric("vllm:kvserver_retrieves_failed_total") == 0
    assert endpoint.metric("vllm:kvserver_retrieve_seconds_count") >= len(LENGTHS)
