"""Figures of hand-made rounds, answers that differ, and how the report shows both."""

import asyncio
import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import bench_vllm
from benchmarks.rows import Rows
from benchmarks.vllm_load import lmcache, report
from benchmarks.vllm_load.asks import Ask, Line, Phase, Span, Workload, token_ids
from benchmarks.vllm_load.counters import OWN_HIT, PROMPTS, Counters
from benchmarks.vllm_load.crowd import Outcome
from benchmarks.vllm_load.engines import (
    Arm,
    ArmKind,
    EngineOptions,
    Engines,
    check_arms,
    check_features,
    connector_config,
    engine_arguments,
)
from benchmarks.vllm_load.reply import Reply
from benchmarks.vllm_load.rounds import Agreement, Rounds, disagreements
from benchmarks.vllm_load.summary import Limits, Round, figures
from kvserver.errors import ConfigError

LIMITS = Limits(ttft_s=2.0, gap_s=0.1)


def outcome(name: str, kind: str = "first", *, began_s: float = 0.0, tokens: int = 10, **reply: object) -> Outcome:
    return Outcome(Ask(name, kind, (Span(name, tokens),), 3), Reply(**reply), began_s, 1)  # type: ignore[arg-type]


OUTCOMES = [
    outcome("a", began_s=1.0, ttft_s=1.0, gaps_s=(0.05, 0.15), total_s=1.2, prompt_tokens=10, output_tokens=3),
    outcome("b", began_s=1.5, ttft_s=3.0, gaps_s=(), total_s=3.0, prompt_tokens=10, output_tokens=1),
    outcome(
        "c",
        "again",
        began_s=3.0,
        ttft_s=0.5,
        gaps_s=(0.3,),
        total_s=2.0,
        prompt_tokens=20,
        output_tokens=2,
        cached_tokens=5,
    ),
    outcome("d", "again", began_s=3.5, problem="HTTP 500", total_s=0.1),
    outcome("e", "filler", began_s=4.0, ttft_s=9.0, total_s=9.0, prompt_tokens=900, output_tokens=1),
]


def a_round(arm: str = "none", number: int = 0, outcomes: list[Outcome] = OUTCOMES) -> Round:
    counted = {PROMPTS: 50.0, OWN_HIT: 10.0}
    return Round(arm, number, 7 + number, outcomes, counted)


def test_figures_of_a_round() -> None:
    told = {name: figure.value for name, figure in figures(a_round(), LIMITS).items()}
    assert told["ttft_first_p50"] == 1000.0
    assert told["ttft_first_p99"] == told["ttft_p90"] == 3000.0
    assert (told["ttft_p95"], told["ttft_max"]) == (3000.0, 3000.0)
    assert told["ttft_again_p50"] == 500.0
    assert (told["gap_p50"], told["gap_p99"]) == (150.0, 300.0)
    assert (told["tpot_p50"], told["tpot_p99"]) == pytest.approx((100.0, 300.0))  # a and c; b has one token only
    assert told["request_rate"] == pytest.approx(3 / 4)  # from 1.0 to 5.0 s, without the filler
    assert told["input_rate"] == pytest.approx(40 / 4)
    assert told["output_rate"] == pytest.approx(6 / 4)
    assert (told["requests"], told["errors"]) == (4, 1)
    assert told["other_length"] == 3  # b, c and the filler: 3 tokens were asked for
    assert told["good"] == 25.0  # only a: b is late, c slow, d failed
    assert told["hit_own"] == 20.0
    assert told["cached"] == 25.0
    assert "ttft_filler_p50" not in told
    assert "loads_failed" not in told  # no connector of ours
    assert "hit_external" not in told


