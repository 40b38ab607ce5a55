"""A vLLM engine in its own process, driven through a pipe, so that a test continues while server or engine is stopped.

    with Engine(model, server.path) as engine:
        answer = engine.generate([prompt])[0]       # tokens, logprobs, and how many prompt tokens were cached
        engine.evict()                              # forgets the engine's own prefix cache, not the server's

remote.py is that process. An engine takes both cores for half a minute to start, so tests share one where they can.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest

from tests.process.harness import until

START_S = float(os.environ.get("KVSERVER_E2E_START_S", "150"))
CALL_S = 90.0
ROOT = Path(__file__).resolve().parents[2]

RANK_FAILS = "KVSERVER_E2E_RANK_FAILS"
"""Environment variable with the path of a file; while the file exists, one rank of one_rank.py fails its loads."""
TRIES_STAGES = "KVSERVER_E2E_STAGES"
"""Environment variable: engines with pipeline stages are started."""
DEVICE = "KVSERVER_E2E_DEVICE"
"""Environment variable with the connector's option `device` for all engines that say nothing else: portable."""
POOL = "kvserver-portable" if os.environ.get(DEVICE) else "kvserver-pool"
"""Beginning of the name of the memory by which the server reaches an engine's KV."""
PATIENT: dict[str, object] = {"lookup_timeout_ms": 1000, "load_timeout_ms": 45_000, "min_load_tokens": 0}
"""Long timeouts: an overloaded machine must not turn a hit into a miss. The prompts here are short."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests/e2e/startup"), os.environ.get("PYTHONPATH")])),
}

ONE_PROCESS: dict[str, object] = {"distributed_executor_backend": "uni"}
"""Runs the worker in the scheduler's process, as with one GPU.

vLLM for CPUs does this only with multiprocessing off. Such an engine starts in a third of the time.
"""

Prompt = Sequence[int]


class Answer(NamedTuple):
    """The engine's answer to one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token."""
    cached_tokens: int
    """Cached tokens of the prompt, from any cache."""

    @property
    def logprob(self) -> float:
        """Sum over all tokens."""
        return sum(self.logprobs)


class Engine:
    """The parent's side.

    options: vLLM's arguments. connector: kv_connector_extra_config besides the socket, and besides PATIENT if
    `patient`.
    """

    def __init__(
        self,
        model: Path,
        socket: Path,
        *,
        connector: dict[str, object] | None = None,
        environment: dict[str, str] | None = None,
        patient: bool = True,
        start_s: float = START_S,
        **options: object,
    ) -> None:
        if int(str(options.get("pipeline_parallel_size", 1))) > 1 and TRIES_STAGES not in os.environ:
            pytest.skip(f"vLLM 0.32 for CPUs dies in a pipeline's first step (vllm.md); {TRIES_STAGES}=1 tries")
        self._start_s = start_s
        self._pipe, theirs = Pipe()
        text = json.dumps(
            {
                "model": str(model),
                "kv_transfer_config": transfer_config(socket, connector or {}, patient=patient),
                **options,
            }
        )
        # Without NUMA nodes, let vLLM simulate one per rank. Otherwise its thread count depends on whether there is
        # a connector, which changes the last digits.
        ranks = math.prod(int(str(options.get(f"{kind}_parallel_size", 1))) for kind in ("tensor", "pipeline"))
        # 0.20 cannot do without binding. Then this variable says which cores there are.
        bind = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = {"VLLM_CPU_SIM_MULTI_NUMA": "1"} if ranks > 1 else {"VLLM_CPU_OMP_THREADS_BIND": bind}
        processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if options.items() >= ONE_PROCESS.items() else {}
        folder = Path(os.environ.get("KVSERVER_E2E_LOGS", socket.parent.parent))
        self.log_path = folder / f"engine-{time.monotonic_ns()}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.remote", str(theirs.fileno()), text],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **threads, **processes, **(environment or {})},
                start_new_session=True,  # so that all its processes can be killed together
            )
        theirs.close()
        self._started = False

    def __enter__(self) -> "Engine":
        try:
            self.wait_started()
        except BaseException:  # an interrupted test leaves no engine either
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(f"---- log of the engine ----\n{self.log()[-12000:]}", file=sys.stderr)
        self.close()

    def wait_started(self) -> None:
        if not self._started:
            self._receive(self._start_s)
            self._started = True

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    # ---------------------------------------------------------------- commands

    def generate(self, prompts: Sequence[Prompt], *, tokens: int = 12, **request: object) -> list[Answer]:
        """Sends all prompts at once and decodes greedily. request: further fields of each request (cache_salt)."""
        return [Answer(*item) for item in self.call("generate", [list(prompt) for prompt in prompts], tokens, request)]

    def begin(self, prompts: Sequence[Prompt], *, tokens: int = 12, **request: object) -> None:
        """Like generate(), but end() returns the result, so that a test can act in between."""
        self.send("generate", [list(prompt) for prompt in prompts], tokens, request)

    def end(self) -> list[Answer]:
        return [Answer(*item) for item in self.receive()]

    def evict(self) -> None:
        """Makes the engine forget its own prefix cache. This can take a moment: stores in flight hold their blocks."""
        until("the engine to forget its prefixes", lambda: self.call("reset"), CALL_S)

    def call(self, name: str, *arguments: object) -> Any:
        self.send(name, *arguments)
        return self.receive()

    def send(self, name: str, *arguments: object) -> None:
        """Like call(), but receive() returns the result."""
        self._pipe.send((name, arguments))

    def receive(self) -> Any:
        return self._receive(CALL_S)

    # ---------------------------------------------------------------- processes

    def kill(self) -> None:
        """Sends SIGKILL to all its processes at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(30)

    def close(self) -> None:
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def _receive(self, within_s: float) -> Any:
        due_s = time.monotonic() + within_s
        while not self._pipe.poll(0.2):
            if time.monotonic() > due_s:
                raise TimeoutError(f"the engine did not answer for {within_s:g} s:\n{self.log()[-6000:]}")
        try:
            value, problem = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the engine has ended:\n{self.log()[-6000:]}") from None
        if problem is not None:
            raise AssertionError(f"in the engine: {problem}")
        return value


def transfer_config(socket: Path, connector: dict[str, object], *, patient: bool = True) -> dict[str, object]:
    """The kv_transfer_config for our connector, on the device that KVSERVER_E2E_DEVICE names."""
    device = {"device": os.environ[DEVICE]} if os.environ.get(DEVICE) else {}
    return {
        "kv_connector": "KvServerConnector",
        "kv_connector_module_path": "kvclient.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), **device, **(PATIENT if patient else {}), **connector},
    }
