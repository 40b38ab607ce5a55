"""Servers with two stores, a Valkey and a directory: what one of them cannot bring comes from the other."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.engine import Engine, prompt
from tests.process.harness import Server, until
from tests.rigs.valkey_server import ValkeyServer

CHUNKS = 7


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def server_of(*stores: str) -> Server:
    """stores: name, URL and options of each."""
    return Server(remotes=" ".join(f"{store}{'&' if '?' in store else '?'}tokens_min=0" for store in stores))


def counted(server: Server, store: str, what: str) -> int:
    """A counter of one store, where a server has several."""
    (remote,) = (remote for remote in server.status().remotes if remote.name == store)
    return remote.counted[what]


def knows_notes(server: Server) -> bool:
    """It uses each of its stores."""
    return all(remote.namespaces_known for remote in server.status().remotes)


def test_what_two_stores_have_comes_from_the_other_while_one_of_them_is_stopped(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    stories = [prompt(seed, CHUNKS) for seed in range(20, 25)]
    stores = f"near=valkey://127.0.0.1:{valkey.port}?write=through", f"far=file://{tmp_path}?write=through"
    with (
        server_of(*stores) as one,
        server_of(*stores) as other,
        Engine(one.path).ready() as first,
        Engine(other.path).ready() as second,
    ):
        for story in stories[:3]:
            first.store(story)
        for store in ("near", "far"):
            until(f"all chunks to be in {store}", lambda store=store: counted(one, store, "writes") == 3 * CHUNKS)
        until("the chunks to come", lambda: second.lookup(stories[0]).chunks == CHUNKS)
        assert second.retrieve(stories[0]) == CHUNKS
        assert counted(other, "near", "reads") + counted(other, "far", "reads") >= CHUNKS

        valkey.stop()
        until("the chunks to come from the other store", lambda: second.lookup(stories[1]).chunks == CHUNKS)
        assert second.retrieve(stories[1]) == CHUNKS
        assert counted(other, "far", "reads") > 0
        first.store(stories[3])
        until("what was stored since to come", lambda: second.lookup(stories[3]).chunks == CHUNKS)
        assert second.retrieve(stories[3]) == CHUNKS

        valkey.go_on()
        first.store(stories[4])
        until("writes to go on", lambda: counted(one, "near", "writes") >= 4 * CHUNKS)
        until("the chunks to come", lambda: second.lookup(stories[2]).chunks == CHUNKS)
        assert second.retrieve(stories[2]) == CHUNKS
        assert [counted(other, store, "writes") for store in ("near", "far")] == [0, 0], "nothing is copied"


def test_one_prompt_comes_half_from_one_store_and_half_from_the_other(valkey: ValkeyServer, tmp_path: Path) -> None:
    story = prompt(31, CHUNKS)
    near, far = f"near=valkey://127.0.0.1:{valkey.port}", f"far=file://{tmp_path}"
    with (
        server_of(f"{near}?write=through") as one,
        server_of(f"{far}?write=through") as other,
        server_of(near, far) as both,
        Engine(one.path).ready() as first,
        Engine(other.path).ready() as second,
        Engine(both.path).ready() as third,
    ):
        first.store(story.head(3))
        second.store(story)
        until("the chunks to be in one store", lambda: one.status().counters["remote_writes"] == 3)
        until("the chunks to be in the other", lambda: other.status().counters["remote_writes"] == CHUNKS)
        until("the chunks to come", lambda: third.lookup(story).chunks == CHUNKS)
        assert third.retrieve(story) == CHUNKS
        assert counted(both, "far", "reads") >= CHUNKS - 3


def test_what_came_from_one_store_is_not_in_the_other(valkey: ValkeyServer, tmp_path: Path) -> None:
    story, own = prompt(41, CHUNKS), prompt(42, CHUNKS - 2)
    near, far = f"near=valkey://127.0.0.1:{valkey.port}?write=through", f"far=file://{tmp_path}?write=through"
    with (
        server_of(far) as one,
        server_of(near, far) as both,
        Engine(one.path).ready() as first,
        Engine(both.path).ready() as second,
    ):
        first.store(story)
        until("the chunks to come", lambda: second.lookup(story).chunks == CHUNKS)
        second.store(own)
        until("all to be written", lambda: counted(both, "near", "writes") == CHUNKS - 2)
        for _ in range(3):
            second.lookup(story)
        with server_of(near) as last, Engine(last.path).ready() as third:
            until("the chunks to come", lambda: third.lookup(own).chunks == CHUNKS - 2)
            assert third.retrieve(own) == CHUNKS - 2
            until("nothing to be waited for", lambda: third.lookup(story).coming == 0)
            assert third.lookup(story).chunks == 0


def test_a_clear_reaches_both_stores_and_a_mover_that_dies_costs_its_store_alone(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    story, later = prompt(51, CHUNKS), prompt(52, CHUNKS)
    stores = f"near=valkey://127.0.0.1:{valkey.port}?write=through", f"far=file://{tmp_path}?write=through"
    with (
        server_of(*stores) as one,
        server_of(*stores) as other,
        Engine(one.path).ready() as first,
        Engine(other.path).ready() as second,
    ):
        until("all notes to be known", lambda: knows_notes(one) and knows_notes(other))
        first.store(story)
        until("the chunks to come", lambda: second.lookup(story).chunks == CHUNKS)
        for store in ("near", "far"):
            until(f"all chunks to be in {store}", lambda store=store: counted(one, store, "writes") == CHUNKS)
        assert first.client.clear(first.namespace) == CHUNKS
        until("the copies of the other server to go", lambda: second.lookup(story).chunks == 0)
        until("both notes to be heard of", lambda: other.log().count("namespace cleared elsewhere") == 2)
        assert second.lookup(story).chunks == 0
        mover = next(mover.pid for mover in other.status().movers if mover.device == "remote:near")
        os.kill(mover, signal.SIGKILL)
        first.store(later)
        until("the chunks to come", lambda: second.lookup(later).chunks == CHUNKS)
        assert second.retrieve(later) == CHUNKS
        until("the mover to be back", lambda: all(remote.usable for remote in other.status().remotes))
