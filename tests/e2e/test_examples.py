"""The offline example, as a user runs it, with a tiny model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.checks import whole_chunks
from tests.e2e.engine import CALL_S, ENVIRONMENT, PATIENT, ROOT, START_S
from tests.process.harness import Server

pytestmark = pytest.mark.long

SMALL = {"enforce_eager": True, "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}


def test_the_second_time_the_prompt_comes_from_the_server(models: Path, server: Server) -> None:
    command = [
        *(sys.executable, str(ROOT / "examples/vllm/offline.py"), "--socket", str(server.path)),
        *("--model", str(models / "llama"), "--engine", json.dumps(SMALL), "--connector", json.dumps(PATIENT)),
    ]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=START_S + CALL_S, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    told = re.findall(r"^(.+): \d+ ms, (\d+) of (\d+) tokens cached$", done.stdout, re.MULTILINE)
    length = int(told[0][2])
    assert told == [("computed", "0", str(length)), ("from the server", str(whole_chunks(length)), str(length))]
    assert length > 800
    assert server.status().counters["retrieves"] == 1
