"""examples/pd with real vLLM: the proxy before a prefill and a decode server, which share a kvserver.

The pair says what one engine alone says, and goes on when the prefill side dies.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.checks import prompt, settled, whole_chunks
from tests.e2e.endpoint import Endpoint
from tests.e2e.engine import START_S
from tests.e2e.pairs import ALONE, COMPUTED, LENGTH, RETRIEVED, Pair, assert_same, begun_and_signalled, paired
from tests.process.harness import Server, free_port, until

pytestmark = pytest.mark.long

TOY_PROXY = "KVSERVER_E2E_TOY_PROXY"
"""Environment variable with the path of vLLM's toy_proxy_server.py, which is in no wheel."""


@pytest.fixture(scope="module")
def pair(models: Path, server: Server) -> Iterator[Pair]:
    with paired(models, server, server, {}) as running:
        yield running


def test_the_pair_says_what_one_engine_says_and_decode_computes_no_more_than_the_tail(pair: Pair) -> None:
    wanted = pair.decode.complete(prompt(1, LENGTH), **ALONE)
    computed, retrieved = pair.decode.metric(*COMPUTED), pair.decode.metric(RETRIEVED)
    found = pair.proxy.complete(prompt(1, LENGTH))
    assert_same(found, wanted)
    assert pair.decode.metric(RETRIEVED) - retrieved == whole_chunks(LENGTH)
    assert pair.decode.metric(*COMPUTED) - computed == LENGTH - whole_chunks(LENGTH)
    until("the server to be at rest", lambda: settled(pair.server) and not pair.server.status().pledges)


def test_a_request_that_vllm_refuses_is_refused_in_its_words_and_the_next_one_is_answered(pair: Pair) -> None:
    wanted = pair.decode.complete(prompt(2, LENGTH), **ALONE)
    for wrong in ({"prompt": prompt(2, 5000)}, {"max_tokens": "many"}, {"kv_transfer_params": 7}):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            pair.proxy.complete(prompt(2, LENGTH), **wrong)
        assert refusal.value.code == 400
        assert json.loads(refusal.value.read())["error"]["code"] == 400
    assert_same(pair.proxy.complete(prompt(2, LENGTH)), wanted)


def test_a_client_that_goes_away_ends_its_request_on_both_sides(pair: Pair) -> None:
    link = http.client.HTTPConnection(pair.proxy.base.removeprefix("http://"), timeout=60)
    body = {"model": "tiny", "prompt": prompt(3, LENGTH), "stream": True, "max_tokens": 100, "ignore_eos": True}
    link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    until("the pledge", lambda: pair.server.status().pledges)
    link.close()
    running = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    sides = (pair.prefill, pair.decode)
    until("both sides to be idle", lambda: not any(side.metric(name) for side in sides for name in running))
    until("the server to be at rest", lambda: settled(pair.server) and not pair.server.status().pledges)


def test_a_stream_has_the_tokens_of_an_answer_at_once(pair: Pair) -> None:
    wanted = pair.proxy.complete(prompt(4, LENGTH))
    assert pair.proxy.stream(prompt(4, LENGTH)) == wanted[0]


@pytest.fixture
def toy_proxy(pair: Pair) -> Iterator[Endpoint]:
    if not (path := os.environ.get(TOY_PROXY)):
        pytest.skip(f"{TOY_PROXY} names no proxy")
    port, log = free_port(), pair.server.folder / "toy.log"
    command = [sys.executable, path, "--port", str(port)]
    for name, side in (("prefiller", pair.prefill), ("decoder", pair.decode)):
        command += [f"--{name}-hosts", "127.0.0.1", f"--{name}-ports", side.base.rpartition(":")[2]]

    def listens() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            until("the toy proxy to be up", listens, START_S)
            yield Endpoint(port, process, log)
        finally:
            process.kill()


def test_vllms_toy_proxy_runs_unchanged(pair: Pair, toy_proxy: Endpoint) -> None:
    """It waits for the prefill side's whole answer, and passes on what that one says."""
    wanted = [pair.decode.complete(prompt(seed, LENGTH), **ALONE) for seed in (8, 9)]
    computed, retrieved = pair.decode.metric(*COMPUTED), pair.decode.metric(RETRIEVED)
    assert_same(toy_proxy.complete(prompt(8, LENGTH)), wanted[0])
    assert toy_proxy.stream(prompt(9, LENGTH)) == wanted[1][0]
    assert pair.decode.metric(RETRIEVED) - retrieved == 2 * whole_chunks(LENGTH)
    assert pair.decode.metric(*COMPUTED) - computed == 2 * (LENGTH - whole_chunks(LENGTH))


def test_a_prefill_side_that_hangs_changes_no_answer(pair: Pair) -> None:
    wanted = pair.decode.complete(prompt(7, LENGTH), **ALONE)
    os.killpg(pair.prefill.pid, signal.SIGSTOP)
    try:
        assert_same(pair.proxy.complete(prompt(7, LENGTH)), wanted)
    finally:
        os.killpg(pair.prefill.pid, signal.SIGCONT)


def test_a_prefill_side_that_is_killed_in_the_middle_of_a_prompt_changes_no_answer(pair: Pair) -> None:
    """The last test here: the prefill side does not come back."""
    wanted = [pair.decode.complete(prompt(seed, LENGTH), **ALONE) for seed in (5, 6)]
    retrieved = pair.decode.metric(RETRIEVED)
    found = begun_and_signalled(pair, 5, signal.SIGKILL).result(90)
    assert 256 <= pair.decode.metric(RETRIEVED) - retrieved < whole_chunks(LENGTH)
    assert_same(found, wanted[0])
    assert_same(pair.proxy.complete(prompt(6, LENGTH)), wanted[1])
    until("the server to be at rest", lambda: settled(pair.server) and not pair.server.status().pledges)
