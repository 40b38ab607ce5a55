"""kv_connector_extra_config: options that a user can set, and values that are refused when the engine starts."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from kvclient.vllm.settings import Settings, parse
from kvserver.errors import RequestError


def test_a_socket_is_enough() -> None:
    settings = parse({"socket": "/run/s"})
    assert settings.socket == "/run/s"
    assert settings.timeouts.retrieve_s == settings.load_timeout_ms / 1000


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "socket"),
        ({"socket": 7}, "socket"),
        ({"socket": "/s", "chunk_token": 256}, "chunk_token"),
        ({"socket": "/s", "chunk_tokens": True}, "chunk_tokens"),
        ({"socket": "/s", "chunk_tokens": "256"}, "chunk_tokens"),
        ({"socket": "/s", "min_load_tokens": -1}, "min_load_tokens"),
        ({"socket": "/s", "remote_wait_ms": -1}, "remote_wait_ms=-1 must not be negative"),
        ({"socket": "/s", "remote_wait_ms": 2.5}, "remote_wait_ms=2.5 must be of type int"),
        ({"socket": "/s", "remote_wait_ms": True}, "remote_wait_ms"),
        ({"socket": "/s", "store_output": 1}, "store_output"),
        ({"socket": "/s", "await_others": "auto"}, "await_others='auto' must be one of"),
        ({"socket": "/s", "await_others": True}, "await_others"),
        ({"socket": "/s", "await_wait_ms": -1}, "await_wait_ms=-1 must not be negative"),
        ({"socket": "/s", "await_wait_ms": 3_600_001}, "await_wait_ms=3600001 must be at most 3600000"),
        ({"socket": "/s", "await_producer_ms": -1}, "await_producer_ms=-1 must not be negative"),
        ({"socket": "/s", "await_producer_ms": 2.5}, "await_producer_ms=2.5 must be of type int"),
        ({"socket": "/s", "await_producer_ms": 3_600_001}, "await_producer_ms=3600001 must be at most 3600000"),
        ({"socket": "/s", "self_test": "yes"}, "self_test='yes' must be one of"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse(extra)


def test_a_remote_store_is_waited_for_unless_it_is_set_otherwise() -> None:
    assert parse({"socket": "/s"}).remote_wait_ms == 10_000
    assert parse({"socket": "/s", "remote_wait_ms": 0}).remote_wait_ms == 0


def test_what_vllm_puts_there_itself_is_left_alone() -> None:
    assert parse({"socket": "/s", "engine_id": "x"}).socket == "/s"


def test_the_manual_lists_every_option_with_its_default() -> None:
    manual = (Path(__file__).resolve().parents[3] / "docs" / "vllm.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", manual, re.MULTILINE))
    shown = {item.name: _shown(item.default) for item in fields(Settings)}
    assert listed == shown


def _shown(default: object) -> str:
    if default is MISSING or default == "":
        return "–"
    return str(default).lower() if isinstance(default, bool) else str(default)
