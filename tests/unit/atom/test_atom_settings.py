"""--kv-transfer-config: options that a user of ATOM can set, and values that are refused when the engine starts."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from kvclient.atom.settings import Settings, parse, role_of
from kvclient.offload.settings import chosen_chunk_tokens
from kvclient.offload.values import Group
from kvserver.errors import RequestError


def extra(**settings: Any) -> dict[str, Any]:
    return {"kv_connector": "kvserver", "kv_connector_extra_config": settings}


def test_a_socket_is_enough() -> None:
    assert parse(extra(socket="/run/s")) == Settings(socket="/run/s")


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        ({}, "kv_connector_extra_config"),
        ({"socket": "/run/s"}, "kv_connector_extra_config"),
        (extra(), "socket"),
        (extra(socket=7), "socket"),
        (extra(socket="/s", chunk_token=256), "chunk_token"),
        (extra(socket="/s", chunk_tokens=True), "chunk_tokens"),
        (extra(socket="/s", chunk_tokens="256"), "chunk_tokens"),
        (extra(socket="/s", chunk_tokens=256.0), "chunk_tokens"),
        (extra(socket="/s", min_load_tokens=-1), "min_load_tokens"),
    ],
)
def test_what_is_wrong_is_named(transfer: dict[str, Any], named: str) -> None:
    """Integers are never coerced.

    ATOM's tests: build_lmcache_config_validates_extras_and_keeps_gds_disabled;
    connector_init_rejects_nonfinite_config_before_starting_executors;
    max_pending_saves_rejects_invalid_connector_extra."""
    with pytest.raises(RequestError, match=named):
        parse(transfer)


@pytest.mark.parametrize(
    ("role", "does"),
    [
        ("offload", (True, True)),
        ("kv_both", (True, True)),
        ("kv_producer", (True, False)),
        ("kv_consumer", (False, True)),
    ],
)
def test_roles(role: str, does: tuple[bool, bool]) -> None:
    assert role_of({"kv_role": role}) == does
    assert role_of({}) == (True, True)


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(RequestError, match="kv_role='both'"):
        role_of({"kv_role": "both"})


@pytest.mark.parametrize(("block", "wanted", "chosen"), [(16, 0, 256), (48, 0, 288), (1024, 0, 1024), (48, 96, 96)])
def test_a_chunk_is_whole_blocks(block: int, wanted: int, chosen: int) -> None:
    assert chosen_chunk_tokens([Group(block)], wanted) == chosen


def test_a_chunk_of_part_of_a_block_is_refused() -> None:
    with pytest.raises(RequestError, match="multiple of 48"):
        chosen_chunk_tokens([Group(48)], 256)


def test_the_manual_lists_every_option_with_its_default() -> None:
    """ATOM's test: lmcache_connector_default_staging_buffer_chunks_is_two."""
    manual = (Path(__file__).resolve().parents[3] / "docs" / "atom.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", manual, re.MULTILINE))
    shown = {item.name: "–" if item.default in (MISSING, "") else str(item.default) for item in fields(Settings)}
    assert {name: listed.get(name) for name in shown} == shown
