"""Operators and a real server: commands over HTTP and by `kvserver admin`, who may, and that no token is ever told."""

import http.client
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.engine import Engine
from tests.process.harness import Server, until

TOKEN = "planted-" + secrets.token_urlsafe(24)
OTHER = "planted-" + secrets.token_urlsafe(24)


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


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(
    server: Server, path: str, body: bytes = b"{}", *, token: str | None = TOKEN, method: str = "POST"
) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", int(str(server.settings["http_port"])), timeout=30)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    document = json.loads(response.read())
    connection.close()
    return response.status, document


def cli(server: Server, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvserver", "admin", *arguments]
    environment = {**os.environ, "KVSERVER_ADMIN_TOKEN": token}
    url = f"--url=http://127.0.0.1:{server.settings['http_port']}"
    return subprocess.run([*command, url], env=environment, capture_output=True, text=True, timeout=60, check=False)
