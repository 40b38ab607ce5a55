"""A vLLM engine in a process of its own, driven through a pipe: a test goes on while a server, or it, is stopped.

    with Engine(model, server.path) as engine:
        answer = engine.generate([prompt])[0]       # tokens, logprobs, and how many prompt tokens were cached
        engine.evict()                              # forgets the engine's own prefix cache, not the server's

remote.py is the process itself. An engine takes both cores for half a minute to start, so tests share one where they
can.
"""

import json
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

from tests.process.harness import until

START_S = 150.0
CALL_S = 90.0
ROOT = Path(__file__).resolve().parents[2]

RANK_FAILS = "KVSERVER_E2E_RANK_FAILS"
"""Environment variable with the path of a file; while that is there, a rank of one_rank.py fails."""
PATIENT: dict[str, object] = {"lookup_timeout_ms": 1000, "load_timeout_ms": 45_000, "min_load_tokens": 0}
"""A machine with more to do than cores must not turn a hit into a miss, and the prompts here are short."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests/e2e/startup"), os.environ.get("PYTHONPATH")])),
}

ONE_PROCESS: dict[str, object] = {"distributed_executor_backend": "uni"}
"""The worker is in the scheduler's process, as with one GPU. vLLM for CPUs does that only where there is no other
process at all; such an engine starts in a third of the time."""

Prompt = Sequence[int]


class Answer(NamedTuple):
    """What an engine said to one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each of them."""
    cached_tokens: int
    """Of the prompt, from whichever cache."""

    @property
    def logprob(self) -> float:
        """Of all tokens together."""
        return sum(self.logprobs)


class Engine:
    """The parent's side. options: vLLM's arguments. connector: what kv_connector_extra_config says beside the
    socket, and beside PATIENT where it is patient."""

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
        self._start_s = start_s
        self._pipe, theirs = Pipe()
        text = json.dumps(
            {
                "model": str(model),
                "kv_transfer_config": transfer_config(socket, connector or {}, patient=patient),
                **options,
            }
        )
        # A machine without NUMA nodes plays as many as there are ranks. Otherwise vLLM would take another number of
        # threads with a connector than without, which changes the last digits.
        ranks = int(str(options.get("tensor_parallel_size", 1)))
        threads = {"VLLM_CPU_SIM_MULTI_NUMA": "1"} if ranks > 1 else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
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
                start_new_session=True,  # so that all its processes can be ended together
            )
        theirs.close()
        self._started = False

    def __enter__(self) -> "Engine":
        try:
            self.wait_started()
        except BaseException:
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

    # ---------------------------------------------------------------- what it does

    def generate(self, prompts: Sequence[Prompt], *, tokens: int = 12, **request: object) -> list[Answer]:
        """All prompts at once, greedily. request: further fields of each (cache_salt)."""
        return [Answer(*item) for item in self.call("generate", [list(prompt) for prompt in prompts], tokens, request)]

    def begin(self, prompts: Sequence[Prompt], *, tokens: int = 12) -> None:
        """generate() of which end() gives the outcome, so that something can happen meanwhile."""
        self.send("generate", [list(prompt) for prompt in prompts], tokens, {})

    def end(self) -> list[Answer]:
        return [Answer(*item) for item in self.receive()]

    def evict(self) -> None:
        """Forgets the engine's own prefix cache. Stores in flight hold their blocks, so it may take a moment."""
        until("the engine to forget its prefixes", lambda: self.call("reset"), CALL_S)

    def call(self, name: str, *arguments: object) -> Any:
        self.send(name, *arguments)
        return self.receive()

    def send(self, name: str, *arguments: object) -> None:
        """call() of which receive() gives the outcome."""
        self._pipe.send((name, arguments))

    def receive(self) -> Any:
        return self._receive(CALL_S)

    # ---------------------------------------------------------------- processes

    def kill(self) -> None:
        """SIGKILL for all its processes, at once."""
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
    """kv_transfer_config for our connector."""
    return {
        "kv_connector": "KvServerConnector",
        "kv_connector_module_path": "kvclient.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), **(PATIENT if patient else {}), **connector},
    }
