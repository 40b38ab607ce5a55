"""Arms: the endpoints that a workload is compared on. Existing ones, or engines and a server started here.

All arms are up at the same time, so that rounds can alternate; while one is measured, the others are idle. They
differ only in the connector:

    none           vLLM alone
    kvserver       with our connector, and its own server
    kvserver+disk  the same, with a disk tier
    native         with vLLM's own offload to CPU memory, if that engine has it (not on CPUs)
    lmcache        with LMCache's connector, and its multi-process server, where LMCache is installed
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, TracebackType

from benchmarks.replay.options import DISK_FLAG, DISK_PATHS_FLAG
from benchmarks.replay.served import TETHER, Served
from benchmarks.rows import say
from benchmarks.serving import HOST, free_port
from benchmarks.vllm_load import lmcache
from kvserver.errors import ConfigError

START_S_MAX = 400.0
STOP_S_MAX = 20.0
POLL_S = 0.3
LOG_TAIL_BYTES = 6000
GIB = 1 << 30
FEATURES = ("enable_prefix_caching", "enable_chunked_prefill")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "LMCACHE_TRACK_USAGE": "false",
}


class ArmKind(StrEnum):
    NONE = "none"
    KVSERVER = "kvserver"
    KVSERVER_DISK = "kvserver+disk"
    NATIVE = "native"
    LMCACHE = "lmcache"


@dataclass(frozen=True)
class Arm:
    name: str
    url: str
    server_url: str = ""
    """URL of kvserver's HTTP port, for its metrics."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of all engines of a run."""

    model: Path
    pool_tokens: int
    """Tokens of the engine's own KV cache."""
    block_tokens: int
    context_tokens_max: int
    arena_bytes: int
    """Bytes of kvserver's arena, of vLLM's own offload, and of LMCache's memory."""
    model_id: str
    """Names a model without weights for kvserver; empty if it has weights."""
    engine_arguments: str
    """Arguments for vLLM, as in a shell."""
    connector: str
    """JSON: further keys of kv_connector_extra_config."""
    disk_dirs: tuple[Path, ...] = ()
    """Parents of the disk tier's directories, a device each."""
    disk_bytes: int = 0
    """Bytes of each device."""
    lmcache_arguments: str = ""
    """Arguments for LMCache's server, as in a shell."""


class Engines:
    """Starts the arms one after another, and ends them all."""

    def __init__(self, kinds: list[ArmKind], options: EngineOptions) -> None:
        check_arms(kinds, options)
        self._kinds = kinds
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="bench-vllm-"))
        self._stack = ExitStack()

    def __enter__(self) -> list[Arm]:
        with self._stack as started:  # if one does not start, those before it end
            arms = [self._start(kind) for kind in self._kinds]
            self._stack = started.pop_all()
        return arms

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None or not isinstance(error, Exception):  # ended or interrupted: nobody needs the logs
            shutil.rmtree(self._folder)

    def _start(self, kind: ArmKind) -> Arm:
        port = free_port()
        arguments, server_url = self._connected(kind)
        say(f"{kind}: starting vLLM")
        began_s = time.monotonic()
        command = [*engine_arguments(self._options, port), *arguments]
        engine = self._stack.enter_context(closing(EngineProcess("vLLM", command, self._folder / f"{kind}.log")))
        wait_for_answer(f"http://{HOST}:{port}/health", engine.problem)
        check_features(engine.log_path.read_text(errors="replace"))
        say(f"{kind}: up after {time.monotonic() - began_s:.0f} s, log {engine.log_path}")
        return Arm(kind.value, f"http://{HOST}:{port}", server_url)

    def _connected(self, kind: ArmKind) -> tuple[list[str], str]:
        """Starts what the engine is to be connected with. Returns vLLM's arguments for it, and our server's URL."""
        options = self._options
        match kind:
            case ArmKind.NONE:
                return [], ""
            case ArmKind.NATIVE:
                gib = f"{options.arena_bytes / GIB:g}"
                return ["--kv-offloading-backend", "native", "--kv-offloading-size", gib], ""
            case ArmKind.LMCACHE:
                return ["--kv-transfer-config", self._lmcache()], ""
            case ArmKind.KVSERVER | ArmKind.KVSERVER_DISK:
                http_port = free_port()
                flags = self._disk_flags() if kind is ArmKind.KVSERVER_DISK else ()
                served = Served(("--http-port", str(http_port), *flags), options.arena_bytes)
                self._stack.enter_context(closing(served))
                server_url = f"http://{HOST}:{http_port}"
                wait_for_answer(f"{server_url}/readyz", served.problem)
                return ["--kv-transfer-config", json.dumps(connector_config(options, served.socket))], server_url

    def _disk_flags(self) -> tuple[str, ...]:
        """A new directory in each of the given ones; they are removed at the end."""
        directories = []
        for parent in self._options.disk_dirs:
            made = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-vllm-disk-", dir=parent))
            directories.append(made)
        return DISK_PATHS_FLAG, ",".join(directories), DISK_FLAG, str(self._options.disk_bytes)

    def _lmcache(self) -> str:
        """Starts LMCache's server. Returns the connector's JSON."""
        port, http_port = free_port(), free_port()
        command = lmcache.server_command(
            host=HOST,
            port=port,
            http_port=http_port,
            arena_bytes=self._options.arena_bytes,
            further=self._options.lmcache_arguments,
        )
        say("lmcache: starting its server")
        log_path = self._folder / "lmcache-server.log"
        server = self._stack.enter_context(closing(EngineProcess("LMCache's server", command, log_path)))
        wait_for_answer(lmcache.health_url(host=HOST, http_port=http_port), server.problem)
        return lmcache.transfer_config(host=HOST, port=port)


