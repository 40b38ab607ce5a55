"""The connector class against the installed vLLM, without an engine."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.offload.values import Group, Statistics
from kvclient.values import StoreResult
from tests.e2e.checks import release

ROOT = Path(__file__).resolve().parents[2]
IMPORT = """
import os, threading
before = set(os.listdir("/proc/self/fd"))
import vllm.distributed.kv_transfer.kv_connector.v1.base
threads, sockets = threading.active_count(), lambda: [
    os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
    and os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
]
had = sockets()
import kvclient.vllm.connector
assert threading.active_count() == threads, threading.enumerate()
assert sockets() == had, sockets()
"""


@pytest.fixture(scope="module")
def module() -> Any:
    return importlib.import_module("kvclient.vllm.connector")


def test_importing_it_opens_no_socket_and_starts_no_thread() -> None:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_everything_abstract_is_there(module: Any) -> None:
    assert not inspect.isabstract(module.KvServerConnector)


def test_overrides_take_what_the_base_takes(module: Any) -> None:
    """Overrides have the base's parameter names: vLLM passes some arguments by keyword."""
    base = module.interface.KVConnectorBase_V1
    different = {}
    for name, own in vars(module.KvServerConnector).items():
        theirs = inspect.getattr_static(base, name, None)
        if name.startswith("_") or theirs is None or isinstance(own, property):
            continue
        mine, wanted = (
            list(inspect.signature(getattr(kind, name)).parameters) for kind in (module.KvServerConnector, base)
        )
        if mine != [item if item != "kwargs" else "_" for item in wanted]:
            different[name] = mine, wanted
    assert different == {}


def test_answers_are_taken_where_vllm_takes_events_behind_each_step(module: Any) -> None:
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    assert "self.connector.take_events()" in inspect.getsource(scheduler.update_from_output)
    connector, collected = object.__new__(module.KvServerConnector), []
    connector._scheduler = SimpleNamespace(collect=lambda: collected.append(True), take_events=lambda: ["an event"])
    assert list(connector.take_events()) == ["an event"]
    assert collected == [True]


def test_every_count_has_a_metric(module: Any) -> None:
    stats = importlib.import_module("kvclient.vllm.stats")
    counted = {item.name for item in fields(Statistics) if not item.name.endswith("_in_flight")}
    assert counted - {stats.SKIPPED} | {"bugs"} == set(stats.COUNTERS)


def test_releases_that_drop_the_statistics_of_steps_without_an_answer_are_known(module: Any) -> None:
    assert module.release_differences.drops_quiet_steps() == (release() < (0, 28))
    assert module.release_differences.counts_beside_workers_only() == (release() < (0, 24))


def test_the_benchmark_of_the_schedulers_calls_runs() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_connector", "--smoke", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]  # vLLM logs there too
    cases = {json.loads(row)["case"] for row in rows}
    assert {"tokens new/8192", "hashes match at once/1024", "tokens decode/1024", "hashes prefill/32768"} <= cases
    assert {"tokens hit allocated/32768", "hashes hit step that loads/1024", "tokens hit decode/1024"} <= cases


FULL = type("FullAttentionSpec", (SimpleNamespace,), {})(block_size=32)
WINDOW = type("SlidingWindowSpec", (SimpleNamespace,), {})(block_size=32, sliding_window=128)


