"""The HTTP pages of real servers: each shows its own server, and they answer while that server's mover cannot."""

import socket
import subprocess
import sys
from contextlib import closing
from http import HTTPStatus

from kvserver.wire import messages as wire
from tests.process.engine import Engine, prompt
from tests.process.harness import WAIT_S, kill, stopped, until
from tests.process.http.site import Site
from tests.process.raw import RawPeer

PAGES = ("/healthz", "/readyz", "/status", "/metrics")


def test_each_server_tells_of_itself() -> None:
    """Two servers side by side, an engine of one rank at each; no figure of one shows up at the other."""
    first, second = Site(), Site()
    with first.server, second.server, Engine(first.server.path) as one, Engine(second.server.path) as other:
        for site, engine, chunks in ((first, one, 3), (second, other, 5)):
            engine.ready()
            until("the arena's first slab", lambda site=site: site.page("/readyz")[0] == HTTPStatus.OK)  # type: ignore[misc]
            assert engine.store(prompt(chunks, chunks)).chunks == chunks
        for site, chunks in ((first, 3), (second, 5)):
            until(f"{chunks} chunks to be shown", lambda site=site, chunks=chunks: site.chunks() == (chunks, chunks))  # type: ignore[misc]
            assert [site.page(path)[0] for path in PAGES] == [HTTPStatus.OK] * len(PAGES)
            assert site.sample('kvserver_stores_total{result="whole"}') == 1
        assert first.sample("kvserver_incarnation") != second.sample("kvserver_incarnation")
        assert second.server.stop() == 0
        assert not second.is_healthy()
        assert first.is_healthy()


def test_pages_answer_while_the_mover_is_stopped_and_while_nobody_reads_theirs() -> None:
    site = Site()
    with site.server, Engine(site.server.path) as engine:
        engine.ready()
        with stopped(site.server.mover_pid()), socket.create_connection(("127.0.0.1", site.port)) as silent:
            silent.sendall(b"GET /metr")
            future = engine.begin_store(prompt(1, 2), engine.place(prompt(1, 2)))
            until("the store to be under way", lambda: site.sample('kvserver_jobs_running{kind="store"}') == 1)
            assert [site.page(path)[0] for path in PAGES] == [HTTPStatus.OK] * len(PAGES)
        assert future.result(WAIT_S).chunks == 2
        stores = 'kvserver_job_seconds_count{direction="store",tier="dram"}'
        until("the job to be counted", lambda: site.sample(stores) == 1)


def test_pages_come_back_with_the_next_brain_and_tell_that_it_is_another() -> None:
    site = Site()
    with site.server, Engine(site.server.path) as engine:
        engine.ready().store(prompt(1, 4))
        until("the chunks to be shown", lambda: site.chunks() == (4, 4))
        before = site.sample("kvserver_incarnation")
        kill(site.server.brain_pid())
        until("the next brain to be healthy", site.is_healthy)
        assert site.sample("kvserver_incarnation") != before
        assert site.chunks() == (4, 4), "what was sealed is there from its first answer on"


def test_the_time_of_a_lookup_that_was_refused_is_not_one_of_lookups() -> None:
    site, story = Site(), prompt(7, 2)
    with site.server, Engine(site.server.path) as engine, closing(RawPeer(site.server.path)) as stranger:
        engine.ready().store(story)
        for keys in (story.keys, prompt(8, 1).keys):  # one hit and one miss
            engine.client.lookup(engine.namespace, keys)
        refused = stranger.ask(wire.Lookup(stranger.next_id(), engine.namespace, story.keys, 1))
        assert (type(refused), refused.code) == (wire.Error, "session-unknown")
        until("the refusal to be shown", lambda: site.sample('kvserver_errors_total{family="request"}') == 1)
        assert [site.sample(f'kvserver_lookups_total{{result="{result}"}}') for result in ("hit", "miss")] == [1, 1]
        assert site.sample("kvserver_lookup_handle_seconds_count") == 2


def test_metrics_and_the_explain_command_agree_with_what_lookups_found() -> None:
    site, story = Site(), prompt(7, 3)
    asked = hit = 0
    with site.server, Engine(site.server.path) as engine:
        engine.ready().store(story)
        for number in range(200):
            keys = (story.keys, story.keys + prompt(number, 2).keys, prompt(number, 1).keys)[number % 3]
            found = engine.client.lookup(engine.namespace, keys)
            asked, hit = asked + len(keys) // wire.KEY_BYTES, hit + found.chunks
            if found.lease is not None:
                engine.client.release(found.lease)
        until("the last lookup to be shown", lambda: site.sample("kvserver_lookup_handle_seconds_count") == 200)
        results = ("dram", "disk", "declined", "unwanted", "miss")
        chunks = {result: site.sample(f'kvserver_lookup_chunks_total{{result="{result}"}}') for result in results}
        assert chunks == {"dram": hit, "disk": 0, "declined": 0, "unwanted": 0, "miss": asked - hit}
        command = [sys.executable, "-m", "kvserver", "explain", "--socket", str(site.server.path)]
        missing = prompt(8, 1).keys.hex()
        for keys, says in (([story.keys[:32].hex()], "1 of 1 chunks"), ([missing], f"next chunk {missing}")):
            done = subprocess.run([*command, *keys], capture_output=True, text=True, check=True, timeout=WAIT_S)
            assert says in done.stdout
            assert f"namespace {engine.namespace.hex()}" in done.stdout
