"""Proxies of others, and the words that each says to the two engines of a prompt. Facts alone: none of their code.

A proxy asks the first engine for one token, and the second one for the answer. It waits for the first one's whole
answer, or sends both requests at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

Params = dict[str, Any] | None

PEER = {"remote_host": "10.0.0.7", "remote_port": 5600}
NOTHING = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False}
GO_ON = {"do_remote_prefill": True, "do_remote_decode": False}


class Proxy(NamedTuple):
    source: str
    """Repository, file, and commit or release."""
    first: Params
    """kv_transfer_params for the engine that computes the prompt."""
    second: Callable[[Params], Params]
    """kv_transfer_params for the engine that answers, from those of the first one's answer."""
    at_once: bool = False


def _pushed(told: Params) -> Params:
    """As the toy proxy for NIXL that pushes: it takes where the first engine is, and says the rest itself."""
    taken = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
    return GO_ON | {name: told.get(name) for name in taken} if told else None


def _elsewhere(told: Params) -> Params:
    return told | {"remote_host": "127.0.0.1"} if told else None


VLLM = "vllm-project/vllm"
LLMD = "llm-d/llm-d-router pkg/sidecar/proxy/{} ebab6879 (0.10.0-rc.1 and 62 commits)"
PROXIES = {
    "vllm-toy": Proxy(
        f"{VLLM} tests/v1/kv_connector/nixl_integration/toy_proxy_server.py 030ea52e",
        COMPUTE | NOTHING,
        lambda told: told,
    ),
    "vllm-toy-push": Proxy(
        f"{VLLM} tests/v1/kv_connector/nixl_integration/toy_push_proxy_server.py d1655eec",
        COMPUTE | NOTHING,
        _pushed,
    ),
    "vllm-push": Proxy(
        f"{VLLM} examples/disaggregated/disaggregated_serving/disagg_proxy_pushconnector_demo.py 1db62a2d",
        COMPUTE | NOTHING | {"transfer_id": "xfer-5"},
        lambda _: GO_ON | PEER | {"remote_engine_id": "p", "tp_size": 1, "pp_size": 1, "transfer_id": "xfer-5"},
        at_once=True,
    ),
    "vllm-turns": Proxy(
        f"{VLLM} examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py 030ea52e",
        COMPUTE | NOTHING,
        _elsewhere,
    ),
    "llm-d-nixl": Proxy(
        LLMD.format("connector_nixlv2.go"),
        COMPUTE | NOTHING,
        lambda told: told,
    ),
    "llm-d-offloading": Proxy(
        LLMD.format("connector_p2p.go"),
        {"remote_decoder": {"kv_request_id": "5"}},
        lambda _: {"remote_prefiller": {"kv_request_id": "5"} | PEER},
        at_once=True,
    ),
    "llm-d-shared-storage": Proxy(
        LLMD.format("connector_shared_storage.go"),
        None,
        lambda _: None,
    ),
    "dynamo": Proxy(
        "ai-dynamo 1.6.1 dynamo/vllm/kv_connector_protocols.py, handlers.py",
        COMPUTE | NOTHING,
        lambda told: told,
    ),
    "production-stack": Proxy(
        "vllm-project/production-stack src/vllm_router/services/request_service/request.py a6c01db0",
        COMPUTE | NOTHING,
        _elsewhere,
    ),
}