def config(**more: Any) -> SimpleNamespace:
    parallel: dict[str, Any] = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    parallel |= {"tensor_parallel_size": 1, "distributed_executor_backend": "mp", "nnodes_within_dp": 1}
    parallel |= {name: more.pop(name) for name in list(more) if name in parallel}
    model = SimpleNamespace(runner_type="generate", is_prefix_caching_supported=True)
    engine = {"model_config": model, "parallel_config": SimpleNamespace(**parallel), "speculative_config": None}
    engine["cache_config"] = SimpleNamespace(cache_dtype="auto")
    engine["compilation_config"] = SimpleNamespace(static_forward_context={})
    return SimpleNamespace(**{**engine, **more})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}, "pipeline_parallel_size=2.*ray"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher"),
        (
            {
                "pipeline_parallel_size": 2,
                "model_config": SimpleNamespace(runner_type="pooling", is_prefix_caching_supported=True),
            },
            "pooling model in pipeline stages",
        ),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"nnodes_within_dp": 2}, "2 nodes"),
        ({"decode_context_parallel_size": 2, "speculative_config": SimpleNamespace(method="mtp")}, "draft model"),
        ({"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}, "external_launcher"),
        ({"speculative_config": SimpleNamespace(method="dflash")}, "dflash"),
        ({"model_config": SimpleNamespace(runner_type="pooling", is_prefix_caching_supported=False)}, "pools over all"),
        ({"model_config": SimpleNamespace(runner_type="generate", is_diffusion=True)}, "diffusion"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=True)}, "scales"),
        ({"attention_config": SimpleNamespace(hisparse_config=object())}, "HiSparse"),
    ],
)
def test_what_is_not_supported_is_refused_at_the_start(
    module: Any, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr(module.release_differences, "knows_stages", lambda _: True)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL)])
    for method in ("ngram", "medusa"):
        module._check_supported(config(speculative_config=SimpleNamespace(method=method)), groups)
    with pytest.raises(module.RequestError, match=named):
        module._check_supported(config(**wrong), groups)


def test_stages_need_a_release_that_knows_of_them(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL)])
    monkeypatch.setattr(module.release_differences, "knows_stages", lambda _: True)
    module._check_supported(config(pipeline_parallel_size=2), groups)
    monkeypatch.setattr(module.release_differences, "knows_stages", lambda _: False)
    module._check_supported(config(), groups)
    with pytest.raises(module.RequestError, match="pipeline_parallel_size"):
        module._check_supported(config(pipeline_parallel_size=2), groups)


def test_a_step_that_vllm_did_not_end_is_ended_by_the_next(module: Any) -> None:
    """Beside speculation vLLM calls wait_for_save() on the last pipeline stage only."""
    connector, calls = object.__new__(module.KvServerConnector), []
    connector._is_bound, connector._steps, connector._is_described = False, 4, True
    connector._worker = SimpleNamespace(
        begin=lambda retrieves, stores: calls.append(f"begin {stores}"), computed=lambda: calls.append("computed")
    )
    for number in (1, 2):
        connector.bind_connector_metadata(module.Step(stores=(number,)))
    connector.wait_for_save()
    assert calls == ["begin (1,)", "computed", "begin (2,)", "computed"]
    connector.bind_connector_metadata(module.Step(stores=(3,)))
    assert calls[4:] == ["begin (3,)"]


def test_models_with_windows_only_are_refused_if_vllm_learns_of_failed_loads_by_block(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would continue as if all tokens before the window's first block were there."""
    full, window = (SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one)]) for one in (FULL, WINDOW))
    monkeypatch.setattr(module.release_differences, "reports_failed_requests", lambda _: True)
    module._check_supported(config(), window)
    monkeypatch.setattr(module.release_differences, "reports_failed_requests", lambda _: False)
    module._check_supported(config(), full)
    with pytest.raises(module.RequestError, match="windows"):
        module._check_supported(config(), window)


