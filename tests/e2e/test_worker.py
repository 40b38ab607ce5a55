"""A worker's connector with vLLM's classes, real tensors and a real server, but without an engine.

For what vLLM does not do on CPUs: from 0.33 on it gives the KV cache's memory back on GPUs around a sleep, and makes it
anew. And for a connector with a mistake.
"""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvclient import Blocks, Client, namespace_digest
from tests.process.engine import PATIENT
from tests.process.harness import WAIT_S, Server, is_gone, maps, until

BLOCKS, TOKENS, CHUNK = 23, 32, 64
KEYS = bytes(range(64))
"""Of two chunks."""
SOURCES, TARGETS = [7, 3, 22, 5], [1, 21, 4, 12]
PAGE = 2 * TOKENS * 8 * 4


class FullAttentionSpec(SimpleNamespace):
    prefix_cacheable = True


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector's module, for an engine without a model."""
    found = importlib.import_module("kvclient.vllm.connector")
    monkeypatch.setattr(found, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(found, "facts_of", lambda *_, **named: {"model": named["model_id"]})
    monkeypatch.setattr(found, "_backends", lambda *_: [])
    return found


def made(module: Any, server: Server, kind: Any) -> Any:
    """A worker's half of that class, and the tensors of its only layer. They are not registered yet."""
    model = {"runner_type": "generate", "is_prefix_caching_supported": True, "max_model_len": 512, "model": "m"}
    extra = {"socket": str(server.path), "model_id": "m", "chunk_tokens": CHUNK, "self_test": "on"}
    transfer = SimpleNamespace(engine_id="e", kv_role="kv_both", kv_connector_extra_config=extra)
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 2, **model),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, distributed_executor_backend="uni"
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
        kv_transfer_config=transfer,
        instance_id="i",
    )
    group = SimpleNamespace(layer_names=["a"], kv_cache_spec=FullAttentionSpec(block_size=TOKENS, page_size_bytes=PAGE))
    tensor = SimpleNamespace(size=BLOCKS * PAGE, shared_by=["a"])
    described = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group], kv_cache_tensors=[tensor])
    worker = kind(config, module.interface.KVConnectorRole.WORKER, described)
    with worker.get_mem_pool_context():
        flat = torch.zeros(BLOCKS * PAGE, dtype=torch.int8, device="cpu")
    return worker, {"a": flat.view(torch.float32).view(BLOCKS, 2, TOKENS, 8)}


@pytest.fixture
def worker(module: Any, server: Server) -> Iterator[Any]:
    running, caches = made(module, server, module.KvServerConnector)
    running.register_kv_caches(caches)
    yield running
    running.shutdown()


def done(module: Any, worker: Any, **orders: Any) -> Any:
    """The report of one order."""
    worker.bind_connector_metadata(module.Step(**{kind: (order,) for kind, order in orders.items()}))
    worker.wait_for_save()

    def reported() -> Any:
        worker.get_finished(set())
        told = worker.build_connector_worker_meta()
        return told.reports if told is not None else []

    (report,) = until("the report", reported)
    return report.result


def test_memory_that_is_given_back_is_let_go_and_what_was_stored_is_found_behind_it(
    module: Any, worker: Any, server: Server
) -> None:
    cache = worker._kv_caches["a"]
    cache.copy_(torch.randn(cache.shape))
    wanted = cache[SOURCES].clone()
    order = module.StoreOrder(1, "r", 0, b"", KEYS, (Blocks(0, 0, SOURCES),))
    assert done(module, worker, stores=order).chunks == 2
    mover = server.mover_pid()
    assert maps(mover, "kvserver-pool")
    for _ in range(2):  # vLLM may call each hook twice
        worker.unregister_kv_caches()
    assert server.status().caches == 0
    assert is_gone(mover) or not maps(mover, "kvserver-pool")
    with Client(server.path, engine="e", epoch=worker._epoch, rank=-1, timeouts=PATIENT) as scheduler:
        assert scheduler.wait_connected(WAIT_S)

        def load(job: int) -> Any:
            lease = scheduler.lookup(namespace_digest({"model": "m"}), KEYS).lease
            assert lease is not None
            blocks = (Blocks(0, 0, TARGETS),)
            return done(module, worker, retrieves=module.RetrieveOrder(job, "r", lease, blocks, 0, 2 * CHUNK))

        cache.zero_()
        assert not load(2).ok
        assert not cache.any()
        for _ in range(2):
            worker.restore_kv_caches()
        assert server.status().caches == 1
        assert load(3).ok
    assert torch.equal(cache[TARGETS], wanted)


def test_a_layout_that_is_read_wrong_is_refused_at_registration_and_leaves_nothing(module: Any, server: Server) -> None:
    before = server.status().chunks
    kind = importlib.import_module("tests.e2e.beside").ReadsItsLayoutWrong
    running, caches = made(module, server, kind)
    caches["a"].copy_(torch.randn(caches["a"].shape))
    with pytest.raises(module.RequestError, match=r"self-test: layer a of group 0: block \d+ does not hold the bytes"):
        running.register_kv_caches(caches)
    running.shutdown()
    until("the server to forget it", lambda: (server.status().caches, server.status().chunks) == (0, before))
