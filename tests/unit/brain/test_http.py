"""HTTP: the content of each page, and no client can keep another from its answer."""

import base64
import hashlib
import http.client
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvserver.brain.http import metrics
from kvserver.brain.http import server as http_pages
from kvserver.brain.http.server import (
    ANSWERED_MAX,
    FRESH_S,
    HEAD_BYTES_MAX,
    HttpServer,
    Snapshot,
    SnapshotBoard,
)
from kvserver.config.descriptor_limit import SILENT_MAX
from kvserver.errors import ConfigError
from kvserver.service.telling.counters import Counters
from kvserver.wire.status import Status, decode_status
from tests.rigs.status_document import a_status

WAIT_S = 20.0


class Clock:
    """Time that only a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Site:
    """A running server with its board and clock."""

    def __init__(self, names: str = "") -> None:
        self.board = SnapshotBoard()
        self.clock = Clock()
        self.server = HttpServer(self.board, host="127.0.0.1", port=0, names=names, clock_s=self.clock)
        self.server.start()

    def publish(self, status: Status | None = None, counters: Counters | None = None) -> None:
        self.board.publish(Snapshot(self.clock.now_s, status or a_status(), counters or Counters()))

    def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=WAIT_S)
        try:
            connection.request(method, path)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def json(self, path: str) -> tuple[int, dict[str, object]]:
        status, body = self.get(path)
        return status, json.loads(body)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=WAIT_S)

    def say(self, request: bytes) -> bytes:
        """Sends raw bytes; returns everything that the server answers up to its end of the connection."""
        with self.connect() as client:
            client.sendall(request)
            return _all_of(client)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A Site with patient connections; tests that need shorter limits set them."""
    monkeypatch.setattr(http_pages, "CONNECTION_S", WAIT_S)
    running = Site()
    yield running
    running.server.close()


def test_health_follows_the_age_of_the_last_snapshot(site: Site) -> None:
    status, said = site.json("/healthz")
    assert (status, said["status"]) == (503, "stuck")
    site.publish()
    assert site.json("/healthz") == (200, {"status": "ok", "problems": []})
    site.clock.now_s += FRESH_S - 0.01
    assert site.json("/healthz")[0] == 200
    site.clock.now_s += 0.01
    status, said = site.json("/healthz")
    assert status == 503
    assert said["problems"] == ["the brain's last sign of life is 2.0 s old, at most 2.0"]
    site.publish()
    assert site.json("/healthz")[0] == 200


def test_probes_name_a_disk_tier_that_cannot_be_used_and_fail_no_server_for_it(site: Site) -> None:
    problem = "no disk can be used: none of 2 could be opened"
    site.publish(msgspec.structs.replace(a_status(), disk_problem=problem))
    assert site.json("/healthz") == (200, {"status": "ok", "problems": [problem]})
    assert site.json("/readyz") == (200, {"status": "ready", "problems": [problem]})
    site.publish(msgspec.structs.replace(a_status(slabs_ready=0), disk_problem=problem))
    status, said = site.json("/readyz")
    assert (status, said["status"]) == (503, "not ready")
    assert problem in said["problems"]


def test_the_configuration_in_force_is_that_of_the_start_and_what_changed_since() -> None:
    board = SnapshotBoard()
    pages = http_pages.Pages(board, {"lease_ttl_ms": 7, "leases_max": 11, "arena_bytes": 13}, time.monotonic)
    ask = b"GET /config HTTP/1.1\r\n\r\n"
    assert pages.answer(ask).status == 503
    settings: dict[str, int | str] = {"lease_ttl_ms": 17, "leases_max": 11}
    board.publish(Snapshot(0.0, msgspec.structs.replace(a_status(), settings=settings), Counters()))
    assert json.loads(pages.answer(ask).body) == {
        "values": {"lease_ttl_ms": 17, "leases_max": 11, "arena_bytes": 13},
        "changed_since_start": ["lease_ttl_ms"],
    }


def test_ready_needs_a_slab_and_says_what_is_missing(site: Site) -> None:
    site.publish(a_status(slabs_ready=0))
    status, said = site.json("/readyz")
    assert status == 503
    assert said["problems"] == ["no slab of the arena is ready: it is still being touched"]
    site.publish(a_status(slabs_ready=0, problem="out of memory"))
    assert site.json("/readyz")[1]["problems"] == ["no slab of the arena is ready: out of memory"]
    assert site.json("/healthz")[0] == 200
    site.publish(a_status(slabs_ready=1))
    assert site.json("/readyz") == (200, {"status": "ready", "problems": []})
    site.clock.now_s += FRESH_S
    assert site.json("/readyz")[0] == 503


def test_status_is_the_document_even_when_the_brain_is_stuck(site: Site) -> None:
    assert site.json("/status")[0] == 503
    site.publish(a_status())
    site.clock.now_s += 100
    status, body = site.get("/status")
    assert status == 200
    assert decode_status(body) == a_status()


