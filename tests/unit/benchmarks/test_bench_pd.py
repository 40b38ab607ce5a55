"""The arithmetic of bench_pd, and its turns between stand-ins for the three engines that answer over HTTP."""

import argparse
import asyncio
import json
import re
import time
from collections.abc import Collection
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks import bench_pd
from benchmarks.bench_pd import (
    Gaps,
    Timed,
    Turn,
    gaps_of,
    gaps_within,
    handed_over,
    lengths_of,
    prompt_tokens,
    tails_of,
    wrong,
)
from benchmarks.rows import Rows
from benchmarks.vllm_load.counters import BROUGHT
from benchmarks.vllm_load.reply import Reply

PROXY = Path(__file__).resolve().parents[3] / "examples" / "pd" / "proxy.py"
LENGTH = 768
LOADED = 512


def test_times_count_from_the_first_of_two_requests_and_gaps_from_the_token_of_prefill() -> None:
    prefill, decode = Timed(10.0, Reply(ttft_s=1.25)), Timed(10.5, Reply(ttft_s=1.0, said="w7"))
    assert handed_over(prefill, decode, 512) == Turn("w7", 1500.0, 250.0, 512)
    early = Timed(10.25, Reply(ttft_s=0.5, said="w7"))
    assert handed_over(prefill, early, 512) == Turn("w7", 750.0, -500.0, 512)


def test_a_problem_of_either_side_is_one_of_the_turn() -> None:
    fine, broken = Timed(1.0, Reply(ttft_s=1.0)), Timed(1.0, Reply(problem="HTTP 500"))
    assert handed_over(broken, fine, 0).problem == handed_over(fine, broken, 0).problem == "HTTP 500"


@pytest.mark.parametrize(
    ("turn", "wanted", "why"),
    [
        (Turn("w3 w4", 1.0, loaded_tokens=LOADED), Turn("w3 w4", 2.0), ""),
        (Turn("w3 w5", 1.0, loaded_tokens=LOADED), Turn("w3 w4", 2.0), "D said 'w3 w5', one engine alone 'w3 w4'"),
        (Turn("w3 w4", 1.0, loaded_tokens=256), Turn("w3 w4", 2.0), "D loaded 256 tokens, expected 512"),
        (Turn("w3 w4", 1.0, problem="cut"), Turn("w3 w4", 2.0), "cut"),
        (Turn("w3 w4", 1.0, loaded_tokens=LOADED), Turn("", 0.0, problem="gone"), "gone"),
    ],
)
def test_a_turn_counts_if_all_but_the_tail_was_loaded_and_the_tokens_are_the_same(
    turn: Turn, wanted: Turn, why: str
) -> None:
    assert wrong(turn, wanted, LOADED) == why


def test_gaps_count_where_they_end_within_the_time() -> None:
    gaps = (0.25, 0.5, 1.0, 0.125, 2.0)  # they end at 1.25, 1.75, 2.75, 2.875 and 4.875
    assert gaps_within(1.0, gaps, 1.75, 2.875) == [500.0, 1000.0, 125.0]
    assert gaps_within(1.0, gaps, 5.0, 6.0) == []


def test_figures_of_a_round_are_those_of_all_its_gaps() -> None:
    gaps = [float(number) for number in range(1, 202)]
    assert gaps_of(gaps[::-1]) == Gaps(p50=101.0, p99=199.0, largest=201.0)
    assert gaps_of([7.0]) == Gaps(7.0, 7.0, 7.0)


def test_lengths_are_whole_chunks() -> None:
    assert lengths_of("32K,1280,8k") == [32768, 1280, 8192]
    assert prompt_tokens(32768) == 32768 - 251
    for text in ("1000", "256", "8K,0"):
        with pytest.raises(argparse.ArgumentTypeError, match="a multiple of 256, at least twice that"):
            lengths_of(text)
    with pytest.raises(ValueError, match="many"):
        lengths_of("many")


