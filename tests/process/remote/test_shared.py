"""Two servers with one store: what an engine of one stores, an engine of the other gets, byte for byte."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.engine import Engine, prompt
from tests.process.harness import Server, resume, stop, until
from tests.rigs.azure_server import AzureServer
from tests.rigs.mooncake_server import MooncakeServer
from tests.rigs.s3_server import S3Server
from tests.rigs.tls_server import make_certificates, tls_server
from tests.rigs.valkey_server import ValkeyCluster, ValkeyServer

CHUNKS = 7


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    with AzureServer() as server:
        yield server


S3, MOONCAKE, AZURE = (pytest.param(kind, marks=pytest.mark.stores) for kind in ("s3", "mooncake", "azure"))
KINDS = ["directory", "valkey", S3, MOONCAKE]
with_azure = pytest.mark.parametrize("url", [*KINDS, AZURE], indirect=True)
"""For what a store does itself. The rest is the server's, and Azure shares that with S3."""


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty store, with what it needs."""
    if request.param == "directory":
        yield f"file://{tmp_path}"
        return
    if request.param in ("s3", "azure"):
        yield request.getfixturevalue(request.param).url(tmp_path)
        return
    if request.param == "mooncake":
        with MooncakeServer() as mooncake:
            yield mooncake.url
        return
    with ValkeyServer() as valkey:
        yield f"valkey://127.0.0.1:{valkey.port}"


@pytest.fixture(params=["cluster", "tls"])
def unusual_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL and options of three masters that share all keys, or of a store that speaks TLS."""
    if request.param == "cluster":
        with ValkeyCluster() as cluster:
            nodes = ",".join(f"127.0.0.1:{node.port}" for node in cluster.servers)
            yield f"valkey://{nodes}?cluster=yes"
        return
    make_certificates(tmp_path)
    with tls_server(tmp_path) as redis:
        yield f"rediss://127.0.0.1:{redis.port}?ca_file={tmp_path}/ca.crt"


def server_of(url: str, **options: object) -> Server:
    given = {"tokens_min": 0, **options}
    begin = "&" if "?" in url else "?"
    return Server(remotes=f"fleet={url}{begin}" + "&".join(f"{key}={value}" for key, value in given.items()))


@contextmanager
def machines(url: str, write: str = "reuse") -> Iterator[tuple[Server, Engine, Server, Engine]]:
    """Two servers that share a store, each with an engine."""
    with (
        server_of(url, write=write) as one,
        server_of(url, write=write) as other,
        Engine(one.path).ready() as first,
        Engine(other.path).ready() as second,
    ):
        yield one, first, other, second


def counted(server: Server, name: str) -> int:
    found = server.status().counters[name]
    assert isinstance(found, int)
    return found


@with_azure
def test_a_prompt_that_was_used_twice_on_one_server_comes_back_on_the_other(url: str) -> None:
    story = prompt(3, CHUNKS)
    with machines(url) as (one, first, other, second):
        assert first.store(story).chunks == CHUNKS
        assert first.retrieve(story) == CHUNKS
        until("the chunks to be in the store", lambda: counted(one, "remote_writes") == CHUNKS)
        until("the chunks to come", lambda: second.lookup(story).chunks == CHUNKS)
        assert second.retrieve(story) == CHUNKS
        assert counted(other, "remote_reads") == CHUNKS
        assert counted(other, "remote_writes") == 0, "what came from the store is not written there again"


def test_a_cluster_and_a_store_with_tls_bring_it_too_and_are_cleared(unusual_url: str) -> None:
    story = prompt(13, CHUNKS)
    with machines(unusual_url, write="through") as (one, first, _, second):
        first.store(story)
        until("the chunks to be in the store", lambda: counted(one, "remote_writes") == CHUNKS)
        until("the chunks to come", lambda: second.lookup(story).chunks == CHUNKS)
        assert second.retrieve(story) == CHUNKS
        assert first.client.clear(first.namespace) == CHUNKS
        until("the copies of the other server to go", lambda: second.lookup(story).chunks == 0)