def test_metrics_show_counters_gauges_and_a_growing_age(site: Site) -> None:
    counters = Counters()
    counters.lookups, counters.leases_granted, counters.lookup_chunks["dram"] = 7, 5, 44
    site.publish(a_status(), counters)
    lines = site.get("/metrics")[1].decode().splitlines()
    assert 'kvserver_lookups_total{result="miss"} 2.0' in lines
    assert 'kvserver_lookup_chunks_total{result="dram"} 44.0' in lines
    assert "kvserver_chunks 13.0" in lines
    assert 'kvserver_slots_used{slot_bytes="4096"} 1.0' in lines
    assert 'kvserver_mover_backend_info{backend="host, 2 threads",device="host"} 1.0' in lines
    assert "kvserver_snapshot_age_seconds 0.0" in lines
    site.clock.now_s += 3
    assert "kvserver_snapshot_age_seconds 3.0" in site.get("/metrics")[1].decode().splitlines()


def test_metrics_are_rendered_once_however_many_ask(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[float] = []
    monkeypatch.setattr(metrics, "render", lambda status, counters, age_s: rendered.append(age_s) or b"x 1\n")
    site.publish()
    assert [site.get("/metrics")[1] for _ in range(5)] == [b"x 1\n"] * 5
    assert len(rendered) == 1


def test_head_has_the_length_of_the_body_and_no_body(site: Site) -> None:
    site.publish()
    length = len(site.get("/status")[1])
    answer = site.say(b"HEAD /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {length}\r\n".encode() in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"GET /page.js HTTP/1.0\r\n\r\n", 404),
        (b"POST /status HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"GET /status HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 413),
        (b"GET /status HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 413),
        (b"GET /status\r\n\r\n", 400),
        (b"\x00\xff\r\n\r\n", 400),
        (b"GET /status HTTP/1.1\r\nX: " + b"a" * (70 * HEAD_BYTES_MAX) + b"\r\n\r\n", 431),
    ],
)
def test_bad_requests_are_refused_in_json(site: Site, request_bytes: bytes, status: int) -> None:
    site.publish()
    answer = site.say(request_bytes)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert json.loads(body)["error"]
    assert site.get("/healthz")[0] == 200


