"""Parsing of answer streams, and real HTTP conversations with servers that support more or fewer fields."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks import bench_vllm
from benchmarks.vllm_load.counters import OWN_HIT, difference, has_prefix_caching, hits, parse, unclean
from benchmarks.vllm_load.endpoint import Endpoint, Form
from benchmarks.vllm_load.engines import Arm
from benchmarks.vllm_load.reply import Reading, Reply


def read(*events: tuple[float, Any]) -> Reply:
    reading = Reading()
    for at_s, event in events:
        reading.line(event if isinstance(event, str) else f"data: {json.dumps(event)}", at_s)
    return reading.reply(9.0)


def ids(*tokens: int) -> dict[str, Any]:
    return {"choices": [{"text": "".join(f" w{token}" for token in tokens), "token_ids": list(tokens)}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 31, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}},
}


def test_tokens_that_come_together_share_the_gap_before_them() -> None:
    reply = read(
        (0.5, ids(7)), (0.6, ": a comment"), (1.5, ids(8, 9)), (1.75, ids(3)), (2.0, USAGE), (2.0, "data: [DONE]")
    )
    assert (reply.ttft_s, reply.gaps_s) == (0.5, (0.5, 0.5, 0.25))
    assert reply.said == (7, 8, 9, 3)
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens, reply.total_s) == (31, 4, 16, 9.0)
    assert reply.problem == ""


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([(0.5, ids(7))], "the stream ended before its end was said"),
        ([(0.5, "data: [DONE]")], "no token came"),
        ([(0.5, ids(7)), (0.6, {"error": {"message": "overloaded"}}), (0.6, "data: [DONE]")], "overloaded"),
    ],
)
def test_an_answer_that_is_cut_short_says_so(events: list[tuple[float, Any]], problem: str) -> None:
    assert problem in read(*events).problem


METRICS = """# HELP vllm:prompt_tokens_total x
vllm:prompt_tokens_total{engine="0",model_name="m"} 200.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 1.1e+3
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 325
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 845
vllm:external_prefix_cache_queries_total 975
vllm:external_prefix_cache_hits_total 195
vllm:kvserver_tokens_retrieved_total{engine="0"} 130
vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_waiting{engine="0"} 2.0
kvserver_lookup_chunks_total{result="dram"} 2
kvserver_lookup_chunks_total{result="disk"} 1
kvserver_lookup_chunks_total{result="declined"} 4
kvserver_lookup_chunks_total{result="miss"} 5
"""


def test_counters_are_summed_over_engines_and_told_apart_by_result() -> None:
    counters = parse(METRICS)
    assert counters["vllm:prompt_tokens_total"] == 1300.0
    assert counters['kvserver_lookup_chunks_total{result="miss"}'] == 5.0
    told = hits(counters)
    assert (told.own, told.external, told.brought, told.server) == (0.25, 0.2, 0.1, 0.25)


def test_hits_are_those_since_the_last_scrape_and_unknown_without_questions() -> None:
    before = parse(METRICS)
    after = {**before, "vllm:prompt_tokens_total": 1400.0, OWN_HIT: 375.0}
    told = hits(difference(before, after))
    assert (told.own, told.external, told.server) == (0.5, None, None)
    assert hits({}) == (None, None, None, None)


def test_a_prompt_that_waits_for_room_counts_once() -> None:
    """Looked for in each of a hundred steps until it fitted: 20 tokens of 100 in the engine, 50 in the server."""
    looked = "vllm:prefix_cache_queries_total 10000\nvllm:prefix_cache_hits_total 2000\n"
    read = (
        "vllm:prompt_tokens_total 100\n"
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"} 20\n'
        "vllm:kvserver_tokens_retrieved_total 50\n"
    )
    told = hits(parse(looked + read))
    assert (told.own, told.brought) == (0.2, 0.5)


def test_requests_that_ended_with_an_error_are_told_apart() -> None:
    counters = parse(
        'vllm:request_success_total{engine="0",finished_reason="error",model_name="m"} 2\n'
        'vllm:request_success_total{engine="1",finished_reason="error",model_name="m"} 1\n'
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 9\n'
    )
    assert unclean(counters, has_connector=False) == ["3 requests ended with an error of the engine"]


@pytest.mark.parametrize(("said", "expected"), [("True", True), ("False", False), (None, None)])
def test_whether_an_engine_has_a_prefix_cache_is_what_its_metrics_say(said: str | None, expected: bool | None) -> None:
    text = f'vllm:cache_config_info{{block_size="32",enable_prefix_caching="{said}",engine="0"}} 1.0\n' if said else ""
    assert has_prefix_caching(METRICS + text) is expected


def test_an_engine_that_has_none_is_not_measured() -> None:
    async def story() -> None:
        async with served(set()) as (server, _):
            server.metrics += 'vllm:cache_config_info{enable_prefix_caching="False",engine="0"} 1.0\n'
            await bench_vllm._measure([Arm("slow", server.url)], None, bench_vllm._parser().parse_args(["misses"]))

    with pytest.raises(RuntimeError, match=r"slow: .* has prefix caching off"):
        bounded(story())


class Server:
    """Answers completions with two tokens, and refuses fields that it does not know."""

    def __init__(self, unknown: set[str]) -> None:
        self.unknown = unknown
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.metrics = METRICS
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            path = head.split(b" ", 2)[1].decode()
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            content = await reader.readexactly(int(fields.get(b"content-length", b"0")))
            status, body = self.answer(path, json.loads(content) if content else {})
            text = body.encode()
            writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)
            await writer.drain()
            if reader.at_eof():
                break
        writer.close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "the-model"}]})
        if path == "/metrics":
            return 200, self.metrics
        self.asked.append((path, body))
        if refused := self.unknown & set(body):
            return 400, f"unknown field {refused}"
        events = [ids(5), ids(6), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}]
        return 200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@asynccontextmanager
async def served(unknown: set[str], form: Form = Form.IDS) -> AsyncIterator[tuple[Server, Endpoint]]:
    server = Server(unknown)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{port}"
    endpoint = Endpoint(f"{server.url}/v1", form=form, request_s_max=20)
    try:
        yield server, endpoint
    finally:
        await endpoint.close()
        listening.close()


def bounded(story: Any) -> Any:
    return asyncio.run(asyncio.wait_for(story, 30))


def test_fields_that_a_server_refuses_are_left_out() -> None:
    async def story() -> None:
        async with served({"ignore_eos"}) as (server, endpoint):
            await endpoint.begin()
            assert endpoint.known == ["return_token_ids", "stream_options"]
            server.asked.clear()
            reply = await endpoint.ask([5, 9, 4], 17)
            assert (reply.said, reply.prompt_tokens, reply.problem) == ((5, 6), 3, "")
            path, body = server.asked[0]
            assert path == "/v1/completions"
            assert (body["model"], body["prompt"], body["max_tokens"]) == ("the-model", [5, 9, 4], 17)
            assert (body["temperature"], body["stream"]) == (0, True)

    bounded(story())


def test_a_chat_endpoint_gets_words_and_its_own_bound() -> None:
    async def story() -> None:
        async with served(set(), Form.CHAT) as (server, endpoint):
            await endpoint.begin()
            server.asked.clear()
            await endpoint.ask([5, 9, 4], 17)
            path, body = server.asked[0]
            assert path == "/v1/chat/completions"
            assert body["max_completion_tokens"] == 17
            assert len(body["messages"][0]["content"].split()) == 3
            assert body["ignore_eos"] is True

    bounded(story())


def test_what_a_server_refuses_is_said_and_raises_nothing() -> None:
    async def story() -> None:
        async with served({"prompt"}) as (_, endpoint):
            with pytest.raises(RuntimeError, match="HTTP 400"):
                await endpoint.begin()
            reply = await endpoint.ask([5], 1)
            assert reply.problem.startswith("HTTP 400: unknown field")
            assert reply.ttft_s is None

    bounded(story())
