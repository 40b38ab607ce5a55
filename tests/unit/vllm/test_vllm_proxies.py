"""Conversations of other people's proxies, replayed: what the two engines are sent, and whether the second waits."""

import json
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvclient.vllm as package
from kvclient.vllm.transfer_params import TransferParams, tell_dynamo
from tests.rigs.dynamo_indexer import PYTHON
from tests.rigs.proxies import PROXIES, Proxy
from tests.rigs.vllm_rig import CHUNK, Bench, request

TOKENS = 3 * CHUNK + 5
WAIT_S = 0.3
CONVERSATIONS = pytest.mark.parametrize("proxy", PROXIES.values(), ids=PROXIES)
IN_TURN = {name: proxy for name, proxy in PROXIES.items() if not proxy.at_once}


def engine(name: str) -> Bench:
    return Bench(await_wait_s=5.0, await_producer_s=WAIT_S, transfer_params=TransferParams(name))


def first(proxy: Proxy, chunks: int) -> Any:
    """The params that the first engine's answer has, as they come over HTTP. chunks: what it has the time to store."""
    at = engine("first")
    at.admit(request(tokens=TOKENS, kv_transfer_params=proxy.first))
    at.step(r=chunks * CHUNK)
    assert len(at.server.pledges) == (1 if proxy.first else 0)
    return json.loads(json.dumps(at.half.finished("r", [[3, 5]])))


def second(proxy: Proxy, chunks: int = 3) -> tuple[Bench, Any]:
    told = first(proxy, chunks)
    passed_on = proxy.second(None if proxy.at_once else told)
    return engine("second"), request("s", tokens=TOKENS, kv_transfer_params=passed_on)


def found(at: Bench, asked: Any) -> int:
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        tokens, _ = at.half.match(asked, 0)
        if tokens is not None:
            return tokens
        time.sleep(0.005)
    raise AssertionError("it waits for ever")


@CONVERSATIONS
def test_the_second_engine_gets_what_the_first_one_stored(proxy: Proxy) -> None:
    at, asked = second(proxy)
    if proxy.at_once:
        assert at.half.match(asked, 0) == (None, False), "it came first"
    at.hold(asked, chunks=3)
    assert found(at, asked) == 3 * CHUNK


@CONVERSATIONS
def test_the_second_engine_waits_exactly_if_the_proxy_says_so(proxy: Proxy) -> None:
    at, asked = second(proxy)
    begun_s = time.monotonic()
    assert found(at, asked) == 0
    assert at.server.may_wait is bool(proxy.first)
    assert (time.monotonic() - begun_s >= WAIT_S) is bool(proxy.first)


@pytest.mark.parametrize("proxy", IN_TURN.values(), ids=IN_TURN)
def test_a_prompt_that_was_not_stored_whole_is_waited_for_by_nobody_who_is_told(proxy: Proxy) -> None:
    """A proxy that says do_remote_prefill itself does not pass it on."""
    at, asked = second(proxy, chunks=2)
    assert found(at, asked) == 0
    assert at.server.may_wait is (proxy is PROXIES["vllm-toy-push"])


def test_engines_that_await_others_need_no_word_of_a_proxy() -> None:
    proxy = PROXIES["llm-d-shared-storage"]
    at, other = (Bench(await_others=True, await_wait_s=5.0) for _ in range(2))
    at.admit(request(tokens=TOKENS, kv_transfer_params=proxy.first))
    at.step(r=TOKENS)
    assert at.half.finished("r", [[3, 5]]) is None
    assert len(at.server.pledges) == 1, "the answer is there before the stores have ended"
    asked = request("s", tokens=TOKENS, kv_transfer_params=proxy.second(None))
    other.hold(asked, chunks=2)
    other.server.awaited = 1
    assert other.half.match(asked, 0) == (None, False)
    other.hold(asked, chunks=3)
    other.server.awaited = 0
    assert found(other, asked) == 3 * CHUNK


