"""A prefix is cleared that thousands of chunks continue, while engines go on: it leaves in pieces."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.process.engine import NAMESPACE, Engine, Prompt, prompt
from tests.process.harness import Server, free_port, kill, until
from tests.process.http.site import ask

TOKEN = "0123456789abcdef0123456789abcdef"
BRANCHES, HEAD, CHUNKS = 350, 2, 15
BELOW = 1 + BRANCHES * (CHUNKS - HEAD)
"""Chunks from the second one of the head on."""


@pytest.fixture(scope="module")
def branches() -> list[Prompt]:
    """Prompts that share two chunks."""
    head = prompt(1, HEAD)
    return [Prompt(head.keys + prompt(100 + number, CHUNKS - HEAD).keys) for number in range(BRANCHES)]


def served(folder: Path, **settings: object) -> Server:
    tokens = folder / "tokens"
    tokens.write_text(f"alice: {TOKEN}\n")
    tokens.chmod(0o600)
    return Server(http_port=free_port(), admin_token_file=tokens, arena_bytes=96 << 20, **settings)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(tmp_path) as running:
        yield running


@pytest.fixture
def helper() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def clear(server: Server, helper: ThreadPoolExecutor, story: Prompt) -> "Future[tuple[int, dict[str, object]]]":
    """Clears the prefix that ends in the second chunk."""
    prefix = {"namespace": NAMESPACE.hex(), "key": story.key(1).hex()}
    return helper.submit(ask, server, "/admin/clear", prefix, token=TOKEN)


def store_all(engine: Engine, stories: list[Prompt]) -> None:
    for story in stories:
        assert engine.store(story).chunks == CHUNKS


def found(engine: Engine, story: Prompt) -> int:
    reply = engine.lookup(story)
    if reply.lease is not None:
        engine.client.release(reply.lease)
    return reply.chunks


def test_others_find_and_store_while_a_large_prefix_is_cleared(
    server: Server, helper: ThreadPoolExecutor, branches: list[Prompt]
) -> None:
    with Engine(server.path, name="first") as first, Engine(server.path, name="second", seed=2) as second:
        store_all(first.ready(), branches)
        other = prompt(7, CHUNKS)
        assert second.ready().store(other).chunks == CHUNKS
        cleared = clear(server, helper, branches[0])
        until("the clear to begin", lambda: found(second, branches[-1]) == 1)
        assert second.retrieve(other) == CHUNKS
        again = branches[::30]
        for story in again:
            assert found(second, story) in (1, HEAD)
            assert first.store(story).chunks == CHUNKS
            assert second.retrieve(story) == CHUNKS
        assert cleared.result() == (HTTPStatus.OK, {"chunks": BELOW})
        assert [second.retrieve(story) for story in again] == [CHUNKS] * len(again)
        assert {found(second, story) for story in branches if story not in again} == {HEAD}
        assert second.retrieve(other) == CHUNKS
        assert server.status().chunks == CHUNKS + HEAD + len(again) * (CHUNKS - HEAD)


def test_a_brain_that_is_killed_in_the_midst_brings_nothing_back(
    server: Server, helper: ThreadPoolExecutor, branches: list[Prompt]
) -> None:
    with Engine(server.path) as engine:
        store_all(engine.ready(), branches)
        before = server.brain_pid()
        cleared = clear(server, helper, branches[0])
        until("the clear to begin", lambda: found(engine, branches[-1]) == 1)
        kill(before)
        until("another brain", lambda: server.brain_pid() != before)
        until("what is left", lambda: found(engine, branches[0]))
        assert {found(engine, story) for story in branches} == {1}
        assert server.status().chunks == 1
        assert engine.ready().store(branches[0]).chunks == CHUNKS
        assert engine.retrieve(branches[0]) == CHUNKS
        cleared.exception()


def test_a_server_that_is_killed_in_the_midst_serves_right_bytes_and_then_what_was_cleared_stays_away(
    tmp_path: Path, helper: ThreadPoolExecutor, branches: list[Prompt]
) -> None:
    """Who was not answered may find cleared chunks again: the devices may not have noted it yet."""
    some = branches[:40]
    every = HEAD + len(some) * (CHUNKS - HEAD)
    disk = {"disk_paths": tmp_path, "disk_bytes": 64 << 20, "disk_segment_bytes": 1 << 20}
    with served(tmp_path, **disk, disk_write_policy="through") as server:
        with Engine(server.path) as engine:
            until("the disk", lambda: server.status().disk_state == "ready")
            store_all(engine.ready(), some)
            until("all to be on disk", lambda: server.status().chunks_on_disk == every)
            cleared = clear(server, helper, some[0])
            until("the clear to begin", lambda: found(engine, some[-1]) == 1)
            server.kill()
            was_answered = cleared.exception() is None
        server.start()
        with Engine(server.path) as engine:
            until("the disk", lambda: server.status().disk_state == "ready")
            back = {engine.ready().retrieve(story) for story in some}
            assert back <= {1, CHUNKS}
            assert not was_answered or back == {1}
            assert engine.store(some[0]).chunks == CHUNKS
            assert clear(server, helper, some[0]).result()[0] == HTTPStatus.OK
            server.kill()
        server.start()
        with Engine(server.path) as engine:
            until("the disk", lambda: server.status().disk_state == "ready")
            assert {engine.ready().retrieve(story) for story in some} == {1}
