"""examples/pd/proxy.py between a client and stand-ins for the two vLLM servers, which record what comes."""

import gzip
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.process.harness import WAIT_S, free_port, until

PROXY = Path(__file__).resolve().parents[3] / "examples" / "pd" / "proxy.py"
PROMPTS = ("/v1/completions", "/v1/chat/completions")
NOTHING = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
START_S = 3 * WAIT_S
"""A start imports aiohttp, from many files: on busy cores that takes its time."""
FOR_PREFILL = {**NOTHING, "do_remote_decode": True, "do_remote_prefill": False}
FOR_DECODE = {**NOTHING, "do_remote_decode": False, "do_remote_prefill": True}
BODY = {"model": "tiny", "prompt": [3, 1, 4], "max_tokens": 7}
ANSWER = b'{"choices": [{"text": "\xc3\xa9t\xc3\xa9"}]}\n'


class Came(NamedTuple):
    """A request as a side saw it."""

    verb: str
    path: str
    headers: dict[str, str]
    body: bytes


class Side:
    """A stand-in for a vLLM server. `does` answers, and a connection that ends under it is in `gone`.

    Requests carry their test's name: one of an earlier test, which its client left behind, may come late.
    """

    def __init__(self) -> None:
        side = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                if headers.pop("x-test") == side.test:
                    side.came.append(Came(self.command, self.path, headers, body))
                    side.does(self)

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        class Listener(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Says nothing: proxies that end connections are what is tested."""

        self._server = Listener(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.begin("")
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def begin(self, test: str) -> None:
        self.test = test
        self.came: list[Came] = []
        self.gone: list[str] = []
        self.does: Callable[[BaseHTTPRequestHandler], None] = answers(200, ANSWER)

    def hangs(self, link: BaseHTTPRequestHandler) -> None:
        """Says no more, and waits for the other end to close."""
        gone = self.gone
        link.connection.settimeout(WAIT_S)
        with suppress(ConnectionResetError):  # it has not read all that was sent
            assert link.connection.recv(1) == b""
        link.close_connection = True
        gone.append(link.path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answers(status: int, body: bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def does(link: BaseHTTPRequestHandler) -> None:
        link.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            link.send_header(name.replace("_", "-"), value)
        link.end_headers()
        link.wfile.write(body)

    return does


def once(
    probe: Callable[[], object], does: Callable[[BaseHTTPRequestHandler], None]
) -> Callable[[BaseHTTPRequestHandler], None]:
    """Does that as soon as the probe is true."""

    def waits(link: BaseHTTPRequestHandler) -> None:
        until("the other side", probe)
        does(link)

    return waits


def begins(link: BaseHTTPRequestHandler, first: bytes, **headers: str) -> None:
    """Sends an answer's head and its first bytes, in chunks unless `headers` say a length."""
    link.send_response(200)
    chosen = headers or {"Transfer_Encoding": "chunked"}
    for name, value in {"Content-Type": "text/event-stream", **chosen}.items():
        link.send_header(name.replace("_", "-"), value)
    link.end_headers()
    goes_on(link, first) if chosen != headers else link.wfile.write(first)


def goes_on(link: BaseHTTPRequestHandler, part: bytes) -> None:
    link.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))


class Pair(NamedTuple):
    """Two sides and the proxy before them."""

    prefill: Side
    decode: Side
    port: int
    process: "subprocess.Popen[bytes]"
    log: Path

    def asked(
        self, verb: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Status, body and headers of the proxy's answer. body: bytes go as they are, all else as JSON."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {
            "Content-Type": "application/json",
            "X-Test": self.decode.test,
            **{name.replace("_", "-"): text for name, text in headers.items()},
        }
        link.request(verb, path, data, sent)
        answer = link.getresponse()
        got = answer.status, answer.read(), answer.headers
        link.close()
        return got

    def prompts(self, body: object = BODY, **headers: str) -> tuple[int, bytes]:
        return self.asked("POST", PROMPTS[0], body, **headers)[:2]

    def begun(self, length: int, body: bytes) -> socket.socket:
        """A connection with a request whose body has, or will have, that length."""
        link = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        head = (
            f"POST {PROMPTS[0]} HTTP/1.1\r\nHost: x\r\nX-Test: {self.decode.test}\r\nContent-Length: {length}\r\n\r\n"
        )
        link.sendall(head.encode() + body)
        return link


