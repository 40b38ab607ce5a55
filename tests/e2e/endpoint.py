"""vLLM's OpenAI server in its own process, and its HTTP API."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.engine import ENVIRONMENT, START_S
from tests.process.harness import until

USUAL: dict[str, object] = {
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "dtype": "float32",
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}
GREEDILY = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}


class Endpoint:
    """The vLLM server's HTTP API."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]", log: Path, *, health: str = "/health") -> None:
        """health: a page that is there as soon as the server is."""
        self.base = f"http://127.0.0.1:{port}"
        self._process = process
        self._log, self._health = log, health

    def is_up(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-6000:]
        try:
            self._get(self._health)
            return True
        except (urllib.error.URLError, OSError):
            return False

    @property
    def pid(self) -> int:
        return self._process.pid

    def complete(
        self, tokens: list[int], *, replica: int | None = None, **more: object
    ) -> tuple[list[str], list[float]]:
        """Tokens and their log-probabilities. replica: the one that computes, of several. more: fields of the body."""
        chosen = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        answer = self._post("/v1/completions", {**GREEDILY, "prompt": tokens, **more}, **chosen)
        found = json.loads(answer)["choices"][0]["logprobs"]
        return found["tokens"], found["token_logprobs"]

    def answer(self, tokens: list[int], **more: object) -> dict[str, Any]:
        """The whole answer to a request whose body has these further fields, and none besides."""
        answer: dict[str, Any] = json.loads(self._post("/v1/completions", {"prompt": tokens, **more}))
        return answer

    def stream(self, tokens: list[int]) -> list[str]:
        """The tokens of an answer that comes as a stream."""
        said = self._post("/v1/completions", {**GREEDILY, "prompt": tokens, "stream": True})
        events = [json.loads(line) for line in re.findall(r"^data: (\{.*)$", said, re.MULTILINE)]
        assert said.endswith("data: [DONE]\n\n")
        return [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]]

    def evict(self) -> bool:
        self._post("/reset_prefix_cache", {})
        return True

    def metric(self, name: str, label: str = "") -> float:
        """The metric's sum over its labels, or over those that contain `label`."""
        labels = rf"{{[^}}]*{re.escape(label)}[^}}]*}}" if label else r"(?:{[^}]*})?"
        found = re.findall(rf"^{re.escape(name)}{labels} (\S+)$", self._get("/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.base + path, timeout=60) as answer:
            return str(answer.read().decode())

    def _post(self, path: str, body: object, **headers: str) -> str:
        request = urllib.request.Request(
            self.base + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return str(answer.read().decode())


@contextmanager
def serving(
    model: Path,
    options: dict[str, object],
    *,
    workers: int,
    log: Path,
    flags: Sequence[str] = (),
    start_s: float = START_S,
) -> Iterator[Endpoint]:
    """A running server. workers: its worker processes. flags: options without a value."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *flags),
        *_flags_of({**USUAL, **options}),
    ]
    threads = {"VLLM_CPU_SIM_MULTI_NUMA": "1"} if workers > 1 else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = {**os.environ, **ENVIRONMENT, **threads, "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True
        )
    try:
        running = Endpoint(port, process, log)
        until("the OpenAI server to be up", running.is_up, start_s)
        yield running
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _flags_of(options: dict[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if value is None:
            continue
        yield f"--{name.replace('_', '-')}"
        yield value if isinstance(value, str) else json.dumps(value)
