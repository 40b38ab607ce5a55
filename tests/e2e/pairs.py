"""A prefill engine, a decode engine and the proxy of examples/pd before them, on one kvserver or two."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.checks import CLOSE, prompt
from tests.e2e.endpoint import Endpoint, serving
from tests.e2e.engine import ROOT, START_S, transfer_config
from tests.process.harness import Server, free_port, until

Answer = tuple[list[str], list[float]]
"""Tokens and their log-probabilities."""
LENGTH = 1900
STEP_TOKENS = 64
"""So small that the prompt takes the prefill side thirty steps."""
ALONE = {"cache_salt": "alone"}
"""With this an engine finds nothing, neither its own nor the server's, and computes by itself."""
COMPUTED = ("vllm:prompt_tokens_by_source_total", 'source="local_compute"')
RETRIEVED = "vllm:kvserver_tokens_retrieved_total"


class Pair(NamedTuple):
    """Both sides and the proxy, which takes requests as an engine does."""

    prefill: Endpoint
    decode: Endpoint
    proxy: Endpoint
    server: Server
    """The prefill side's."""
    other: Server
    """The decode side's; of one machine the same."""


@contextmanager
def paired(models: Path, first: Server, other: Server, connector: dict[str, object]) -> Iterator[Pair]:
    """first, other: the prefill side's server and the decode side's. connector: settings of both connectors."""
    with ExitStack() as stack:
        sides = []
        for name, step_tokens, server in (("prefill", STEP_TOKENS, first), ("decode", 2048, other)):
            transfer = transfer_config(server.path, connector)
            options = {"kv_transfer_config": transfer, "max_num_batched_tokens": step_tokens}
            log = server.folder / f"{name}.log"
            sides.append(stack.enter_context(serving(models / "llama", options, workers=1, log=log)))
        until("both to be registered", lambda: first.status().caches == other.status().caches == 1 + (first is other))
        prefill, decode = sides
        port, log = free_port(), first.folder / "proxy.log"
        command = [sys.executable, str(ROOT / "examples/pd/proxy.py"), "--port", str(port)]
        command += ["--prefill", prefill.base, "--decode", decode.base]
        with log.open("wb") as said:
            process = stack.enter_context(subprocess.Popen(command, stdout=said, stderr=said))
        stack.callback(process.kill)
        proxy = Endpoint(port, process, log)
        until("the proxy to be up", proxy.is_up, START_S)
        proxy.complete(prompt(90, 300))  # after this both know the namespace
        yield Pair(prefill, decode, proxy, first, other)


def begun_and_signalled(pair: Pair, seed: int, number: signal.Signals) -> Future[Answer]:
    """Asks the proxy for a prompt, and sends the prefill side a signal when the prompt's first chunk is stored."""
    chunks = pair.server.status().chunks
    client = ThreadPoolExecutor(1)
    asked = client.submit(pair.proxy.complete, prompt(seed, LENGTH))
    client.shutdown(wait=False)
    until("the prompt's first chunk", lambda: pair.server.status().chunks > chunks)
    os.killpg(pair.prefill.pid, number)
    return asked


def assert_same(found: Answer, wanted: Answer) -> None:
    assert found[0] == wanted[0]
    assert found[1] == pytest.approx(wanted[1], abs=CLOSE)