@contextmanager
def proxied(folder: Path, **limits: int) -> Iterator[Pair]:
    with ExitStack() as stack:
        prefill, decode = Side(), Side()
        stack.callback(prefill.close)
        stack.callback(decode.close)
        port, log = free_port(), folder / f"proxy-{len(list(folder.iterdir()))}.log"
        command = [sys.executable, str(PROXY), "--port", str(port)]
        command += ["--prefill", f"http://127.0.0.1:{prefill.port}", "--decode", f"http://127.0.0.1:{decode.port}"]
        command += [word for name, value in limits.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        with log.open("wb") as said:
            process = stack.enter_context(subprocess.Popen(command, stdout=said, stderr=said))
        stack.callback(process.kill)
        until("the proxy to listen", lambda: listens(process, port), START_S)
        yield Pair(prefill, decode, port, process, log)


def listens(process: "subprocess.Popen[bytes]", port: int) -> bool:
    assert process.poll() is None
    try:
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with proxied(tmp_path_factory.mktemp("pd")) as pair:
        yield pair


@pytest.fixture
def pair(running: Pair, request: pytest.FixtureRequest) -> Iterator[Pair]:
    for side in (running.prefill, running.decode):
        side.begin(request.node.name.encode().hex())
    yield running
    assert "Traceback" not in running.log.read_text()


# ---------------------------------------------------------------- what each side gets


def test_both_sides_have_a_prompt_at_the_same_time_and_decode_answers(pair: Pair) -> None:
    """Each side answers only when the other one has its request too."""

    pair.prefill.does = once(lambda: pair.decode.came, answers(200, b"one token"))
    pair.decode.does = once(lambda: pair.prefill.came, answers(200, ANSWER))
    assert pair.prompts() == (200, ANSWER)
    assert len(pair.prefill.came) == len(pair.decode.came) == 1


@pytest.mark.parametrize("path", PROMPTS)
def test_prefill_is_asked_for_one_token_at_once_and_decode_for_what_the_client_wants(pair: Pair, path: str) -> None:
    wanted = {"messages": [{"role": "user", "content": "é \udc00"}], "stream": True, "max_tokens": 9, "n": 3}
    wanted |= {"min_tokens": 5, "max_completion_tokens": 8, "stream_options": {"include_usage": True}, "seed": 1.5}
    pair.decode.does = once(lambda: pair.prefill.came, answers(200, ANSWER))
    status, body, _ = pair.asked("POST", f"{path}?a=%26&b", wanted, Authorization="Bearer xyzzy", X_Request_Id="r-7")
    assert (status, body) == (200, ANSWER)
    (decode,), (prefill,) = pair.decode.came, pair.prefill.came
    assert json.loads(decode.body) == {**wanted, "kv_transfer_params": FOR_DECODE}
    least = {"stream": False, "stream_options": None, "max_tokens": 1, "min_tokens": 1, "max_completion_tokens": 1}
    assert json.loads(prefill.body) == {**wanted, **least, "n": 1, "kv_transfer_params": FOR_PREFILL}
    for side in (decode, prefill):
        assert (side.verb, side.path) == ("POST", f"{path}?a=%26&b")
        assert side.headers["authorization"] == "Bearer xyzzy"
        assert side.headers["content-type"] == "application/json"
        assert side.headers["x-request-id"] == "r-7"


def test_limits_that_a_client_does_not_set_are_not_set_for_it(pair: Pair) -> None:
    pair.decode.does = once(lambda: pair.prefill.came, answers(200, ANSWER))
    pair.prompts({"prompt": "x"})
    assert json.loads(pair.decode.came[0].body) == {"prompt": "x", "kv_transfer_params": FOR_DECODE}
    (prefill,) = pair.prefill.came
    assert set(json.loads(prefill.body)) == {"prompt", "max_tokens", "stream", "stream_options", "kv_transfer_params"}


def test_both_sides_know_a_request_by_one_name_and_another_one_by_another(pair: Pair) -> None:
    pair.decode.does = once(lambda: len(pair.prefill.came) == len(pair.decode.came), answers(200, ANSWER))
    for _ in range(2):
        pair.prompts()
    names = [[one.headers["x-request-id"] for one in side.came] for side in (pair.prefill, pair.decode)]
    assert names[0] == names[1]
    assert names[0][0] != names[0][1]


def test_what_a_client_says_to_the_connector_stays(pair: Pair) -> None:
    pair.prompts({**BODY, "kv_transfer_params": {"mine": 5, "do_remote_decode": True, "remote_port": 9}})
    assert json.loads(pair.decode.came[0].body)["kv_transfer_params"] == {"mine": 5, **FOR_DECODE}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"\xff\xfe",
        b'{"a": ' + b"[" * 9999 + b"]" * 9999 + b"}",
        b'{"kv_transfer_params": 7}',
    ],
    ids=["empty", "half", "list", "text", "no text", "deep", "params"],
)
def test_what_is_no_request_comes_to_decode_as_it_is_so_that_it_says_what_is_wrong(pair: Pair, body: bytes) -> None:
    pair.decode.does = answers(422, b"that is wrong")
    assert pair.prompts(body) == (422, b"that is wrong")
    assert pair.decode.came[0].body == body