def test_the_slowest_answers_are_at_the_low_end_of_paces() -> None:
    """Ten answers of five tokens: 2, 4, … 20 a second after the first, for prompts of 100 tokens in 1, 2, … 10 s."""
    outcomes = [
        outcome(str(n), ttft_s=float(n), gaps_s=(0.25 / n, 0.75 / n) * 2, total_s=99.0, prompt_tokens=100)
        for n in range(1, 11)
    ]
    outcomes.append(outcome("at once", ttft_s=0.0, gaps_s=(0.0, 0.0), prompt_tokens=100))  # no pace can be computed
    outcomes.append(outcome("failed", ttft_s=0.1, gaps_s=(9.0,), prompt_tokens=100, problem="HTTP 500"))
    outcomes.append(outcome("filler", "filler", ttft_s=0.1, gaps_s=(9.0,), prompt_tokens=100))
    told = {name: figure for name, figure in figures(a_round(outcomes=outcomes), LIMITS).items() if "pace" in name}
    assert {figure.unit for figure in told.values()} == {"tok/s"}
    assert {name: figure.value for name, figure in told.items()} == pytest.approx(
        {
            "output_pace_p50": 10.0,
            "output_pace_p10": 2.0,
            "output_pace_p1": 2.0,
            "input_pace_p50": 100 / 6,
            "input_pace_p10": 10.0,
            "input_pace_p1": 10.0,
        }
    )


def test_equal_prompts_are_compared_wherever_they_were_answered() -> None:
    found = [
        outcome("a", said=(1, 2)),
        outcome("a", "again", said=(1, 2)),
        outcome("b", said=(1, 2)),
        outcome("b", said=(1, 3)),
        outcome("b", problem="late"),
        outcome("c", said=(4,)),
    ]
    compared, differing = disagreements(found)
    assert (compared, [ask.name for ask in differing]) == (4, ["b"])


class Canned:
    """An arm whose answers are its prompts' first tokens, unless told otherwise."""

    server = None

    def __init__(self, name: str, log: list[str], wrong: dict[str, str]) -> None:
        self.name = name
        self.endpoint = self
        self._log = log
        self._wrong = wrong
        self._asked: dict[str, int] = {}

    async def counters(self) -> Counters:
        return {}

    async def ask(self, prompt: list[int], output_tokens: int) -> Reply:
        for name, when in self._wrong.items():
            if prompt == token_ids((Span(name, 9),), seed=3, vocabulary=50):
                self._asked[name] = self._asked.get(name, 0) + 1
                if when == "always" or self._asked[name] == 1:
                    return Reply(ttft_s=0.1, said=(0, 0))
        self._log.append(self.name)
        return Reply(ttft_s=0.1, said=tuple(prompt[:output_tokens]))