def test_a_lookup_says_that_more_may_come_and_does_not_wait(url: str) -> None:
    story = prompt(4, CHUNKS)
    with machines(url, write="through") as (one, first, _, second):
        first.store(story)
        until("the chunks to be in the store", lambda: counted(one, "remote_writes") == CHUNKS)
        second.store(story.head(2))
        until("the epoch to be known", lambda: second.lookup(story).coming == CHUNKS - 2)
        until("the chunks to come", lambda: second.lookup(story).chunks == CHUNKS)
        assert second.lookup(story).coming == 0
        assert second.retrieve(story) == CHUNKS


@with_azure
def test_a_clear_on_one_server_reaches_the_other(url: str) -> None:
    story, later = prompt(5, CHUNKS), prompt(6, CHUNKS - 2)
    with machines(url, write="through") as (one, first, other, second):
        first.store(story)
        until("the chunks to be in the store", lambda: counted(one, "remote_writes") == CHUNKS)
        until("the chunks to come", lambda: second.lookup(story).chunks == CHUNKS)
        assert first.client.clear(first.namespace) == CHUNKS
        until("the copies of the other server to go", lambda: second.lookup(story).chunks == 0)
        assert "namespace cleared elsewhere" in other.log()
        second.store(later)
        until("what was stored since to come", lambda: first.lookup(later).chunks == CHUNKS - 2)
        assert first.retrieve(later) == CHUNKS - 2
        assert first.retrieve(story) == 0


@pytest.mark.parametrize("dies", [False, True], ids=["stopped", "killed"])
def test_a_brain_that_missed_a_clear_drops_what_was_cleared(url: str, dies: bool) -> None:
    story = prompt(7, CHUNKS)
    with machines(url, write="through") as (_, first, other, second):
        first.store(story)
        until("the chunks to come", lambda: second.lookup(story).chunks == CHUNKS)
        brain = other.brain_pid()
        stop(brain)
        assert first.client.clear(first.namespace) == CHUNKS
        if dies:
            os.kill(brain, signal.SIGKILL)
        resume(brain)
        until("the clear to be heard of", lambda: "namespace cleared elsewhere" in other.log())
        assert second.lookup(story).chunks == 0


@pytest.mark.parametrize("kind", ["valkey", S3, MOONCAKE, AZURE])
def test_a_store_that_stops_answering_delays_no_lookup_and_is_used_again(kind: str, tmp_path: Path) -> None:
    stories = [prompt(seed, CHUNKS) for seed in range(10, 14)]
    servers = {"valkey": ValkeyServer, "s3": S3Server, "mooncake": MooncakeServer, "azure": AzureServer}
    with servers[kind]() as server:
        url = {
            "valkey": lambda: f"valkey://127.0.0.1:{server.port}",
            "s3": lambda: server.url(tmp_path),
            "mooncake": lambda: server.url,
            "azure": lambda: server.url(tmp_path),
        }[kind]()
        store = server.master if kind == "mooncake" else server
        with machines(url, write="through") as (one, first, _, second):
            for story in stories[:2]:
                first.store(story)
            until("the chunks to be in the store", lambda: counted(one, "remote_writes") == 2 * CHUNKS)
            until("the chunks to come", lambda: second.lookup(stories[0]).chunks == CHUNKS)
            store.stop()
            first.store(stories[2])
            assert first.retrieve(stories[2]) == CHUNKS, "what is here is served"
            until("nothing to be waited for", lambda: second.lookup(stories[1]).coming == 0)
            assert second.lookup(stories[1]).chunks == 0
            assert second.retrieve(stories[0]) == CHUNKS
            store.go_on()
            until("the chunks to come", lambda: second.lookup(stories[1]).chunks == CHUNKS)
            assert second.retrieve(stories[1]) == CHUNKS
            first.store(stories[3])
            until("writes to go on", lambda: second.lookup(stories[3]).chunks == CHUNKS)


def test_a_mover_that_dies_loses_nothing_and_comes_back(url: str) -> None:
    story, later = prompt(8, CHUNKS), prompt(9, CHUNKS)
    with machines(url, write="through") as (_, first, other, second):
        first.store(story)
        until("the chunks to come", lambda: second.lookup(story).chunks == CHUNKS)
        mover = next(mover.pid for mover in other.status().movers if mover.device == "remote")
        os.kill(mover, signal.SIGKILL)
        until("the mover to be gone", lambda: "mover gone" in other.log())
        assert second.retrieve(story) == CHUNKS
        first.store(later)
        until("the chunks to come", lambda: second.lookup(later).chunks == CHUNKS)
        assert second.retrieve(later) == CHUNKS
