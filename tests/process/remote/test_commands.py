"""`kvserver remote` beside a real server, on a real Valkey with a password and on a directory.

No planted password or token is in any output."""

import os
import re
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.engine import NAMESPACE, Engine, prompt
from tests.process.harness import WAIT_S, Server, free_port, until
from tests.rigs.s3_server import KEY, S3Server
from tests.rigs.valkey_server import ValkeyServer

CHUNKS = 7
PASSWORD = "planted-" + secrets.token_urlsafe(24)
TOKEN = "planted-" + secrets.token_urlsafe(24)
DIGEST = NAMESPACE.hex()


@dataclass
class Place:
    """A store, as the value of --remotes, and its Valkey if it has one."""

    remotes: str
    tokens: Path
    valkey: ValkeyServer | None

    def run(self, *arguments: str, status: int = 0) -> str:
        """The output of `kvserver remote`, both streams. It has no secret in it."""
        command = [sys.executable, "-m", "kvserver", "remote", *arguments]
        environment = {**os.environ, "KVSERVER_ADMIN_TOKEN": TOKEN}
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S + 20,
            check=False,
            env=environment,
        )
        said = run.stdout + run.stderr
        assert PASSWORD not in said
        assert TOKEN not in said
        assert KEY not in said
        assert run.returncode == status, said
        return said

    def inspect(self, *arguments: str, status: int = 0) -> str:
        return self.run("inspect", "--remotes", self.remotes, *arguments, status=status)

    def server(self, **settings: object) -> Server:
        return Server(remotes=self.remotes, http_port=free_port(), admin_token_file=self.tokens, **settings)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["directory", "valkey", pytest.param("s3", marks=pytest.mark.stores)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    tokens, password, store = tmp_path / "tokens", tmp_path / "password", tmp_path / "store"
    for file, text in ((tokens, f"tests: {TOKEN}\n"), (password, PASSWORD)):
        file.touch(mode=0o600)
        file.write_text(text)
    options = "tokens_min=0&write=through"
    if request.param == "directory":
        store.mkdir()
        yield Place(f"fleet=file://{store}?{options}", tokens, None)
        return
    if request.param == "s3":
        yield Place(f"fleet={request.getfixturevalue('s3').url(tmp_path)}&{options}", tokens, None)
        return
    with ValkeyServer("--requirepass", PASSWORD) as valkey:
        options += f"&password_file={password}"
        yield Place(f"fleet=valkey://127.0.0.1:{valkey.port}?{options}", tokens, valkey)


def counted(server: Server, name: str) -> int:
    found = server.status().counters[name]
    assert isinstance(found, int)
    return found


def of_epoch(said: str) -> tuple[int, int]:
    """Chunks and bytes of the epoch that counts."""
    chunks, of_bytes = re.findall(r"of this epoch: ([\d,]+) chunks, [\d,]+ values, ([\d,]+) bytes", said)[0]
    return int(chunks.replace(",", "")), int(of_bytes.replace(",", ""))


def test_the_commands_tell_what_a_server_has_written(place: Place) -> None:
    story = prompt(3, CHUNKS)
    with place.server() as server, Engine(server.path).ready() as engine:
        engine.store(story)
        until("the chunks to be in the store", lambda: counted(server, "remote_writes") == CHUNKS)
        said = place.run("status", f"--socket={server.path}")
        payload_bytes = counted(server, "remote_written_bytes")
        assert "usable    yes\n" in said
        assert f"counted   writes {CHUNKS}\n" in said
        assert f"counted   written_bytes {payload_bytes:,}\n" in said

        assert f"namespace {DIGEST}: epoch " in place.inspect()
        said = place.inspect("--namespace", DIGEST[:7])
        chunks, all_bytes = of_epoch(said)
        assert chunks == CHUNKS
        assert all_bytes == payload_bytes + CHUNKS * (136 + 16 + 16), "a head of one part has 168 bytes"
        assert "of 0 other epochs, which no server finds: 0 chunks" in said

        chunk = place.inspect("--namespace", DIGEST, "--key", story.key(1).hex())
        assert f"1 parts, {payload_bytes // CHUNKS:,} bytes" in chunk
        assert f"  follows {story.key(0).hex()}\n" in chunk
        assert f"{payload_bytes // CHUNKS:,} bytes, right\n" in chunk
        assert "not there" in place.inspect("--namespace", DIGEST, "--key", prompt(4, 1).key(0).hex(), status=1)

        assert "a probe takes" in place.run("probe", "--remotes", place.remotes)
        assert of_epoch(place.inspect("--namespace", DIGEST)) == (chunks, all_bytes), "a probe leaves nothing"


@pytest.mark.parametrize("everything", [False, True], ids=["namespace", "all"])
def test_a_clear_of_the_store_alone_reaches_its_servers(place: Place, everything: bool) -> None:
    story = prompt(5, CHUNKS)
    with place.server() as server, Engine(server.path).ready() as engine:
        engine.store(story)
        until("the chunks to be in the store", lambda: counted(server, "remote_writes") == CHUNKS)
        what = "--all" if everything else DIGEST
        assert "expected --yes" in place.run("clear", what, "--remotes", place.remotes, status=2)
        assert engine.lookup(story).chunks == CHUNKS
        assert place.run("clear", what, "--yes", "--remotes", place.remotes).startswith("cleared: 1 namespaces;")
        until("the server to hear of it", lambda: engine.lookup(story).chunks == 0)
        assert "namespace cleared elsewhere" in server.log()
        said = place.inspect("--namespace", DIGEST)
        assert of_epoch(said) == (0, 0)
        assert f"of 1 other epochs, which no server finds: {CHUNKS} chunks" in said
        newer = prompt(6, CHUNKS - 2)
        engine.store(newer)
        until("the newer ones to be there", lambda: counted(server, "remote_writes") == 2 * CHUNKS - 2)
        sweep = ("sweep", "--remotes", place.remotes)
        assert place.run(*sweep, "--dry-run").startswith(f"found of 1 epochs: {CHUNKS} chunks, ")
        assert place.run(*sweep, "--yes").startswith(f"removed of 1 epochs: {CHUNKS} chunks, ")
        said = place.inspect("--namespace", DIGEST)
        assert of_epoch(said)[0] == CHUNKS - 2
        assert "of 0 other epochs, which no server finds: 0 chunks" in said


def test_a_clear_by_a_server_clears_its_store_too(place: Place) -> None:
    story = prompt(6, CHUNKS)
    with place.server() as server, Engine(server.path).ready() as engine:
        engine.store(story)
        until("the chunks to be in the store", lambda: counted(server, "remote_writes") == CHUNKS)
        url = f"--url=http://127.0.0.1:{server.settings['http_port']}"
        assert place.run("clear", DIGEST, "--yes", url) == f"cleared: {CHUNKS} chunks\n"
        assert engine.lookup(story).chunks == 0
        assert of_epoch(place.inspect("--namespace", DIGEST)) == (0, 0)


@pytest.mark.parametrize("place", ["valkey"], indirect=True)
def test_a_store_that_refuses_is_named_with_its_reason_and_without_the_password(place: Place, tmp_path: Path) -> None:
    assert place.valkey is not None
    (tmp_path / "password").write_text(PASSWORD + "wrong")
    assert "remote-denied: " in place.inspect(status=1)
    assert place.run("probe", "--remotes", place.remotes, status=1).startswith("fail  fleet at valkey://")
    (tmp_path / "password").write_text(PASSWORD)
    place.valkey.kill()
    assert "remote-down: " in place.inspect(status=1)


def test_a_server_without_a_store_says_so(tmp_path: Path) -> None:
    with Server() as server:
        place = Place("", tmp_path, None)
        assert place.run("status", f"--socket={server.path}").startswith("this server has no remote store")


def test_a_user_and_a_password_of_lmcaches_variables_are_used_and_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status, log, pages and commands of a server that was started with them."""
    user = "planted-" + secrets.token_urlsafe(24)
    monkeypatch.setenv("LMCACHE_RESP_USERNAME", user)
    monkeypatch.setenv("LMCACHE_RESP_PASSWORD", PASSWORD)
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"tests: {TOKEN}\n")
    options = "tokens_min=0&write=through&username_env=LMCACHE_RESP_USERNAME&password_env=LMCACHE_RESP_PASSWORD"
    story = prompt(11, CHUNKS)
    with ValkeyServer() as valkey:
        assert valkey.ask("ACL", "SETUSER", user, "on", f">{PASSWORD}", "~*", "&*", "+@all") == "+OK\r\n"
        assert valkey.ask("ACL", "SETUSER", "default", "off") == "+OK\r\n"
        place = Place(f"fleet=valkey://127.0.0.1:{valkey.port}?{options}", tokens, valkey)
        port = free_port()
        settings = {"remotes": place.remotes, "http_port": port, "admin_token_file": tokens, "log_level": "debug"}
        with Server(**settings) as server, Engine(server.path).ready() as engine:
            engine.store(story)
            until("the chunks to be in the store", lambda: counted(server, "remote_writes") == CHUNKS)
            shown = {"status": place.run("status", f"--socket={server.path}")}
            shown |= {"inspect": place.inspect("--namespace", DIGEST)}
            shown |= {"probe": place.run("probe", "--remotes", place.remotes)}
            for page in ("/status", "/env", "/config", "/metrics"):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=WAIT_S) as answer:
                    shown[page] = answer.read().decode()
            shown["log"] = server.log()
    assert "remote" in shown["log"]
    assert "LMCACHE_RESP_USERNAME" in shown["/env"], "its name, not its value"
    assert [where for where, text in shown.items() if user in text or PASSWORD in text] == []