class Three:
    def draw(self, seed: int) -> Workload:
        lines = [Line((Ask(name, "first", (Span(name, 9),), 2),)) for name in "abc"]
        return Workload("three", (Phase(lines, 2),))


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes canned arms rest at once."""
    monkeypatch.setattr("benchmarks.vllm_load.rounds.REST_S", 0.001)


def run(*, rounds: int = 1, **wrong: str) -> tuple[list[Round], Agreement, list[str]]:
    log: list[str] = []
    arms = [Canned("one", log, {}), Canned("two", log, wrong)]
    running = Rounds(arms, Three(), vocabulary=50, on_outcome=lambda *_: None)  # type: ignore[arg-type]
    done = asyncio.run(asyncio.wait_for(running.run(rounds=rounds, seed=3), 60))
    return done, running.agreement, log


def test_arms_take_turns_with_the_same_prompts_and_each_round_has_its_own() -> None:
    done, agreement, log = run(rounds=2)
    assert [(each.arm, each.number, each.seed) for each in done] == [
        ("one", 0, 3),
        ("two", 0, 3),
        ("two", 1, 4),
        ("one", 1, 4),
    ]
    assert log[6:] == ["one"] * 3 + ["two"] * 6 + ["one"] * 3  # after three each to warm up
    assert (agreement.compared, agreement.differing, agreement.differing_alone) == (12, 0, 0)


def test_an_answer_that_differs_only_in_company_has_an_excuse() -> None:
    _, agreement, _ = run(b="once")
    assert (agreement.compared, agreement.differing, agreement.differing_alone) == (6, 1, 0)


def test_an_answer_that_differs_alone_as_well_has_none() -> None:
    _, agreement, _ = run(b="always", c="once")
    assert (agreement.differing, agreement.differing_alone) == (2, 1)
    assert "request b" in agreement.examples[0]


def faster() -> list[Outcome]:
    return [outcome("a", ttft_s=0.25, total_s=0.5, prompt_tokens=10, output_tokens=1)]


def test_rows_have_the_first_arm_of_the_same_round_as_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    slow = [outcome("a", ttft_s=1.0, total_s=2.0, prompt_tokens=10, output_tokens=1)]
    runs = report.collect([a_round("none", 0, slow), a_round("kvserver", 0, faster())], LIMITS)
    report.rows(runs, "chat", ["none", "kvserver"], Agreement(2, 0, 0), Rows("vllm", as_json=True, config="c"))
    rows = {row["case"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (rows["chat/none/ttft_p50"]["value"], rows["chat/none/ttft_p50"]["ceiling"]) == (1000.0, None)
    assert (rows["chat/kvserver/ttft_p50"]["ceiling"], rows["chat/kvserver/ttft_p50"]["ratio"]) == (1000.0, 0.25)
    assert rows["chat/kvserver/errors"]["ceiling"] is None  # nothing to compare with zero
    assert rows["chat/answers_compared"]["value"] == 2


def test_loads_that_failed_are_counted_where_the_connector_tells() -> None:
    counted = {"vllm:kvserver_retrieves_failed_total": 2.0}
    assert figures(dataclasses.replace(a_round("kvserver"), counted=counted), LIMITS)["loads_failed"].value == 2


@pytest.mark.parametrize(
    ("tokens", "words", "status"), [(3, [], 0), (2, [], 1), (4, [], 1), (2, ["--allow-differences"], 0)]
)
def test_answers_that_are_not_as_long_as_asked_for_fail_the_run(
    tokens: int, words: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = bench_vllm._parser().parse_args(["misses", "--url", "http://a", *words])
    rounds = [a_round(outcomes=[outcome("a", ttft_s=1.0, total_s=2.0, prompt_tokens=10, output_tokens=tokens)])]
    told = bench_vllm._tell(rounds, Agreement(0, 0, 0), [Arm("none", "http://a")], bench_vllm._workload(given), given)
    assert told == status
    assert (f"a: {tokens} tokens of output, asked for 3" in capsys.readouterr().err) == (tokens != 3)


@pytest.mark.parametrize(
    ("arm", "counted", "why"),
    [
        ("kvserver", {"vllm:kvserver_retrieves_failed_total": 0.0}, ""),
        ("kvserver", {"vllm:kvserver_retrieves_failed_total": 2.0}, "2 loads failed"),
        (
            "kvserver",
            {
                "vllm:kvserver_retrieves_failed_total": 0.0,
                'vllm:request_success_total{finished_reason="error"}': 3.0,
                'vllm:request_success_total{finished_reason="length"}': 9.0,
            },
            "3 requests ended with an error",
        ),
        ("kvserver", {"vllm:kvserver_retrieves_failed_total": 0.0, "vllm:kvserver_bugs_total": 1.0}, "1 bugs"),
        ("kvserver", {}, "the engine does not count failed loads"),
        ("none", {}, ""),
    ],
)
@pytest.mark.parametrize("words", [[], ["--allow-differences"]])
def test_a_load_that_failed_within_a_measured_round_fails_the_run(
    arm: str, counted: Counters, why: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arms = [Arm("none", "http://a"), Arm("kvserver", "http://b", "http://c")]
    given = bench_vllm._parser().parse_args(["misses", "--url", "http://a", *words])
    whole = outcome("a", ttft_s=1.0, total_s=2.0, prompt_tokens=10, output_tokens=3)
    measured = dataclasses.replace(a_round(arm, outcomes=[whole]), counted=counted)
    told = bench_vllm._tell([measured], Agreement(0, 0, 0), arms, bench_vllm._workload(given), given)
    assert told == bool(why)
    assert (f"not a clean run: {arm}, round 0: {why}" in capsys.readouterr().err) == bool(why)


@pytest.mark.parametrize("off", ["", "enable_prefix_caching", "enable_chunked_prefill"])
def test_an_engine_without_prefix_caching_or_chunked_prefill_is_not_measured(off: str) -> None:
    """Asking for either is no proof: vLLM turns it off by itself where it has to."""
    log = "INFO non-default args: {'enable_prefix_caching': True}\nINFO Initializing a V1 LLM engine with config: m"
    for feature in ("enable_prefix_caching", "enable_chunked_prefill"):
        log += f", {feature}={feature != off}"
    with pytest.raises(RuntimeError, match=f"False of {off}") if off else nullcontext():
        check_features(log)
    with pytest.raises(RuntimeError, match="nothing of enable_prefix_caching"):
        check_features("INFO: up")


def test_arms_differ_in_nothing_but_the_connector() -> None:
    options = EngineOptions(
        model=Path("/m"),
        pool_tokens=1000,
        block_tokens=32,
        context_tokens_max=900,
        arena_bytes=1 << 30,
        model_id="made up",
        engine_arguments="--dtype float32",
        connector='{"chunk_tokens": 512}',
    )
    arguments = engine_arguments(options, 1234)
    assert "--kv-transfer-config" not in arguments
    assert arguments[arguments.index("--num-gpu-blocks-override") + 1] == "33"
    assert arguments[-4:] == ["--load-format", "dummy", "--dtype", "float32"]
    config = connector_config(options, Path("/s/kv.sock"))
    assert config["kv_connector_extra_config"] == {"socket": "/s/kv.sock", "chunk_tokens": 512, "model_id": "made up"}
    assert config["kv_load_failure_policy"] == "recompute"


OPTIONS = EngineOptions(
    model=Path("/m"),
    pool_tokens=1000,
    block_tokens=32,
    context_tokens_max=900,
    arena_bytes=3 << 29,
    model_id="",
    engine_arguments="",
    connector="{}",
)


def test_an_arm_has_one_row_over_all_its_rounds() -> None:
    own = [
        outcome(name, ttft_s=seconds, total_s=seconds, prompt_tokens=100, output_tokens=1, cached_tokens=25, said=said)
        for name, seconds, said in (("a", 1.0, (1,)), ("b", 3.0, (2,)))
    ]
    theirs = [
        outcome("a", ttft_s=0.5, total_s=1.0, prompt_tokens=100, output_tokens=1, cached_tokens=75, said=(1,)),
        outcome("b", ttft_s=0.25, total_s=1.0, prompt_tokens=100, output_tokens=1, cached_tokens=75, said=(9,)),
        outcome("c", ttft_s=0.75, total_s=2.0, prompt_tokens=100, output_tokens=1, cached_tokens=75, said=(9,)),
        outcome("d", problem="HTTP 500"),
        outcome("e", "filler", ttft_s=9.0, total_s=9.0, prompt_tokens=100, cached_tokens=75),
    ]
    rounds = [a_round("none", 0, own), a_round("kvserver", 0, theirs), a_round("kvserver", 1, theirs[:1])]
    head, _, none, ours = [line.split() for line in report.arms(rounds, ["none", "kvserver"]).splitlines()]
    assert head[:2] == ["all", "rounds"]
    assert none == ["none", "2", "1000", "3000", "3000", "66.7", "25.0"]
    # Paces of the rounds: 300 tokens in 2 s, 100 in 1 s. Only b was answered in another way: nobody else answered c.
    assert ours == ["kvserver", "4", "500", "750", "750", "125", "75.0", "1"]


def test_an_arm_that_cannot_be_started_is_refused_before_any_other_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lmcache, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="install lmcache"):
        Engines([ArmKind.NONE, ArmKind.LMCACHE], OPTIONS)
    with pytest.raises(ConfigError, match="--disk-dir and --disk-bytes"):
        Engines([ArmKind.KVSERVER_DISK], dataclasses.replace(OPTIONS, disk_bytes=1 << 30))
    check_arms([ArmKind.KVSERVER_DISK], dataclasses.replace(OPTIONS, disk_bytes=1 << 30, disk_dirs=(tmp_path,)))


def test_lmcache_gets_the_memory_that_kvserver_gets() -> None:
    command = lmcache.server_command(host="h", port=5, http_port=6, arena_bytes=3 << 29, further="--max-workers 2")
    assert command[command.index("--l1-size-gb") + 1] == "1.5"
    assert command[-2:] == ["--max-workers", "2"]
    assert json.loads(lmcache.transfer_config(host="h", port=5))["kv_connector_extra_config"]["lmcache.mp.port"] == 5
