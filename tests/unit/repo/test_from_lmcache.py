"""docs/from-lmcache.md names settings that kvserver takes: its examples are read as a server and a connector do."""

import json
import re
from pathlib import Path

import pytest

from kvclient.vllm.settings import Settings
from kvclient.vllm.settings import parse as parse_connector
from kvserver.config.config import KEYS, Config, load
from kvserver.config.remotes import OPTIONS, parse

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "from-lmcache.md").read_text()


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def ours() -> list[str]:
    """What stands as code in the last column of the tables that have names on both sides."""
    named = PAGE.partition("## What is different")[0]
    rows = [line.strip("| ").split(" | ") for line in named.splitlines() if line.startswith("| ") and "---" not in line]
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row[-1])]


def configured(text: str, tmp_path: Path) -> Config:
    file = tmp_path / "kvserver.toml"
    file.write_text(text)
    return load(file, {})[0]


def test_the_variables_of_lmcache_are_named_by_the_first_example(tmp_path: Path) -> None:
    config = configured(examples("toml")[0], tmp_path)
    assert (config.arena_bytes, config.disk_directories, config.disk_bytes) == (64 << 30, ("/mnt/nvme0/kv",), 1 << 40)
    (remote,) = config.remote_stores
    assert remote.addresses == (("10.0.0.7", 6379),)
    names = remote.username_env, remote.password_env
    assert names == ("LMCACHE_RESP_USERNAME", "LMCACHE_RESP_PASSWORD")


def test_the_example_for_s3_has_the_bucket_in_its_url(tmp_path: Path) -> None:
    remote = configured(examples("toml")[1].replace("BUCKET", "kv-cache-7"), tmp_path).remote_stores[0]
    assert (remote.bucket, remote.bucket_prefix, remote.threads) == ("kv-cache-7", "lmcache-successor", 16)
    assert (remote.endpoint, remote.region) == ("https://s3.internal:9000", "eu-central-1")


def test_the_connector_takes_its_options() -> None:
    (example,) = examples("json")
    given = json.loads(example)
    assert given.pop("kv_connector_extra_config") == {"socket": "/run/kvserver/kvserver.sock", "store_output": False}
    assert parse_connector(json.loads(example)["kv_connector_extra_config"]).store_output is False
    manual = (Path(__file__).resolve().parents[3] / "docs" / "vllm.md").read_text()
    assert [key for key, value in given.items() if f'"{key}": "{value}"' not in manual] == []


def test_every_setting_of_ours_in_its_tables_is_one() -> None:
    taken = {key.name for key in KEYS} | {"url", *OPTIONS} | set(Settings.__dataclass_fields__)
    foreign = {"maxmemory", "maxmemory-policy"}
    values = {"through", "reuse"}
    names = [text.partition(" = ")[0] for text in ours() if not text.startswith("kvserver ")]
    assert len(names) > 30
    assert sorted(set(names) - taken - foreign - values) == []


@pytest.mark.parametrize(
    "example", [text for text in ours() if text.startswith(("url = ", "cluster = ", "endpoint = "))]
)
def test_every_setting_with_a_value_in_its_tables_is_taken(example: str, tmp_path: Path) -> None:
    given = example.replace("HOST:PORT", "h:7").replace("…", "pkg:Class" if "plugin" in example else "h")
    given = given.replace("BUCKET/PREFIX", "bucket/prefix").replace("DIRECTORY", "mnt")
    url = "" if given.startswith("url") else f'url = "{"s3://bucket" if "endpoint" in given else "valkey://h"}"\n'
    remote = configured(f"[remotes.a]\n{url}{given}\n", tmp_path).remote_stores[0]
    assert parse(f"a={remote.url}")[0].scheme == remote.scheme
