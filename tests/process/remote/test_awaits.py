"""A prompt that an engine of one server computes and an engine of another one awaits, through a store between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.engine import Engine, Prompt, Waiting, prompt
from tests.process.harness import Server, kill, until
from tests.process.worker import Worker
from tests.rigs.valkey_server import ValkeyServer

CHUNKS = 7
PATIENCE_MS = 3_000


@pytest.fixture(params=["directory", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty store."""
    if request.param == "directory":
        yield f"file://{tmp_path}"
        return
    with ValkeyServer() as valkey:
        yield f"valkey://127.0.0.1:{valkey.port}"


def server_of(url: str, **options: str) -> Server:
    given = {"tokens_min": "0", **options}
    remotes = f"fleet={url}?" + "&".join(f"{key}={value}" for key, value in given.items())
    return Server(remotes=remotes, pledge_patience_ms=PATIENCE_MS)


@contextmanager
def decoding(url: str) -> Iterator[tuple[Server, Engine]]:
    """A server whose engine awaits. It has no setting for it."""
    with server_of(url) as server, Engine(server.path, name="decode").ready() as engine:
        until("what others tell to be heard", lambda: hears(server))
        yield server, engine


@contextmanager
def prefilling(url: str, **options: str) -> Iterator[tuple[Server, Worker]]:
    """A server whose engine, a process of its own, computes for others."""
    with server_of(url, **{"pledged": "write", **options}) as server, Worker(server.path, name="prefill") as worker:
        worker.call("ready")
        until("what others tell to be heard", lambda: hears(server))
        yield server, worker


def counted(server: Server, name: str) -> int:
    found = server.status().counters[name]
    assert isinstance(found, int)
    return found


def hears(server: Server) -> bool:
    remote = server.status().remote
    return remote is not None and remote.namespaces_heard == 1


def awaits(engine: Engine, story: Prompt) -> Waiting:
    """The engine's retrieve of all of a prompt that another server has foretold."""
    found = engine.client.lookup(engine.namespace, story.keys, may_wait=True)

    def is_foretold() -> bool:
        nonlocal found
        found = engine.client.lookup(engine.namespace, story.keys, may_wait=True)
        return found.awaited > 0

    until("the prompt to be foretold", is_foretold)
    waiting = Waiting(engine, story)
    assert waiting.found.chunks + waiting.found.awaited == story.chunks
    assert found.lease is not None
    engine.client.release(found.lease)  # not before, or nobody would await it in between
    return waiting


def test_each_chunk_comes_to_the_other_server_before_the_next_one_is_computed(url: str) -> None:
    story = prompt(61, CHUNKS)
    with prefilling(url) as (one, worker), decoding(url) as (other, engine):
        assert worker.call("pledge", 61, CHUNKS) == CHUNKS
        waiting = awaits(engine, story)
        assert waiting.found.producer == "remote"
        for chunk in range(CHUNKS):
            assert not waiting.future.done()
            assert worker.call("store_piece", 61, chunk, chunk + 1) == 1
            until(f"{chunk + 1} chunks to be there", lambda chunk=chunk: waiting.has(chunk + 1))  # type: ignore[misc]
        assert waiting.end().ok
        assert counted(one, "remote_writes") == CHUNKS, "each was written with its first use"
        assert counted(other, "remote_reads") == CHUNKS
        assert counted(other, "remote_writes") == 0
        until("nothing to be pinned", lambda: not other.status().pins)


def test_what_the_producer_held_before_comes_with_it(url: str) -> None:
    story = prompt(62, CHUNKS)
    with prefilling(url) as (one, worker), decoding(url) as (_, engine):
        worker.call("store_piece", 62, 0, 2)
        assert counted(one, "remote_writes") == 0, "nobody has used it a second time"
        assert worker.call("pledge", 62, CHUNKS) == CHUNKS - 2
        waiting = awaits(engine, story)
        until("two chunks to be there", lambda: waiting.has(2))
        assert worker.call("store_piece", 62, 2, CHUNKS) == CHUNKS - 2
        assert waiting.end().ok
        assert counted(one, "remote_writes") == CHUNKS


def test_without_the_setting_nothing_is_foretold_and_nothing_is_written_early(url: str) -> None:
    story = prompt(63, CHUNKS)
    with (
        prefilling(url) as (_, worker),
        prefilling(url, pledged="wait") as (plain, other),
        decoding(url) as (_, engine),
    ):
        assert other.call("pledge", 63, CHUNKS) == CHUNKS
        other.call("store_piece", 63, 0, CHUNKS)
        worker.call("pledge", 64, CHUNKS)
        awaits(engine, prompt(64, CHUNKS))
        assert not engine.client.lookup(engine.namespace, story.keys, may_wait=True).awaited
        assert counted(plain, "remote_foretold") == counted(plain, "remote_writes") == 0


def test_a_word_that_is_taken_back_ends_the_wait_on_the_other_server(url: str) -> None:
    story = prompt(65, CHUNKS)
    with prefilling(url) as (_, worker), decoding(url) as (other, engine):
        worker.call("pledge", 65, CHUNKS)
        waiting = awaits(engine, story)
        worker.call("store_piece", 65, 0, 2)
        until("two chunks to be there", lambda: waiting.has(2))
        worker.call("unpledge")
        result = waiting.end()
        assert (result.ok, result.why, result.right_chunks) == (False, "not-coming", 2)
        assert pledges_ended(other) == {"withdrawn": 1}, "nobody had to wait for its patience"


@pytest.mark.parametrize("victim", ["engine", "brain", "server"])
def test_a_producer_that_is_killed_ends_the_wait_and_what_came_is_right(url: str, victim: str) -> None:
    story = prompt(66, CHUNKS)
    with prefilling(url) as (one, worker), decoding(url) as (other, engine):
        worker.call("pledge", 66, CHUNKS)
        waiting = awaits(engine, story)
        worker.call("store_piece", 66, 0, 3)
        until("three chunks to be there", lambda: waiting.has(3))
        match victim:
            case "engine":
                worker.kill()
            case "brain":
                kill(one.brain_pid())
            case _:
                one.kill()
        result = waiting.end()
        assert (result.ok, result.why, result.right_chunks) == (False, "not-coming", 3)
        assert pledges_ended(other) == {"withdrawn" if victim == "engine" else "late": 1}
        until("nothing to be pinned", lambda: not other.status().pins)


def test_a_store_that_stops_ends_the_wait_and_the_engine_computes() -> None:
    story = prompt(67, CHUNKS)
    with ValkeyServer() as valkey:
        url = f"valkey://127.0.0.1:{valkey.port}"
        with prefilling(url) as (_, worker), decoding(url) as (other, engine):
            worker.call("pledge", 67, CHUNKS)
            waiting = awaits(engine, story)
            worker.call("store_piece", 67, 0, 2)
            until("two chunks to be there", lambda: waiting.has(2))
            valkey.stop()
            worker.call("store_piece", 67, 2, CHUNKS)
            result = waiting.end()
            assert (result.ok, result.why, result.right_chunks) == (False, "not-coming", 2)
            assert sum(pledges_ended(other).values()) == 1
            assert engine.store(story).chunks == CHUNKS
            assert engine.retrieve(story) == CHUNKS


def pledges_ended(server: Server) -> dict[str, int]:
    """How pledges have ended."""
    ended = server.status().counters["pledges_ended"]
    assert isinstance(ended, dict)
    return {how: count for how, count in ended.items() if count}