def test_a_compressed_request_is_read_and_sent_on_uncompressed(pair: Pair) -> None:
    assert pair.prompts(gzip.compress(json.dumps(BODY).encode()), Content_Encoding="gzip") == (200, ANSWER)
    assert json.loads(pair.decode.came[0].body) == {**BODY, "kv_transfer_params": FOR_DECODE}
    assert "content-encoding" not in pair.decode.came[0].headers


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_page_is_decodes_alone(pair: Pair, path: str) -> None:
    pair.decode.does = answers(503, b"not yet")
    assert pair.asked("GET", path)[:2] == (503, b"not yet")
    assert [(one.verb, one.path, one.body) for one in pair.decode.came] == [("GET", path, b"")]
    assert pair.prefill.came == []


@pytest.mark.parametrize(
    ("verb", "path", "status"),
    [
        *(("POST", path, 404) for path in ("/", "/v1/completions/", "//v1/completions", "/V1/completions", "/v1")),
        *(("POST", path, 404) for path in ("/reset_prefix_cache", "/v1/completions%00", "/v1/responses")),
        *(("GET", path, 404) for path in ("/metrics", "/health/", "/v1/models/tiny", "http://elsewhere/metrics")),
        *(("GET", path, 405) for path in PROMPTS),
        *(("HEAD", "/health", 405), ("DELETE", "/v1/models", 405), ("POST", "/health", 405)),
    ],
)
def test_other_paths_and_verbs_reach_nobody(pair: Pair, verb: str, path: str, status: int) -> None:
    assert pair.asked(verb, path, BODY if verb == "POST" else None)[0] == status
    assert pair.prefill.came == pair.decode.came == []


# ---------------------------------------------------------------- the answer


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 503])
def test_decodes_answer_is_passed_on_with_its_status_and_headers(pair: Pair, status: int) -> None:
    pair.decode.does = answers(status, ANSWER, Retry_After="17", X_Odd="a b")
    got, body, headers = pair.asked("POST", PROMPTS[1], BODY)
    assert (got, body) == (status, ANSWER)
    assert (headers["Retry-After"], headers["X-Odd"], headers["Content-Type"]) == ("17", "a b", "application/json")