def test_connectors_of_two_servers_do_not_take_each_others_stores_for_theirs(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connectors in one MultiConnector, worker and scheduler in one process: their jobs have the same numbers."""
    transfer = {"engine_id": "e", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    group = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL)], kv_cache_tensors=[])
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    workers = []
    for path in ("/one", "/other"):
        told = SimpleNamespace(kv_connector_extra_config={"socket": path}, **transfer)
        engine = config(kv_transfer_config=told, instance_id="i")
        workers.append(module.KvServerConnector(engine, module.interface.KVConnectorRole.WORKER, group))
    one, other = workers
    order = module.StoreOrder(7, "r", 0, b"", bytes(32), ())
    other._worker._half.ends.note([order])
    other._worker._half.ends.end(7, StoreResult(1, 1, 1, ""))
    assert (one._stores_over(), other._stores_over()) == ([], [(7, 0)])
    for worker in workers:
        worker.shutdown()


@pytest.fixture
def worker(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A worker's half without a cache or a server: every job ends at once, with a reason."""
    transfer = {"engine_id": "e", "kv_role": "kv_both", "kv_connector_extra_config": {"socket": "/nobody"}}
    group = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL)], kv_cache_tensors=[], num_blocks=7)
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(module.KvServerConnector, "_describe_or_look", lambda _: None)
    engine = config(kv_transfer_config=SimpleNamespace(**transfer), instance_id="i")
    made = module.KvServerConnector(engine, module.interface.KVConnectorRole.WORKER, group)
    yield made
    made.shutdown()


@pytest.mark.parametrize("is_draft_last", [False, True])
def test_each_store_is_reported_once_in_either_order_of_a_steps_hooks(
    module: Any, worker: Any, is_draft_last: bool
) -> None:
    """With a draft model, Model Runner V2 of 0.33 takes results and reports before it has the blocks saved."""
    told = []
    for job in (7, 8, None, None):
        orders = () if job is None else (module.StoreOrder(job, "r", 0, b"", bytes(32), ()),)
        worker.bind_connector_metadata(module.Step(stores=orders))
        if not is_draft_last:
            worker.wait_for_save()
        if module.release_differences.reports_failed_requests(module.KVConnectorBase_V1):
            assert worker.get_transfer_results(set()).finished_recving == set()
        else:
            assert worker.get_finished(set()) == (None, None)
        told.append(worker.build_connector_worker_meta())
        if is_draft_last:
            worker.wait_for_save()
        worker.clear_connector_metadata()
    reported = [[report.job for report in each.reports] if each is not None else [] for each in told]
    assert reported == ([[], [7], [8], []] if is_draft_last else [[7], [8], [], []])


def test_sleep_is_supported_where_its_memory_can_be_shared(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.KvServerConnector.supports_sleep_mode(None)
    monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert not module.KvServerConnector.supports_sleep_mode(None)
    portable = SimpleNamespace(kv_connector_extra_config={"device": "portable"})
    assert module.KvServerConnector.supports_sleep_mode(portable)


def test_a_release_that_is_known_to_be_broken_does_not_start(
    module: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = module.release_table.Row(refused="it answers wrong")
    monkeypatch.setattr(module.release_table, "table", lambda: {"0.98.1": row})
    monkeypatch.setattr(module.vllm, "__version__", "0.98.1+cpu")
    with pytest.raises(module.RequestError, match=r"vllm-release: vLLM 0\.98\.1\+cpu .*it answers wrong"):
        module.KvServerConnector(worker._vllm_config, module.interface.KVConnectorRole.WORKER, worker._kv_cache_config)


@pytest.fixture
def since_0_30(module: Any) -> None:
    """Skips what earlier releases refuse for another reason."""
    if not module.release_differences.reports_failed_requests(module.KVConnectorBase_V1):
        pytest.skip("before 0.30 states, windows and draft models are refused")


@pytest.mark.usefixtures("since_0_30")
def test_drafts_beside_states_are_refused(module: Any) -> None:
    kept = {"block_size": 32, "mamba_cache_mode": "align", "num_speculative_blocks": 0}
    spec = type("MambaSpec", (SimpleNamespace,), {})(mamba_type="gdn", shapes=(), dtypes=(), **kept)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    module._check_supported(config(), groups)
    with pytest.raises(module.RequestError, match="states"):
        module._check_supported(config(speculative_config=SimpleNamespace(method="ngram")), groups)


@pytest.mark.usefixtures("since_0_30")
def test_a_draft_model_is_refused_beside_windows_and_where_it_would_be_saved_too_early(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL)])
    mixed = SimpleNamespace(kv_cache_groups=[*plain.kv_cache_groups, SimpleNamespace(kv_cache_spec=WINDOW)])
    drafts = config(speculative_config=SimpleNamespace(method="eagle3"))
    module._check_supported(drafts, plain)
    with pytest.raises(module.RequestError, match="window"):
        module._check_supported(drafts, mixed)
    monkeypatch.setattr(module.release_differences, "saves_behind_drafts", lambda base: False)
    module._check_supported(config(), plain)
    with pytest.raises(module.RequestError, match="draft model"):
        module._check_supported(drafts, plain)