def test_a_tail_is_less_than_a_chunk() -> None:
    assert tails_of("5,250") == [5, 250]
    assert prompt_tokens(1024, 250) == 768 + 250
    for text in ("0", "5,256", "-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="a tail has from 1 to 255 tokens"):
            tails_of(text)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["case"]: row for row in rows}


def test_a_ratio_is_the_median_of_the_rounds_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [
        (Turn("", 100.0), Turn("", 110.0, 7.0), Turn("", 150.0, 40.0)),
        (Turn("", 200.0), Turn("", 204.0, -3.0), Turn("", 260.0, 50.0)),
        (Turn("", 400.0), Turn("", 420.0, 5.0), Turn("", 480.0, 60.0)),
    ]
    bench_pd.tell_first_tokens(Rows("pd", as_json=True, config=""), 2048, rounds)
    rows = printed(capsys)
    assert next(iter(rows)) == "2K together"
    assert (rows["2K together"]["value"], rows["2K together"]["ceiling"]) == (204.0, 200.0)
    assert rows["2K together"]["ratio"] == pytest.approx(1.05)  # of 1.1, 1.02 and 1.05
    assert rows["2K whole first"]["ratio"] == pytest.approx(1.3)
    assert (rows["2K together, gap"]["value"], rows["2K whole first, gap"]["value"]) == (5.0, 50.0)
    assert (rows["2K alone"]["min"], rows["2K alone"]["max"], rows["2K alone"]["runs"]) == (100.0, 400.0, 3)


def test_the_time_between_tokens_is_compared_with_one_engine_round_by_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = [Gaps(10.0, 300.0, 400.0), Gaps(20.0, 200.0, 500.0)], [Gaps(10.0, 30.0, 40.0), Gaps(10.0, 40.0, 50.0)]
    bench_pd.tell_gaps(Rows("pd", as_json=True, config=""), one, two, [Gaps(4.0, 5.0, 6.0), Gaps(8.0, 9.0, 9.0)])
    rows = printed(capsys)
    assert rows["between tokens, two engines, p50"]["ratio"] == pytest.approx(0.75)
    assert rows["between tokens, two engines, p99"]["ratio"] == pytest.approx(0.15)
    assert rows["between tokens, two engines, largest"]["value"] == 45.0
    assert rows["between tokens, one engine, p99"]["value"] == 250.0
    assert rows["between tokens, idle, p50"]["value"] == 6.0