def test_the_page_is_answered_whatever_the_brain_does_and_runs_nothing_but_its_own_script(site: Site) -> None:
    head, _, body = site.say(b"GET / HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    assert {"Content-Type: text/html; charset=utf-8", "X-Content-Type-Options: nosniff"} < set(lines)
    (policy,) = [line for line in lines if line.startswith("Content-Security-Policy: ")]
    rules = dict(rule.split(" ", 1) for rule in policy.partition(": ")[2].split("; "))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy
    for rule, tag in (("script-src", b"script"), ("style-src", b"style")):
        (text,) = re.findall(b"<%s[^>]*>(.*?)</%s>" % (tag, tag), body, re.DOTALL)
        assert len(text) > 1000
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


def test_the_page_is_whole_and_makes_no_html_of_what_it_is_told(site: Site) -> None:
    page = site.get("/")[1].decode()
    addresses = set(re.findall(r"(?:src|href)=\"([^\"]*)\"", page))
    assert {address for address in addresses if not address.startswith("data:")} == {
        "status",
        "metrics",
        "config",
        "healthz",
        "readyz",
    }
    assert not re.search(r"\b(?:src|href)=[^\"]", page)
    assert re.findall(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", page) == []


def test_a_query_does_not_change_the_page(site: Site) -> None:
    site.publish()
    assert site.get("/healthz?verbose=1")[0] == 200


def test_silent_clients_do_not_delay_others_and_the_oldest_makes_room(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pages, "CONNECTION_S", 10 * WAIT_S)
    site.publish()
    with_nothing_to_say = [site.connect() for _ in range(SILENT_MAX + 3)]
    try:
        assert site.get("/healthz")[0] == 200
        assert with_nothing_to_say[0].recv(1) == b"", "the oldest silent client should have been turned away"
    finally:
        for client in with_nothing_to_say:
            client.close()


def test_a_request_that_has_come_is_answered_however_many_connections_came_behind_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def render(status: Status, counters: Counters, age_s: float) -> bytes:
        busy.set()
        assert go_on.wait(WAIT_S)
        return b""

    monkeypatch.setattr(metrics, "render", render)
    site.publish()
    with site.connect() as slow, site.connect() as probe:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert busy.wait(WAIT_S)
        probe.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        behind = [site.connect() for _ in range(SILENT_MAX + 77)]
        go_on.set()
        try:
            assert _all_of(probe).startswith(b"HTTP/1.1 200 OK\r\n")
        finally:
            for client in behind:
                client.close()


def test_a_flood_is_told_in_one_line_and_without_a_traceback(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_pages, "CONNECTION_S", 10 * WAIT_S)
    site.publish()
    clients = [site.connect() for _ in range(SILENT_MAX + 55)]
    try:
        assert site.get("/healthz")[0] == 200, "answered, so all before it have been taken in"
    finally:
        for client in clients:
            client.close()
    site.server.close()
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [(record.levelname, record.getMessage()) for record in told] == [("WARNING", "http crowded")]


def test_health_is_answered_beside_clients_that_read_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "render", lambda status, counters, age_s: b"x" * (5 << 20))
    site.publish()
    deaf = [site.connect() for _ in range(ANSWERED_MAX + 5)]
    try:
        for client in deaf:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert [site.get("/healthz")[0] for _ in range(3)] == [200] * 3
        assert _ends(deaf[0]), "the oldest should have made room"
    finally:
        for client in deaf:
            client.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"evil.example", 421),
        (b"evil.example:9710", 421),
        (b"localhost.evil.example", 421),
        (b"127.0.0.1.evil.example", 421),
        (b"1.2.3", 421),
        (b"", 421),
        (b"localhost\r\nHost: evil.example", 400),
        (b"localhost", 200),
        (b"LocalHost.:9710", 200),
        (b"app.localhost:1", 200),
        (b"127.3.2.1:9710", 200),
        (b"10.7.0.3:9710", 200),
        (b"[::1]:9710", 200),
        (b"[fd00::7]", 200),
        (b"kv.cluster.example:9710", 200),
        (socket.gethostname().encode() + b":9710", 200),
    ],
)
@pytest.mark.parametrize("path", [b"/", b"/env", b"/status", b"/metrics"])
def test_a_browser_reads_nothing_under_a_name_that_is_not_ours(path: bytes, host: bytes, status: int) -> None:
    site = Site(names="gpu.example, kv.cluster.example")
    try:
        site.publish()
        answer = site.say(b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nAccept: */*\r\n\r\n")
        assert int(answer.split()[1]) == status
        assert status == 200 or json.loads(answer.partition(b"\r\n\r\n")[2]).keys() == {"error"}
        health = site.say(b"GET /healthz HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert health.startswith(b"HTTP/1.1 200 OK\r\n"), "a probe that fails would have the server restarted"
    finally:
        site.server.close()


def test_a_silent_client_is_closed_in_bounded_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pages, "CONNECTION_S", 0.05)
    with site.connect() as half_said, site.connect() as silent:
        half_said.sendall(b"GET /healthz HT")
        assert silent.recv(1) == b""
        assert _ends(half_said)


def test_a_client_that_never_reads_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def render(status: Status, counters: Counters, age_s: float) -> bytes:
        asked.set()
        return b"x" * (64 << 20)

    monkeypatch.setattr(metrics, "render", render)
    site.publish()
    monkeypatch.setattr(http_pages, "CONNECTION_S", 0.5)
    with site.connect() as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert asked.wait(WAIT_S)
        monkeypatch.setattr(http_pages, "CONNECTION_S", WAIT_S)
        assert site.get("/healthz")[0] == 200
        _wait_until(lambda: not site.server.connections)
        assert _ends(deaf)


def test_a_client_that_has_said_all_gets_all(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "render", lambda status, counters, age_s: b"x" * (16 << 20))
    site.publish()
    with site.connect() as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = _all_of(client)
    assert len(answer.partition(b"\r\n\r\n")[2]) == 16 << 20


def test_a_client_that_says_too_much_still_gets_all(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing with unread input would reset the connection and lose the bytes still on their way."""
    monkeypatch.setattr(metrics, "render", lambda status, counters, age_s: b"x" * (16 << 20))
    site.publish()
    answer = site.say(b"GET /metrics HTTP/1.1\r\n\r\n" + b"a" * 600_000)
    assert len(answer.partition(b"\r\n\r\n")[2]) == 16 << 20


def test_endless_input_is_cut_off(site: Site) -> None:
    site.publish()
    with site.connect() as flood:
        try:
            while True:
                flood.sendall(b"\r\n\r\n" + b"a" * 65_536)
        except OSError:
            cut_off = True
    assert cut_off
    assert site.get("/healthz")[0] == 200


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"http_port={port}: Address already in use"):
            HttpServer(SnapshotBoard(), host="127.0.0.1", port=port)


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"http_host=no-such-host\.invalid"):
        HttpServer(SnapshotBoard(), host="no-such-host.invalid", port=0)


def test_close_gives_the_port_back() -> None:
    first = Site()
    port = first.server.port
    waiting = first.connect()
    assert first.get("/healthz")[0] == 503, "answered, so the one that waits has been accepted before"
    first.server.close()
    assert _ends(waiting)
    waiting.close()
    assert all(thread.name != "http" for thread in threading.enumerate())
    HttpServer(SnapshotBoard(), host="127.0.0.1", port=port).close()


def _all_of(client: socket.socket) -> bytes:
    """Everything received up to the end of the connection."""
    pieces: list[bytes] = []
    while piece := client.recv(1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def _ends(client: socket.socket) -> bool:
    """Reads to the end of the connection, orderly or reset."""
    try:
        while client.recv(1 << 20):
            continue
    except ConnectionResetError:
        return True
    return True


def _wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, "did not come true"
        time.sleep(0.005)