def test_a_stream_comes_piece_by_piece_and_byte_by_byte_the_same(pair: Pair) -> None:
    """Each piece is sent only when the client has read the one before."""
    pieces = [b'data: {"text": "\xc3', b'\xa9"}\n\n', b"\x00\r\n0\r\n\r\n", b"x" * 70_001, b"data: [DONE]\n\n"]
    read = threading.Semaphore(0)

    def does(link: BaseHTTPRequestHandler) -> None:
        begins(link, pieces[0])
        for piece in pieces[1:]:
            assert read.acquire(timeout=WAIT_S)
            goes_on(link, piece)
        link.wfile.write(b"0\r\n\r\n")

    pair.decode.does = does
    link = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=WAIT_S)
    link.request("POST", PROMPTS[0], json.dumps({**BODY, "stream": True}), {"X-Test": pair.decode.test})
    answer = link.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    for piece in pieces:
        assert answer.read(len(piece)) == piece
        read.release()
    assert answer.read() == b""
    link.close()


@pytest.mark.parametrize("headers", [{}, {"Content_Length": "999"}], ids=["chunked", "of a length"])
def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one_and_ends_prefill(
    pair: Pair, headers: dict[str, str]
) -> None:
    def does(link: BaseHTTPRequestHandler) -> None:
        begins(link, b"half", **headers)
        link.close_connection = True

    pair.prefill.does, pair.decode.does = pair.prefill.hangs, does
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        pair.prompts()
    until("prefill to be aborted", lambda: len(pair.prefill.gone) == len(pair.prefill.came))


# ---------------------------------------------------------------- prefill fails, or is slow


def half(link: BaseHTTPRequestHandler) -> None:
    begins(link, b"{", Content_Length="99")
    link.close_connection = True


def nothing(link: BaseHTTPRequestHandler) -> None:
    link.close_connection = True


def noise(link: BaseHTTPRequestHandler) -> None:
    link.wfile.write(b"\x16\x03\x01\x00\xff\r\n\r\n")
    link.close_connection = True


@pytest.mark.parametrize(
    "does",
    [answers(500, b'{"error": 1}'), answers(503, b""), half, nothing, noise, None],
    ids=["500", "503", "half", "nothing", "noise", "not there"],
)
def test_whatever_prefill_does_decode_answers_and_is_not_told_to_wait_for_a_while(
    does: Callable[[BaseHTTPRequestHandler], None] | None, tmp_path: Path
) -> None:
    with proxied(tmp_path) as pair:
        if does is None:
            pair.prefill.close()
        else:
            pair.prefill.does = does
        pair.decode.does = once(lambda: "prefill side failed" in pair.log.read_text(), answers(200, ANSWER))
        for _ in range(2):
            assert pair.prompts(Authorization="Bearer xyzzy") == (200, ANSWER)
        told = [json.loads(one.body)["kv_transfer_params"]["do_remote_prefill"] for one in pair.decode.came]
        assert told == [True, False]
        (line,) = pair.log.read_text().splitlines()[-1:]
        assert "prefill side failed" in line
        assert pair.log.read_text().count("prefill side failed") == 1
        assert "xyzzy" not in pair.log.read_text()


def test_a_prefill_that_refuses_a_request_has_not_failed(tmp_path: Path) -> None:
    with proxied(tmp_path) as pair:
        pair.decode.does = once(lambda: len(pair.prefill.came) == len(pair.decode.came), answers(200, ANSWER))
        for status in (400, 401, 404, 422, 200):
            pair.prefill.does = answers(status, b"no")
            assert pair.prompts() == (200, ANSWER)
        assert all(json.loads(one.body)["kv_transfer_params"] == FOR_DECODE for one in pair.decode.came)
        assert "prefill side failed" not in pair.log.read_text()


def test_a_prefill_that_is_slower_than_the_answer_is_aborted_with_it(pair: Pair) -> None:
    pair.prefill.does = pair.prefill.hangs
    pair.decode.does = once(lambda: pair.prefill.came, answers(200, ANSWER))
    assert pair.prompts() == (200, ANSWER)
    until("prefill to be aborted", lambda: len(pair.prefill.gone) == 1)


# ---------------------------------------------------------------- decode or the client goes away