@pytest.mark.parametrize(
    ("ratio", "found"), [(1.03, "held"), (1.031, "missed, and within the limit"), (1.081, "missed")]
)
def test_the_goal_is_a_share_of_one_engine_alone(ratio: float, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [(Turn("", 1000.0), Turn("", 1000.0 * ratio), Turn("", 2000.0))]
    for length in (8192, 32768):
        bench_pd.tell_first_tokens(Rows("pd", as_json=True, config=""), length, rounds)
    assert capsys.readouterr().err == f"32K together: {ratio:.3f} of alone, goal 1.03, at most 1.08: {found}\n"


def test_nothing_measured_is_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Rows("pd", as_json=True, config="")
    bench_pd.tell_first_tokens(rows, 2048, [])
    bench_pd.tell_gaps(rows, [], [], [])
    assert printed(capsys) == {}


def test_both_engines_are_asked_as_the_proxy_asks_them() -> None:
    spec = spec_from_file_location("pd_proxy", PROXY)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(proxy := module_from_spec(spec))
    there, here = map(json.loads, proxy.sides(b'{"prompt": [3], "max_tokens": 7}', True))
    assert there["kv_transfer_params"] == bench_pd.FOR_PREFILL
    assert here["kv_transfer_params"] == bench_pd.FOR_DECODE
    assert there["max_tokens"] == 1


# ---------------------------------------------------------------- stand-ins


class Engine:
    """Answers with words that depend on the whole prompt. As D it counts tokens as loaded, but for `misses`."""

    def __init__(
        self, *, shift: int = 0, loads: float = 1.0, misses: Collection[int] = (), refuses: bool = False
    ) -> None:
        self.shift, self.loads, self.misses, self.refuses = shift, loads, misses, refuses
        self.loaded = 0
        self.loads_asked = 0
        self.running = 0
        self.asked: list[dict[str, Any]] = []
        self.waits_for: Engine | None = None
        """Where a prompt that both get at once must have come before this engine answers."""
        self.follows: Engine | None = None
        """Where nothing may run when a prompt comes that both get one after another."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        way = body.get("cache_salt")
        if self.waits_for is not None and way == "together":
            while body["prompt"] not in [other["prompt"] for other in self.waits_for.asked]:
                await asyncio.sleep(0.001)
        if self.follows is not None and way == "whole first":
            assert self.follows.asked[-1]["prompt"] == body["prompt"]
            assert not self.follows.running
        if self.refuses:
            return web.Response(status=500, text="broken")
        if (body.get("kv_transfer_params") or {}).get("do_remote_prefill"):
            self.loads_asked += 1
            if self.loads_asked not in self.misses:
                self.loaded += int(self.loads * (len(body["prompt"]) // 256 * 256))
        self.running += 1
        try:
            answer = web.StreamResponse()
            await answer.prepare(request)
            for place in range(body["max_tokens"]):
                word = f" w{sum(body['prompt']) + place + self.shift}"
                await answer.write(f"data: {json.dumps({'choices': [{'text': word}]})}\n\n".encode())
                await asyncio.sleep(0.005)
            usage = {"completion_tokens": body["max_tokens"]}
            await answer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
            return answer
        finally:
            self.running -= 1

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"{BROUGHT} {self.loaded}\nvllm:num_requests_running {self.running}\n")


class Idle:
    """A client of a server that has nothing to do."""

    def status(self) -> dict[str, int]:
        return {"stores": 0, "retrieves": 0, "pledges": 0}


def run(prefill: Engine, decode: Engine, alone: Engine, *arguments: str) -> int:
    given = bench_pd._parser().parse_args(
        ["--shape", "small", "--lengths", str(LENGTH), "--rounds", "2", "--prompts", "1", "--json", *arguments]
    )

    async def story() -> int:
        runners, urls = [], []
        for engine in (prefill, decode, alone):
            app = web.Application()
            app.add_routes([web.post("/v1/completions", engine.complete), web.get("/metrics", engine.metrics)])
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            rows = Rows("pd", as_json=True, config="")
            due_s = time.monotonic() + given.limit_s
            return await bench_pd.measured(urls, Idle(), rows, given, due_s)  # type: ignore[arg-type]
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(asyncio.wait_for(story(), 100))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_pd, "IDLE_S", 0.05)
    monkeypatch.setattr(bench_pd, "COUNTED_S", 0.2)


def test_every_way_is_asked_the_same_new_prompts_and_all_rows_come(capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode, alone = Engine(), Engine(), Engine()
    prefill.waits_for, decode.follows = decode, prefill
    assert run(prefill, decode, alone) == 0
    rows = printed(capsys)
    assert [case for case in rows if re.match(r"768 (together|whole first|alone)$", case)]
    assert {rows[case]["runs"] for case in rows} == {2}
    assert len(rows) == 5 + 7
    salts = {"together", "whole first"}
    asked = [tuple(body["prompt"]) for body in prefill.asked]
    assert {body["cache_salt"] for body in prefill.asked} == salts
    assert {len(prompt) for prompt in asked} == {prompt_tokens(LENGTH)}
    # Three rounds ask each prompt in both ways, and three more ask one at once while an answer streams.
    assert (len(asked), len(set(asked))) == (9, 6)
    assert [body["max_tokens"] for body in prefill.asked] == [1] * 9
    streams = [[body["max_tokens"] for body in engine.asked].count(8000) for engine in (prefill, decode, alone)]
    assert streams == [0, 3, 3]
    computed = [tuple(body["prompt"]) for body in alone.asked if len(body["prompt"]) == prompt_tokens(LENGTH)]
    assert set(asked[:6]) <= set(computed)
    assert all("kv_transfer_params" not in body and "cache_salt" not in body for body in alone.asked)


def test_each_tail_has_rows_of_its_own_and_no_answer_streams_if_no_prompts_are_wanted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefill, decode, alone = Engine(), Engine(), Engine()
    prefill.waits_for, decode.follows = decode, prefill
    assert run(prefill, decode, alone, "--tails", "5,250", "--prompts", "0") == 0
    rows = printed(capsys)
    assert len(rows) == 2 * 5
    assert rows["768, tail 250 together"]["runs"] == rows["768 together"]["runs"] == 2
    lengths = [len(body["prompt"]) for body in decode.asked]
    assert lengths == 6 * [512 + 5] + 6 * [512 + 250]


def test_ways_take_turns_and_the_engine_alone_is_asked_again_at_once() -> None:
    prefill, decode, alone = Engine(), Engine(), Engine()
    asked: list[dict[str, Any]] = []
    prefill.asked = alone.asked = asked
    assert run(prefill, decode, alone) == 0
    ways = [body.get("cache_salt", "alone") for body in asked]
    assert ways[:4] == ["whole first", "alone", "alone", "together"]
    assert ways[4:8] == ["alone", "alone", "together", "whole first"]
    assert ways[8:12] == ["together", "whole first", "alone", "alone"]


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (Engine(), Engine(shift=1), "one engine alone"),
        (Engine(), Engine(loads=0.5), "D loaded 256 tokens, expected 512"),
        (Engine(), Engine(loads=0.0), "D loaded 0 tokens, expected 512"),
        (Engine(), Engine(misses=(6,)), "WRONG: between tokens, round 0: D loaded 0 tokens, expected 512"),
        (Engine(refuses=True), Engine(), "HTTP 500: broken"),
    ],
)
def test_what_is_wrong_is_said_and_ends_with_1(
    prefill: Engine, decode: Engine, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prefill, decode, Engine(), "--rounds", "1") == 1
    assert why in capsys.readouterr().err


class Moody(Engine):
    """Answers a prompt otherwise in one way than in the other."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.shift = int((await request.json()).get("cache_salt") == "whole first")
        return await super().complete(request)


@pytest.mark.parametrize(("decode", "status"), [(Engine(shift=1), 0), (Moody(), 1), (Engine(loads=0.5), 1)])
def test_engines_that_compile_are_compared_with_themselves(
    decode: Engine, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Engine(), decode, Engine(), "--rounds", "1", "--engine", "") == status
    said = capsys.readouterr().err
    assert ("in the other way" in said) == isinstance(decode, Moody)
    same = 0 if decode.shift == 1 and not isinstance(decode, Moody) else 2
    assert f"D said what one engine alone said from its own cache: {same} of 2" in said


def test_what_runs_out_of_time_while_warming_up_is_said_and_counts_not(capsys: pytest.CaptureFixture[str]) -> None:
    decode = Engine(misses=(1, 2))
    assert run(Engine(), decode, Engine(), "--rounds", "1") == 0
    said = capsys.readouterr().err
    for way in ("together", "whole first"):
        assert f"while warming up: 768 round -1, {way}: D loaded 0 tokens, expected 512" in said
    assert "WRONG" not in said


def test_an_answer_that_ends_before_its_prompts_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_pd, "STREAM_TOKENS", 3)
    assert run(Engine(), Engine(), Engine(), "--rounds", "1") == 1
    assert "between tokens, round 0: the answer ended after 3 tokens: it was whole" in capsys.readouterr().err


def test_nothing_within_the_limit_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Engine(), Engine(), Engine(), "--limit-s", "0") == 1
    assert "not all was measured: 0 s are over" in capsys.readouterr().err
