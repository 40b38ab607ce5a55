"""Operators and a real server: commands over HTTP and by `kvserver admin`, permissions, and secrecy of tokens."""

import http.client
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.process.engine import NAMESPACE, Engine, prompt
from tests.process.harness import Server, free_port, kill, pids_below, until
from tests.process.http import site

TOKEN = "planted-" + secrets.token_urlsafe(24)
OTHER = "planted-" + secrets.token_urlsafe(24)
STRANGER = "planted-" + secrets.token_urlsafe(24)
WAIT_S = 30.0


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who may\nalice: {TOKEN}\nbob: {OTHER}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def server(tokens: Path) -> Iterator[Server]:
    with Server(http_port=free_port(), admin_token_file=tokens) as server:
        yield server


def ask(
    server: Server, path: str, body: object = None, *, token: str | None = TOKEN, method: str = "POST"
) -> tuple[int, dict[str, object]]:
    return site.ask(server, path, body, token=token, method=method)


def cli(server: Server, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    url = f"--url=http://127.0.0.1:{server.settings['http_port']}"
    command = [sys.executable, "-m", "kvserver", "admin", *arguments, url]
    environment = {**os.environ, "KVSERVER_ADMIN_TOKEN": token}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def page(server: Server, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", int(str(server.settings["http_port"])), timeout=WAIT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_without_a_known_token_nothing_is_done(server: Server) -> None:
    with Engine(server.path).register().ready() as engine:
        story = prompt(1, 3)
        engine.store(story)
        clear = {"namespace": NAMESPACE.hex()}
        for token in (None, STRANGER, TOKEN[:-1], TOKEN + "x", ""):
            status, document = ask(server, "/admin/clear", clear, token=token)
            assert (status, document["code"]) == (401, "token")
        assert ask(server, "/admin/clear", clear, token=None, method="GET")[0] == 401
        assert engine.lookup(story).chunks == 3
        assert ask(server, "/admin/clear", clear) == (200, {"chunks": 3})
        assert engine.lookup(story).chunks == 0


def test_bad_input_is_refused_and_says_what_is_wrong(server: Server) -> None:
    digest = NAMESPACE.hex()
    for path, body, status, code in (
        ("/admin/nothing", {}, 400, "command"),
        ("/admin/clear", {}, 400, "command"),
        ("/admin/clear", {"namespace": "xyz"}, 400, "command"),
        ("/admin/clear", {"namespace": "00"}, 400, "namespace"),
        ("/admin/clear", {"namespace": digest, "extra": 1}, 400, "command"),
        ("/admin/clear", {"namespace": digest, "do": "pin"}, 400, "command"),
        ("/admin/clear", {"namespace": 7}, 400, "command"),
        ("/admin/clear", b"[" * 100_000, 400, "command"),
        ("/admin/clear", b"\xff", 400, "command"),
        ("/admin/pin", {"namespace": digest, "keys": ["00"] * 33, "ttl_ms": 5}, 400, "keys"),
        ("/admin/pin", {"namespace": digest, "keys": ["00" * 32], "ttl_ms": 5}, 400, "namespace-unknown"),
        ("/admin/unpin", {"hold": "one"}, 400, "command"),
        ("/admin/unpin", {"hold": 1 << 70}, 400, "hold-unknown"),
        ("/admin/log-level", {"level": "loud"}, 400, "command"),
        ("/admin/reload", {"values": {"nothing": 1}}, 400, "config-key"),
        ("/admin/reload", {"values": {"disk_clean_percent": 0}}, 400, "config-range"),
        ("/admin/reload", {"values": {"lease_ttl_ms": "soon"}}, 400, "config-type"),
        ("/admin/clear", b"x" * 400_000, 413, "body"),
        ("/admin/Clear/", {}, 404, "verb"),
    ):
        said = ask(server, path, body)
        assert (said[0], said[1]["code"]) == (status, code), (path, said)
    told = ask(server, "/admin/clear", {"namespace": "xyz"})[1]["error"]
    assert told == "clear: namespace='xyz' is not hexadecimal: a digest is 64 digits 0-9, a-f"
    assert ask(server, "/admin/drain", method="PUT")[1]["code"] == "method"
    assert server.status().drain == ""


def test_commands_come_true_and_leave_audit_lines(server: Server) -> None:
    with Engine(server.path).register().ready() as engine:
        story, other = prompt(1, 3), prompt(2, 4)
        engine.store(story)
        engine.store(other)
        digest = NAMESPACE.hex()
        pinned = cli(server, "pin", digest, story.key(2).hex(), "--for=60")
        assert (pinned.returncode, "3 chunks for 60 s" in pinned.stdout) == (0, True), pinned
        (hold,) = server.status().holds
        assert (hold.chunks, hold.key) == (3, story.key(2).hex())
        assert cli(server, "warm", digest, story.key(1).hex(), token=OTHER).stdout == "2 chunks\n"
        assert cli(server, "unpin", str(hold.hold)).returncode == 0
        cleared = cli(server, "clear", digest, f"--key={other.key(1).hex()}")
        assert cleared.stdout == "cleared: 3 chunks\n"
        assert engine.lookup(other).chunks == 1
        drained = cli(server, "drain")
        assert drained.returncode == 0, drained
        assert "there is no disk tier" in drained.stdout
        assert engine.store(prompt(3, 2)).chunks == 0
        assert engine.lookup(story).chunks == 3
        assert cli(server, "resume").returncode == 0
        assert engine.store(prompt(3, 2)).chunks == 2
        assert cli(server, "new-weights", digest, "--quiet-s=600").returncode == 0
        assert engine.lookup(story).chunks == 0
        assert engine.store(story).chunks == 0
    audited = [line for line in server.log().splitlines() if " brain admin " in line]
    assert [line.split(" did=")[1].split()[0] for line in audited] == [
        *("pin", "warm", "unpin", "clear", "drain", "resume", "new-weights")
    ]
    assert 'who="token alice"' in audited[0]
    assert 'who="token bob"' in audited[1]
    assert f"key={other.key(1).hex()}" in audited[3]


def test_level_and_bounds_change_while_the_server_runs(server: Server, tmp_path: Path) -> None:
    assert cli(server, "log-level", "error").stdout == "log_level = error\n"
    assert cli(server, "log-level", "debug").returncode == 0
    with Engine(server.path).register().ready() as engine:
        engine.lookup(prompt(1, 2))
    until("a line about a lookup", lambda: " DEBUG brain lookup " in server.log())
    file = tmp_path / "kvserver.toml"
    settings = {"arena_bytes": 64 << 20, "copy_threads": 2, "touch_threads": 1, "lease_ttl_ms": 777}
    texts = {"socket": str(server.path), "admin_token_file": str(server.settings["admin_token_file"])}
    lines = [f"{name} = {value}" for name, value in settings.items()]
    lines += [f'{name} = "{value}"' for name, value in texts.items()]
    lines += [f"http_port = {server.settings['http_port']}", "sessions_max = 99"]
    file.write_text("\n".join(lines))
    said = cli(server, "reload", f"--config={file}")
    assert said.stdout.splitlines() == [
        "changed: lease_ttl_ms, log_level",
        "other than in force, and only at the next start: sessions_max",
    ]
    command = [sys.executable, "-m", "kvserver", "config", "--running", f"--config={file}", "--json"]

    def in_force() -> dict[str, dict[str, object]] | None:
        """What the command says, once the server has published the change."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        told: dict[str, dict[str, object]] = json.loads(done.stdout)
        return told if told["log_level"]["value"] == "info" else None

    told = until("the change to be told", in_force)
    assert told["lease_ttl_ms"] == {"value": 777, "origin": "changed since the start"}
    assert told["sessions_max"]["value"] != 99
    assert told["sessions_max"]["origin"] == "start; these flags and this file say 99"
    assert told["arena_bytes"] == {"value": 64 << 20, "origin": "start"}
    kill(server.brain_pid())

    def changed() -> list[str] | None:
        with suppress(OSError):  # between two brains nobody listens
            document = json.loads(page(server, "/config"))
            return list(document["changed_since_start"]) if "values" in document else None
        return None

    until("the next brain to have forgotten it", lambda: changed() == [])


def test_tokens_can_be_changed_and_a_bad_file_changes_nothing(server: Server, tokens: Path) -> None:
    tokens.write_text(f"alice: {TOKEN}\ncarol: {STRANGER}\n")
    assert ask(server, "/admin/resume", token=STRANGER)[0] == 401
    assert ask(server, "/admin/reload", {"values": {}}) == (200, {"needs_restart": [], "keys": []})
    assert ask(server, "/admin/resume", token=STRANGER)[0] == 200
    assert ask(server, "/admin/resume", token=OTHER)[0] == 401
    tokens.chmod(0o644)
    status, document = ask(server, "/admin/reload", {"values": {}})
    assert (status, document["code"]) == (400, "admin-token")
    assert ask(server, "/admin/resume", token=STRANGER)[0] == 200


def test_a_brain_that_cannot_read_the_tokens_any_more_serves_engines_and_nobody_else(
    server: Server, tokens: Path
) -> None:
    with Engine(server.path).register().ready() as engine:
        story = prompt(1, 3)
        engine.store(story)
        tokens.chmod(0o644)
        kill(server.brain_pid())
        until("the prompt again", lambda: engine.lookup(story).chunks == 3)
        assert ask(server, "/admin/clear", {"namespace": NAMESPACE.hex()})[1]["code"] == "admin-off"
        assert " ERROR brain admin off " in server.log()
        tokens.chmod(0o600)
        kill(server.brain_pid())
        until("the prompt again", lambda: engine.lookup(story).chunks == 3)
        assert ask(server, "/admin/clear", {"namespace": NAMESPACE.hex()}) == (200, {"chunks": 3})


def test_a_tenant_is_cleared_by_its_name(server: Server) -> None:
    with Engine(server.path).register().ready() as engine:
        story = prompt(1, 3)
        engine.store(story)
        assert cli(server, "clear-tenant", "somebody").stdout == "cleared: 0 chunks in 0 namespaces\n"
        assert engine.lookup(story).chunks == 3
        said = ask(server, "/admin/clear-tenant", {"tenant": ""})
        assert (said[0], said[1]["code"]) == (400, "name")
    with Engine(server.path, tenant="guests").register().ready() as engine:
        engine.store(story)
        assert cli(server, "clear-tenant", "guests").stdout == "cleared: 3 chunks in 1 namespaces\n"
        assert engine.lookup(story).chunks == 0


def test_a_server_without_tokens_takes_no_commands() -> None:
    with Server(http_port=free_port()) as server:
        assert ask(server, "/admin/drain")[0] == 403
        assert server.status().drain == ""


def test_a_cleared_prefix_stays_cleared_when_brain_and_server_start_again(tokens: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = {"disk_paths": disk, "disk_bytes": 16 << 20, "disk_segment_bytes": 1 << 20}
    with Server(http_port=free_port(), admin_token_file=tokens, disk_write_policy="through", **settings) as server:
        story = prompt(1, 5)
        with Engine(server.path).register().ready() as engine:
            engine.store(story)
            until("all of it to be on disk", lambda: server.status().chunks_on_disk == 5)
            assert ask(server, "/admin/clear", {"namespace": NAMESPACE.hex(), "key": story.key(2).hex()})[0] == 200
            kill(server.brain_pid())
            until("the prefix again", lambda: engine.lookup(story).chunks > 0)
            assert engine.lookup(story).chunks == 2
        server.kill()
        server.start()
        until("the disk to be read", lambda: server.status().disk_state == "ready")
        with Engine(server.path).register().ready() as engine:
            assert engine.lookup(story).chunks == 2


def test_no_token_is_ever_told(server: Server, tokens: Path) -> None:
    """Sends known and unknown tokens in every way that the server accepts, then searches all output for them."""
    told = [ask(server, "/admin/drain", token=STRANGER), ask(server, f"/admin/{STRANGER}", {"x": STRANGER})]
    told += [ask(server, "/admin/clear", {"namespace": STRANGER}), ask(server, "/admin/log-level", {"level": "debug"})]
    told += [ask(server, "/admin/nothing", token=STRANGER), ask(server, "/admin/resume", token=OTHER)]
    said = [cli(server, "resume"), cli(server, "unpin", "7"), cli(server, "resume", token=STRANGER)]
    bad = tokens.with_name("bad")
    bad.write_text(f"short: x\n{TOKEN} {OTHER}\n")
    bad.chmod(0o600)
    socket = f"--socket={server.folder}/other.sock"
    command = [
        sys.executable,
        "-m",
        "kvserver",
        "serve",
        socket,
        f"--admin-token-file={bad}",
        f"--http-port={free_port()}",
    ]
    start = subprocess.run([*command, "--arena-bytes=1MiB"], capture_output=True, text=True, timeout=60, check=False)
    assert start.returncode == 2
    assert "admin-token" in start.stdout + start.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "kvserver", "config", f"--admin-token-file={tokens}"],
        env={**os.environ, "KVSERVER_ADMIN_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    texts = {
        path: page(server, path) for path in ("/status", "/metrics", "/healthz", "/readyz", "/env", "/admin/drain")
    }
    texts |= {"log": server.log(), "start": start.stdout + start.stderr, "config": shown.stdout + shown.stderr}
    texts["cli"] = "".join(done.stdout + done.stderr for done in said)
    texts["refused"] = "".join(str(document) for status, document in told if status == 401)
    for pid in (server.pid, server.brain_pid()):
        texts[f"command line of {pid}"] = Path(f"/proc/{pid}/cmdline").read_text()
    for where, text in texts.items():
        for token in (TOKEN, OTHER, STRANGER):
            assert token not in text, where


def test_a_token_of_the_environment_is_inherited_by_the_brain_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSERVER_ADMIN_TOKEN", TOKEN)
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = {"disk_paths": disk, "disk_bytes": 16 << 20, "disk_segment_bytes": 1 << 20}
    with Server(http_port=free_port(), **settings) as server, Engine(server.path).register().ready():
        assert ask(server, "/admin/resume")[0] == 200
        movers = {server.mover_pid(), server.disk_mover_pid()}
        shown = json.loads(page(server, "/env"))
        assert (shown["KVSERVER_ADMIN_TOKEN"], shown["PATH"]) == ("(hidden)", os.environ["PATH"])
        assert TOKEN not in "".join(shown.values())
        assert set(pids_below(server.pid)) == {server.brain_pid(), *movers}
        assert TOKEN.encode() in Path(f"/proc/{server.brain_pid()}/environ").read_bytes()
        for pid in movers:
            inherited = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"PATH=" in inherited
            assert TOKEN.encode() not in inherited