def test_ranks_that_share_a_models_kv_but_not_its_drafts_are_refused(module: Any) -> None:
    def model(heads: int) -> SimpleNamespace:
        return SimpleNamespace(use_mla=not heads, get_total_num_kv_heads=lambda: heads)

    def engine(heads: int) -> SimpleNamespace:
        drafts = SimpleNamespace(method="mtp", draft_model_config=model(heads))
        return SimpleNamespace(model_config=model(0), speculative_config=drafts)

    module._check_draft_shards(engine(0), 2)
    module._check_draft_shards(engine(4), 1)
    with pytest.raises(module.RequestError, match="draft model"):
        module._check_draft_shards(engine(4), 2)


def test_vllm_finds_it_by_its_name_as_well(module: Any) -> None:
    """MultiConnector looks it up by name for statistics, without the module path."""
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    assert factory.get_connector_class_by_name("KvServerConnector") is module.KvServerConnector


def test_dummy_weights_need_a_name(module: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"weights")
    engine = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), revision=None, hf_config=None),
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        speculative_config=None,
    )
    with pytest.raises(module.RequestError, match="model_id"):
        module._model_files(engine)
    engine.load_config.load_format = "auto"
    (found,) = module._model_files(engine)
    assert [seen.path for seen, _ in found.weights] == [tmp_path / "model.bin"]
    engine.model_config.model = "nobody/has-this"
    with pytest.raises(module.RequestError, match="model_id"):
        module._model_files(engine)


def test_weights_are_looked_at_where_they_were_downloaded(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's cache has the settings, and may have older weights."""
    for name, weights in (("hub", b"before"), ("mine", b"now")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_bytes(weights)
    (tmp_path / "hub" / "config.json").write_text("{}")
    hub = importlib.import_module("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda _, *, cache_dir, **__: cache_dir or str(tmp_path / "hub"))
    model = SimpleNamespace(model="org/model", revision=None, hf_config=None)

    def weights(folder: str | None) -> bytes:
        load = SimpleNamespace(load_format="auto", download_dir=folder)
        engine = SimpleNamespace(model_config=model, load_config=load, speculative_config=None)
        ((seen, _),) = module._model_files(engine)[0].weights
        return bytes(seen.path.read_bytes())

    assert weights(None) == b"before"
    assert weights(str(tmp_path / "mine")) == b"now"


@pytest.mark.parametrize(
    ("policy", "device", "groups", "tokens"),
    [
        ("recompute", "host", [Group(16)], 41 * 16 * 30 // 100),
        ("fail", "host", [Group(16)], 0),
        ("recompute", "portable", [Group(16)], 0),
        ("recompute", "host", [Group(16), Group(16, "window", 32)], 0),
        ("recompute", "host", [Group(16, "window", 32)], 0),
    ],
)
def test_blocks_wait_for_others_only_where_what_a_load_did_not_bring_is_computed(
    module: Any, policy: str, device: str, groups: list[Group], tokens: int
) -> None:
    connector = SimpleNamespace(_groups=groups, _device=device, _settings=SimpleNamespace(await_blocks_percent=30))
    transfer, kv_config = SimpleNamespace(kv_load_failure_policy=policy), SimpleNamespace(num_blocks=41)
    assert module.KvServerConnector._await_tokens_max(connector, transfer, kv_config) == tokens