@pytest.mark.parametrize(
    ("sent", "warned"),
    [
        ({"remote_decoder": None, "remote_prefiller": None}, ""),
        ({"remote_kv_source": {"kv_request_id": "5"}}, ""),
        ({"remote_decoder": {}, "remote_prefiller": {}}, "exclude each other"),
        ({"remote_decoder": {}, "do_remote_prefill": True}, "exclude each other"),
        ({"remote_prefiller": "5"}, "must be mappings or null"),
        ({"remote_decoder": True}, "must be mappings or null"),
    ],
)
def test_words_of_peers_that_say_nothing_or_nonsense_count_as_absent_with_one_warning(
    sent: dict[str, object], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    at = engine("first")
    for name in ("r", "s"):
        at.admit(request(name, tokens=TOKENS, kv_transfer_params=sent))
        at.step(**{name: CHUNK})
        assert at.half.finished(name) is None
    assert (at.server.pledges, at.server.may_wait) == ({}, False)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [warned in line for line in said] == [True] * bool(warned)


# ---------------------------------------------------------------- NVIDIA Dynamo's table of connectors


class Nixl:
    """As Dynamo's protocol of NIXL's connector."""

    produces_kv_transfer_params = True

    def __init__(self, config: object) -> None:
        self.config = config


def dynamo(monkeypatch: pytest.MonkeyPatch, **table: Any) -> None:
    module = ModuleType("dynamo.vllm.kv_connector_protocols")
    vars(module).update(table)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_worker_of_dynamo_speaks_to_this_connector_as_to_nixls(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"NixlConnector": Nixl}
    dynamo(monkeypatch, KV_CONNECTOR_PROTOCOLS=known)
    for _ in range(2):
        tell_dynamo("KvServerConnector")
    ours = known["KvServerConnector"]
    assert list(known) == ["NixlConnector", "KvServerConnector"]
    assert isinstance(ours(7), Nixl)
    assert ours(7).config == 7
    assert not ours.produces_kv_transfer_params, "in MultiConnector the params are NIXL's"
    assert Nixl.produces_kv_transfer_params


def test_what_dynamo_knows_of_this_connector_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"NixlConnector": Nixl, "KvServerConnector": int}
    dynamo(monkeypatch, KV_CONNECTOR_PROTOCOLS=known)
    tell_dynamo("KvServerConnector")
    assert known["KvServerConnector"] is int


@pytest.mark.parametrize("known", [None, [], {}, {"NixlConnector": 5}])
def test_a_table_of_another_kind_is_left_alone(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo(monkeypatch, KV_CONNECTOR_PROTOCOLS=known)
    before = repr(known)
    tell_dynamo("KvServerConnector")
    assert repr(known) == before


def test_outside_dynamo_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dynamo.vllm.kv_connector_protocols", raising=False)
    tell_dynamo("KvServerConnector")


def test_vllm_looking_the_connector_up_tells_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"NixlConnector": Nixl}
    dynamo(monkeypatch, KV_CONNECTOR_PROTOCOLS=known)
    monkeypatch.setitem(sys.modules, "kvclient.vllm.connector", SimpleNamespace(KvServerConnector=int))
    assert package.KvServerConnector is int
    assert "KvServerConnector" in known


PROTOCOLS = "dynamo.vllm.kv_connector_protocols"
WHERE = f"import importlib.util; print(importlib.util.find_spec({PROTOCOLS!r}).origin)"


def chosen(module: Any, connector: str, *inside: str) -> Any:
    """Dynamo's protocol for an engine with this connector. inside: those of a MultiConnector."""
    further = {"connectors": [{"kv_connector": name} for name in inside]}
    config = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=further, engine_id="e")
    return module.make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=config))


@pytest.mark.skipif(not PYTHON, reason="KVSERVER_DYNAMO_PYTHON names no Python with Dynamo")
def test_dynamos_own_table_takes_the_connector_and_says_what_is_replayed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    path = subprocess.run([PYTHON, "-c", WHERE], check=True, capture_output=True, text=True).stdout.strip()
    spec = spec_from_file_location(PROTOCOLS, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, PROTOCOLS, module)
    with pytest.raises(ValueError, match="Unsupported kv_connector"):
        chosen(module, "KvServerConnector")
    tell_dynamo("KvServerConnector")
    protocol, replayed, told = (
        chosen(module, "KvServerConnector"),
        PROXIES["dynamo"],
        first(PROXIES["dynamo"], chunks=3),
    )
    assert protocol.prefill_request_kv_transfer_params() == replayed.first
    assert protocol.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=told)) == replayed.second(told)
    beside_nixl = chosen(module, "MultiConnector", "KvServerConnector", "NixlConnector")
    assert type(beside_nixl) is type(chosen(module, "NixlConnector"))
