"""Containers, compose file and manifests in deploy/ start the server with valid flags. No engine is run."""

import re
from pathlib import Path

import pytest

from kvserver.brain.http.server import Pages, SnapshotBoard
from kvserver.config.config import KEYS, Config

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
FILES = ("container/Containerfile", "container/compose.yml", "kubernetes/sidecar.yaml", "kubernetes/daemonset.yaml")
FLAGS = {key.flag for key in KEYS} | {"--http-host"}


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


def commands(name: str) -> list[list[str]]:
    """Arguments of each `serve`."""
    lists = re.findall(r'\[("serve"[^\]]*)\]', text(name))
    return [re.findall(r'"([^"]*)"', arguments) for arguments in lists]


@pytest.mark.parametrize("name", FILES)
def test_the_server_is_started_with_flags_that_it_has(name: str) -> None:
    ((verb, *arguments),) = commands(name)
    assert verb == "serve"
    assert set(arguments[::2]) <= FLAGS
    assert dict(zip(arguments[::2], arguments[1::2], strict=True))["--http-host"] == "0.0.0.0"


@pytest.mark.parametrize("name", FILES[1:])
def test_engines_are_told_the_socket_that_the_server_opens(name: str) -> None:
    ((_, *arguments),) = commands(name)
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    opened = flags.get("--socket", "/run/kvserver/kvserver.sock")
    assert set(re.findall(r'"socket": "([^"]+)"', text(name))) <= {opened}
    assert Path(opened).is_relative_to("/run/kvserver"), "the volume that both have"


@pytest.mark.parametrize("name", FILES[1:])
def test_probes_ask_for_pages_that_there_are(name: str) -> None:
    paths = set(re.findall(r"(?:path: |127\.0\.0\.1:9710)(/\w*z)\b", text(name)))
    assert paths
    pages = Pages(SnapshotBoard(), {}, lambda: 0.0)
    assert all(pages.answer(f"GET {path} HTTP/1.1\r\n\r\n".encode()).status != 404 for path in paths)
    assert str(Config().http_port) in text(name) or "port: metrics" in text(name)


def test_the_image_runs_as_somebody_else_than_root_and_ends_by_sigterm() -> None:
    image = text("container/Containerfile")
    (user,) = re.findall(r"^USER (\d+):(\d+)$", image, re.MULTILINE)
    assert int(user[0]) > 0
    assert "ENTRYPOINT [" in image, "a shell in between would keep SIGTERM to itself"


def test_the_engines_image_takes_the_wheels_of_the_image_that_is_built_here() -> None:
    """Named by its tag, the base image might be built too late, or be another image with that tag."""
    compose = text("container/compose.yml")
    (source,) = re.findall(r"COPY --from=(\S+) /wheels", compose)
    assert f'additional_contexts: {{{source}: "service:kvserver"}}' in compose


def test_an_image_is_built_from_the_sources_and_not_from_what_was_built_beside_them() -> None:
    root = DEPLOY.parent
    left_out = set((root / ".dockerignore").read_text().splitlines())
    ignored = (root / ".gitignore").read_text().split()
    assert {".git", *(f"**/{pattern.rstrip('/')}" for pattern in ignored)} <= left_out


@pytest.mark.parametrize("name", FILES[2:])
def test_pods_have_the_least_that_they_need(name: str) -> None:
    manifest = text(name)
    assert "privileged: true" not in manifest
    assert "allowPrivilegeEscalation: false" in manifest
    assert "readOnlyRootFilesystem: true" in manifest
    assert re.findall(r"capabilities: (.*)", manifest) == ["{drop: [ALL], add: [IPC_LOCK]}"]
