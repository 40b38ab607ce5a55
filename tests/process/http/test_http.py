"""The HTTP pages of real servers: each shows its own server, and they answer while that server's mover cannot."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import closing
from http import HTTPStatus
from pathlib import Path

import pytest

from kvserver.wire import messages as wire
from tests.process.engine import MODEL, Engine, prompt
from tests.process.harness import WAIT_S, kill, stopped, until
from tests.process.http.site import Site
from tests.process.raw import RawPeer

STUCK = Path(__file__).parent / "stuck"
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
            whole = 'kvserver_stores_total{result="whole"}'
            until("its store to be counted", lambda site=site, whole=whole: site.sample(whole) == 1)  # type: ignore[misc]
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


def test_every_way_of_a_byte_has_a_histogram_of_speeds_and_every_count_its_label(tmp_path: Path) -> None:
    """Stores what DRAM cannot hold, and brings it back from disk."""
    site = Site(
        arena_bytes=1 << 20,
        slab_bytes=1 << 18,
        disk_paths=tmp_path,
        disk_bytes=16 << 20,
        disk_segment_bytes=1 << 19,
        disk_write_policy="through",
    )
    stories = [prompt(seed, 3) for seed in range(90)]
    with site.server, Engine(site.server.path) as engine:
        engine.ready()
        until("the disk", lambda: site.server.status().disk_state == "ready")
        for number, story in enumerate(stories, 1):
            assert engine.store(story).chunks == story.chunks
            until("it to be on disk", lambda number=number: site.server.status().chunks_on_disk >= 3 * number)  # type: ignore[misc]
        for story in (stories[0], stories[-1]):
            lease = until("a lease", lambda story=story: engine.lookup(story).lease)  # type: ignore[misc]
            assert engine.begin_retrieve(lease, engine.ready().spare(engine.place(story))).result(WAIT_S).ok
        site.server.status()  # counts what was asked so far
        ways = {"store": "dram", "retrieve": "dram", "demote": "disk", "promote": "disk"}
        advanced = [
            f'kvserver_{metric}{{direction="{direction}",tier="{tier}"}}'
            for direction, tier in ways.items()
            for metric in (
                "job_bytes_per_second_count",
                "job_bytes_per_second_sum",
                "job_seconds_count",
                "moved_bytes_total",
            )
        ]
        advanced += [f'kvserver_worker_bytes_total{{kind="{kind}",worker="0"}}' for kind in ("store", "retrieve")]
        tokens = 'kvserver_lookup_tokens_total{{model="{}",result="{}"}}'
        advanced += [tokens.format(MODEL, result) for result in ("dram", "disk")]
        advanced += [f'kvserver_disk_device_{way}_bytes_total{{device="0"}}' for way in ("written", "read")]
        for sample in advanced:
            until(f"{sample} to advance", lambda sample=sample: site.sample(sample))  # type: ignore[misc]
        for direction, tier in ways.items():
            labels = f'direction="{direction}",tier="{tier}"'
            jobs = site.sample(f"kvserver_job_bytes_per_second_count{{{labels}}}")
            mean = (site.sample(f"kvserver_job_bytes_per_second_sum{{{labels}}}") or 0) / (jobs or 1)
            assert jobs == site.sample(f"kvserver_job_seconds_count{{{labels}}}"), "every job ended well"
            assert 1e4 < mean < 1e12, "bytes per second"


def test_a_server_whose_disks_were_all_refused_serves_from_dram_and_every_page_says_it(tmp_path: Path) -> None:
    settings = {"disk_paths": tmp_path, "disk_bytes": 4 << 20}
    with Site(**settings, disk_segment_bytes=1 << 19).server as first:
        until("the disk to be made", lambda: first.status().disks[0].usable and first.status().disk_state == "ready")
    site = Site(**settings, disk_segment_bytes=1 << 20)
    with site.server, Engine(site.server.path) as engine:
        refused = "no disk can be used: none of 1 could be opened"
        until("the refusal", lambda: site.server.status().disk_problem == refused)
        until("the first slab", lambda: json.loads(site.page("/readyz")[1])["status"] == "ready")
        for path, word in (("/healthz", "ok"), ("/readyz", "ready")):
            until(f"{path} to say so", lambda path=path: refused in site.page(path)[1])  # type: ignore[misc]
            assert site.page(path) == (
                HTTPStatus.OK,
                json.dumps({"status": word, "problems": [refused]}, separators=(",", ":")),
            )
        assert site.sample('kvserver_disk_usable{device="0"}') == 0
        warnings = site.server.status().warnings
        assert warnings[0] == refused
        assert "disk_segment_bytes=1048576" in warnings[1], "it says what was expected"
        assert engine.ready().store(prompt(1, 2)).chunks == 2
        assert engine.lookup(prompt(1, 2)).chunks == 2


# ---------------------------------------------------------------- the runbooks of docs/OPERATING.md


def status_command(site: Site) -> tuple[int, str]:
    command = [sys.executable, "-m", "kvserver", "status", f"--socket={site.server.path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S + 20)
    return done.returncode, done.stderr


def test_a_brain_that_is_stuck_is_found_and_killed_as_its_runbook_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """KvserverBrainStuck: pages are answered and go stale, the command names the process, and no chunk is lost."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STUCK), os.environ.get("PYTHONPATH", "")]))
    site, story = Site(), prompt(3, 4)
    with site.server, Engine(site.server.path) as engine:
        engine.ready().store(story)
        until("the chunks to be shown", lambda: site.chunks() == (4, 4))
        brain = site.server.brain_pid()
        os.kill(brain, signal.SIGUSR1)
        until("health to fail", lambda: site.page("/healthz")[0] == HTTPStatus.SERVICE_UNAVAILABLE)
        assert json.loads(site.page("/healthz")[1])["status"] == "stuck"
        until("the alert's bound to be passed", lambda: (site.sample("kvserver_snapshot_age_seconds") or 0) > 5)
        assert site.page("/status")[0] == HTTPStatus.OK, "it can be saved"
        code, said = status_command(site)
        assert code == 1
        assert said.startswith(f"kvserver: server-silent: process {brain} listens at {site.server.path}")
        kill(brain)
        until("the next brain", site.is_healthy)
        until("its chunks", lambda: engine.lookup(story).chunks == 4)


def test_a_brain_that_is_stopped_answers_nobody_and_is_told_from_one_that_is_gone() -> None:
    """KvserverDown: no page is answered, and the command tells the two apart."""
    site = Site()
    with site.server:
        until("the server to be healthy", site.is_healthy)
        brain = site.server.brain_pid()
        with stopped(brain):
            with pytest.raises(TimeoutError):
                urllib.request.urlopen(f"http://127.0.0.1:{site.port}/metrics", timeout=1)
            assert status_command(site)[1].startswith(f"kvserver: server-silent: process {brain} listens at")
    code, said = status_command(site)
    assert (code, said) == (1, f"kvserver: server-absent: no server listens at {site.server.path}\n")
