"""Data parallel: each replica is an engine of its own, with its own cache. They share a server, and each other's work.

With a mixture of experts, the replicas also share the experts' work (expert parallel).
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cases import HASHES
from tests.e2e.checks import CLOSE, prompt, settled, whole_chunks
from tests.e2e.engine import ENVIRONMENT, transfer_config
from tests.e2e.test_openai import START_S, USUAL, Endpoint, flags_of
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

REPLICAS = 2
LENGTH = 700


class Replicas(Endpoint):
    def ask(self, tokens: list[int], *, replica: int) -> tuple[list[str], list[float]]:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        request = urllib.request.Request(
            self._base + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-data-parallel-rank": str(replica)},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.loads(answer.read())["choices"][0]["logprobs"]
        return found["tokens"], found["token_logprobs"]

    def hits(self, replica: int) -> float:
        """Tokens that this replica found outside its own cache."""
        name = rf'^vllm:external_prefix_cache_hits_total{{[^}}]*engine="{replica}"[^}}]*}} (\S+)$'
        return sum(map(float, re.findall(name, self._get("/metrics"), re.MULTILINE)))


@pytest.fixture(scope="module", params=["llama", "experts"])
def replicas(request: pytest.FixtureRequest, models: Path, server: Server) -> Iterator[Replicas]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    more: dict[str, object] = {"data_parallel_size": REPLICAS, "kv_transfer_config": transfer_config(server.path, {})}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models / request.param)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *(["--enable-expert-parallel"] if request.param == "experts" else []),
        *flags_of({**USUAL, **HASHES, **more}),
    ]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}
    log_path = server.folder / f"replicas-{request.param}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        running = Replicas(port, process, log_path)
        until("the OpenAI server to be up", running.is_up, 2 * START_S)
        until("both caches to be registered", lambda: server.status().caches == REPLICAS)
        yield running
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    until("the replicas' sessions to end", lambda: server.status().caches == 0)


def test_a_replica_finds_what_another_computed(replicas: Replicas, server: Server) -> None:
    before = replicas.hits(1)
    computed = replicas.ask(prompt(1, LENGTH), replica=0)
    until("the stores to end", lambda: settled(server))
    found = replicas.ask(prompt(1, LENGTH), replica=1)
    assert replicas.hits(1) - before == whole_chunks(LENGTH)
    assert found[0] == computed[0]
    assert found[1] == pytest.approx(computed[1], abs=CLOSE)