def check_arms(kinds: Sequence[ArmKind], options: EngineOptions) -> None:
    """Raises ConfigError for an arm that cannot be started, before any other is."""
    if ArmKind.LMCACHE in kinds and not lmcache.is_installed():
        raise ConfigError("bench-options", "the arm lmcache needs LMCache in this environment: install lmcache")
    if ArmKind.KVSERVER_DISK in kinds and not (options.disk_dirs and options.disk_bytes):
        raise ConfigError("bench-options", "the arm kvserver+disk needs --disk-dir and --disk-bytes")


def engine_arguments(options: EngineOptions, port: int) -> list[str]:
    """The command without a connector."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(options.model), "--served-model-name", "bench", "--host", HOST, "--port", str(port)),
        *("--max-model-len", str(options.context_tokens_max), "--block-size", str(options.block_tokens)),
        *("--num-gpu-blocks-override", str(1 + -(-options.pool_tokens // options.block_tokens))),  # 1: the null block
        *("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-prompt-tokens-details"),
        *("--disable-uvicorn-access-log", "--seed", "0"),
        *(("--load-format", "dummy") if options.model_id else ()),
        *shlex.split(options.engine_arguments),
    ]


def check_features(log: str) -> None:
    """Raises RuntimeError unless vLLM's log says that both features are on; vLLM may turn either off by itself."""
    for feature in FEATURES:
        said = re.findall(rf"{feature}=(True|False)", log)
        if said[-1:] != ["True"]:
            found = said[-1] if said else "nothing"
            raise RuntimeError(f"vLLM's log says {found} of {feature}; engines are measured with it on")


def connector_config(options: EngineOptions, server: Path) -> dict[str, object]:
    extra: dict[str, object] = {"socket": str(server), **json.loads(options.connector)}
    if options.model_id:
        extra["model_id"] = options.model_id
    return {
        "kv_connector": "KvServerConnector",
        "kv_connector_module_path": "kvclient.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class EngineProcess:
    """An engine's API server or LMCache's, and all processes that it starts."""

    def __init__(
        self, name: str, command: list[str], log_path: Path, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._name = name
        self.log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", TETHER, *command],  # it must not outlive us
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT, **environment},
                start_new_session=True,  # so that all of them can be killed together
            )

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            say(f"{self.log_path.stem}: does not end, is killed")
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the usual case: no process is left
        self._process.wait()

    def problem(self) -> str:
        """The exit code and the end of the log; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        words = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return f"{self._name} exited with {code}; its last words, of {self.log_path}: {words}"


def wait_for_answer(url: str, problem: Callable[[], str], within_s: float = START_S_MAX) -> None:
    """Waits until `url` answers 200. problem: returns why that can no longer happen, or ""."""
    due_s = time.monotonic() + within_s
    while time.monotonic() < due_s:
        if told := problem():
            raise RuntimeError(told)
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise RuntimeError(f"{url} did not answer within {within_s:.0f} s")
