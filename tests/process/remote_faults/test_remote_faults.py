"""A part of the campaign against remote stores (python -m tests.process.remote_faults)."""

import pytest

from kvserver.movers import remote_checks
from tests.process.remote_faults.clears import run_clears
from tests.process.remote_faults.scenarios import (
    damaged_stream,
    run_files,
    run_http_proxy,
    run_mooncake,
    run_objects,
    run_values,
)
from tests.rigs.valkey_server import ValkeyServer

KINDS = ["s3", pytest.param("azure", marks=pytest.mark.stores)]


def test_no_byte_of_a_damaged_value_is_delivered() -> None:
    assert "right" in run_values(100, seed=3)


def test_no_byte_of_a_damaged_file_is_delivered() -> None:
    assert "right" in run_files(100, seed=3)


def test_no_byte_of_a_damaged_stream_is_delivered() -> None:
    with ValkeyServer() as server:
        assert damaged_stream(server.port, 60, seed=3)["right"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_of_a_damaged_object_is_delivered(kind: str) -> None:
    assert "right" in run_objects(40, seed=3, kind=kind)


@pytest.mark.stores
def test_no_byte_of_a_damaged_object_of_mooncake_is_delivered() -> None:
    assert "right" in run_mooncake(40, seed=3)


@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_of_a_damaged_answer_is_delivered(kind: str) -> None:
    assert "right" in run_http_proxy(30, seed=3, kind=kind)


def test_nothing_of_a_cleared_namespace_comes_to_a_server_that_cannot_read_its_note() -> None:
    assert "cut off: notes 1" in run_clears(3, seed=3, short=True)


def test_a_reader_that_does_not_compare_digests_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_checks, "wrong_sums", lambda *_: [])
    with pytest.raises(AssertionError, match="wrong bytes"):
        run_values(2000, seed=3)