@pytest.mark.parametrize("begun", [False, True], ids=["before an answer", "in the middle of one"])
def test_a_client_that_goes_away_aborts_both(pair: Pair, begun: bool) -> None:
    def does(link: BaseHTTPRequestHandler) -> None:
        if begun:
            begins(link, b"half")
        pair.decode.hangs(link)

    pair.prefill.does, pair.decode.does = pair.prefill.hangs, does
    body = json.dumps(BODY).encode()
    with pair.begun(len(body), body) as link:
        until("both to have it", lambda: pair.prefill.came and pair.decode.came)
        came = b""
        while begun and b"half" not in came:
            came += (part := link.recv(99))
            assert part
    until("both to be aborted", lambda: len(pair.prefill.gone) == len(pair.decode.gone) == 1)


def test_a_decode_side_that_is_not_there_is_said_and_nothing_is_left_of_prefill(tmp_path: Path) -> None:
    with proxied(tmp_path) as pair:
        pair.prefill.does = pair.prefill.hangs
        pair.decode.close()
        status, body = pair.prompts()
        assert status == 502
        assert b"the decode side did not answer" in body
        assert str(pair.decode.port).encode() in body
        until("prefill to be aborted", lambda: len(pair.prefill.gone) == len(pair.prefill.came))


# ---------------------------------------------------------------- bounds


def test_an_answer_has_its_time_and_then_both_are_aborted(tmp_path: Path) -> None:
    with proxied(tmp_path, answer_s=1) as pair:
        pair.prefill.does, pair.decode.does = pair.prefill.hangs, pair.decode.hangs
        assert pair.prompts()[0] == 504
        until("both to be aborted", lambda: len(pair.prefill.gone) == len(pair.decode.gone) == 1)


def test_a_decode_side_that_takes_no_connections_is_not_waited_for(tmp_path: Path) -> None:
    with ExitStack() as full, proxied(tmp_path, connect_s=1) as pair:
        pair.decode.close()
        listener = full.enter_context(socket.create_server(("127.0.0.1", pair.decode.port), backlog=0))
        full.enter_context(socket.create_connection(listener.getsockname()))  # the only one that waits to be accepted
        assert pair.prompts()[0] == 504


def test_a_request_that_does_not_come_to_its_end_is_refused(tmp_path: Path) -> None:
    with proxied(tmp_path, body_s=1) as pair, pair.begun(9, b"x" * 8) as link:
        assert b" 504 " in link.recv(99)
        assert pair.prefill.came == pair.decode.came == []


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "compressed"])
def test_a_body_above_its_bound_reaches_nobody(tmp_path: Path, packed: bool) -> None:
    def sized(length: int) -> bytes:
        body = json.dumps({"prompt": ""}).encode()
        whole = body.replace(b'""', b'"%b"' % (b"x" * (length - len(body))))
        return gzip.compress(whole) if packed else whole

    headers = {"Content_Encoding": "gzip"} if packed else {}
    with proxied(tmp_path, body_mib_max=1) as pair:
        assert pair.prompts(sized((1 << 20) + 1), **headers)[0] == 413
        assert pair.prefill.came == pair.decode.came == []
        assert pair.prompts(sized((1 << 20) - 1), **headers) == (200, ANSWER)


def test_requests_above_their_bound_are_refused_and_pages_are_not(tmp_path: Path) -> None:
    with proxied(tmp_path, requests_max=2) as pair, ExitStack() as clients:
        pair.decode.does = pair.decode.hangs
        body = json.dumps(BODY).encode()
        for count in (1, 2):
            link = clients.enter_context(pair.begun(len(body), body))
            until("the request to be under way", lambda count=count: len(pair.decode.came) == count)
        pair.decode.does = answers(200, ANSWER)
        assert pair.prompts()[0] == 503
        assert pair.asked("GET", "/health")[:2] == (200, ANSWER)
        link.close()
        until("its place to be free", lambda: pair.prompts() == (200, ANSWER))


def test_sigterm_ends_it(tmp_path: Path) -> None:
    with proxied(tmp_path) as pair:
        pair.process.send_signal(signal.SIGTERM)
        assert pair.process.wait(WAIT_S) == 0
